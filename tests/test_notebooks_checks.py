"""Checks of exercises that took a wrong answer, refused a right one, or hinted at another mistake.

tests/test_notebooks.py tries the solutions and their tempting mistakes.
"""

import hashlib
import itertools
import json
import re
import sys

import pool
import pytest
import torch
from helpers import ROOT

FOLDER = ROOT / "notebooks"


def source(chapter: str, cell: str) -> str:
    (path,) = FOLDER.glob(f"{chapter}_*.ipynb")
    (found,) = (c for c in json.loads(path.read_text())["cells"] if c["id"] == cell)
    return re.sub(r"^%%px.*\n", "", "".join(found["source"]))


@pytest.fixture
def said(capsys, monkeypatch):
    """said(chapter, cell, **names): the lines of a check that runs twice: a hint comes second."""
    monkeypatch.syspath_prepend(FOLDER)
    import exercises

    monkeypatch.setattr(exercises, "_tries", {})
    monkeypatch.setattr(exercises, "_given", {})

    def run(chapter: str, cell: str, **names) -> list[str]:
        for _ in range(2):
            exec(source(chapter, cell), {"check": exercises.check} | names)
        return capsys.readouterr().out.splitlines()

    return run


ON_RANKS = """
import os, sys
import torch
import torch.distributed as dist
sys.path.insert(0, {folder!r})
import exercises
from exercises import check, on_all_ranks
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port = int(os.environ["MASTER_PORT"])
store = exercises.store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo")
for cell in {cells!r}:
    exec(cell)
for answer in {answers!r}:
    exec(answer)
    exercises._tries, exercises._given = {{}}, {{}}
    for _ in range(2):
        exec({check!r})
if "rpc" in globals():
    rpc.shutdown()
dist.barrier()
dist.destroy_process_group()
"""


def on_ranks(tmp_path, chapter: str, cells: list[str], check: str, answers, ranks: int):
    """The two lines that the check prints for each of the answers. cells: their names, or code."""
    file = tmp_path / "script.py"
    cells = [cell if "\n" in cell else source(chapter, cell) for cell in cells]
    check = source(chapter, check)
    told = {"folder": str(FOLDER), "cells": cells, "check": check, "answers": answers}
    file.write_text(ON_RANKS.format(**told))
    lines = pool.run(file, ranks=ranks, timeout=120).check().output.splitlines()
    lines = [line for line in lines if line.startswith(("correct", "not "))]
    assert len(lines) == 2 * len(answers), lines
    return list(zip(lines[::2], lines[1::2], strict=True))


AVERAGES = """
def average_gradients(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= world_size
"""
NO_SKIP = """
def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size
"""


def test_06_a_hint_about_none_does_not_speak_of_the_sum(tmp_path):
    lines = on_ranks(tmp_path, "06", ["cell-10"], "cell-65", [AVERAGES, NO_SKIP], ranks=2)
    assert lines[0][1].endswith("must keep None (Hint: skip p.grad is None)")
    assert lines[1][1].endswith("(Hint: do you skip p.grad is None?)")


WEIGHTED = """
def weighted_average(model, count):
    total = torch.tensor(count)
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad *= count / {total}
        dist.all_reduce(p.grad)
"""


def test_06_the_weights_are_not_those_of_64_images_alone(tmp_path):
    answers = [WEIGHTED.format(total=total) for total in ("total", "64")] + ["weighted_average = 7"]
    lines = on_ranks(tmp_path, "06", ["cell-10"], "cell-78", answers, ranks=2)
    assert lines[0] == ("correct", "correct")
    assert lines[1][0].startswith("not yet: 40 and 8 images: 0.weight is 0.75 times")
    assert "who knows that there are 64?" in lines[1][1]
    assert lines[2][1] == "not yet: weighted_average must be a function"


SOFTMAX = """
def sharded_softmax(x):
    mine = x.to_local()
    highest = mine.amax(1, keepdim=True)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    mine = (mine - highest).exp()
    total = mine.sum(1, keepdim=True)
    dist.all_reduce(total)
    return DTensor.from_local(mine / total, line, [Shard(1)])
"""
ALL_OF_X = """
def sharded_softmax(x):
    mine = x.to_local()
    n = mine.shape[1]
    whole = torch.zeros(mine.shape[0], n * world_size)
    whole[:, rank * n : (rank + 1) * n] = mine
    dist.all_reduce(whole)
    mine = whole.softmax(1)[:, rank * n : (rank + 1) * n].contiguous()
    return DTensor.from_local(mine, line, [Shard(1)])
"""
BROADCASTS = """
def sharded_softmax(x):
    parts = [x.to_local().clone() if r == rank else torch.empty(6, 16) for r in range(world_size)]
    for r, part in enumerate(parts):
        dist.broadcast(part, src=r)
    mine = torch.cat(parts, 1).softmax(1).chunk(world_size, 1)[rank].contiguous()
    return DTensor.from_local(mine, line, [Shard(1)])
"""


