"""RRef lifetime: how long a remotely referenced object lives, and how references leak.

    torchrun --standalone --nproc_per_node=3 rpc_basics/rref_lifetime.py

worker1 owns the objects, worker0 and worker2 hold references. An object lives as long as its owner
counts at least one reference. Look at the two counts: references, and objects that are alive. Then
look at a loop that leaks references, and at what shutdown waits for and deletes.
"""

import argparse
import time
import weakref

import torch
from arguments import ArgumentParser, above, at_least
from rpc_worker import rpc_worker
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record

MEGABYTES = 4  # size of one object
KEPT = []  # references that this worker holds


@record
def main() -> None:
    args = parse_args()
    with rpc_worker(args.timeout, least=3) as worker:
        if worker.rank == 0:
            owner, other = worker.name_of(1), worker.name_of(2)
            print(f"{'what worker0 has done':42}{'references':>11}{'objects':>9}")
            show_one(owner, other)
            show_leak(owner, args.rounds)
            leave_something(owner)
    if worker.rank == 1:  # this worker was the first to be done
        print(f"shutdown has waited for the call: {'yes' if LEFT else 'no'}; ", end="")
        print(f"objects when the call ended: {LEFT}, now: {len(ALIVE)}")


# ---- what worker0 does


def show_one(owner: str, other: str) -> None:
    block = rpc.remote(owner, Block)
    note(owner, "remote(): created an object", references=1, objects=1)
    copy = block.to_here()  # a copy of the object, not a reference
    del copy
    note(owner, "to_here(): fetched a copy, deleted it", references=1, objects=1)
    rpc.rpc_sync(other, keep, args=(block,))
    note(owner, "gave worker2 a reference, which it holds", references=2, objects=1)
    del block
    note(owner, "deleted its own reference", references=1, objects=1)
    rpc.rpc_sync(other, drop)
    note(owner, "made worker2 delete its reference", references=0, objects=0)


def show_leak(owner: str, rounds: int) -> None:
    results = []
    for _ in range(rounds):
        block = rpc.remote(owner, Block)
        results.append(block)  # only its sum is needed, but the list keeps the remote object alive
    del block
    note(owner, f"{rounds} rounds, each kept a reference", references=rounds, objects=rounds)
    results = [reference.rpc_sync().sum() for reference in results]
    note(owner, "replaced the references by sums", references=0, objects=0)
    for _ in range(rounds):
        block = rpc.remote(owner, Block)
        results.append(block.rpc_sync().sum())
    note(owner, f"{rounds} rounds, each kept a sum", references=1, objects=1)
    del block
    note(owner, "deleted the loop's variable", references=0, objects=0)


def leave_something(owner: str) -> None:
    """Leave a reference and a running call when worker0 is done."""
    KEPT.append(rpc.remote(owner, Block))
    note(owner, "holds one reference at its end", references=1, objects=1)
    rpc.rpc_async(owner, work, args=(1.0,))  # worker0 does not wait for this call


def note(owner: str, what: str, references: int, objects: int) -> None:
    """Print the owner's counts when they are as expected: a deletion reaches the owner later."""
    rpc.rpc_sync(owner, wait_for, args=(references, objects))
    print(f"{what:42}{references:11}{objects:9}", flush=True)


# ---- what worker2 does


def keep(reference: rpc.RRef) -> None:
    KEPT.append(reference)


def drop() -> None:
    KEPT.clear()


# ---- at the owner

ALIVE = weakref.WeakSet()  # the objects that exist; does not keep them alive
LEFT = []  # how many objects were alive when the last call ended


class Block:
    """A large object."""

    def __init__(self):
        self.numbers = torch.ones(MEGABYTES * 2**18)
        ALIVE.add(self)

    def sum(self) -> float:
        return self.numbers.sum().item()


def wait_for(references: int, objects: int) -> None:
    """Return when the counts have these values. Raises RuntimeError after 10 s."""
    deadline = time.monotonic() + 10
    while True:
        # torch has no public name for the number of references.
        found = [int(rpc._rref_context_get_debug_info()["num_forks"]), len(ALIVE)]
        if found == [references, objects]:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{references} references, {objects} objects expected, not {found}")
        time.sleep(0.001)  # torch has no event to wait for


def work(seconds: float) -> None:
    """A call that takes `seconds`."""
    time.sleep(seconds)
    LEFT.append(len(ALIVE))


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="References to objects of other workers, counted.")
    parser.add_argument("--rounds", type=at_least(1), default=8, help="rounds of the loop")
    parser.add_argument("--timeout", type=above(0), default=60, help="seconds for each call")
    return parser.parse_args()


if __name__ == "__main__":
    main()
