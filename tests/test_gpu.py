"""More than one rank on one GPU, through Gloo: what runs on GPUs only is run with two ranks.

The same worker on the CPU shows, where there is no GPU, that it is right itself.
"""

import runpy
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from helpers import ROOT, torchrun
from workers.one_gpu import STRATEGIES

pytestmark = pytest.mark.slow
WORKER = ROOT / "tests/workers/one_gpu.py"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request, tmp_path_factory) -> list[dict]:
    """The results of two ranks on one device."""
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


@pytest.mark.skipif(torch.accelerator.current_accelerator() is None, reason="a CPU-only torch")
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(
    "directory", ["fsdp_basics", "parallel_basics", "t5_finetuning", "transformer_basics"]
)
def test_minimal_takes_a_gpu_per_process_or_the_cpu(monkeypatch, directory, gpus):
    """Two ranks on a machine with one GPU: both take the CPU, and their mesh is one of CPUs."""
    joined, chosen = [], []

    def mesh(device_type: str, *_, **__):
        raise InterruptedError(device_type)  # here it has decided

    environment = {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    for name, value in environment.items():  # rank 3 is on the second node
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["minimal.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, device_id: joined.extend((name, device_id))
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_backend", lambda: joined[0])
    monkeypatch.setattr(torch.distributed.device_mesh, "init_device_mesh", mesh)
    monkeypatch.setattr(dist, "init_device_mesh", mesh)
    with pytest.raises(InterruptedError) as decided:
        runpy.run_path(str(ROOT / directory / "minimal.py"), run_name="__main__")
    assert [str(decided.value), *joined] == (
        ["cuda", "nccl", 1] if gpus == 2 else ["cpu", "gloo", None]
    )
    assert chosen == ([torch.device("cuda", 1)] if gpus == 2 else [])
