"""custom_backend/minimal_backend.py: minimal.cpp compiles, and DDP trains on it."""

import fcntl
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compile_once import build_folder
from helpers import ROOT, torchrun

SOURCE = ROOT / "custom_backend/minimal.cpp"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = build_folder("minimal_backend", SOURCE)
    folder.mkdir()
    (folder / "lock").touch()  # left behind by a killed build
    return folder


@pytest.mark.slow
def test_ddp_on_the_smallest_backend_in_cpp(tmp_path, folder):
    script = ROOT / "custom_backend/minimal_backend.py"
    output = torchrun(script, timeout=600, TORCH_EXTENSIONS_DIR=str(tmp_path)).check().output
    for rank in range(2):
        assert f"rank {rank}: all_reduce gave [3.0, 30.0]" in output
        line = rf"rank {rank}: DDP's gradients differ from those on Gloo by (\S+) at most"
        assert float(re.search(line, output)[1]) < 1e-6


# load() before torch 2.15: it waits while the file "lock" exists
PROGRAM = """
import time, compile_once
from pathlib import Path

def load(name, sources, build_directory):
    while (Path(build_directory) / "lock").exists():
        time.sleep(0.01)
    print("compiled in", build_directory)

compile_once.cpp_extension.load = load
compile_once.compile_once("minimal_backend", Path("minimal.cpp").resolve())
"""


@pytest.mark.slow
def test_a_lock_that_a_killed_build_left_behind_blocks_no_rank(folder):
    """A rank waits for another rank that holds the kernel's lock, says so, and removes the file."""
    with (folder / "ranks").open("w") as other_rank:
        fcntl.flock(other_rank, fcntl.LOCK_EX)
        rank = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT / "custom_backend",
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert rank.stdout.readline() == "waiting for another process to compile minimal.cpp\n"
            assert (folder / "lock").exists()
            fcntl.flock(other_rank, fcntl.LOCK_UN)
            assert rank.communicate(timeout=60)[0] == f"compiled in {folder}\n"
        finally:
            rank.kill()
