"""How long an object lives to which other workers have references, and what keeps it too long.

    torchrun --standalone --nproc_per_node=3 rpc_basics/rref_lifetime.py

worker1 owns the objects, worker0 and worker2 hold references. An object lives as long as its owner
counts a reference to it anywhere. Look at the two counts: references, and objects that are alive.
Then at a loop that keeps what it should not; and at what shutdown still waits for, and deletes.
"""

import argparse
import time
import weakref

import torch
from arguments import ArgumentParser, above, at_least
from rpc_worker import rpc_worker
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record

MEGABYTES = 4  # of one object
KEPT = []  # references that this worker keeps


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
    if worker.rank == 1:  # this worker was at its end first of all
        print(f"shutdown has waited for the call: {'yes' if LEFT else 'no'}; ", end="")
        print(f"objects when the call ended: {LEFT}, now: {len(ALIVE)}")


# ---- what worker0 does


def show_one(owner: str, other: str) -> None:
    block = rpc.remote(owner, Block)
    note(owner, "remote(): made one", references=1, objects=1)
    copy = block.to_here()  # of the object; no reference
    del copy
    note(owner, "to_here(): fetched a copy, dropped it", references=1, objects=1)
    rpc.rpc_sync(other, keep, args=(block,))
    note(owner, "gave worker2 a reference, which it keeps", references=2, objects=1)
    del block
    note(owner, "dropped its own", references=1, objects=1)
    rpc.rpc_sync(other, drop)
    note(owner, "had worker2 drop the other", references=0, objects=0)


def show_leak(owner: str, rounds: int) -> None:
    results = []
    for _ in range(rounds):
        block = rpc.remote(owner, Block)
        results.append(block)  # only its sum is needed, but the list keeps the object over there
    del block
    note(owner, f"{rounds} rounds, each kept a reference", references=rounds, objects=rounds)
    results = [reference.rpc_sync().sum() for reference in results]
    note(owner, "took the sums instead", references=0, objects=0)
    for _ in range(rounds):
        block = rpc.remote(owner, Block)
        results.append(block.rpc_sync().sum())
    note(owner, f"{rounds} rounds, each kept a sum", references=1, objects=1)
    del block
    note(owner, "dropped the loop's variable", references=0, objects=0)


def leave_something(owner: str) -> None:
    """What is still there when worker0 comes to its end."""
    KEPT.append(rpc.remote(owner, Block))
    note(owner, "keeps one until its end", references=1, objects=1)
    rpc.rpc_async(owner, work, args=(1.0,))  # and nobody waits for this


def note(owner: str, what: str, references: int, objects: int) -> None:
    """Print the counts at the owner, once they are these. It hears of a drop a moment later."""
    rpc.rpc_sync(owner, wait_for, args=(references, objects))
    print(f"{what:42}{references:11}{objects:9}", flush=True)


# ---- what worker2 is asked to do


def keep(reference: rpc.RRef) -> None:
    KEPT.append(reference)


def drop() -> None:
    KEPT.clear()


# ---- at the owner

ALIVE = weakref.WeakSet()  # the objects that have not been deleted; keeps none of them
LEFT = []  # how many objects were alive when the last call ended


class Block:
    """Something big that should not live for ever."""

    def __init__(self):
        self.numbers = torch.ones(MEGABYTES * 2**18)
        ALIVE.add(self)

    def sum(self) -> float:
        return self.numbers.sum().item()


def wait_for(references: int, objects: int) -> None:
    """Return when the counts are these. Raises RuntimeError if that is not within 10 s."""
    deadline = time.monotonic() + 10
    while True:
        # torch has no public name for the number of references.
        found = [int(rpc._rref_context_get_debug_info()["num_forks"]), len(ALIVE)]
        if found == [references, objects]:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{references} references, {objects} objects expected, not {found}")
        time.sleep(0.001)  # there is nothing that would wake us


def work(seconds: float) -> None:
    """Something that takes a while."""
    time.sleep(seconds)
    LEFT.append(len(ALIVE))


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="References to objects of other workers, counted.")
    parser.add_argument("--rounds", type=at_least(1), default=8, help="of the loop that leaks")
    parser.add_argument("--timeout", type=above(0), default=60, help="seconds, of each call")
    return parser.parse_args()


if __name__ == "__main__":
    main()
