"""clusters/flight_recorder.py: each rank leaves a record, and torchfrtrace finds the difference."""

import pickle
import sys
from pathlib import Path

import pytest
from helpers import ROOT, Job, python, torchrun

SCRIPT = ROOT / "clusters" / "flight_recorder.py"
READER = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]


def recorded(folder: Path, *args, ranks: int = 2):
    """(result of the job, what torchfrtrace makes of its files)"""
    job = torchrun(SCRIPT, *args, "--output-dir", folder, ranks=ranks, timeout=120)
    if not list(folder.glob("rank_*")):
        return job, ""
    with Job([*READER, folder, "--prefix", "rank_"]) as reader:
        return job, reader.wait(120).check().output


def line_of(text: str) -> int:
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.slow
def test_the_barrier_of_one_rank_is_found(tmp_path):
    job, verdict = recorded(tmp_path, "--timeout", 3)
    assert job.returncode == 1
    assert sorted(path.name for path in tmp_path.glob("rank_*")) == ["rank_0", "rank_1"]
    assert "Collective sequence number: 13 " in verdict  # after two in each of steps 0 to 5
    assert "'barrier' does not match found collective type: 'all_reduce'" in verdict
    assert f"train at {SCRIPT}:{line_of('# the bug: this line')}" in verdict


@pytest.mark.slow
def test_a_rank_that_raises_nothing_leaves_a_record_too(tmp_path):
    """Of three, so that a majority goes on."""
    job, verdict = recorded(tmp_path, "--bug", "stuck", "--timeout", 3, ranks=3)
    assert job.returncode == 1
    assert "Not all ranks joining collective, sequence number: 11" in verdict
    assert "missing ranks: {2}" in verdict
    counts = [
        len(pickle.loads(path.read_bytes())["entries"]) for path in sorted(tmp_path.glob("r*"))
    ]
    assert counts == [11, 11, 10]


@pytest.mark.slow
def test_a_job_that_ends_well_leaves_no_record(tmp_path):
    job, _ = recorded(tmp_path, "--bug", "none")
    job.check()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "a hang needs another rank: torchrun"),
        (("--timeout", "0"), "a hang needs another rank: torchrun"),
        (("--bug", "other"), "invalid choice: 'other'"),
    ],
)
@pytest.mark.slow
def test_bad_arguments(args, says):
    result = python(SCRIPT, *args, timeout=60)
    assert result.returncode == 2
    assert says in result.output.splitlines()[-1]
