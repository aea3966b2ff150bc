"""Collectives for autograd: the backward of a collective is another collective.

    torchrun --standalone --nproc_per_node=3 collectives/autograd_collectives.py
    torchrun --standalone --nproc_per_node=2 collectives/autograd_collectives.py --count 5
    python collectives/autograd_collectives.py              # a world of one: all are the identity

    forward                          backward
    broadcast   one to all           reduce           all gradients to one, added
    reduce      all to one, added    broadcast
    all_reduce                       all_reduce
    all_gather                       reduce_scatter
    reduce_scatter                   all_gather
    all_to_all                       all_to_all       with the two lists of sizes swapped

Why: each rank calls backward() on its own loss, and we want the gradient of the *sum* of all ranks'
losses. If a number was sent to all ranks, every rank sends back a gradient, and these are added up.
(If all ranks compute the same loss, the sum counts it once per rank: divide by the world size.
Under DDP do not: it divides each gradient by the world size. A contrastive loss is such a case.)

Look at how little each gradient differs from a single process that holds all ranks' tensors, and
from finite differences. Then look at plain `dist` calls: they cut the graph, or they leave it
uncut with a wrong gradient, which is worse.

(torch.distributed.nn.functional has such functions, most of them deprecated since torch 2.13.)
"""

import itertools
import warnings
from collections.abc import Callable

import new_names
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as old
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from runtime import Worker, distributed_worker
from tables import print_table
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        show_gradients(args, worker)
        show_plain_calls(worker)


# Call them as AllReduce.apply(x, group). Each backward uses them, so second derivatives work. On
# every rank x must require a gradient, and the loss must use the result: a rank without a backward
# lets all other ranks wait.


