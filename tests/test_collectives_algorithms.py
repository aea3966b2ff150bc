"""all_reduce_algorithms.py gives dist.all_reduce's sums in groups of 1 to 6 ranks and sends as many
bytes as the formulas say; what point_to_point.py prints is true."""

import itertools
import re
import sys
from collections import Counter
from contextlib import nullcontext

import all_reduce_algorithms as algorithms
import compare_all_reduce
import point_to_point
import pool
import pytest
import torch
from all_reduce_traffic import critical_path, expected_traffic
from helpers import ROOT
from workers.collectives_algorithms import CELLS, DTYPES, SIZES

pytestmark = pytest.mark.slow  # each launch of ranks takes some seconds

WORKER = ROOT / "tests/workers/collectives_algorithms.py"
NAMES = tuple(algorithms.ALGORITHMS)
WORLDS = range(1, 7)

each_name = pytest.mark.parametrize("name", NAMES)
each_world = pytest.mark.parametrize("world_size", WORLDS)


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    """What each of 6 ranks recorded, in rank order."""
    folder = tmp_path_factory.mktemp("algorithms")
    pool.run(WORKER, folder, ranks=6, timeout=200).check()
    return [torch.load(folder / f"{rank}.pt") for rank in range(6)]


def records_of(seen, kind: str, **wanted) -> list[dict]:
    records = [record for rank in seen for record in rank[kind]]
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def log2(world_size: int) -> int:
    return world_size.bit_length() - 1


# ---- all_reduce_algorithms.py


def test_sums_are_those_of_all_reduce(seen):
    records = records_of(seen, "algorithms")
    count = len(SIZES) + len(DTYPES)
    cases = [(name, n, rank) for name in NAMES for n in WORLDS for rank in range(n)]
    found = Counter((r["name"], r["world_size"], r["rank"]) for r in records)
    assert found == dict.fromkeys(cases, count)
    wrong = [r for r in records if not (r["like_plain_sum"] and r["like_all_reduce"])]
    assert not wrong, "\n" + "\n".join(map(str, wrong))


def test_traffic_is_that_of_the_formula(seen):
    wrong = []
    for r in records_of(seen, "algorithms"):
        case = (r["name"], r["numel"], r["itemsize"], r["world_size"], r["rank"])
        formula = expected_traffic(*case)
        on_the_wire = r["wire_bytes"], r["wire_messages"]
        if not on_the_wire == (r["bytes"], r["steps"]) == (formula.bytes, formula.steps):
            wrong.append(f"{r}: {formula}")
    assert not wrong, "\n" + "\n".join(wrong)


@each_world
def test_ring_in_pieces(seen, world_size):
    records = records_of(seen, "pieces", world_size=world_size)
    assert len(records) == 6 * world_size
    for r in records:
        formula = expected_traffic("ring", r["numel"], 4, world_size, r["rank"])
        assert r["like_plain_sum"], r
        assert (r["bytes"], r["steps"]) == (formula.bytes, formula.steps), r
        assert r["wire_bytes"] == r["bytes"], r
        chunk = -(-r["numel"] // world_size)
        assert r["wire_messages"] == r["steps"] * max(1, 4 * chunk // 32), r


@each_name
@each_world
def test_every_rank_has_the_same_bits(seen, name, world_size):
    results = [r["result"] for r in records_of(seen, "floats", name=name, world_size=world_size)]
    assert len(results) == world_size
    inputs = []
    for rank in range(world_size):
        torch.manual_seed(rank)
        inputs.append(torch.randn(5, 7, 3))
    assert all(torch.equal(result, results[0]) for result in results)
    exact = torch.stack(inputs).double().sum(0)
    assert (results[0] - exact).abs().max() < 1e-6 * world_size  # fp32, values of order 1


def sent_by_all(name: str, world_size: int) -> int:
    """In units of the tensor: independent of how it is split into chunks."""
    power = 1 << log2(world_size)
    pairs = world_size - power
    return {
        "naive": 2 * (world_size - 1),
        "tree": 2 * (world_size - 1),
        "ring": 2 * (world_size - 1),
        "recursive_doubling": power * log2(world_size) + 2 * pairs,
        "recursive_halving_doubling": 2 * (power - 1) + 2 * pairs,
    }[name]


def test_formulas_add_up():
    wrong = []
    for name, n, numel in itertools.product(NAMES, WORLDS, (0, 1, 5, 720, 1001)):
        sent = sum(expected_traffic(name, numel, 8, n, rank).bytes for rank in range(n))
        if sent != sent_by_all(name, n) * 8 * numel:
            wrong.append(f"{name}, {n} ranks, {numel} numbers: {sent} bytes")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 64])
