"""clusters/straggler.py: which rank is named, when, and that a job really names its slow rank."""

import re
import sys

import pool
import pytest
import torch.distributed as dist
from helpers import ROOT, python

sys.path.insert(0, str(ROOT / "clusters"))
import straggler
from straggler import StragglerWatch, own_work, slow_ranks

sys.path.remove(str(ROOT / "clusters"))

SCRIPT = ROOT / "clusters/straggler.py"


def test_own_work_leaves_the_waiting_out():
    # begins at 0, waits from 2 to 10, waits from 13 to 20
    assert own_work([0.0, 2.0, 10.0, 13.0, 20.0]) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([1.0, 1.1, 0.9, 1.0], {}),
        ([1.0, 1.0, 2.0, 1.0], {2: 2.0}),
        ([1.0, 3.0], {1: 3.0}),  # of two
        ([1.2, 1.0], {0: 1.2}),
        ([4.0, 1.0, 1.0, 1.0, 2.0], {0: 4.0, 4: 2.0}),
    ],
)
def test_slow_ranks(seconds, slow):
    assert slow_ranks(seconds, factor=1.2) == slow


class Job:
    """Ranks in one process, on a clock of our own: a look every 10 s, steps of 1 s."""

    def __init__(self, monkeypatch, ranks: int):
        self.now, store = 0.0, dist.HashStore()
        monkeypatch.setattr(straggler.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(straggler.time, "monotonic", lambda: self.now)
        self.ranks = [StragglerWatch(store, rank, ranks) for rank in range(ranks)]

    def steps(self, count: int, *own: float) -> None:
        """Each rank works for its own time, and then waits until the second is over."""
        for _ in range(count):
            began = self.now
            for watch, seconds in zip(self.ranks, own, strict=True):
                self.now = began + seconds
                context = watch.waiting()
                context.__enter__()
                self.now = began + 1
                context.__exit__(None, None, None)


def test_it_is_named_within_a_minute_and_once(monkeypatch, capsys):
    job = Job(monkeypatch, 3)
    job.steps(40, 0.2, 0.2, 0.2)
    assert capsys.readouterr().out == ""
    job.steps(30, 0.2, 0.2, 0.5)
    said = capsys.readouterr().out
    assert re.fullmatch(
        r"straggler: rank 2 on \S+ takes 500.0 ms per step for its own work, 2.5 times the median "
        r"rank\n",
        said,
    )
    job.steps(100, 0.2, 0.2, 0.5)
    assert capsys.readouterr().out == ""  # said already
    job.steps(40, 0.2, 0.2, 0.2)
    assert re.fullmatch(r"straggler: rank 2 on \S+ keeps up again\n", capsys.readouterr().out)


def test_a_bad_moment_is_no_straggler(monkeypatch, capsys):
    job = Job(monkeypatch, 2)
    job.steps(20, 0.2, 0.2)
    job.steps(4, 0.9, 0.2)  # less than half of a look: the median hides it
    job.steps(16, 0.2, 0.2)
    job.steps(10, 0.2, 0.9)  # one look
    job.steps(40, 0.2, 0.2)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_job_names_its_slow_rank():
    """The sleep makes its own work 30 ms at least, on any machine; a whole step is equal for all,
    as each waits for the slow one."""
    options = ("--slow-rank", 1, "--every", 0.5, "--steps", 100)
    said = pool.run(SCRIPT, *options, ranks=2, timeout=120).check().output
    assert re.search(r"^straggler: rank 1 on \S+ takes \d+\.\d ms per step", said, re.MULTILINE)
    table = re.findall(r"^ +(\d)  \S+ +([\d.]+) +([\d.]+)$", said, re.MULTILINE)
    assert [rank for rank, _, _ in table] == ["0", "1"]
    (own_0, whole_0), (own_1, whole_1) = ([float(x) for x in row[1:]] for row in table)
    assert own_1 >= 30
    assert own_0 < own_1 / 2
    assert whole_0 == pytest.approx(whole_1, rel=0.2)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "needs two ranks: torchrun "),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "there is no rank 2 in a job of 2"),
    ],
)
@pytest.mark.slow
def test_mistakes_are_one_sentence(environment, says):
    result = python(SCRIPT, "--slow-rank", 2, timeout=60, **environment)
    assert result.returncode == 2
    assert f"straggler.py: error: {says}" in result.output
