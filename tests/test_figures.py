"""What draws the course: colours tell whose data it is, letters can be read, movies move."""

import io
import sys
from itertools import combinations

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

import figures
import matplotlib.pyplot as plt
import torch
from figures import collectives, cost_of_communication, point_to_point, start_here
from figures import processes_and_groups as groups
from PIL import Image


@pytest.fixture
def shown(monkeypatch) -> list[bytes]:
    """The pictures that were shown, as files."""
    files, open_before = [], plt.get_fignums()  # other tests' figures are their own business
    monkeypatch.setattr(figures.page, "display", lambda image: files.append(image.data))
    yield files
    left = set(plt.get_fignums()) - set(open_before)
    assert not left, f"left open: {left}, beside {open_before}"


# ---- whose data is it?


def test_tens():
    assert [figures.tens(value) for value in (0, 9, 10, 31.0, 79)] == [0, 0, 1, 3, 7]


def test_digits():
    assert figures.digits(1) == [0]
    assert figures.digits(300) == [2]
    assert figures.digits(1101.0) == [0, 2, 3]
    assert figures.digits(0) == []


def test_a_cell_has_a_stripe_for_each_rank_that_contributed():
    figure, ax = plt.subplots()
    figures.tensor(ax, [[20, 101]], figures.digits)
    faces = [patch.get_facecolor() for patch in ax.patches if patch.get_facecolor()[3]]
    colours = [plt.matplotlib.colors.to_rgba(figures.COLOURS[rank]) for rank in (1, 0, 2)]
    assert faces == colours
    assert [text.get_text() for text in ax.texts] == ["20", "101"]
    plt.close(figure)


def test_cells_of_one_size(monkeypatch):
    """A column of a matrix is drawn as a column, and not as wide as the matrix."""
    drawn = []
    monkeypatch.setattr(figures.tensors, "show", drawn.append)
    stages = {"all": [torch.ones(4, 4)], "a column": [torch.ones(4, 1)]}
    for one_size, widths in ((True, [4.05, 4.05]), (False, [4.05, 1.05])):
        figures.ranks(stages, one_size=one_size)
        assert [ax.get_xlim()[1] for ax in drawn[-1].axes] == pytest.approx(widths)
        plt.close(drawn[-1])


# ---- colours


def rgb(colour: str) -> torch.Tensor:
    """In linear light."""
    srgb = torch.tensor(plt.matplotlib.colors.to_rgb(colour), dtype=torch.float64)
    return torch.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


# What remains of linear RGB for people without the pigment for green: G. Machado, M. Oliveira,
# L. Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009.
DEUTERANOPIA = torch.tensor(
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    dtype=torch.float64,
)
NORMAL = torch.eye(3, dtype=torch.float64)
XYZ = torch.tensor(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]],
    dtype=torch.float64,
)


