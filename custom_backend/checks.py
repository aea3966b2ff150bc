"""Call every operation once, and compare its result with a computation without communication.

Each rank computes the expected result from the inputs of all ranks, which it can generate. The
numbers are small integers, whose sums are exact in any order.
"""

import operator
from functools import reduce

import torch
import torch.distributed as dist


def mine(rank: int, numel: int, dtype=torch.float32) -> torch.Tensor:
    """The input of one rank; every rank can generate it."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 4, (numel,), generator=generator).to(dtype)


def check_all(group, numel: int) -> dict[str, bool]:
    """operation -> whether this rank got the expected result."""
    rank, size = group.rank(), group.size()
    x = mine(rank, numel * size)
    every = [mine(other, numel * size) for other in range(size)]  # the inputs of all ranks
    total = reduce(operator.add, every)
    last = size - 1  # the root
    cut = slice(rank * numel, (rank + 1) * numel)  # the part of this rank
    found = {}

    def check(operation: str, got, expected) -> None:
        found[operation] = torch.equal(torch.as_tensor(got), torch.as_tensor(expected))

    check("all_reduce", call(dist.all_reduce, x, group=group), total)
    check("broadcast", call(dist.broadcast, x, group_src=last, group=group), every[last])
    reduced = call(dist.reduce, x, group_dst=0, group=group)
    check("reduce", reduced, total if rank == 0 else x)

    outputs = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(outputs, x, group=group)
    check("all_gather", torch.stack(outputs), torch.stack(every))

    output = x.new_empty(numel)
    dist.reduce_scatter(output, list(x.split(numel)), group=group)
    check("reduce_scatter", output, total[cut])

    outputs = [torch.empty_like(x) for _ in range(size)] if rank == last else None
    dist.gather(x, outputs, group_dst=last, group=group)
    check("gather", torch.stack(outputs or every), torch.stack(every))

    dist.scatter(output, list(x.split(numel)) if rank == 0 else None, group_src=0, group=group)
    check("scatter", output, every[0][cut])

    output = torch.empty_like(x)
    dist.all_to_all_single(output, x, group=group)
    check("all_to_all", output, torch.cat([other[cut] for other in every]))

    # Uneven: rank r sends r + 1 elements to every rank.
    output = x.new_empty(size * (size + 1) // 2)
    sizes = [other + 1 for other in range(size)]
    given = x[: rank + 1].repeat(size)
    dist.all_to_all_single(output, given, sizes, [rank + 1] * size, group=group)
    uneven = torch.cat([every[other][: other + 1] for other in range(size)])
    check("all_to_all, uneven", output, uneven)

    to, source = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        arrived = torch.empty_like(x)
        works = [
            dist.isend(x, group_dst=to, group=group),
            dist.irecv(arrived, group_src=source, group=group),
        ]
        for work in works:
            work.wait()
        check("send and recv", arrived, every[source])

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    found["all_gather_object"] = objects == [{"rank": other} for other in range(size)]
    dist.barrier(group=group)
    return found


def call(operation, x: torch.Tensor, **arguments) -> torch.Tensor:
    """Run the operation on a copy of x, and return the copy."""
    x = x.clone()
    operation(x, **arguments)
    return x
