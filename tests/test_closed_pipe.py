"""Scripts that print tables end without a traceback when the program they are piped to has left."""

import os
import shlex
import subprocess
import sys

import pytest
from helpers import ROOT, clean_environment

TABLES = (
    "planner/plan.py --model llama-3-8b --gpus 8",
    "planner/plan.py --help",
    "planner/score.py",
    "planner/fit.py",
    "clusters/goodput.py",
    "clusters/merge_traces.py --help",
    pytest.param(
        "transformer_basics/memory_at_scale.py --ranks 1 --pp 1 --tp 1 --dp-shard 1 --layers 1",
        marks=pytest.mark.slow,
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at exit", "at each line"])
@pytest.mark.parametrize("command", TABLES)
def test_a_closed_pipe_is_no_error(command, unbuffered):
    """The reading end is closed before the script begins, so each write fails."""
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            [sys.executable, *shlex.split(command)],
            cwd=ROOT,
            env=clean_environment(PYTHONUNBUFFERED=unbuffered),
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    finally:
        os.close(write)
    ignored = "--help" in command and unbuffered  # argparse itself drops an error of its print
    assert (result.returncode, result.stderr) == (0 if ignored else 1, "")