def lab(linear: torch.Tensor) -> torch.Tensor:
    """CIE L*a*b*: a distance of 2.3 can just be seen, side by side."""
    white = XYZ @ torch.ones(3, dtype=torch.float64)
    ratio = (XYZ @ linear.clamp(0, 1)) / white
    x, y, z = torch.where(ratio > 0.008856, ratio ** (1 / 3), 7.787 * ratio + 16 / 116)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str, eye: torch.Tensor) -> float:
    return (lab(eye @ rgb(one)) - lab(eye @ rgb(other))).norm().item()


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it: 4.5 is enough for small letters."""
    dark, light = sorted((XYZ[1] @ rgb(colour)).item() for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("eye", [NORMAL, DEUTERANOPIA], ids=["all colours", "deuteranopia"])
def test_ranks_can_be_told_apart(eye):
    pairs = combinations(figures.COLOURS, 2)
    near = {pair: round(distance(*pair, eye), 1) for pair in pairs if distance(*pair, eye) < 10}
    assert not near


def test_the_simulation_finds_red_and_green_alike():
    red, green = "#c06020", "#808020"
    assert distance(red, green, DEUTERANOPIA) < 0.5 * distance(red, green, NORMAL)


@pytest.mark.parametrize(
    "colour", sorted({*figures.COLOURS, *figures.ACTIONS.values(), *figures.KINDS.values()})
)
def test_black_letters_can_be_read_on(colour):
    assert contrast("black", colour) >= 4.5


def test_contrast():
    assert contrast("black", "white") == pytest.approx(21)
    assert contrast("#767676", "white") == pytest.approx(4.54, abs=0.01)


# ---- the page


def test_pictures_are_as_wide_as_the_page(shown):
    figures.ranks({"before": [torch.arange(3), None], "after": [torch.ones(2, 2)] * 2})
    figures.curves({"a": ([1, 2], [3, 4]), "b": ([1, 2], [4, 3], "o")}, xlabel="x")
    figures.bars({"one": {"parameters": 1.0, "gradients": 2.0}})
    figures.timeline({"rank 0": [figures.Span(0, 1, "forward", "0"), figures.Span(1, 2, "wait")]})
    assert [Image.open(io.BytesIO(file)).width for file in shown] == [1200] * 4


def test_small_letters_are_refused(shown):
    figure, ax = plt.subplots(figsize=(figures.WIDTH, 1))
    ax.text(0.5, 0.5, "who?", fontsize=7)
    with pytest.raises(ValueError, match=r"'who\?' is 7.0 points high"):
        figures.show(figure)
    plt.close(figure)
    assert not shown


def test_another_width_is_refused(shown):
    figure, _ = plt.subplots(figsize=(6, 1))
    with pytest.raises(ValueError, match=r"6\.0 inches wide"):
        figures.show(figure)
    plt.close(figure)
    assert not shown


# ---- what moves


def draw(ax, k: int) -> None:
    figures.cell(ax, k, 0, str(k), [k])


def test_a_movie_has_its_frames_and_stills(shown):
    figures.movie(draw, 3, 1.0, (0, 3), (0, 1), stills=(0, 2), seconds=0.5)
    moving, still = (Image.open(io.BytesIO(file)) for file in shown)
    assert (moving.n_frames, moving.is_animated, moving.format) == (3, True, "PNG")
    assert getattr(still, "n_frames", 1) == 1
    frames = []
    for k in range(3):
        moving.seek(k)
        frames.append(moving.convert("RGB").tobytes())
    assert len(set(frames)) == 3
    assert moving.info["duration"] == 1500  # the last stays three times as long
    assert still.height == pytest.approx(2 * moving.height, abs=2)


def test_a_large_movie_is_refused(shown):
    with pytest.raises(ValueError, match="bytes, more than 1,000"):
        figures.movie(draw, 3, 1.0, (0, 3), (0, 1), most_bytes=1000)
    assert not shown


# ---- pictures of single chapters: an exchanged label, or another story, is noticed


def test_transfers_get_common_steps():
    exchange = [[(1, 1, 4)], [(0, 0, 4)]]
    assert cost_of_communication.steps_of(exchange) == [[(0, 1, 4), (1, 0, 4)]]
    # Rank 2 to 1, then 1 to 0, however long rank 0 has been waiting
    chain = [[(None, 1, 0)], [(None, 2, 0), (0, None, 4)], [(1, None, 4)]]
    assert cost_of_communication.steps_of(chain) == [[(2, 1, 4)], [(1, 0, 4)]]


PLANS = {"one by one": [[(0, 1)], [(0, 2)]], "tree": [[(0, 1), (0, 2)]]}
HELD = [
    {"one by one": [7, 7, 7], "tree": [7, 7]},
    {"one by one": [17, 7, 7], "tree": [17, 7]},
    {"one by one": [27, 27, 7], "tree": [27, 7]},
]


@pytest.mark.slow
def test_broadcasts(shown):
    cost_of_communication.broadcasts(PLANS, HELD)
    assert Image.open(io.BytesIO(shown[0])).n_frames == 3
    exchanged = {"one by one": PLANS["tree"], "tree": PLANS["one by one"]}
    with pytest.raises((AssertionError, IndexError)):
        cost_of_communication.broadcasts(exchanged, HELD)


def ring_of(world: int) -> list:
    """What each rank holds, step by step."""
    held = [[[10**rank] * world] for rank in range(world)]
    for step in range(2 * (world - 1)):
        before = [rank[-1] for rank in held]
        for rank in range(world):
            chunk, now = (rank - step - 1) % world, list(before[rank])
            now[chunk] = before[rank - 1][chunk] + (now[chunk] if step < world - 1 else 0)
            held[rank].append(now)
    return held


@pytest.mark.slow
def test_orders_of_computing_and_sending(shown):
    in_turn = [(0, 1, 1, 2), (2, 3, 3, 4), (4, 5, 5, 6)]
    overlapped = [
        (0, 1, 1, 2),
        (2, 3, 3, 5),
        (4, 5, 5, 6),
    ]  # the third begins before the second ends
    cost_of_communication.orders({"sequential": in_turn, "overlapped": overlapped})
    for exchanged in (
        {"sequential": overlapped[1:], "overlapped": in_turn},
        {"sequential": in_turn, "overlapped": in_turn},
    ):
        with pytest.raises(AssertionError, match=r"one after the other|nothing overlaps"):
            cost_of_communication.orders(exchanged)


def test_the_memory_of_a_step_is_what_the_script_printed(shown, monkeypatch):
    heights = []
    monkeypatch.setattr(
        plt.Axes, "barh", lambda ax, y, width, *_, **style: heights.append((y, width))
    )
    table = "after          MiB\nforward 0     1.50  ####\nend of step  12.25  ########\n"
    cost_of_communication.memory_of_a_step(f"2 of 4 numbers are wrong\n{table}")
    assert heights == [(0, 1.5), (1, 12.25)]
    assert len(shown) == 1
    with pytest.raises(ValueError, match="no table of memory"):
        cost_of_communication.memory_of_a_step("forward 0")


@pytest.mark.slow
def test_ring(shown):
    held = ring_of(3)
    point_to_point.ring(held)
    assert Image.open(io.BytesIO(shown[0])).n_frames == 5
    with pytest.raises(AssertionError, match="it has come from the left"):
        point_to_point.ring(held[::-1])


@pytest.mark.slow
def test_all_to_all(shown):
    held = [[1, 2], [10, 20]]
    received = [[[0, 0], [1, 0], [1, 10]], [[0, 0], [0, 20], [2, 20]]]
    collectives.all_to_all(held, received)
    assert Image.open(io.BytesIO(shown[0])).n_frames == 3
    with pytest.raises(AssertionError, match="transposed"):
        collectives.all_to_all(held[::-1], received)


def test_rendezvous(shown):
    keys = ["0//cpu//0/0", "0//cpu//0/1"]
    groups.rendezvous(keys)
    with pytest.raises(AssertionError, match="is not rank 0's"):
        groups.rendezvous(keys[::-1])
    assert len(shown) == 1
    plt.close("all")


@pytest.mark.slow
def test_start_here(shown):
    start_here.strategies()
    start_here.choice()
    start_here.state_per_rank(lambda n, ranks, how: 16 * n / (ranks if how == "fsdp" else 1))
    with pytest.raises(AssertionError, match="stays level"):
        start_here.state_per_rank(lambda n, ranks, how: 16 * n / (1 if how == "fsdp" else ranks))
    assert len(shown) == 3
    plt.close("all")