def test_12_softmax_by_collectives_of_torch_distributed(tmp_path):
    answers, cells = [SOFTMAX, ALL_OF_X, BROADCASTS], ["c003", "c016", "c024", "c025"]
    lines = on_ranks(tmp_path, "12", cells, "c061", answers, ranks=4)
    assert lines[0] == ("correct", "correct")
    assert lines[1][0] == "not yet: 2304 bytes sent: two numbers per row are enough"
    assert lines[2][0] == "not yet: 1152 bytes sent: two numbers per row are enough"


def test_12_placements_may_be_tuples_and_hints_are_about_the_mistake(tmp_path):
    answers = [
        "x_placements, W1_placements, W2_placements = "
        "(Shard(0), Replicate()), (Shard(0), Shard(1)), [Shard(1), Shard(0)]",
        "x_placements, W1_placements, W2_placements = 1, 2, 3",
        "x_placements, W1_placements, W2_placements = "
        "[Shard(0), Replicate()], [Replicate(), Shard(1)], [Replicate(), Shard(0)]",
    ]
    cells = ["c003", "c016", "c024", "c025", "c036"]
    lines = on_ranks(tmp_path, "12", cells, "c064", answers, ranks=4)
    assert lines[0] == ("correct", "correct")
    assert lines[1][1] == "not yet: a list: a placement for dp and one for tp"
    assert "a rank holds 0.50 of W1 (Hint: Look at the two-dim" in lines[2][1]


def test_12_a_shape_that_is_none_has_no_hint_about_rows(tmp_path):
    answers = ["local_shape = lambda shape, placements: None"]
    answers += ["local_shape = lambda shape, placements: shape"]
    lines = on_ranks(tmp_path, "12", ["c003", "c016"], "c055", answers, ranks=4)
    assert lines[0][1].startswith("not yet: it raises TypeError")
    assert "Hint" not in lines[0][1]
    assert "(Hint: Only a Shard makes it smaller" in lines[1][1]


def hybrid(between):
    def hybrid_bytes(P, nodes, ranks):
        return P / ranks, 3 * (ranks - 1) / ranks * P, between(P, nodes, ranks)

    return hybrid_bytes


def ring(P, nodes, ranks):
    return 2 * (nodes - 1) / nodes * P / ranks


def test_09_bytes_between_nodes_follow_the_formula(said):
    P = 1000
    log = {(n, s): {"gather": 2 * (s - 1) / s * P, "reduce": (s - 1) / s * P} for n, s in MESHES}
    for (n, s), sizes in log.items():
        sizes["sum"] = ring(P, n, s)
    measured = [("", P / s, None, log[n, s]) for n, s in MESHES]
    names = {"sizes": {"all": P}, "gather": lambda name: [measured]}
    names["sent"] = lambda log, *kinds: sum(log[kind] for kind in kinds)

    def nonsense(P, nodes, ranks):
        return min(1, nodes - 1) * P / ranks * (1 + nodes / 20 - 0.1)

    assert said("09", "fsdp-52", hybrid_bytes=hybrid(ring), **names) == ["correct"] * 2
    first, second = said("09", "fsdp-52", hybrid_bytes=hybrid(nonsense), **names)
    assert first == "not yet: between: not 0.3250 P over 8 nodes of 4 ranks, or not 0.2500 P over 2"
    assert "one all_reduce over the nodes" in second
    two = said("09", "fsdp-52", hybrid_bytes=lambda *_: (1, 2), **names)
    assert two[0] == "not yet: return three numbers"


MESHES = ((1, 4), (2, 2))  # (nodes, ranks of a node) that chapter 09 measures


def test_messages_name_the_mistake(said):
    chunks = {"LINKS": {frozenset((0, 1)): 1}, "print": lambda *_: None}
    exec(source("04", "cost-54d").partition("\n\n\nplain_ring")[0], chunks)
    with pytest.raises(AssertionError, match="round 1, 0 -> 1: the chunks are 0 to 3"):
        chunks["play"]([[(0, 1, 4)]])
    lines = said("05", "roof-50", parameters=15.4, days=13)
    assert lines[0] == "not yet: a number of parameters: is yours in billions?"
    answers = {"ranks_for_stage_3": "5", "ranks_for_stage_2": 11, "largest_for_stage_2": 20e9}
    assert said("08", "cell-51", **answers)[0] == "not yet: stage 3: '5' is no number of ranks"


