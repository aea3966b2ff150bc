"""notebooks/exercises.py: check() prints one line, and never fails."""

import contextlib
import signal
import sys
import time

import pool
import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

import exercises


@pytest.fixture
def said(capsys, monkeypatch):
    monkeypatch.setattr(exercises, "_tries", {})
    monkeypatch.setattr(exercises, "_given", {})

    def check(*args, **kwargs) -> str:
        exercises.check(*args, **kwargs)
        return capsys.readouterr().out

    return check


def right(a, b):
    if a <= 0:  # no assert: pytest would add to its message, as IPython does not
        raise AssertionError("a is not above 0")
    if b == 7:
        raise AssertionError
    return 1 / (b - 8)


def test_one_line_says_what_is_wrong(said):
    assert said(right, 1, 2) == "correct\n"
    assert said(right, None, None) == "not answered yet\n"
    assert said(right, 1, None) == "not answered yet (missing: answer 2)\n"
    assert said(right, 0, 2) == "not yet: a is not above 0\n"
    assert said(right, 1, 7) == "not yet: wrong\n"
    assert said(right, 1, 8) == "not yet: it raises ZeroDivisionError: division by zero\n"

    def two_lines(answer):
        raise ValueError("the first line\nthe second")

    assert said(two_lines, 1) == "not yet: it raises ValueError: the first line\n"

    def of_another_process(answer):
        raise TypeError(
            "TypeError: On WorkerInfo(id=1, name=worker1):\nno such argument\nTraceback"
        )

    line = "TypeError: On WorkerInfo(id=1, name=worker1): no such argument"
    assert said(of_another_process, print) == f"not yet: it raises TypeError: {line}\n"


def test_hints_come_one_after_another(said):
    hints = ["look up", "look down"]
    lines = [said(right, 0, 2, hints=hints) for _ in range(4)]
    wrong = "not yet: a is not above 0"
    assert lines == [f"{wrong}\n", f"{wrong} (Hint: look up)\n"] + 2 * [
        f"{wrong} (Hint: look down)\n"
    ]
    missing = said(right, 1, None, hints=hints)  # which is no wrong answer
    assert missing == "not answered yet (missing: answer 2)\n"
    assert said(right, 1, 2, hints=hints) == "correct\n"


def test_a_hint_is_about_the_mistake_that_was_made(said):
    hints = {"not above 0": ["look up", "look down"], "ZeroDivision": "not 8"}
    wrong, zero = "not yet: a is not above 0", "not yet: it raises ZeroDivisionError"
    assert said(right, 0, 2, hints=hints) == f"{wrong}\n"
    assert said(right, 1, 8, hints=hints) == f"{zero}: division by zero (Hint: not 8)\n"
    assert said(right, 0, 2, hints=hints) == f"{wrong} (Hint: look up)\n"
    assert said(right, 1, 8, hints=hints) == f"{zero}: division by zero (Hint: not 8)\n"
    assert said(right, 0, 2, hints=hints) == f"{wrong} (Hint: look down)\n"
    assert said(right, 1, 7, hints=hints) == "not yet: wrong\n"  # of which no hint speaks


def test_an_answer_may_hang_exit_or_fail_in_any_way(said, monkeypatch):
    def calls(answer):
        answer()

    def for_ever():
        while True:
            with contextlib.suppress(Exception):  # which must not hold up the end
                time.sleep(0.01)

    def deeper():
        deeper()

    with monkeypatch.context() as patch:  # the other answers end by themselves
        patch.setattr(exercises, "SECONDS", 0.2)
        assert said(calls, for_ever) == "not yet: no end within 0.2 seconds\n"
    assert said(calls, sys.exit) == "not yet: it raises SystemExit: \n"
    assert said(calls, deeper).startswith("not yet: it raises RecursionError: maximum")
    assert said(calls, 7) == (
        "not yet: is that of the kind that was asked for? 'int' object is not callable\n"
    )
    assert said(calls, lambda: None) == "correct\n"
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    assert interval == 0  # ours is over,
    assert left > 1  # and that of this test goes on


RANKS = """
import os, sys, time
from datetime import timedelta
sys.path.insert(0, {folder!r})
import torch, torch.distributed as dist
import exercises
from exercises import check
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
exercises.store = dist.TCPStore("127.0.0.1", port, is_master=False)
exercises.store.set(f"here {{rank}}", "")
exercises.store.wait(["here 0", "here 1", "here 2"])  # the next line waits for 15 seconds only
dist.init_process_group("gloo", timeout=timedelta(seconds=15))
exercises.SECONDS = 60

def mine(answer):
    assert answer == rank, f"wrong on rank {{rank}}"

def summed(add):
    assert rank != 1 or add is not wrong, "wrong on rank 1"  # and it leaves the others alone
    x = torch.ones(1)
    add(x)
    assert x == 3, "not the sum"

def wrong(x):
    dist.all_reduce(x)

def raises_on_2(x):
    if rank == 2:
        raise ValueError("rank 2 is here")
    dist.all_reduce(x)

check(mine, rank)
check(mine, None if rank == 1 else rank)
check(mine, None)
check(mine, 5 if rank else 0)
check(summed, dist.all_reduce)
check(summed, None if rank else dist.all_reduce)  # no rank waits for the two others
check(summed, dist.all_reduce)
assert not exercises.start_again
check(summed, {wrong})
assert exercises.start_again
"""


def on_three_ranks(tmp_path, wrong: str) -> list[str]:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(folder=str(ROOT / "notebooks"), wrong=wrong))
    return pool.run(script, ranks=3).check().output.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("wrong", "not yet: a rank waits for another one: do all ranks make the same calls?"),
        ("raises_on_2", "not yet: it raises ValueError: rank 2 is here"),
    ],
)
def test_ranks_print_one_line(tmp_path, wrong, line):
    """The exception or the mistake of the first rank that has one; the group may be broken."""
    assert on_three_ranks(tmp_path, wrong) == [
        "correct",
        "not answered yet on rank 1: every rank needs the answer",
        "not answered yet",
        "not yet: wrong on rank 1",
        "correct",
        "not answered yet on rank 1: every rank needs the answer",
        "correct",
        line + " (The ranks start again.)",
    ]
