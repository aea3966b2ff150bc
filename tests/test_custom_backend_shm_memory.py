"""custom_backend/shm: addresses, descriptors and memory that it takes, and gives back."""

import json

import pool
import pytest
from helpers import ROOT

pytest.importorskip("shm", exc_type=RuntimeError)  # RuntimeError: no compiler

WORKER = ROOT / "tests" / "workers" / "shm_memory.py"
MIB = 2**20


def run(case: str, folder, ranks: int, timeout: float = 100) -> list[dict]:
    pool.run(WORKER, case, folder, ranks=ranks, timeout=timeout).check()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_groups_map_each_heap_once(tmp_path):
    """A group costs its own slots, and a thread: nothing for the heaps of its ranks."""
    for rank in run("groups", tmp_path, 8, timeout=800):
        few, many = rank["counts"]
        groups = many["groups"] - few["groups"]
        print(few, many)
        assert groups > 100
        assert (many["addresses"] - few["addresses"]) / groups < 48 * MIB
        assert (many["resident"] - few["resident"]) / groups < 1 * MIB
        assert many["descriptors"] == few["descriptors"]
        assert few["heaps"] == many["heaps"] == 8


def test_freed_memory_goes_back_to_the_system(tmp_path):
    for rank in run("returns", tmp_path, 2):
        assert rank["empty"] == rank["size"] == 0
        for turn in ("first", "second"):
            assert rank[f"{turn} full"] == 4 * 48
            assert 48 <= rank[f"{turn} freed"] <= 64  # kept for the next tensors
            assert rank[f"{turn} sum"] == 2 * 48 * MIB // 4


@pytest.mark.slow
def test_tensors_of_any_size_come_and_go(tmp_path):
    for rank in run("extents", tmp_path, 2):
        assert rank["wrong"] == []
        assert rank["extents"] > 4  # of two heaps


def test_a_process_with_few_addresses_can_start(tmp_path):
    """`ulimit -v`: a gibibyte more than Python and torch need."""
    for rank in run("limit", tmp_path, 3):
        assert rank["x"] == 3
        assert rank["y"] == 9
        assert rank["message"].startswith("mapping 2048 MiB of shared memory failed")
