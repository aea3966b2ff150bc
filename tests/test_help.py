"""--help answers at once: scripts that need no torch do not import it, which takes seconds."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT, clean_environment

WITHOUT_TORCH = (
    "check_environment.py",
    "clusters/goodput.py",
    "clusters/kubernetes/without_jobset.py",
    "clusters/lab.py",
    "clusters/merge_traces.py",
    "clusters/preflight.py",
    "clusters/torchrun/launch.py",
    "planner/fit.py",
    "planner/plan.py",
    "planner/score.py",
)


def imported(*command: str) -> tuple[int, set[str]]:
    """The exit status of a script, and the modules that it imports."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return result.returncode, set(re.findall(r"\| +([\w.]+)$", result.stderr, re.MULTILINE))


@pytest.mark.parametrize("script", WITHOUT_TORCH)
def test_help_imports_neither_torch_nor_matplotlib(script):
    status, modules = imported(script, "--help")
    assert status == 0
    assert "argparse" in modules
    assert modules & {"torch", "matplotlib", "matplotlib.pyplot"} == set()


def test_an_import_of_torch_is_seen(tmp_path):
    (tmp_path / "torch.py").touch()
    (tmp_path / "slow.py").write_text("import argparse, torch\n")
    assert "torch" in imported(str(tmp_path / "slow.py"))[1]
