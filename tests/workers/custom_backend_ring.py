"""Run what PyTorch builds on process groups, on the backend "ring" and on Gloo.

test_custom_backend_ring.py starts it with 4 ranks and a folder, to which each rank writes its
results; or with 3 ranks and the word "dies": then one rank dies in the middle of the work.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "custom_backend"))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional  # as DTensor calls them
from checks import check_all
from ring.group import new_ring_group
from runtime import leave
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

GROUPS = ([2], [1, 3], [0, 2, 3], [0, 1, 2, 3])


def main() -> None:
    dist.Backend.register_backend("ring", new_ring_group, extended_api=True, devices=["cpu"])
    dist.init_process_group("ring", timeout=timedelta(seconds=60))
    if sys.argv[1] == "dies":
        train_until_one_dies()
    record = {"operations": operations(), "training": training()}
    for what in (objects, batch, coalesced, functional_collectives, dtensor, names):
        name = what.__name__.removesuffix("_collectives")
        record[name], record[f"{name}, expected"] = what(dist.get_rank(), dist.get_world_size())
    torch.save(record, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    leave()


def train_until_one_dies() -> None:
    """With DDP, C++ code waits for the collectives, and must pass on their errors."""
    model = DistributedDataParallel(nn.Linear(1000, 10))
    for step in range(10**6):
        if step == 20 and dist.get_rank() == 1:
            os._exit(0)  # status 0: torchrun would end all ranks otherwise
        try:
            model(torch.ones(1, 1000)).sum().backward()
        except RuntimeError as error:
            print(f"rank {dist.get_rank()} has seen: {error}", flush=True)
            os._exit(0)


def operations() -> dict:
    found = {}
    for members in GROUPS:
        group = dist.new_group(members)
        if dist.get_rank() in members:
            for numel in (1, 5, 700):
                found[tuple(members), numel] = check_all(group, numel)
    return found


def objects(rank: int, size: int) -> tuple:
    box, everything, mine = [{"from": rank}, rank], [None] * size, [None]
    dist.broadcast_object_list(box, src=1)
    dist.gather_object((rank, "x" * 1000 * rank), everything if rank == 2 else None, dst=2)
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    gathered = [(r, "x" * 1000 * r) for r in range(size)] if rank == 2 else [None] * size
    return (box, everything, mine), ([{"from": 1}, 1], gathered, [f"for {rank}"])


def batch(rank: int, size: int) -> tuple:
    to, source = (rank + 1) % size, (rank - 1) % size
    first, second, any_source = torch.zeros(3), torch.zeros(3), torch.zeros(1)
    operations = [
        dist.P2POp(dist.irecv, first, source),
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), to),
        dist.P2POp(dist.isend, torch.full((3,), 10.0 + rank), to),
        dist.P2POp(dist.irecv, second, source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    sent = dist.isend(torch.tensor([float(rank)]), to, tag=9)
    who = dist.recv(any_source, tag=9)
    sent.wait()
    found = (first.tolist(), second.tolist(), any_source.item(), who)
    return found, ([source] * 3, [10.0 + source] * 3, source, source)


def coalesced(rank: int, size: int) -> tuple:
    a, b = torch.full((3,), float(rank)), torch.full((2, 2), 1.0)
    with dist._coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    gathered, scattered = torch.empty(2 * size), torch.empty(2)
    # The name up to torch 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with dist._coalescing_manager():
        gather(gathered, torch.full((2,), float(rank)))
    with dist._coalescing_manager():
        scatter(scattered, torch.arange(2.0 * size))
    found = [x.flatten().tolist() for x in (a, b, gathered, scattered)]
    total = size * (size - 1) / 2
    repeated = [float(r) for r in range(size) for _ in range(2)]
    return found, [[total] * 3, [size] * 4, repeated, [2.0 * rank * size, (2.0 * rank + 1) * size]]


def functional_collectives(rank: int, size: int) -> tuple:
    """As DTensor and compiled code call them: from C++, through methods of the group."""
    group, x = dist.group.WORLD, torch.arange(2.0 * size) + rank
    found = [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(torch.tensor([float(rank)]), 0, group),
        functional.reduce_scatter_tensor(x, "avg", 0, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, 1, group),
        *functional.all_reduce_coalesced([x, x + 1], "max", group),
        *functional.all_gather_into_tensor_coalesced([torch.tensor([rank]), x[:1]], group),
        *functional.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group),
    ]
    every = [torch.arange(2.0 * size) + r for r in range(size)]
    total, cut = sum(every), slice(2 * rank, 2 * rank + 2)
    ranks = torch.arange(size)
    expected = [total, ranks.float(), total[cut] / size, torch.cat([x[cut] for x in every])]
    expected += [every[1], every[-1], every[-1] + 1, ranks, ranks.float(), total[cut], total[cut]]
    return [x.tolist() for x in found], [x.tolist() for x in expected]


def dtensor(rank: int, size: int) -> tuple:
    torch.manual_seed(0)
    mesh = DeviceMesh("cpu", torch.arange(size).view(2, 2), mesh_dim_names=("a", "b"))
    x, w = torch.randint(0, 5, (7, 6)).float(), torch.randint(0, 5, (6, 9)).float()
    x_shards = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    w_shards = distribute_tensor(w, mesh, [Replicate(), Shard(0)])
    y = x_shards @ w_shards  # a partial sum on axis "b"
    found = [
        y.full_tensor(),
        y.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor(),
        x_shards.redistribute(mesh, [Shard(1), Shard(1)]).full_tensor(),
        x_shards.sum().full_tensor(),
    ]
    return [x.tolist() for x in found], [x.tolist() for x in (x @ w, x @ w, x, x.sum())]


def names(rank: int, size: int) -> tuple:
    sub = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=5))
    found = (dist.get_backend(), dist.get_backend(sub), dist.get_rank(sub), sub.seconds)
    dist.destroy_process_group(sub)
    return found, ("ring", "ring", rank, 5.0)


def training() -> dict:
    found = {}
    for world in (1, 2, 3, 4):
        for backend in ("ring", "gloo"):
            group = dist.new_group(list(range(world)), backend=backend)
            if dist.get_rank() < world:
                found["ddp", world, backend] = train(group, "ddp")
                found["fsdp", world, backend] = train(group, "fsdp")
    return found


class Model(nn.Module):
    """Has a weight that is used twice, an unused parameter, and sizes that do not divide."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        return self.head(self.inner(torch.relu(self.inner(x))))


def train(group, strategy: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    if strategy == "ddp":
        wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        fully_shard(model.inner, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        x = torch.randn(6, 7, generator=generator)
        nn.functional.cross_entropy(wrapped(x), torch.arange(6) % 5).backward()
        optimizer.step()
    return {
        f"{what} {name}": tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, p in model.named_parameters()
        for what, tensor in (("gradient", p.grad), ("parameter", p.detach()))
        if tensor is not None
    }


if __name__ == "__main__":
    main()