class Broadcast(torch.autograd.Function):
    """Every rank gets rank `src`'s tensor. Rank `src` gets the gradient; other ranks get zeros."""

    @staticmethod
    def forward(ctx, x, src=0, group=None):
        ctx.src, ctx.group = src, group
        y = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(y, group_src=src, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return Reduce.apply(grad, ctx.src, ctx.group), None, None


class Reduce(torch.autograd.Function):
    """Rank `dst` gets the sum; other ranks get zeros, so the result is defined on every rank."""

    @staticmethod
    def forward(ctx, x, dst=0, group=None):
        ctx.dst, ctx.group = dst, group
        y = x.clone(memory_format=torch.contiguous_format)
        dist.reduce(y, group_dst=dst, group=group)
        return y if dist.get_rank(group) == dst else torch.zeros_like(y)

    @staticmethod
    def backward(ctx, grad):
        return Broadcast.apply(grad.contiguous(), ctx.dst, ctx.group), None, None


class AllReduce(torch.autograd.Function):
    """Every rank gets the sum. A number is in every rank's sum, so all gradients are added up."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return AllReduce.apply(grad, ctx.group), None


class AllGather(torch.autograd.Function):
    """Every rank gets all tensors, concatenated along dim 0."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        y = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        new_names.all_gather_single(y, x.contiguous(), group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return ReduceScatter.apply(grad, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    """Rank i gets part i of the sum, along dim 0."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        y = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
        new_names.reduce_scatter_single(y, x.contiguous(), group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return AllGather.apply(grad, ctx.group), None


class AllToAll(torch.autograd.Function):
    """Send send[i] rows to rank i, receive receive[i] rows from it. Gradients go the other way."""

    @staticmethod
    def forward(ctx, x, send, receive, group=None):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        y = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), receive, send, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None


# The single-process reference: `xs` holds every rank's tensor; returns what each rank gets.


def in_one_process(name: str, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    world_size, total = len(xs), sum(xs)
    pieces = [x.split(split_sizes(rank, world_size, len(x))) for rank, x in enumerate(xs)]
    return {
        "broadcast": [xs[0]] * world_size,
        "reduce": [total] + [torch.zeros_like(total)] * (world_size - 1),
        "all_reduce": [total] * world_size,
        "all_gather": [torch.cat(xs)] * world_size,
        "reduce_scatter": list(total.chunk(world_size)),
        "all_to_all": [torch.cat([p[to] for p in pieces]) for to in range(world_size)],
    }[name]


def split_sizes(rank: int, world_size: int, rows: int) -> list[int]:
    """How many of its `rows` rows a rank sends to ranks 0, 1, ...: uneven, some of them zero."""
    weights = [(rank + 2 * to) % 3 for to in range(world_size)]
    sizes = [rows * w // max(sum(weights), 1) for w in weights]
    sizes[rank] += rows - sum(sizes)
    return sizes


def all_to_all(x: torch.Tensor, group=None) -> torch.Tensor:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    receive = [split_sizes(r, world_size, len(x))[rank] for r in range(world_size)]
    return AllToAll.apply(x, split_sizes(rank, world_size, len(x)), receive, group)


COLLECTIVES = {
    "broadcast": lambda x, group=None: Broadcast.apply(x, 0, group),
    "reduce": lambda x, group=None: Reduce.apply(x, 0, group),
    "all_reduce": AllReduce.apply,
    "all_gather": AllGather.apply,
    "reduce_scatter": ReduceScatter.apply,
    "all_to_all": all_to_all,
}


def loss_of(y: torch.Tensor, rank: int) -> torch.Tensor:
    """A loss in which every number has a different weight on every rank."""
    weights = torch.linspace(1, 2, y.numel(), dtype=y.dtype, device=y.device) + rank
    return (weights * torch.sin(y.flatten())).sum()


def inputs(world_size: int, count: int, device) -> list[torch.Tensor]:
    """One float64 tensor [count * world_size, 2] per rank; every rank knows all of them."""
    generator = torch.Generator().manual_seed(0)
    shape = (world_size, count * world_size, 2)
    return list(torch.randn(shape, generator=generator, dtype=torch.float64).to(device))


def expected_gradients(name: str, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    xs = [x.clone().requires_grad_() for x in xs]
    sum(loss_of(y, rank) for rank, y in enumerate(in_one_process(name, xs))).backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]


def finite_differences(function: Callable, xs: list, group=None, step=1e-6) -> torch.Tensor:
    """This rank's gradient of the sum of all ranks' losses: move each number of each rank by step.

    function: maps this rank's tensor to its loss; a collective, so all ranks call it each time.
    """
    rank, count = dist.get_rank(group), xs[0].numel()
    changes = xs[0].new_zeros(len(xs), count)
    for owner, k in itertools.product(range(len(xs)), range(count)):
        moved = torch.stack([xs[rank], xs[rank]])
        if rank == owner:
            moved.view(2, -1)[:, k] += step * moved.new_tensor([1, -1])
        changes[owner, k] = (function(moved[0]) - function(moved[1])).detach()
    dist.all_reduce(changes, group=group)  # the losses of all ranks
    return (changes[rank] / (2 * step)).view_as(xs[rank])


def show_gradients(args, worker: Worker) -> None:
    xs = inputs(worker.world_size, args.count, worker.device)
    rows = []
    for name, collective in COLLECTIVES.items():

        def loss(x, collective=collective):
            return loss_of(collective(x), worker.rank)

        x = xs[worker.rank].clone().requires_grad_()
        loss(x).backward()
        to_one_process = (x.grad - expected_gradients(name, xs)[worker.rank]).abs().max()
        to_differences = (x.grad - finite_differences(loss, xs)).abs().max()
        largest = torch.stack([x.grad.abs().max(), to_one_process, to_differences])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # of all ranks
        gradient, to_one_process, to_differences = largest.tolist()
        rows.append([name, f"{gradient:.3f}", f"{to_one_process:.0e}", f"{to_differences:.0e}"])
    if worker.is_main:
        print("\nLargest gradient on any rank, and its largest difference (float64)")
        header = ["forward", "gradient", "from one process", "from finite differences"]
        print_table(header, rows)


def plain_all_reduce(y: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(y)  # in place, unseen by autograd, which still takes y for exp(x)
    return y


def plain_all_gather(y: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y)  # into new tensors, which have no graph to y
    return torch.stack(parts).sum(0)


def show_plain_calls(worker: Worker) -> None:
    x0, rows = (worker.rank + 1) / 2, []
    for name, function in (
        ("AllReduce.apply(y)", AllReduce.apply),
        ("dist.all_reduce(y)", plain_all_reduce),
        ("dist.all_gather(parts, y)", plain_all_gather),
        ("nn.functional.all_reduce(y, MAX)", lambda y: old.all_reduce(y, dist.ReduceOp.MAX)),
    ):
        x = torch.full((1,), x0, dtype=torch.float64, device=worker.device, requires_grad=True)
        # Only the last rank's y moves the maximum.
        factor = worker.rank == worker.world_size - 1 if "MAX" in name else 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", FutureWarning)  # nn.functional is deprecated
            try:
                function(x.exp()).backward()
                got, said = f"{x.grad.item():.4f}", "a warning" if caught else "nothing"
            except RuntimeError as error:
                got, said = "none", f"an error: {error}"
        right = worker.world_size * factor * x.exp().item()
        rows.append([name, f"{right:.4f}", got, said])
    if worker.is_main:
        print("\nx = (rank + 1) / 2, y = exp(x). Each rank's loss: the sum (or MAX) of all y")
        print_table(["how", "right gradient, rank 0", "got", "torch says"], rows)


def parse_args():
    parser = ArgumentParser(description="Gradients through collectives, checked.")
    parser.add_argument(
        "--count", type=at_least(1), default=1, help="rows of each tensor, per rank"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
