"""The collectives, out of nothing but send and receive. ring_backend.py runs them all.

Each function is what every rank of the group runs, at the same time:

    link.rank, link.size, link.left, link.right      in the ring: 0 -> 1 -> ... -> size - 1 -> 0
    link.send(to, tensor)                             returns at once
    link.receive(source, like)                        waits; a new tensor of the shape of `like`

All tensors are flat (1-D, contiguous) views of what the caller gave, changed in place.
"""

from collections.abc import Callable

import torch

PIECE = 1 << 20  # bytes: while one piece goes from rank 1 to 2, the next comes from 0 to 1


def all_reduce(link, x: torch.Tensor, add: Callable) -> None:
    """Everybody gets the sum. Each rank sends 2 (p-1)/p of the tensor: no algorithm needs less."""
    parts = x.tensor_split(link.size)  # sizes differ by one where they must; some may be empty
    reduce_scatter(link, parts, add)
    all_gather(link, parts)


def reduce_scatter(link, parts: list[torch.Tensor], add: Callable) -> None:
    """Afterwards parts[rank] is the sum of everybody's; the other parts are half-way sums.

    Each part walks once round the ring and is added to at every rank, so its sum is made in one
    order only: all ranks hold the same bits later.
    """
    for step in range(1, link.size):
        link.send(link.right, parts[(link.rank - step) % link.size])
        mine = parts[(link.rank - step - 1) % link.size]
        add(mine, link.receive(link.left, like=mine))


def all_gather(link, parts: list[torch.Tensor]) -> None:
    """Everybody has parts[rank]; afterwards all have all: each passes on what it got last."""
    for step in range(link.size - 1):
        link.send(link.right, parts[(link.rank - step) % link.size])
        mine = parts[(link.rank - step - 1) % link.size]
        mine.copy_(link.receive(link.left, like=mine))


def broadcast(link, x: torch.Tensor, root: int) -> None:
    """From the root along the ring, in pieces, so that all links are busy at the same time."""
    for piece in pieces(x):
        if link.rank != root:
            piece.copy_(link.receive(link.left, like=piece))
        if link.right != root:
            link.send(link.right, piece)


def reduce(link, x: torch.Tensor, root: int, add: Callable) -> None:
    """Along the ring to the root, which adds last; the others' x ends as a half-way sum."""
    for piece in pieces(x):
        if link.left != root:
            add(piece, link.receive(link.left, like=piece))
        if link.rank != root:
            link.send(link.right, piece)


def pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.split(max(1, PIECE // x.element_size()))


def gather(link, parts: list[torch.Tensor] | None, x: torch.Tensor, root: int) -> None:
    """All send to the root: parts, which only the root has, are everybody's x."""
    if link.rank != root:
        link.send(root, x)
        return
    for rank, part in enumerate(parts):
        part.copy_(x if rank == root else link.receive(rank, like=part))


def scatter(link, x: torch.Tensor, parts: list[torch.Tensor] | None, root: int) -> None:
    """The root, which alone has parts, sends to each rank its own."""
    if link.rank != root:
        x.copy_(link.receive(root, like=x))
        return
    for rank, part in enumerate(parts):
        if rank != root:
            link.send(rank, part)
    x.copy_(parts[root])


def all_to_all(link, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """inputs[r] goes to rank r, outputs[r] comes from there. First to the next, then the one after
    it, and so on: in no step do two ranks send to the same one."""
    outputs[link.rank].copy_(inputs[link.rank])
    for distance in range(1, link.size):
        to = (link.rank + distance) % link.size
        link.send(to, inputs[to])
        source = (link.rank - distance) % link.size
        outputs[source].copy_(link.receive(source, like=outputs[source]))


def barrier(link) -> None:
    """An all_gather of nothing: what arrives last has come from every rank of the ring."""
    nothing = torch.empty(0)
    all_gather(link, [nothing] * link.size)
