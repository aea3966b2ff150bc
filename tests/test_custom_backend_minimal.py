"""custom_backend/minimal_backend.py: minimal.cpp compiles, and DDP trains on it."""

import fcntl
import importlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from compile_once import build_folder, compile_once
from helpers import ROOT, torchrun
from minimal import StoreGroup
from ring.group import new_ring_group

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


def test_hidden_files_do_not_change_the_build(tmp_path):
    source = tmp_path / "minimal.cpp"
    source.write_text("")
    before = build_folder("minimal_backend", source)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".coverage").write_text("of a test")
    assert build_folder("minimal_backend", source) == before
    (tmp_path / "minimal.h").write_text("")
    assert build_folder("minimal_backend", source) == before  # empty
    (tmp_path / "minimal.h").write_text("// more")
    assert build_folder("minimal_backend", source) != before


MODULES = {"minimal": "minimal_backend", "pipe": "pipe", "shm": "shm.backend"}


def join(name: str, store: dist.Store, rank: int):
    limit = timedelta(seconds=60)
    if name == "store":
        return StoreGroup(store, rank, 2, limit)
    if name == "ring":
        options = {"group_rank": rank, "group_size": 2, "global_ranks_in_group": []}
        return new_ring_group(SimpleNamespace(store=store, timeout=limit, **options))
    return importlib.import_module(MODULES[name]).create_backend(store, rank, 2, limit)


def live(name: str, store: dist.Store, rank: int, x: torch.Tensor) -> torch.Tensor:
    """Join, add, and leave."""
    group = join(name, store, rank)
    group.allreduce([x], dist.AllreduceOptions()).wait()
    if name in ("ring", "pipe", "shm"):
        group.shutdown()
    return x


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "name", ["store", "minimal", pytest.param("pipe", marks=pytest.mark.release), "shm", "ring"]
)
def test_a_second_group_knows_nothing_of_the_first(name):
    """Ranks destroy their group and make another one, under one store; rank 1 is early."""
    if name == "minimal":  # before the limits of time count
        compile_once("minimal_backend", SOURCE)
    elif name in MODULES:
        importlib.import_module(MODULES[name]).compiled()
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        for life in range(3):
            x, y = torch.full((3,), 10.0**life), torch.full((3,), 2 * 10.0**life)
            early = threads.submit(live, name, store, 1, y)
            assert not wait([early], timeout=0.3 if life else 0).done  # it waits for rank 0
            late = threads.submit(live, name, store, 0, x)
            assert early.result(60).tolist() == late.result(60).tolist() == [3 * 10.0**life] * 3


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
