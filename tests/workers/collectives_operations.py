"""Call every collective in groups of 2, 3, 4 of 4 ranks; each rank saves its results.

Started by test_collectives_operations.py under torchrun. That file computes the expected results
from `given(...)` by plain tensor operations.
"""

import itertools
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "collectives"))

import autograd_collectives
import object_collectives
import reduce_ops
import torch
import torch.distributed as dist
from runtime import distributed_worker

import collectives

RANKS, WORLDS = 4, (2, 3, 4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
SHAPES = (
    (1,),
    (7,),
    (0,),
    (3, 5),
    (),
    (1025,),
)  # odd sizes, nothing, no dims, more than one packet
ROWS = (0, 1, 3)  # rows of a part, where a tensor is split into parts
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")


def given(world: int, rank: int, shape, dtype) -> torch.Tensor:
    """The input of `rank` in the group of the first `world` ranks: integers below 8.

    On the last rank a matrix lies column by column: its memory has another order.
    """
    generator = torch.Generator().manual_seed(1000 * world + rank)
    numbers = torch.randint(0, 8, shape, generator=generator)
    if len(shape) == 2 and rank == world - 1:
        numbers = numbers.t().contiguous().t()
    return numbers % 2 == 1 if dtype == torch.bool else numbers.to(dtype)


def counts(world: int, rank: int) -> list[int]:
    """How many rows `rank` sends to each rank: uneven, with zeros."""
    return [(rank + 2 * to) % 3 for to in range(world)]


def call_all(world: int, rank: int, group) -> dict:
    """(name, dtype, shape or rows) -> what this rank got."""
    got, last = {}, world - 1
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        x = given(world, rank, shape, dtype)
        key = (str(dtype), shape)
        for root in (0, last):
            got["broadcast", *key, root] = collectives.broadcast(x, root, group)
            got["gather", *key, root] = collectives.gather(x, root, group)
            got["reduce", *key, root] = collectives.reduce(x, root, group=group)
        got["all_gather", *key] = collectives.all_gather(x, group)
        for op in OPS:
            got["all_reduce", *key, op] = refused_or(
                lambda x=x, op=op: collectives.all_reduce(x, getattr(dist.ReduceOp, op), group)
            )
        got["input", *key] = x  # must still be unchanged
    for dtype, rows in itertools.product(DTYPES, ROWS):
        x = given(world, rank, (rows * world, 2), dtype)
        parts, key = list(x.split(rows) if rows else [x] * world), (str(dtype), rows)
        got["scatter", *key] = collectives.scatter(parts, parts[0], last, group)
        got["reduce_scatter", *key] = collectives.reduce_scatter(parts, group=group)
        got["reduce_scatter_single", *key] = collectives.reduce_scatter_single(x, group=group)
        got["all_gather_single", *key] = collectives.all_gather_single(x, group)
        got["all_to_all", *key] = collectives.all_to_all(parts, group)
        with missing("all_to_all", "Backend gloo does not support alltoall"):
            got["all_to_all, older Gloo", *key] = collectives.all_to_all(parts, group)
        got["all_to_all_single", *key] = collectives.all_to_all_single(x, group)
        uneven = given(world, rank, (rows * rank, 2), dtype)
        got["all_gather_uneven", *key] = collectives.all_gather_uneven(uneven, group)
        send = [rows * n for n in counts(world, rank)]
        x = given(world, rank, (sum(send), 2), dtype)
        got["all_to_all_uneven", *key] = collectives.all_to_all_uneven(x, send, group)
    try:
        collectives.all_to_all_uneven(x, [len(x) + 1] * world, group)
    except ValueError as error:
        got["too many rows"] = str(error)
    return got


@contextmanager
def missing(name: str, message: str):
    """As if the backend lacked a collective."""

    def refuse(*_, **__):
        raise RuntimeError(message)

    real = getattr(dist, name)
    setattr(dist, name, refuse)
    yield
    setattr(dist, name, real)


def refused_or(call):
    try:
        return call()
    except RuntimeError as error:
        return str(error)


def call_others(world: int, rank: int, group) -> dict:
    """The small functions of the other files."""
    x = given(world, rank, (7,), torch.int64)
    got = {
        "average_integers": reduce_ops.average_integers(x, group),
        "premul_sum": reduce_ops.premul_sum(x.float(), 0.25, group),
        "premul refused": reduce_ops.try_op("PREMUL_SUM", x.float(), group),
        "broadcast_json": object_collectives.broadcast_json(
            {"from": rank, "text": "\u00e4" * 100, "list": [1, None, 0.5]}, world - 1, group
        ),
    }
    matrix = given(world, rank, (3, 4), torch.int64)
    for op in ("and", "or", "xor"):
        got[op] = reduce_ops.bitwise(matrix, getattr(torch, f"bitwise_{op}"), group)
    got["contrastive"] = contrastive(world, rank, group)
    return got | {("gradient", name): gradients(name, world, rank, group) for name in FUNCTIONS}


FUNCTIONS = autograd_collectives.COLLECTIVES


def gradients(name: str, world: int, rank: int, group) -> dict:
    """First and second derivative through a collective, and the first by finite differences."""
    xs = autograd_collectives.inputs(world, 1, "cpu")

    def loss(x):
        return autograd_collectives.loss_of(FUNCTIONS[name](x, group), rank)

    x = xs[rank].clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (first.square().sum()).backward()
    numeric = autograd_collectives.finite_differences(loss, xs, group)
    return {"first": first.detach(), "second": x.grad, "numeric": numeric}


def contrastive(world: int, rank: int, group) -> torch.Tensor:
    """DDP's gradient of a loss over the features of all ranks, which all ranks compute alike."""
    model = torch.nn.Linear(4, 3, bias=False, dtype=torch.float64)
    torch.nn.init.eye_(model.weight)
    ddp_model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    features = ddp_model(given(world, rank, (2, 4), torch.float64))
    features = autograd_collectives.AllGather.apply(features, group)
    torch.logsumexp(features @ features.T / 10, dim=1).mean().backward()
    return model.weight.grad


def barriers(rank: int) -> bool:
    """Whether no rank left a barrier before the last rank had arrived."""
    store = dist.PrefixStore("barriers", next(dist.rendezvous("env://"))[0])
    ok = True
    for i in range(20):
        store.add(f"came {i}", 1)
        collectives.barrier()
        ok &= store.add(f"came {i}", 0) == RANKS
    return ok


def main() -> None:
    with distributed_worker("cpu") as worker:
        got = {"barriers": barriers(worker.rank)}
        for world in WORLDS:
            group = dist.new_group(range(world))
            if worker.rank < world:
                got[world] = call_all(world, worker.rank, group)
                got[world].update(call_others(world, worker.rank, group))
        torch.save(got, Path(sys.argv[1]) / f"{worker.rank}.pt")


if __name__ == "__main__":
    main()
