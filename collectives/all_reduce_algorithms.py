"""Five all_reduce algorithms, written with sends and receives.

Each one replaces a contiguous tensor by its sum over the group, as dist.all_reduce does, and
returns how much this rank has sent. compare_all_reduce.py compares them:

    torchrun --standalone --nproc_per_node=4 collectives/compare_all_reduce.py

    naive                       every rank to rank 0, and back: rank 0 sends N-1 tensors
    tree                        to rank 0 and back through ranks in between, which add and pass on
    ring                        one chunk per step to the neighbour: the fewest bytes, many steps
    recursive_doubling          the full tensor, to one partner after another: few steps, many bytes
    recursive_halving_doubling  halves, quarters, ...: few bytes and few steps
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from all_reduce_traffic import Traffic, bounds, halves, power_and_pairs, tree_neighbours

PIECE_BYTES = 4 << 20  # the ring sends its chunks in pieces of about this size
PIECES_AHEAD = 4  # the pieces that the ring has in flight at a time


class Link:
    """This rank's connection to its group: starts transfers, and counts what it sends."""

    def __init__(self, group=None):
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = Counter()  # step -> bytes

    def start(self, step, send=None, to=None, receive=None, source=None) -> list:
        """Start to send one tensor and to receive another. `to`, `source`: ranks in the group.

        Both are in one batch: on NCCL two ranks that first send to each other, then receive, would
        wait for ever. Empty tensors are not sent: the peer knows the size, too.
        """
        transfers = []
        if send is not None and send.numel():
            transfers.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=to))
            self.sent[step] += send.nbytes
        if receive is not None and receive.numel():
            transfers.append(dist.P2POp(dist.irecv, receive, group=self.group, group_peer=source))
        return dist.batch_isend_irecv(transfers) if transfers else []

    def transfer(self, send=None, to=None, receive=None, source=None) -> None:
        """One full step: start the transfers and wait for them."""
        finish(self.start(len(self.sent), send, to, receive, source))

    def traffic(self) -> Traffic:
        return Traffic(bytes=self.sent.total(), steps=len(self.sent))


def finish(transfers: list) -> None:
    for transfer in transfers:
        transfer.wait()  # on a GPU the stream waits, not this thread


def naive(tensor: torch.Tensor, group=None) -> Traffic:
    """Every rank sends to rank 0, which adds up, then sends the sum to one rank after another."""
    link, flat = Link(group), flatten(tensor)
    if link.rank > 0:
        link.transfer(send=flat, to=0)
        link.transfer(receive=flat, source=0)
        return link.traffic()
    arrived = torch.empty_like(flat)
    for other in range(1, link.world_size):
        link.transfer(receive=arrived, source=other)
        flat += arrived
    for other in range(1, link.world_size):
        link.transfer(send=flat, to=other)
    return link.traffic()


def tree(tensor: torch.Tensor, group=None) -> Traffic:
    """Add up a binomial tree to rank 0; then send the sum down that tree."""
    link, flat = Link(group), flatten(tensor)
    parent, children = tree_neighbours(link.rank, link.world_size)
    arrived = torch.empty_like(flat) if children else None
    for child in children:
        link.transfer(receive=arrived, source=child)
        flat += arrived
    if parent is not None:
        link.transfer(send=flat, to=parent)
        link.transfer(receive=flat, source=parent)
    for child in reversed(children):  # the largest subtree first: it takes longest
        link.transfer(send=flat, to=child)
    return link.traffic()