@pytest.fixture(scope="module")
def chapter_21():
    """What its cells define, without their output."""
    paths = [str(FOLDER), str(ROOT / "planner")]
    sys.path[:0] = paths
    names = {}
    for cell in ("mesh21-01", "mesh21-03", "mesh21-19"):
        exec(source("21", cell), names)
    yield names
    for path in paths:
        sys.path.remove(path)


@pytest.mark.parametrize(
    ("llama_8b", "line"),
    [
        ((64, 1, 1, 1), "that mesh was tried: it crashed or ran out of memory"),
        ((1, 1, 64, 2), "that mesh was not measured; a neighbour of it, perhaps?"),
    ],
)
def test_21_a_mesh_that_crashed_was_tried(said, chapter_21, llama_8b, line):
    answers = {"llama_3b": (16, 1, 1, 2), "llama_8b": llama_8b, "bloom": (8, 4, 12, 2)}
    assert said("21", "mesh21-45", **chapter_21 | answers)[0] == f"not yet: llama_8b: {line}"


@pytest.mark.parametrize(
    ("of", "line"),
    [("min", "correct"), ("median", "not yet: mosaic: 0.24, where 0.22 is right")],
)
def test_21_the_median_mfu_is_not_the_best(said, chapter_21, of, line):
    np = chapter_21["np"]

    def skill(predicted, measured, ideal):
        mfus = np.linspace(0.02, 1, 50) if of == "min" else [np.median(ideal / measured)]
        rival = min(np.abs(ideal / mfu / measured - 1).mean() for mfu in mfus)
        return 1 - np.abs(predicted / measured - 1).mean() / rival

    assert said("21", "mesh21-36", **chapter_21 | {"skill": skill})[0] == line


SWAP = """
def swap(wire, mine, theirs, peer):
    for move, tensor in {order}:
        getattr(wire, move)(tensor, peer)
"""


@pytest.mark.parametrize(
    "order", ["(('send', mine), ('recv', theirs))", "(('recv', theirs), ('send', mine))"]
)
def test_22_two_ranks_that_begin_alike_hear_so(tmp_path, order):
    """Not that the connection was reset by the rank that gave up first."""
    answers = [SWAP.format(order=order)]
    ((first, _),) = on_ranks(tmp_path, "22", ["cell-13"], "cell-60", answers, ranks=2)
    assert first.startswith("not yet: no byte moved for 3 s: do both send, or both receive?")


def test_22_a_sum_in_float64_depends_on_the_order(said):
    def add_up(arrived):
        return sum(tensor.double() for _, tensor in arrived).float()

    given = {"torch": torch, "itertools": itertools, "add_up": add_up}
    first, _ = said("22", "cell-63", **given)
    assert first == "not yet: 16 of 24 orders of arrival give other bits"


@pytest.mark.parametrize("answer", [4.5, "2", [2]])
def test_22_a_mistake_is_a_number(said, answer):
    given = dict.fromkeys(("mistake_of_a", "mistake_of_b", "mistake_of_c"), answer)
    line = f"not yet: backend A: a number from 1 to 4, not {answer!r}"
    assert said("22", "cell-69", hashlib=hashlib, **given)[0] == line


def test_22_a_mistake_may_be_a_float(said):
    given = {"mistake_of_a": 2.0, "mistake_of_b": 3.0, "mistake_of_c": 4.0}
    assert said("22", "cell-69", hashlib=hashlib, **given) == ["correct"] * 2


RPC = """
import time, threading, warnings
from torch.distributed import rpc
warnings.filterwarnings("ignore", message="You are using a Backend")
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
"""
ACCOUNT = """
class SafeAccount:
    def __init__(self):
        self.balance, self.lock = 0, threading.Lock()

    def pay_in(self, amount):
        {pay_in}

    def get(self):
        return self.balance
"""


def test_23_an_account_without_a_lock_is_not_safe(tmp_path):
    """Even if it never sleeps between the read and the write."""
    pay_in = ["self.balance += amount", "with self.lock: self.balance += amount", "self.no(amount)"]
    answers = [ACCOUNT.format(pay_in=line) for line in pay_in]
    cells = [RPC, source("23", "cell-49")]
    lines = on_ranks(tmp_path, "23", cells, "cell-51", answers, ranks=2)
    assert re.match(r"not yet: 60 were paid in, \d+ are there", lines[0][0])
    assert lines[1][0] == "correct"
    raised = "not yet: it raises RuntimeError: AttributeError: On Worker.*has no attribute 'no'"
    assert re.match(raised, lines[2][0])
