"""The operations that bandwidth.py measures: one call of each, and its expected result."""

from collections.abc import Callable
from typing import NamedTuple

import new_names
import torch
import torch.distributed as dist
from all_reduce_algorithms import ALGORITHMS

COLLECTIVES = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
]
OPERATIONS = [*COLLECTIVES, *ALGORITHMS]  # the latter are those of all_reduce_algorithms.py


def pattern(rank: int, numel: int, device=None) -> torch.Tensor:
    """Rank `rank`'s input: small integers in float32, so that a sum is exact in any order."""
    return ((torch.arange(numel, device=device) * 3 + rank * 5) % 11).float()


class Case(NamedTuple):
    run: Callable[[], object]  # a collective call: every rank of the group must make it
    result: torch.Tensor  # where this rank's result lies after run()


def prepare(operation: str, x: torch.Tensor, y: torch.Tensor, group=None) -> Case:
    """One call of `operation`, which reads x and writes into x or y.

    x, y: float32 [S], where the size of the group divides S. For gather and all_gather S counts the
    inputs of all ranks, for scatter and reduce_scatter the outputs of all ranks, else one rank's x.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    part_of_x, part_of_y = x[: len(x) // world_size], y[: len(y) // world_size]
    parts_of_x = list(x.chunk(world_size)) if rank == 0 else None
    parts_of_y = list(y.chunk(world_size)) if rank == 0 else None

    def send_recv() -> None:
        send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % world_size)
        receive = dist.P2POp(dist.irecv, y, group=group, group_peer=(rank - 1) % world_size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    match operation:
        case "all_reduce":
            return Case(lambda: dist.all_reduce(x, group=group), x)
        case "reduce":
            return Case(lambda: dist.reduce(x, group=group, group_dst=0), x)
        case "broadcast":
            return Case(lambda: dist.broadcast(x, group=group, group_src=0), x)
        case "all_gather":
            return Case(lambda: new_names.all_gather_single(y, part_of_x, group=group), y)
        case "reduce_scatter":
            return Case(
                lambda: new_names.reduce_scatter_single(part_of_y, x, group=group), part_of_y
            )
        case "gather":
            return Case(lambda: dist.gather(part_of_x, parts_of_y, group=group, group_dst=0), y)
        case "scatter":
            return Case(
                lambda: dist.scatter(part_of_y, parts_of_x, group=group, group_src=0), part_of_y
            )
        case "all_to_all":
            return Case(lambda: dist.all_to_all_single(y, x, group=group), y)
        case "send_recv":
            return Case(send_recv, y)
    return Case(lambda: ALGORITHMS[operation](x, group), x)


def expected_result(operation: str, numel: int, device=None, group=None) -> torch.Tensor | None:
    """This rank's result if every rank began with x = pattern(rank, numel).

    None if this rank receives nothing.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    inputs = [pattern(r, numel, device) for r in range(world_size)]
    match operation:
        case "broadcast":
            return inputs[0]
        case "scatter":
            return inputs[0].chunk(world_size)[rank]
        case "gather" | "all_gather":
            gathered = torch.cat([x[: numel // world_size] for x in inputs])
            return gathered if operation == "all_gather" or rank == 0 else None
        case "reduce_scatter":
            return sum(inputs).chunk(world_size)[rank]
        case "all_to_all":
            return torch.cat([x.chunk(world_size)[rank] for x in inputs])
        case "send_recv":
            return inputs[rank - 1]
        case "reduce":
            return sum(inputs) if rank == 0 else None
    return sum(inputs)  # all_reduce: torch's and our own


def first_error(result: torch.Tensor, expected: torch.Tensor | None) -> str | None:
    if expected is None:
        return None
    wrong = (result != expected).nonzero().flatten()
    if not len(wrong):
        return None
    i = wrong[0].item()
    return f"{len(wrong)} values, the first at {i}: {result[i]:g}, not {expected[i]:g}"
