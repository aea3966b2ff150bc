"""Run all-reduce algorithms and point-to-point functions in groups of 1 to 6 ranks; save results.

Started by test_collectives_algorithms.py under torchrun with 6 ranks. Every rank writes what it
saw: lists of plain dicts.
"""

import sys
from datetime import timedelta
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "collectives"))

import all_reduce_algorithms as algorithms
import point_to_point as p2p
import torch
import torch.distributed as dist
from runtime import distributed_worker

# Most groups do not begin with rank 0, and some have gaps: global ranks differ from group ranks.
GROUPS = ([4], [1, 4], [0, 3, 5], [2, 3, 4, 5], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
SIZES = (0, 1, 2, 3, 5, 7, 16, 31, 64, 1000)
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "uint8", "complex64")
CELLS = (6, 7, 17, 50)

WIRE = {"bytes": 0, "messages": 0}
real_batch = dist.batch_isend_irecv


def counting_batch(operations):
    """Counts what the code sends, independent of the code's own count."""
    for operation in operations:
        if operation.op is dist.isend:
            WIRE["bytes"] += operation.tensor.numel() * operation.tensor.element_size()
            WIRE["messages"] += 1
    return real_batch(operations)


def integers(rank: int, numel: int, dtype: str) -> torch.Tensor:
    """Numbers whose sum over 6 ranks is exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * rank + numel)
    return torch.randint(0, 20, (numel,), generator=generator).to(getattr(torch, dtype))


def reduce_once(name: str, own: torch.Tensor, plain: torch.Tensor, group) -> dict:
    expected, result = own.clone(), own.clone()
    dist.all_reduce(expected, group=group)
    WIRE.update(bytes=0, messages=0)
    sent = algorithms.ALGORITHMS[name](result, group)
    return {
        "name": name,
        "world_size": dist.get_world_size(group),
        "rank": dist.get_rank(group),
        "numel": own.numel(),
        "itemsize": own.element_size(),
        "dtype": str(own.dtype),
        "like_all_reduce": torch.equal(result, expected),
        "like_plain_sum": torch.equal(result, plain),
        "bytes": sent.bytes,
        "steps": sent.steps,
        "wire_bytes": WIRE["bytes"],
        "wire_messages": WIRE["messages"],
    }


def all_algorithms(members: list[int], group) -> list[dict]:
    records = []
    cases = [(numel, "float32") for numel in SIZES] + [(13, dtype) for dtype in DTYPES]
    for (numel, dtype), name in product(cases, algorithms.ALGORITHMS):
        inputs = [integers(member, numel, dtype) for member in members]
        plain = torch.stack(inputs).sum(0, dtype=inputs[0].dtype)
        own = inputs[dist.get_rank(group)]
        records.append(reduce_once(name, own, plain, group))
    return records


def ring_in_pieces(members: list[int], group) -> list[dict]:
    """Pieces of 8 elements, with 1, 2 or 3 of them in flight."""
    records, before = [], (algorithms.PIECE_BYTES, algorithms.PIECES_AHEAD)
    for ahead, numel in product((1, 2, 3), (50, 301)):
        algorithms.PIECE_BYTES, algorithms.PIECES_AHEAD = 32, ahead
        inputs = [integers(member, numel, "float32") for member in members]
        own = inputs[dist.get_rank(group)]
        records.append(reduce_once("ring", own, torch.stack(inputs).sum(0), group))
    algorithms.PIECE_BYTES, algorithms.PIECES_AHEAD = before
    return records


def random_floats(members: list[int], group) -> list[dict]:
    """Several dims, and sums that depend on the order: the result itself is saved."""
    records = []
    for name, function in algorithms.ALGORITHMS.items():
        torch.manual_seed(dist.get_rank(group))
        result = torch.randn(5, 7, 3)
        function(result, group)
        records.append({"name": name, "world_size": len(members), "result": result})
    return records


def point_to_point(members: list[int], group) -> list[dict]:
    rank, size, records = dist.get_rank(group), len(members), []
    left = rank - 1 if rank > 0 else None
    right = rank + 1 if rank < size - 1 else None
    for count in CELLS:
        start = torch.rand(count, generator=torch.Generator().manual_seed(count))
        part = p2p.heat(p2p.part_of(start, rank, size), 40, left, right, group)
        alone = p2p.heat(start, 40)
        records.append(
            {
                "what": f"heat {count}",
                "equal": torch.equal(part, p2p.part_of(alone, rank, size)),
                "changed": not torch.equal(start, alone),
                "cells": len(part),
            }
        )
    if size > 1:
        own, expected = torch.full((3, 2), rank), torch.full((3, 2), (rank - 1) % size)
        for way in (p2p.take_turns, p2p.do_not_wait, p2p.batch):
            incoming = torch.full((3, 2), -1)
            way(own, incoming, group)
            records.append({"what": way.__name__, "equal": torch.equal(incoming, expected)})
        shifted = p2p.ring_shift(own, group)
        records.append({"what": "ring_shift", "equal": torch.equal(shifted, expected)})
    return [{"world_size": size, "rank": rank, **record} for record in records]


def run(folder: Path) -> None:
    with distributed_worker("cpu", timeout=timedelta(seconds=60)) as worker:
        groups = [dist.new_group(members) for members in GROUPS]
        records = {"algorithms": [], "pieces": [], "floats": [], "p2p": []}
        dist.batch_isend_irecv = counting_batch
        for members, group in zip(GROUPS, groups, strict=True):
            if worker.rank in members:
                records["algorithms"] += all_algorithms(members, group)
                records["pieces"] += ring_in_pieces(members, group)
                records["floats"] += random_floats(members, group)
                records["p2p"] += point_to_point(members, group)
        torch.save(records, folder / f"{worker.rank}.pt")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
