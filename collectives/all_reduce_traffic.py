"""Formulas for the bytes and steps of the algorithms in all_reduce_algorithms.py."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Traffic:
    """What one rank sends. A step is one round of sending: a message, or the pieces of one."""

    bytes: int
    steps: int


def expected_traffic(name: str, numel: int, itemsize: int, world_size: int, rank: int) -> Traffic:
    """What rank `rank` of N = world_size sends of S = numel * itemsize bytes, if N divides numel:

    naive                       rank 0: N-1 messages of S; every other rank: one of S
    tree                        S to the parent (rank 0 has none), S to each child
    ring                        2(N-1) messages of S/N
    recursive_doubling          log2(N) messages of S
    recursive_halving_doubling  S/2, S/4, ... S/N and back S/N, ... S/2: together 2(N-1)/N S
    The last two algorithms run between 2^k ranks. If there are more, then in each pair the even
    rank sends one message of S, and the odd rank one more than stated.
    Chunk i has the elements i*numel//N to (i+1)*numel//N; empty messages do not count.
    Sources: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication
    Operations in MPICH, IJHPCA 19(1), 2005 (recursive); P. Patarasuk, X. Yuan, Bandwidth optimal
    all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009 (ring, minimal).
    """
    power, pairs = power_and_pairs(world_size)
    doublings, paired = power.bit_length() - 1, rank < 2 * pairs
    if name == "naive":
        messages = [numel] * (1 if rank else world_size - 1)
    elif name == "tree":
        parent, children = tree_neighbours(rank, world_size)
        messages = [numel] * (len(children) + (parent is not None))
    elif name == "ring":
        chunks = [b - a for a, b in pairwise(bounds(numel, world_size))]
        messages = [chunks[(rank - step) % world_size] for step in range(2 * (world_size - 1))]
    elif not name.startswith("recursive_"):
        raise ValueError(f"there is no algorithm {name!r}")
    elif paired and rank % 2 == 0:
        messages = [numel]
    elif name == "recursive_doubling":
        messages = [numel] * (doublings + paired)
    else:
        index, ends = rank // 2 if paired else rank - pairs, bounds(numel, power)
        parts = [part for k in range(doublings) for part in halves(ends, index, 1 << k)]
        messages = [part.stop - part.start for part in parts] + [numel] * paired
    return Traffic(bytes=sum(messages) * itemsize, steps=sum(size > 0 for size in messages))


def critical_path(name: str, numel: int, itemsize: int, world_size: int) -> Traffic:
    """The longest chain of transfers that wait for each other: its steps and its bytes.

    A rank sends and receives at the same time. With a start-up cost of alpha seconds per step and
    beta seconds per byte the algorithm takes at least steps * alpha + bytes * beta. N, S as above,
    P = the largest power of two up to N. Exact if N and P divide numel, else to a few elements.

    naive                       2(N-1) steps of S: rank 0 receives and sends all of them
    tree                        2 ceil(log2 N) steps of S
    ring                        2(N-1) steps of S/N
    recursive_doubling          log2(P) steps of S, and two more of S if P < N
    recursive_halving_doubling  2 log2(P) steps, 2(P-1)/P S together; two more of S if P < N
    """
    power, pairs = power_and_pairs(world_size)
    doublings, extra = power.bit_length() - 1, 2 if pairs else 0
    steps, tensors = {
        "naive": (2 * (world_size - 1), 2 * (world_size - 1)),
        "tree": (2 * (world_size - 1).bit_length(), 2 * (world_size - 1).bit_length()),
        "ring": (2 * (world_size - 1), 2 * (world_size - 1) / world_size),
        "recursive_doubling": (doublings + extra, doublings + extra),
        "recursive_halving_doubling": (2 * doublings + extra, 2 * (power - 1) / power + extra),
    }[name]
    return Traffic(bytes=round(tensors * numel * itemsize), steps=steps)


def bounds(numel: int, parts: int) -> list[int]:
    return [i * numel // parts for i in range(parts + 1)]


def halves(ends: list[int], index: int, width: int) -> tuple[slice, slice]:
    """The aligned run of `width` blocks that contains block `index`, and its neighbour."""
    mine, theirs = index // width * width, (index ^ width) // width * width
    return slice(ends[mine], ends[mine + width]), slice(ends[theirs], ends[theirs + width])


def tree_neighbours(rank: int, world_size: int) -> tuple[int | None, list[int]]:
    """Parent: the rank without its lowest bit. Children: rank + 1, + 2, + 4, ... below that bit."""
    lowest = rank & -rank or world_size
    children = [rank + (1 << k) for k in range(world_size.bit_length()) if 1 << k < lowest]
    return rank - lowest if rank else None, [child for child in children if child < world_size]


def power_and_pairs(world_size: int) -> tuple[int, int]:
    power = 1 << (world_size.bit_length() - 1)
    return power, world_size - power
