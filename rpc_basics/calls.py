"""rpc_sync, rpc_async, remote and RRefs: every kind of remote call, and what a failed call raises.

    torchrun --standalone --nproc_per_node=2 rpc_basics/calls.py

worker0 calls, the last worker answers. Look at the process in which a call ran, and at exceptions
that come from another process. benchmarks/rpc.py measures what a call costs.
"""

import argparse
import os
import threading
import time

import torch
from arguments import ArgumentParser, above
from rpc_worker import rpc_worker
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with rpc_worker(args.timeout, least=2) as worker:
        other = worker.name_of(worker.world_size - 1)
        if worker.rank == 0:
            show_calls(other)
            show_references(other)
            show_failures(other)
        # All other workers come here at once: their threads answer calls until all are done.


# Functions that the other worker runs. It imports this file, so a call carries only their names.


def process_of(*_tensors: torch.Tensor) -> int:
    return os.getpid()


class Account:
    """An object that stays in the process that created it."""

    def __init__(self, balance: float):
        self.balance = torch.tensor(balance)

    def pay_in(self, amount: float) -> float:
        if amount <= 0:
            raise ValueError(f"the amount must be above 0, not {amount}")
        self.balance += amount
        return self.balance.item()

    def get(self) -> torch.Tensor:
        return self.balance


def double(account: rpc.RRef) -> bool:
    """Takes a reference; at its owner, local_value() is the object itself."""
    account.local_value().balance *= 2
    return account.is_owner()


OPEN = threading.Event()  # one per worker


def wait_for_the_door() -> bool:
    return OPEN.wait(60)


def open_the_door() -> None:
    OPEN.set()


# The four ways to call.


def show_calls(other: str) -> None:
    print(f"\ncalls from process {os.getpid()} to {other}")
    ones = torch.ones(2)
    show("rpc_sync, a function of ours", f"ran in process {rpc.rpc_sync(other, process_of)}")
    show("rpc_sync, one of torch's", rpc.rpc_sync(other, torch.add, args=(ones, 2)).tolist())
    futures = [rpc.rpc_async(other, torch.mul, args=(ones, n)) for n in range(100)]  # in flight
    products = torch.futures.wait_all(futures)  # in the order of the calls
    show("rpc_async, 100 in flight", f"sum of the answers {sum(products)[0].item():.0f}")
    reference = rpc.remote(other, torch.add, args=(ones, 2))  # returns at once; nothing comes back
    show("remote", f"a reference; to_here() fetches a copy: {reference.to_here().tolist()}")


def show_references(other: str) -> None:
    print("\nreferences (RRef): an object that stays at its owner")
    account = rpc.remote(other, Account, args=(100.0,))
    show("its owner", account.owner_name())
    show("is it ours?", account.is_owner())
    show("rpc_sync().pay_in(20)", account.rpc_sync().pay_in(20.0))
    show("rpc_async().pay_in(5).wait()", account.rpc_async().pay_in(5.0).wait())
    show("confirmed by the owner", account.confirmed_by_owner())
    account.to_here().pay_in(1000.0)  # into a copy
    show("after to_here().pay_in(1000)", account.rpc_sync().get().item())
    # A reference as an argument: at its owner it leads to the object itself.
    show("double(account) ran at the owner", rpc.rpc_sync(other, double, args=(account,)))
    show("balance", account.rpc_sync().get().item())


# Failures, as the caller sees them.


def show_failures(other: str) -> None:
    print("\nfailures, as the caller sees them")
    account = rpc.remote(other, Account, args=(100.0,))
    show_failure("the callee raises", lambda: account.rpc_sync().pay_in(-1.0))
    show_failure(
        "it takes longer than timeout=0.2",
        lambda: rpc.rpc_sync(other, wait_for_the_door, timeout=0.2),
    )
    # The caller has given up, but a thread of the callee still runs that function.
    rpc.rpc_sync(other, open_the_door)
    show_failure("no worker has that name", lambda: rpc.rpc_sync("worker99", process_of))
    show_failure("it cannot be imported", lambda: rpc.rpc_sync(other, lambda: 1))
    show("and the next call", f"works: {account.rpc_sync().pay_in(1.0)}")


def show_failure(what: str, call) -> None:
    begin = time.perf_counter()
    try:
        call()
    except Exception as error:
        seconds = time.perf_counter() - begin
        show(what, f"{type(error).__name__} after {seconds:.1f} s")
        for line in str(error).splitlines()[:2]:
            print(f"      {line}")
        if "Traceback" in str(error):
            print("      and below it the traceback in the other process")


def show(what: str, value: object) -> None:
    print(f"  {what:34}{value}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="The kinds of remote calls, and how they fail.")
    parser.add_argument(
        "--timeout", type=above(0), default=60, help="timeout of each call, in seconds"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
