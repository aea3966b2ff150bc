"""notebooks/exercises.py: check() prints one line, and never fails."""

import sys

import pool
import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

import exercises


@pytest.fixture
def said(capsys, monkeypatch):
    monkeypatch.setattr(exercises, "_tries", {})

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
    assert said(right, None, None) == said(right, 1, None) == "not answered yet\n"
    assert said(right, 0, 2) == "not yet: a is not above 0\n"
    assert said(right, 1, 7) == "not yet: wrong\n"
    assert said(right, 1, 8) == "not yet: it raises ZeroDivisionError: division by zero\n"

    def two_lines(answer):
        raise ValueError("the first line\nthe second")

    assert said(two_lines, 1) == "not yet: it raises ValueError: the first line\n"


def test_hints_come_one_after_another(said):
    hints = ["look up", "look down"]
    lines = [said(right, 0, 2, hints=hints) for _ in range(4)]
    wrong = "not yet: a is not above 0"
    assert lines == [f"{wrong}\n", f"{wrong} (Hint: look up)\n"] + 2 * [
        f"{wrong} (Hint: look down)\n"
    ]
    assert said(right, 1, None, hints=hints) == "not answered yet\n"  # which is no wrong answer
    assert said(right, 1, 2, hints=hints) == "correct\n"


RANKS = """
import sys
sys.path.insert(0, {folder!r})
import torch.distributed as dist
from exercises import check
dist.init_process_group("gloo")
rank = dist.get_rank()

def mine(answer):
    assert answer == rank, f"wrong on rank {{rank}}"

check(mine, rank)
check(mine, None if rank == 1 else rank)
check(mine, 5 if rank else 0)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_print_one_line(tmp_path):
    """The mistake of the first rank that has one."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(folder=str(ROOT / "notebooks")))
    output = pool.run(script, ranks=3).check().output
    assert output == "correct\nnot answered yet\nnot yet: wrong on rank 1\n"
