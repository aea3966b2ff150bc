"""Run random operations on random groups, on the backend "shm" and on Gloo, and compare.

test_custom_backend_shm_stress.py runs: python shm_stress.py SEED OPERATIONS [--leave]. With --leave
it ends without destroy_process_group. All ranks make the same list of operations from the seed. On
shm each rank then runs the list in one of two ways:

ordered   in the order of the list, synchronously or with async_op=True and a later wait();
shuffled  all asynchronously, in a random order per rank, and wait() in any order. Operations of
          one group, or of one sender, receiver and tag, keep their order.

On Gloo each rank runs the list synchronously. The numbers are small integers: sums are exact.
"""

import random
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "custom_backend"))

import shm
import torch
import torch.distributed as dist

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter")
KINDS += ("all_to_all", "barrier", "send", "send", "send")
NUMBERS = (0, 1, 3, 100, 1500, 5000, 40_000)
BATCH = 20


@dataclass(frozen=True)
class Operation:
    index: int
    kind: str
    group: int
    ranks: tuple[int, ...]  # the ranks of the group
    root: int  # a rank of the group; of a send: the sender
    to: int  # of a send: the receiver
    tag: int
    n: int
    dtype: torch.dtype

    @property
    def stream(self) -> tuple:
        """Operations with equal stream keep their order."""
        return (self.group, self.root, self.to, self.tag) if self.kind == "send" else (self.group,)

    def given(self, rank: int, part: int = 0) -> torch.Tensor:
        """The input of a rank; `part`: the rank that receives it."""
        first = self.index + 7 * rank + 3 * part
        return (torch.arange(first, first + self.n) % 30).to(self.dtype)  # exact in bfloat16


def main() -> None:
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    minute = timedelta(seconds=60)
    dist.init_process_group("shm", timeout=minute)
    rank, size = dist.get_rank(), dist.get_world_size()
    plan = random.Random(seed)  # equal on all ranks
    own = random.Random(1000 * seed + rank)
    sets = [tuple(range(size))]
    while len(sets) < 5:
        sets.append(tuple(sorted(plan.sample(range(size), plan.randint(2, size)))))
    groups = {
        backend: [dist.new_group(ranks, backend=backend, timeout=minute) for ranks in sets]
        for backend in ("shm", "gloo")
    }
    for begin in range(0, count, BATCH):
        batch = [any_operation(i, sets, plan) for i in range(begin, begin + BATCH)]
        mine = [operation for operation in batch if rank in operation.ranks]
        how = plan.choice((ordered, shuffled))
        results = how(mine, groups["shm"], rank, own)
        for operation in mine:
            works, expected = call(operation, groups["gloo"], rank, torch.Tensor.clone)
            finish(works)
            got = results[operation.index]
            assert all(map(torch.equal, got, expected)), (
                f"rank {rank}, {how.__name__}, {operation}: {got}, Gloo: {expected}"
            )
    dist.barrier()
    if rank == 0:
        print(f"{count} operations in groups of {[len(ranks) for ranks in sets]} ranks", flush=True)
    if "--leave" not in sys.argv:
        dist.destroy_process_group()


def any_operation(index: int, sets: list[tuple], plan: random.Random) -> Operation:
    group = plan.randrange(len(sets))
    root, to = plan.sample(sets[group], 2)
    return Operation(
        index=index,
        kind=plan.choice(KINDS),
        group=group,
        ranks=sets[group],
        root=root,
        to=to,
        tag=plan.randrange(3),
        n=plan.choice(NUMBERS),
        dtype=plan.choice((torch.float32, torch.float64, torch.int64, torch.bfloat16)),
    )


def ordered(operations: list[Operation], groups, rank: int, own: random.Random) -> dict:
    results, open_works = {}, []
    for operation in operations:
        perhaps_sleep(own)
        works, results[operation.index] = call(operation, groups, rank, placed(own))
        if own.random() < 0.5:
            finish(works)
        else:
            open_works.append(works)
        if open_works and own.random() < 0.3:
            finish(open_works.pop(own.randrange(len(open_works))))
    for works in open_works:
        finish(works)
    return results


def shuffled(operations: list[Operation], groups, rank: int, own: random.Random) -> dict:
    streams = [operation.stream for operation in operations]
    waiting = {stream: [o for o in operations if o.stream == stream] for stream in streams}
    own.shuffle(streams)
    results, open_works = {}, []
    for stream in streams:
        perhaps_sleep(own)
        operation = waiting[stream].pop(0)
        works, results[operation.index] = call(operation, groups, rank, placed(own))
        open_works.append(works)
    own.shuffle(open_works)
    for works in open_works:
        perhaps_sleep(own)
        finish(works)
    return results


def perhaps_sleep(own: random.Random) -> None:
    if own.random() < 0.05:
        time.sleep(own.random() * 0.002)


def placed(own: random.Random):
    """Allocates tensors in private memory or in the heap."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if own.random() < 0.5:
            return tensor.clone()
        return shm.empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)

    return place


def finish(works: list) -> None:
    for work in works:
        work.wait()


def call(operation: Operation, groups: list, rank: int, place) -> tuple[list, list]:
    """Start the operation; return its Works, and the tensors that will hold the result."""
    o, group = operation, groups[operation.group]
    options = {"group": group, "async_op": True}
    mine, others = place(o.given(rank)), range(len(o.ranks))
    position = o.ranks.index(rank)
    empty = [place(torch.zeros(o.n, dtype=o.dtype)) for _ in others]
    parts = [place(o.given(rank, part)) for part in others]
    if o.kind == "all_reduce":
        return [dist.all_reduce(mine, **options)], [mine]
    if o.kind == "reduce":
        return [dist.reduce(mine, o.root, **options)], [mine] if rank == o.root else []
    if o.kind == "broadcast":
        return [dist.broadcast(mine, o.root, **options)], [mine]
    if o.kind == "all_gather":
        return [dist.all_gather(empty, mine, **options)], empty
    if o.kind == "reduce_scatter":
        return [dist.reduce_scatter(empty[position], parts, **options)], [empty[position]]
    if o.kind == "gather":
        outputs = empty if rank == o.root else None
        return [dist.gather(mine, outputs, o.root, **options)], outputs or []
    if o.kind == "scatter":
        inputs = parts if rank == o.root else None
        return [dist.scatter(mine, inputs, o.root, **options)], [mine]
    if o.kind == "all_to_all":
        whole = place(torch.zeros(o.n * len(o.ranks), dtype=o.dtype))
        return [dist.all_to_all_single(whole, torch.cat(parts), **options)], [whole]
    if o.kind == "barrier":
        return [dist.barrier(**options)], []
    if rank == o.root:
        return [dist.isend(mine, o.to, group=group, tag=o.tag)], []
    if rank == o.to:
        return [dist.irecv(mine.zero_(), o.root, group=group, tag=o.tag)], [mine]
    return [], []


if __name__ == "__main__":
    main()