def test_formulas_where_all_divides(world_size):
    size, steps = 4 * 6400, log2(world_size)
    per_rank = {
        "ring": (2 * size * (world_size - 1) // world_size, 2 * (world_size - 1)),
        "recursive_doubling": (steps * size, steps),
        "recursive_halving_doubling": (2 * size * (world_size - 1) // world_size, 2 * steps),
    }
    for name, expected in per_rank.items():
        for rank in range(world_size):
            sent = expected_traffic(name, 6400, 4, world_size, rank)
            assert (sent.bytes, sent.steps) == expected, (name, rank)
        path = critical_path(name, 6400, 4, world_size)  # every rank sends in every step
        assert (path.bytes, path.steps) == expected, name
    root = expected_traffic("tree", 6400, 4, world_size, 0)
    assert (root.bytes, root.steps) == (steps * size, steps)
    assert critical_path("tree", 6400, 4, world_size).steps == 2 * steps
    assert critical_path("naive", 6400, 4, world_size).bytes == 2 * (world_size - 1) * size


def test_critical_path_where_ranks_do_not_divide():
    """6 ranks: two pairs, then 4 ranks; a tree of 3 levels."""
    steps = {name: critical_path(name, 600, 4, 6).steps for name in NAMES}
    assert steps == {
        "naive": 10,
        "ring": 10,
        "tree": 6,
        "recursive_doubling": 4,
        "recursive_halving_doubling": 6,
    }
    assert critical_path("recursive_halving_doubling", 600, 4, 6).bytes == 2400 * 3.5
    assert critical_path("ring", 600, 4, 6).bytes == 2400 * 10 / 6


def test_unknown_algorithm():
    with pytest.raises(ValueError, match="no algorithm 'star'"):
        expected_traffic("star", 1, 4, 2, 0)


def test_wants_contiguous_tensors():
    with pytest.raises(ValueError, match="contiguous"):
        algorithms.flatten(torch.zeros(4, 4).T)


def test_script_prints_what_is_true():
    output = pool.run(ROOT / "collectives/compare_all_reduce.py", ranks=3).check().output
    # 1. The ring: how many ranks' values each chunk holds after each step.
    table = output[output.index("\nstep ") :].splitlines()[2:7]
    for step, line in enumerate(table):
        shown = [int(n) for n in line.split()]
        expected = [ring_count(3, rank, chunk, step) for rank in range(3) for chunk in range(3)]
        assert shown == [step, *expected]
    # 2. and 3.: the numbers, next to the formulas.
    assert "100,003 float32: S = 400,012 bytes" in output
    details = {}
    for name, rank, *numbers in re.findall(
        r"^(\w+) +(\d) +(\d+) +(\d+) +(\d+) +(\d+)$", output, re.M
    ):
        details[name, int(rank)] = [int(n) for n in numbers]
    for name in NAMES:
        row = re.search(rf"^{name} +(\d+) +([\d.]+) +([\d.e+-]+) +yes$", output, re.M)
        path = critical_path(name, 100_003, 4, 3)
        assert (int(row[1]), float(row[2])) == (path.steps, round(path.bytes / 400_012, 3))
        assert float(row[3]) < 2e-6  # float32 sums of three numbers of order 1
        for rank in range(3):
            sent = expected_traffic(name, 100_003, 4, 3, rank)
            assert details[name, rank] == [sent.steps, sent.steps, sent.bytes, sent.bytes]


def ring_count(world_size: int, rank: int, chunk: int, step: int) -> int:
    """How many ranks' values are in `chunk` on `rank` after `step` steps of the ring.

    Chunk c starts at rank c and reaches rank c+d after d steps, with d+1 values in it. It is
    complete after N-1 steps and goes around the ring a second time, unchanged.
    """
    distance = (rank - chunk) % world_size
    if step >= distance + world_size:  # second time around
        return world_size
    return distance + 1 if step >= distance else 1


# ---- point_to_point.py


@each_world
def test_heat_has_the_bits_of_one_process(seen, world_size):
    for count in CELLS:
        records = records_of(seen, "p2p", world_size=world_size, what=f"heat {count}")
        assert len(records) == world_size
        assert sum(r["cells"] for r in records) == count
        assert all(r["equal"] and r["changed"] for r in records)


@pytest.mark.parametrize("what", ["take_turns", "do_not_wait", "batch", "ring_shift"])
@pytest.mark.parametrize("world_size", range(2, 7))
def test_right_ways_to_exchange(seen, what, world_size):
    records = records_of(seen, "p2p", world_size=world_size, what=what)
    assert len(records) == world_size
    assert all(r["equal"] for r in records), records


def test_heat_is_the_heat_equation():
    x = torch.arange(1, 51, dtype=torch.float64) / 51
    cooled = point_to_point.heat(torch.sin(torch.pi * x), 300)
    factor = (1 - torch.sin(torch.tensor(torch.pi / 102, dtype=torch.float64)) ** 2) ** 300
    assert torch.allclose(cooled, factor * torch.sin(torch.pi * x), rtol=0, atol=1e-13)


@pytest.fixture(scope="module")
def output() -> str:
    options = ("--timeout", 0.5, "--cells", 50, "--steps", 200)
    return pool.run(ROOT / "collectives/point_to_point.py", *options, ranks=3).check().output


def section(output: str, number: int) -> str:
    return re.split(r"^\d\. ", output, flags=re.MULTILINE)[number]


def test_all_stuck_or_all_served(output):
    rows = re.findall(r"^(\w+) +(\d+) +(\d) +(\d) +([\d.]+)$", section(output, 2), re.M)
    assert [row[0] for row in rows[::2]] == ["send_first", "take_turns", "do_not_wait", "batch"]
    for way, size, served, stuck, seconds in rows:
        assert int(size) in (4, 4 << 20)
        assert (int(served), int(stuck)) == ((0, 3) if way == "send_first" else (3, 0))
        assert (float(seconds) >= 0.5) == (way == "send_first") or float(seconds) > 0.5
        assert float(seconds) < 20
    error = section(output, 2).strip().splitlines()[-1]
    assert re.match("send_first: (Timed out waiting 500ms for send|.*closed|.*reset)", error)


def test_what_point_to_point_prints(output):
    lines = {n: section(output, n).strip().splitlines()[2:] for n in (1, 3, 4, 5, 6)}
    assert [line.split() for line in lines[1]] == [
        ["0", "100", "100"], ["1", "100", "101"], ["2", "101", "103"],
    ]  # fmt: skip
    # The receiver got what was written after isend.
    assert [line.split() for line in lines[3]] == [
        ["0", "False", "[-1.0]"], ["1", "-", "[-1.0]"], ["2", "-", "[7.0]"],
    ]  # fmt: skip
    assert lines[4][0].endswith("{2: 200.0, 1: 100.0}")
    assert "[80.0, 70.0]" in lines[4][1]
    for rank, line in enumerate(lines[5]):
        assert [int(n) for n in line.split()] == [rank, *((rank - s) % 3 for s in range(4))]
    cells = [[float(n) for n in line.split()] for line in lines[6][:3]]
    assert [row[:3] for row in cells] == [[0, 16, 1600], [1, 17, 3200], [2, 17, 1600]]
    assert "same bits as one process: yes" in lines[6][3]
    assert float(lines[6][4].split(": ")[1]) < 1e-12


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [(1, [], "needs 2 ranks or more"), (4, ["--cells", "3"], "--cells 3 leaves some of 4 ranks")],
)
def test_too_few(ranks, options, message, monkeypatch):
    """A UserError, which runtime.py turns into one sentence and exit status 2."""
    worker = point_to_point.Worker(0, 0, ranks, torch.device("cpu"))
    monkeypatch.setattr(point_to_point, "distributed_worker", lambda _: nullcontext(worker))
    monkeypatch.setattr(sys, "argv", ["point_to_point.py", *options])
    with pytest.raises(point_to_point.UserError, match=message):
        point_to_point.main()


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (compare_all_reduce, ["--numel", "-1"], "--numel: must be an integer of at least 0"),
        (point_to_point, ["--timeout", "0"], "--timeout: must be a number above 0"),
        (point_to_point, ["--cells", "0"], "--cells: must be an integer of at least 1"),
        (point_to_point, ["--steps", "0"], "--steps: must be an integer of at least 1"),
    ],
)
def test_bad_arguments(module, options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", *options])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        module.parse_args()
    assert stop.value.code == 2
    assert capsys.readouterr().err.count(message) == 1
