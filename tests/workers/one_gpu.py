"""Two ranks that share one device: DDP and fully_shard next to one process.

Started by test_gpu.py under torchrun with the device and a folder. NCCL refuses two ranks on one
GPU; Gloo carries CUDA tensors through the CPU's memory. So the lines that only run on GPUs run with
more than one rank where a single GPU is there. In float64, where no order of additions shows.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "collectives"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from runtime import leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers.place import gather_shards

STEPS = 3


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)  # the same on every rank
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    return model.to(device, torch.float64)


def batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(STEPS, 8, 10, generator=generator, dtype=torch.float64).to(device)
    return [(batch[:, :6], batch[:, 6:]) for batch in numbers]


def train(model: nn.Module, own: Callable, device: torch.device) -> dict:
    """Some steps of SGD with momentum. own: from the global batch to this rank's part of it.

    Returns the gradients of the first step and the parameters after the last, whole, on the CPU.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients = {}
    for x, y in batches(device):
        loss = nn.functional.mse_loss(model(own(x)), own(y))
        loss.backward()
        gradients = gradients or {n: gather_shards(p.grad) for n, p in named_parameters(model)}
        optimizer.step()
        optimizer.zero_grad()
    return {
        "gradients": gradients,
        "parameters": {n: gather_shards(p) for n, p in named_parameters(model)},
    }


def named_parameters(model: nn.Module) -> list:
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters()]


def everything(x: torch.Tensor) -> torch.Tensor:
    return x


def half(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def one_process(device: torch.device) -> dict:
    return train(build(device), everything, device)


def data_parallel(device: torch.device) -> dict:
    return train(DistributedDataParallel(build(device)), half, device)


def fully_sharded(device: torch.device) -> dict:
    model, mesh = build(device), init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return train(model, half, device)


STRATEGIES = (data_parallel, fully_sharded)


def main() -> None:
    device, folder = torch.device(sys.argv[1]), sys.argv[2]
    if device.type == "cuda":
        device = torch.device("cuda", 0)  # not the local rank: there is one GPU for all
        torch.cuda.set_device(device)
        torch.cuda.init()  # or a DeviceMesh would choose a device by the local rank
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    seen = {"one_process": one_process(device)}
    for strategy in STRATEGIES:
        try:
            seen[strategy.__name__] = strategy(device)
        except (RuntimeError, NotImplementedError) as error:  # says which ones Gloo cannot carry
            seen[strategy.__name__] = f"{type(error).__name__}: {error}"
    torch.save(seen, f"{folder}/{dist.get_rank()}.pt")
    leave()  # DTensor's caches would hold the group: see runtime.py


if __name__ == "__main__":
    main()
