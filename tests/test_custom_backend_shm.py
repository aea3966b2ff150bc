"""custom_backend/shm: every operation, dtype and ReduceOp against a plain computation."""

import json

import pool
import pytest
from helpers import ROOT

WORKER = ROOT / "tests" / "workers" / "shm_operations.py"
WORLDS = (1, 2, 3, 4, pytest.param(8, marks=pytest.mark.release))
OPERATIONS = (
    "all_reduce", "all_reduce_of_every_half", "all_reduce_of_100_mb", "written_past_the_caches",
    "all_reduce_coalesced", "all_reduce_of_sparse_tensors", "reduce", "broadcast", "all_gather",
    "gather", "scatter", "reduce_scatter", "all_to_all", "send_and_recv", "barriers", "objects",
    "functional_collectives", "groups", "refusals", "work_and_future", "profiles",
    "in_a_row", "not_a_number",
)  # fmt: skip
NOT_IN_ALL = {"send_and_recv": (2, 3, 4, 8), "in_a_row": (2, 3, 4, 8)}
NOT_IN_ALL |= {"all_reduce_of_100_mb": (2,), "written_past_the_caches": (2,)}


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world}ranks")
def found(request, tmp_path_factory) -> tuple[int, list[dict]]:
    """The findings of each rank of one job, operation by operation."""
    folder = tmp_path_factory.mktemp("operations")
    pool.run(WORKER, folder, ranks=request.param, timeout=240).check()
    saved = [json.loads((folder / f"{r}.json").read_text()) for r in range(request.param)]
    return request.param, saved


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.slow
def test_equals_a_plain_computation(found, operation):
    world, saved = found
    for rank, results in enumerate(saved):
        assert set(results) == set(OPERATIONS)
        assert not results[operation]["wrong"], f"rank {rank} of {world}"
        if world in NOT_IN_ALL.get(operation, (world,)) and (operation, rank) != ("groups", 1):
            assert results[operation]["cases"]