def ring(tensor: torch.Tensor, group=None, steps: int | None = None) -> Traffic:
    """One chunk per rank; in each step send one chunk to the right, receive one from the left.

    In the first N-1 steps (reduce-scatter) the chunk that arrives is added, in the last N-1
    (all-gather) it replaces. Chunks are sent in pieces, a few at a time: while one piece is added,
    the next ones are in flight, and a finished piece starts its next step without waiting for the
    rest of its chunk. steps: stop after this many steps, to look at a tensor half-way.
    """
    link, flat = Link(group), flatten(tensor)
    rank, world_size = link.rank, link.world_size
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    largest = math.ceil(len(flat) / world_size)
    pieces = max(1, largest * flat.element_size() // PIECE_BYTES)  # of each chunk
    chunks = [flat[a:b].tensor_split(pieces) for a, b in pairwise(bounds(len(flat), world_size))]
    # Pieces to add arrive in a few buffers, which are small enough to stay in the cache.
    places = flat.new_empty(min(pieces, PIECES_AHEAD), math.ceil(largest / pieces))
    on_the_way = deque()

    def complete() -> None:
        transfers, theirs, arrived = on_the_way.popleft()
        finish(transfers)
        if arrived is not theirs:
            theirs += arrived

    steps = 2 * (world_size - 1) if steps is None else steps
    for number in range(steps * pieces):
        step, piece = divmod(number, pieces)
        if len(on_the_way) == len(places):  # also completes what this piece of this step needs
            complete()
        mine = chunks[(rank - step) % world_size][piece]
        theirs = chunks[(rank - step - 1) % world_size][piece]
        place = places[number % len(places), : len(theirs)]
        arrived = place if step < world_size - 1 else theirs
        on_the_way.append((link.start(step, mine, right, arrived, left), theirs, arrived))
    while on_the_way:
        complete()
    return link.traffic()


def recursive_doubling(tensor: torch.Tensor, group=None) -> Traffic:
    """Swap full tensors with the rank whose number differs in one bit, add; then the next bit.

    After k steps a rank has the sum over 2^k ranks: few steps, each with the full tensor.
    """

    def double(link: Link, flat, arrived, index: int, members: list[int]) -> None:
        for k in range(len(members).bit_length() - 1):
            partner = members[index ^ 1 << k]
            link.transfer(flat, partner, arrived, partner)
            flat += arrived

    return among_power_of_two(double, tensor, group)


def recursive_halving_doubling(tensor: torch.Tensor, group=None) -> Traffic:
    """Swap halves and add, then quarters, ... until each rank has one finished block. Then back:
    swap blocks, then pairs of blocks, ... It sends the ring's bytes in 2 log2(P) steps.
    """

    def halve_and_double(link: Link, flat, arrived, index: int, members: list[int]) -> None:
        ends = bounds(len(flat), len(members))
        widths = [1 << k for k in range(len(members).bit_length() - 1)]  # 1, 2, 4, ... blocks
        for width in reversed(widths):
            mine, theirs = halves(ends, index, width)
            partner, into = members[index ^ width], arrived[: mine.stop - mine.start]
            link.transfer(flat[theirs], partner, into, partner)
            flat[mine] += into
        for width in widths:
            mine, theirs = halves(ends, index, width)
            partner = members[index ^ width]
            link.transfer(flat[mine], partner, flat[theirs], partner)

    return among_power_of_two(halve_and_double, tensor, group)


def among_power_of_two(algorithm: Callable, tensor: torch.Tensor, group) -> Traffic:
    """Run an algorithm that needs 2^k ranks. If there are more ranks, the first ones form pairs:
    the even rank sends its tensor to its neighbour, which adds it, and later receives the sum."""
    link, flat = Link(group), flatten(tensor)
    _, pairs = power_and_pairs(link.world_size)
    members = [*range(1, 2 * pairs, 2), *range(2 * pairs, link.world_size)]
    if link.rank not in members:
        link.transfer(send=flat, to=link.rank + 1)
        link.transfer(receive=flat, source=link.rank + 1)
        return link.traffic()
    arrived = torch.empty_like(flat)
    if link.rank < 2 * pairs:
        link.transfer(receive=arrived, source=link.rank - 1)
        flat += arrived
    algorithm(link, flat, arrived, members.index(link.rank), members)
    if link.rank < 2 * pairs:
        link.transfer(send=flat, to=link.rank - 1)
    return link.traffic()


functions = (naive, ring, tree, recursive_doubling, recursive_halving_doubling)
ALGORITHMS: dict[str, Callable[..., Traffic]] = {f.__name__: f for f in functions}


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError("the tensor must be contiguous: call .contiguous() and use what it gives")
    return tensor.detach().view(-1)
