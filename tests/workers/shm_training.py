"""Train with every parallel strategy, on one backend: python shm_training.py BACKEND FOLDER.

Rank r saves losses, gradients and parameters, by strategy, to FOLDER/BACKENDr.pt.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "custom_backend"))

import shm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

BACKEND, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, WIDTH = 3, 128


def main() -> None:
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=60))
    ways = WAYS | (ON_SHM if BACKEND == "shm" else {})
    found = {}
    for name, way in ways.items():
        torch.manual_seed(0)
        found[name] = way()
    torch.save(found, FOLDER / f"{BACKEND}{RANK}.pt")
    dist.barrier()
    dist.destroy_process_group()


def model() -> nn.Sequential:
    """A model with several buckets, and with tensors that need several slots."""
    layers = [nn.Linear(20, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()]
    return nn.Sequential(
        *layers, nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(8, 20, generator=generator)
    return images, torch.randint(0, 7, (8,), generator=generator)


def train(model: nn.Module, rank: int = RANK, optimizer=None) -> list[torch.Tensor]:
    """Train; return the loss, all gradients and all parameters after each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(STEPS):
        images, labels = batch(step, rank)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        seen += [loss.detach().clone(), *(local(p.grad) for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        seen += [local(p) for p in model.parameters()]
    return seen


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def ddp(hook=None, state=None, **options) -> list:
    replica = DistributedDataParallel(model(), bucket_cap_mb=0.1, **options)
    if hook:
        replica.register_comm_hook(state, hook)
    seen = train(replica)
    if hook and options:  # gradients are views of DDP's buckets, which moved into the heap
        replica(batch(0, RANK)[0]).sum().backward()
        assert all(shm.lies_in_heap(parameter.grad) for parameter in replica.parameters())
    return seen


def power_sgd() -> list:
    """The callbacks of its futures call more collectives, and wait for them."""
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    replica = DistributedDataParallel(model())
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(replica)


def fsdp(from_group: bool = False, **options) -> list:
    sharded = model()
    for layer in (*sharded, sharded):
        if len(list(layer.parameters())):
            fully_shard(layer, **options)
            if from_group:
                layer.set_allocate_memory_from_process_group_for_comm(True)
    return train(sharded)


def tensor_parallel() -> list:
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
    plan = {"2": ColwiseParallel(), "4": RowwiseParallel(), "5": SequenceParallel(sequence_dim=0)}
    plan["4"] = RowwiseParallel(output_layouts=Shard(0))
    plan["6"] = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    return train(parallelize_module(model(), mesh, plan), rank=0)


def dtensors() -> list:
    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.randn(12, 6)
    seen = []
    for one in (Shard(0), Shard(1), Replicate()):
        for other in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(whole, mesh, [one]).redistribute(mesh, [other])
            seen += [local(tensor), tensor.full_tensor()]
            assert torch.equal(seen[-1], whole)
    return seen


def pipeline() -> list:
    layers = list(model())
    torch.manual_seed(1)
    stage = nn.Sequential(*(layers[:3] if RANK == 0 else layers[3:]))
    shape = (4, 20) if RANK == 0 else (4, 4 * WIDTH)
    pipe = PipelineStage(stage, RANK, SIZE, torch.device("cpu"), input_args=torch.randn(shape))
    schedule = ScheduleGPipe(pipe, n_microbatches=4, loss_fn=F.cross_entropy)
    images = torch.cat([batch(0, 0)[0], batch(1, 0)[0]])
    labels = torch.cat([batch(0, 0)[1], batch(1, 0)[1]])
    losses = []
    if RANK == 0:
        schedule.step(images)
    else:
        schedule.step(target=labels, losses=losses)
    return [*(p.grad.clone() for p in stage.parameters()), *(loss.detach() for loss in losses)]


def checkpoint() -> list:
    """Save shards, synchronously and asynchronously; load them into another model."""
    seen = []
    for asynchronous in (False, True):
        sharded, other = model(), model()
        for one in (sharded, other):
            fully_shard(one)
        path = FOLDER / f"checkpoint_{BACKEND}_{asynchronous}"
        state = {"model": sharded.state_dict(), "step": 3}
        if asynchronous:  # a separate Gloo group, so that it does not disturb the training
            group = dist.new_group()
            dcp.async_save(state, checkpoint_id=path, process_group=group).result()
        else:
            dcp.save(state, checkpoint_id=path)
        loaded = {"model": other.state_dict(), "step": 0}
        dcp.load(loaded, checkpoint_id=path)
        assert loaded["step"] == 3
        pairs = zip(sharded.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(local(a), local(b)) for a, b in pairs)
        seen += [local(p) for p in other.parameters()]
    return seen


WAYS = {
    "ddp": ddp,
    "ddp, unused": lambda: ddp(find_unused_parameters=True, gradient_as_bucket_view=True),
    "ddp, power sgd": power_sgd,
    "fsdp": fsdp,
    "fsdp, kept": lambda: fsdp(reshard_after_forward=False),
    "dtensors": dtensors,
    "checkpoint": checkpoint,
}
if SIZE == 2:  # two stages, and the widths divide by 2
    WAYS |= {"pipeline": pipeline, "tensor parallel": tensor_parallel}
ON_SHM = {
    "ddp, hook": lambda: ddp(shm.ddp_hook),
    "ddp, hook, views": lambda: ddp(shm.ddp_hook, gradient_as_bucket_view=True),
    "fsdp, from group": lambda: fsdp(from_group=True),
}

if __name__ == "__main__":
    main()
