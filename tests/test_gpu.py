"""More than one rank on one GPU, through Gloo: what runs on GPUs only is run with two ranks.

The same worker on the CPU shows, where there is no GPU, that it is right itself.
"""

import pytest
import torch
from helpers import ROOT, torchrun
from workers.one_gpu import STRATEGIES

pytestmark = pytest.mark.slow
WORKER = ROOT / "tests/workers/one_gpu.py"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each of two ranks on one device has saved."""
    folder = tmp_path_factory.mktemp(request.param)
    torchrun(WORKER, request.param, folder, ranks=2, timeout=200).check()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("strategy", [function.__name__ for function in STRATEGIES])
def test_two_ranks_on_one_device_equal_one_process(ranks, strategy):
    for seen in ranks:
        expected, found = seen["one_process"], seen[strategy]
        assert isinstance(found, dict), f"Gloo could not carry {strategy}: {found}"
        for what in ("gradients", "parameters"):
            assert found[what].keys() == expected[what].keys()
            for name, tensor in expected[what].items():
                assert tensor.abs().max() > 1e-3, f"{what} {name}: nothing to compare"
                # float64, numbers of order 1: only the order of additions differs.
                assert (found[what][name] - tensor).abs().max() < 1e-12, f"{what} {name}"
