"""Call collectives in every possible way, in a script that does not know it is counted.

Each rank saves its results to FOLDER/RANK.pt: name -> tensors. A comment "# name" ends each line
whose calls a test looks for.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# DTensor and torch.compile call these; they have no public names.
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
# torch 2.15 has new names for them.
all_gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)
results = {}


def main(backend: str, folder: str) -> None:
    if backend == "counting":  # a script that imports the counting backend
        sys.path.insert(0, str(Path(__file__).parents[2] / "custom_backend"))
        import counting_backend
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())
    results["backend"] = dist.get_backend()
    train_ddp()
    if backend != "counting":
        train_fsdp()
        tensors_of_a_mesh()
        functional()
        eager()
    groups()
    torch.save(results, Path(folder) / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    if backend == "counting":
        counting_backend.log.report()  # else at exit, which a forked rank skips


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))  # 676 parameters


def train(trained: nn.Module, name: str) -> None:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = trained(torch.randn(8, 16, generator=generator)).square().mean()
        loss.backward()  # backward
        optimizer.step()

    def whole(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    results[name] = [whole(p.detach()).clone() for p in trained.parameters()]
    results[f"{name}, gradients"] = [whole(p.grad).clone() for p in trained.parameters()]


def train_ddp() -> None:
    train(DistributedDataParallel(model()), "ddp")


def train_fsdp() -> None:
    sharded = model()
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer)
    train(fully_shard(sharded), "fsdp")


def tensors_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    weight = torch.randn(8, 8)
    sharded = distribute_tensor(weight, mesh, [Shard(0)])
    results["dtensor"] = [sharded.redistribute(mesh, [Replicate()]).to_local()]  # dtensor gather
    product = (sharded.t() @ sharded).redistribute(mesh, [Replicate()])  # dtensor sum
    results["dtensor, sum"] = [product.to_local()]


def functional() -> None:
    x, group = torch.ones(6) * (dist.get_rank() + 1), dist.group.WORLD
    n = dist.get_world_size()
    results["functional"] = [
        funcol.all_reduce(x, "sum", group) + 0,  # functional all_reduce
        all_gather(x, 0, group) + 0,  # functional all_gather
        reduce_scatter(x.repeat(n), "sum", 0, group) + 0,  # functional reduce_scatter
        funcol.all_to_all_single(x.repeat(n), None, None, group) + 0,  # functional all_to_all
        funcol.broadcast(x, 0, group) + 0,  # functional broadcast
    ]
    pair = funcol.all_reduce_coalesced([x, x + 1], "sum", group)  # functional coalesced
    results["functional, coalesced"] = [part + 0 for part in pair]


def eager() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    x = torch.arange(4.0) + 10 * rank

    def room():
        return [torch.zeros(4) for _ in range(n)]

    gathered, parts, received = room(), room(), torch.zeros(4)
    dist.all_gather(gathered, x)  # all_gather
    dist.all_to_all(parts, [x + i for i in range(n)])  # all_to_all
    to_root = room() if rank == 0 else None
    dist.gather(x, to_root)  # gather
    mine = torch.zeros(4)
    dist.scatter(mine, gathered if rank == 0 else None)  # scatter
    summed = x.clone()
    dist.reduce(summed, 0)  # reduce
    part = torch.zeros(4)
    dist.reduce_scatter(part, gathered)  # reduce_scatter
    work = dist.all_reduce(x, async_op=True)  # all_reduce
    work.wait()
    assert work.is_completed()
    assert work.get_future().done()
    sends = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, received, left)]
    for request in dist.batch_isend_irecv(sends):  # batch
        request.wait()
    anyone = torch.zeros(4)
    if rank == 0:
        assert dist.recv(anyone) == 1  # any
    elif rank == 1:
        dist.send(x, 0)  # send
    results["eager"] = [*gathered, *parts, *(to_root or []), mine, part, x, received, anyone]
    results["reduce"] = [summed] if rank == 0 else []
    said = [None] * n
    dist.all_gather_object(said, {"rank": rank})  # objects
    results["objects"] = said
    dist.monitored_barrier()  # monitored


def groups() -> None:
    x = torch.ones(5) * (dist.get_rank() + 1)
    dist.all_reduce(x, group=dist.new_group([0, 1]))  # new_group
    world = dist.group.WORLD
    # There is no public name for this test.
    if getattr(world._get_backend(torch.device("cpu")), "supports_splitting", False):
        dist.all_reduce(x, group=dist.split_group(split_ranks=[[0, 1]]))  # split_group
    results["groups"] = [x]


if __name__ == "__main__":
    main(*sys.argv[1:])
