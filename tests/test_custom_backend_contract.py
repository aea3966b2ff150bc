"""custom_backend/: what torch expects of every backend, beyond right numbers."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pool
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT
from minimal import StoreGroup

pytestmark = pytest.mark.slow
WORKER = ROOT / "tests/workers/backend_contract.py"
compiled = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
new = pytest.mark.skipif(
    torch.__version__ < "2.14", reason="this backend needs torch 2.14 or newer"
)
IN_PYTHON = ["store", "ring"]
IN_CPP = [
    pytest.param("minimal", marks=compiled),
    pytest.param("pipe", marks=compiled),
    pytest.param("shm", marks=[compiled, new]),
]


def saw(backend: str, case: str, **environment: str) -> list[str]:
    """What rank 0 and rank 1 printed."""
    result = pool.run(WORKER, backend, case, ranks=2, timeout=400, **environment).check()
    return [found for _, found in sorted(re.findall(r"^rank (\d) saw (.*)$", result.output, re.M))]


@pytest.mark.parametrize("backend", IN_PYTHON + IN_CPP)
def test_autograd_does_not_see_a_collective(backend):
    """Else a loss that is summed for the log would have no gradient."""
    assert saw(backend, "gradients") == ["[3.0, 3.0] 36.0 [3.0, 3.0]"] * 2


@pytest.mark.parametrize("backend", IN_PYTHON + IN_CPP)
def test_a_tensor_with_gaps(backend):
    assert saw(backend, "gaps") == ["[[0.0, 1.0], [4.0, 3.0], [8.0, 5.0]]"] * 2


@pytest.mark.parametrize("backend", IN_PYTHON + IN_CPP)
def test_the_limit_of_a_group_is_its_own(backend):
    assert saw(backend, "limits") == ["True", "True"]


@pytest.mark.parametrize("backend", IN_CPP)
def test_torch_compares_the_calls(backend):
    assert saw(backend, "detail", TORCH_DISTRIBUTED_DEBUG="DETAIL") == ["[2.0, 2.0]"] * 2


@pytest.mark.parametrize("backend", IN_CPP[1:])
def test_an_abort_waits_for_nobody(backend):
    (found,) = saw(backend, "abort")
    assert found.startswith("True ")
    assert found != "True none"


def test_a_restart_in_the_middle_of_a_call():
    """torchrun --max-restarts keeps the store. Rank 0 had begun a call when rank 1 died."""
    store, limit = dist.HashStore(), timedelta(seconds=60)
    first = StoreGroup(store, 0, 2, limit)
    first.store.add("calls of 0", 1)
    first.store.set("1/0", torch.full((1,), 9.0).numpy().tobytes())
    StoreGroup(store, 1, 2, limit)
    with ThreadPoolExecutor(2) as threads:
        groups = [StoreGroup(store, rank, 2, limit) for rank in range(2)]
        for step in range(3):
            x = [torch.full((1,), 10.0 * step + rank) for rank in range(2)]
            done = [
                threads.submit(group.allreduce, [mine], dist.AllreduceOptions())
                for group, mine in zip(groups, x, strict=True)
            ]
            assert all(one.result(60).wait() for one in done)
            assert x[0] == x[1] == 20.0 * step + 1
    # Of each life: the calls counted, the lives, and each rank's value of its last call.
    assert store.num_keys() <= 10
