"""The pictures of the chapters on model parallelism refuse data that do not fit their labels."""

import sys

import pytest
import torch
from helpers import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

import figures
from figures import context_parallel, device_mesh, pipeline, tensor_parallel


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    """The pictures that the page would show."""
    pictures = []
    monkeypatch.setattr(figures.page, "display", pictures.append)
    return pictures


MET = [
    {"coordinate": (0, 0), "dp": [0, 2], "tp": [0, 1]},
    {"coordinate": (0, 1), "dp": [1, 3], "tp": [0, 1]},
    {"coordinate": (1, 0), "dp": [0, 2], "tp": [2, 3]},
    {"coordinate": (1, 1), "dp": [1, 3], "tp": [2, 3]},
]


@pytest.mark.slow
def test_groups(shown):
    device_mesh.groups(MET)
    assert len(shown) == 1
    with pytest.raises(AssertionError, match="not a line along"):
        device_mesh.groups([{**said, "dp": said["tp"], "tp": said["dp"]} for said in MET])


def test_layouts(shown):
    rows = [[4 * i + j for i in range(4) for j in range(4) if i // 2 == r // 2] for r in range(4)]
    columns = [[4 * i + j for i in range(4) for j in range(4) if j // 2 == r % 2] for r in range(4)]
    right = {"[Shard(0), Replicate()]": rows, "[Replicate(), Shard(1)]": columns}
    device_mesh.layouts([{name: held[r] for name, held in right.items()} for r in range(4)])
    assert len(shown) == 1
    wrong = dict(zip(right, reversed(right.values()), strict=True))
    with pytest.raises(AssertionError, match="Shard"):
        device_mesh.layouts([{name: held[r] for name, held in wrong.items()} for r in range(4)])


def test_activations(shown):
    tensor_parallel.pair()
    tensor_parallel.activations({"tensor": 10.2, "sequence": 9.1})
    assert len(shown) == 2
    with pytest.raises(AssertionError, match="not the formula"):
        tensor_parallel.activations({"tensor": 9.1, "sequence": 10.2})


def played(orders: list[str]) -> list:
    """(kind, micro-batch, start, end) of ranks that do "FFBB", ...: each action takes one unit."""
    lines, done = [[] for _ in orders], {}
    for now in range(100):
        for stage, (line, order) in enumerate(zip(lines, orders, strict=True)):
            if len(line) == len(order):
                continue
            kind = order[len(line)]
            i = order[: len(line)].count(kind)
            before = stage - 1 if kind == "F" else stage + 1
            if before in (-1, len(orders)) or done.get((kind, before, i), now + 1) <= now:
                line.append((kind, i, now, now + 1))
                done[kind, stage, i] = now + 1
    return lines


GPIPE = ["FFFFBBBB", "FFFFBBBB"]
ONE_F_ONE_B = ["FFBFBFBB", "FBFBFBFB"]


@pytest.mark.slow
def test_movie_of_1f1b(shown):
    pipeline.movie(played(ONE_F_ONE_B), frames=4)
    assert len(shown) == 2  # it moves; and stills
    with pytest.raises(AssertionError, match="1F1B keeps"):
        pipeline.movie(played(GPIPE), frames=4)


def test_kept_has_a_panel_per_rank(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "show", drawn.append)
    gpipe = {("GPipe", 1): [8, 0], ("GPipe", 2): [8, 16, 8, 0]}
    of_ranks = [gpipe | {("1F1B", 2): [8, 16, 8, 0]}, gpipe | {("1F1B", 2): [8, 0, 8, 0]}]
    pipeline.kept(of_ranks, m=2)
    assert [len(ax.lines) for ax in drawn[0].axes] == [2, 2]
    figures.charts.plt.close(drawn[0])
    with pytest.raises(AssertionError, match="1F1B, rank 0: not 2 micro-batches"):
        pipeline.kept(of_ranks[::-1], m=2)
    figures.charts.plt.close()


def test_timelines_refuse_what_cannot_be(shown):
    lines = played(GPIPE)
    pipeline.timelines({"GPipe": lines}, unit="units of time")
    assert len(shown) == 1
    with pytest.raises(AssertionError, match="too late"):
        pipeline.timelines({"GPipe": lines[::-1]})


@pytest.mark.slow
def test_ring(shown):
    seen = [[(rank - step) % 4 for step in range(4)] for rank in range(4)]
    context_parallel.ring(seen)
    assert len(shown) == 2
    with pytest.raises(AssertionError, match="has sent"):
        context_parallel.ring([[(rank + step) % 4 for step in range(4)] for rank in range(4)])


def test_scores(shown):
    mask, tokens = torch.ones(8, 8).tril() > 0, list(torch.arange(8).chunk(4))
    assert context_parallel.scores({"in order": (mask, tokens)}) == [[3, 7, 11, 15]]
    assert len(shown) == 1
    with pytest.raises(AssertionError, match="nobody"):
        context_parallel.scores({"in order": (mask, tokens[:3])})
