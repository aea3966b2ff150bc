"""Ring collectives made of send and receive. ring_backend.py runs all of them.

Every rank of the group runs the same function at the same time:

    link.rank, link.size, link.left, link.right      the ring: 0 -> 1 -> ... -> size - 1 -> 0
    link.send(to, tensor)                             returns at once
    link.receive(source, like)                        waits; a new tensor of the shape of `like`

All tensors are flat (1-D, contiguous) views of the tensors of the caller, and change in place.
"""

from collections.abc import Callable

import torch

PIECE = 1 << 20  # bytes: while rank 1 sends one piece to 2, rank 0 sends it the next


def all_reduce(link, x: torch.Tensor, add: Callable) -> None:
    """All ranks get the sum. Each sends 2 (p-1)/p of the tensor, the least of any algorithm."""
    parts = x.tensor_split(link.size)  # sizes differ by at most one; some may be 0
    reduce_scatter(link, parts, add)
    all_gather(link, parts)


def reduce_scatter(link, parts: list[torch.Tensor], add: Callable) -> None:
    """Afterwards parts[rank] is the sum over all ranks; the other parts are partial sums.

    Each part travels once around the ring, and every rank adds its own numbers. So each sum has one
    order of additions, and all ranks get the same bits later.
    """
    for step in range(1, link.size):
        link.send(link.right, parts[(link.rank - step) % link.size])
        mine = parts[(link.rank - step - 1) % link.size]
        add(mine, link.receive(link.left, like=mine))


def all_gather(link, parts: list[torch.Tensor]) -> None:
    """Each rank has parts[rank]; afterwards all ranks have all parts.

    In each step a rank forwards the part that it received last.
    """
    for step in range(link.size - 1):
        link.send(link.right, parts[(link.rank - step) % link.size])
        mine = parts[(link.rank - step - 1) % link.size]
        mine.copy_(link.receive(link.left, like=mine))


def broadcast(link, x: torch.Tensor, root: int) -> None:
    """Send x from the root along the ring, in pieces, so that all links are busy at once."""
    for piece in pieces(x):
        if link.rank != root:
            piece.copy_(link.receive(link.left, like=piece))
        if link.right != root:
            link.send(link.right, piece)


def reduce(link, x: torch.Tensor, root: int, add: Callable) -> None:
    """Add along the ring up to the root; on all other ranks, x ends as a partial sum."""
    for piece in pieces(x):
        if link.left != root:
            add(piece, link.receive(link.left, like=piece))
        if link.rank != root:
            link.send(link.right, piece)


def pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.split(max(1, PIECE // x.element_size()))


def gather(link, parts: list[torch.Tensor] | None, x: torch.Tensor, root: int) -> None:
    """All ranks send x to the root, which collects them in parts (None on other ranks)."""
    if link.rank != root:
        link.send(root, x)
        return
    for rank, part in enumerate(parts):
        part.copy_(x if rank == root else link.receive(rank, like=part))


def scatter(link, x: torch.Tensor, parts: list[torch.Tensor] | None, root: int) -> None:
    """The root sends parts[r] to each rank r (parts is None on other ranks)."""
    if link.rank != root:
        x.copy_(link.receive(root, like=x))
        return
    for rank, part in enumerate(parts):
        if rank != root:
            link.send(rank, part)
    x.copy_(parts[root])


def all_to_all(link, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Send inputs[r] to rank r, and receive outputs[r] from it.

    In step d each rank sends to the rank d places ahead, so no two ranks send to the same one.
    """
    outputs[link.rank].copy_(inputs[link.rank])
    for distance in range(1, link.size):
        to = (link.rank + distance) % link.size
        link.send(to, inputs[to])
        source = (link.rank - distance) % link.size
        outputs[source].copy_(link.receive(source, like=outputs[source]))


def barrier(link) -> None:
    """An all_gather of empty tensors: the last one to arrive has passed every rank."""
    nothing = torch.empty(0)
    all_gather(link, [nothing] * link.size)
