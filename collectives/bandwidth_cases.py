"""One call of every operation that bandwidth.py measures, and the values that it must give."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from all_reduce_algorithms import ALGORITHMS

# torch 2.13 has new names for these two, and warns at the old ones.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all", "send_recv"),
)
OPERATIONS = (*COLLECTIVES, *ALGORITHMS)  # the latter are those of all_reduce_algorithms.py


def pattern(rank: int, numel: int, device=None) -> torch.Tensor:
    """Rank `rank`'s input: small integers in float32, so that a sum is exact in any order."""
    return ((torch.arange(numel, device=device) * 3 + rank * 5) % 11).float()


class Case(NamedTuple):
    run: Callable[[], object]  # a collective call: every rank of the group must make it
    result: torch.Tensor  # where this rank's result lies after run()
    expected: Callable[[], torch.Tensor] | None  # None: this rank receives nothing


def prepare(operation: str, x: torch.Tensor, y: torch.Tensor, group=None) -> Case:
    """One call of `operation`, with its tensors, and the result that it must have.

    x, y: float32 of one shape [S], x being filled with `pattern`; the size of the group divides S.
    S is what all ranks together contribute to (all_)gather, or receive from scatter and
    reduce_scatter, else what each rank holds.
    """
    rank, n, device = dist.get_rank(group), dist.get_world_size(group), x.device
    size = len(x)
    part, piece = x[: size // n], y[: size // n]
    from_root, to_root = {"group": group, "group_src": 0}, {"group": group, "group_dst": 0}

    def of(rank: int, numel: int = size) -> torch.Tensor:
        return pattern(rank, numel, device)

    def total() -> torch.Tensor:
        return sum(of(r) for r in range(n))

    def parts() -> torch.Tensor:
        return torch.cat([of(r, size // n) for r in range(n)])

    def swap() -> None:
        send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n)
        receive = dist.P2POp(dist.irecv, y, group=group, group_peer=(rank - 1) % n)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    match operation:
        case "all_reduce":
            return Case(lambda: dist.all_reduce(x, group=group), x, total)
        case "reduce":
            return Case(lambda: dist.reduce(x, **to_root), x, None if rank else total)
        case "broadcast":
            return Case(lambda: dist.broadcast(x, **from_root), x, lambda: of(0))
        case "all_gather":
            return Case(lambda: ALL_GATHER(y, part, group=group), y, parts)
        case "reduce_scatter":
            expected = lambda: total().chunk(n)[rank]  # noqa: E731
            return Case(lambda: REDUCE_SCATTER(piece, x, group=group), piece, expected)
        case "gather":
            out = None if rank else list(y.chunk(n))
            return Case(lambda: dist.gather(part, out, **to_root), y, None if rank else parts)
        case "scatter":
            given = None if rank else list(x.chunk(n))
            expected = lambda: of(0).chunk(n)[rank]  # noqa: E731
            return Case(lambda: dist.scatter(piece, given, **from_root), piece, expected)
        case "all_to_all":
            expected = lambda: torch.cat([of(r).chunk(n)[rank] for r in range(n)])  # noqa: E731
            return Case(lambda: dist.all_to_all_single(y, x, group=group), y, expected)
        case "send_recv":
            return Case(swap, y, lambda: of((rank - 1) % n))
    return Case(lambda: ALGORITHMS[operation](x, group), x, total)


def first_error(case: Case) -> str | None:
    if case.expected is None:
        return None
    expected = case.expected()
    wrong = (case.result != expected).nonzero().flatten()
    if not len(wrong):
        return None
    i = wrong[0].item()
    return f"{len(wrong)} values, the first at {i}: {case.result[i]:g}, not {expected[i]:g}"
