"""Every kind of remote call, what comes back when one fails, and what a call costs.

    torchrun --standalone --nproc_per_node=2 rpc_basics/calls.py
    torchrun --standalone --nproc_per_node=2 rpc_basics/calls.py --repeats 20    # steadier times

worker0 asks, the last worker answers. Look at where a call ran, at what an exception looks like
that comes from another process, and at the last table: a call against send and recv of a Gloo
group between the same two processes.
"""

import argparse
import os
import statistics
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from arguments import ArgumentParser, above, at_least
from rpc_worker import rpc_worker
from runtime import distributed_worker
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record

SIZES = (0, 1 << 10, 1 << 16, 1 << 20, 1 << 24)  # bytes of the tensor that goes and comes back


@record
def main() -> None:
    args = parse_args()
    # A Gloo group and RPC in one process: they meet through the same store, then keep apart.
    with (
        distributed_worker("cpu", timedelta(seconds=args.timeout)),
        rpc_worker(args.timeout, least=2) as worker,
    ):
        other = worker.name_of(worker.world_size - 1)
        if worker.rank == 0:
            show_calls(other)
            show_references(other)
            show_failures(other)
        dist.barrier()  # the others wait here, while their threads answer the calls
        show_costs(worker, other, args.repeats)


# What the other worker runs. It imports this same file, so a call only carries the name.


def process_of(*_tensors: torch.Tensor) -> int:
    return os.getpid()


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Account:
    """An object that stays where it was made."""

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
    """Given a reference; its owner gets at the object itself."""
    account.local_value().balance *= 2
    return account.is_owner()


OPEN = threading.Event()  # on each worker its own


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
    futures = [rpc.rpc_async(other, torch.mul, args=(ones, n)) for n in range(100)]  # all under way
    products = torch.futures.wait_all(futures)  # in the order of the calls, whoever came first
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
    account.to_here().pay_in(1000.0)  # to a copy
    show("after to_here().pay_in(1000)", account.rpc_sync().get().item())
    # The reference as an argument: the owner finds its own object behind it.
    show("double(account) ran at the owner", rpc.rpc_sync(other, double, args=(account,)))
    show("balance", account.rpc_sync().get().item())


# What fails, and what the caller sees of it.


def show_failures(other: str) -> None:
    print("\nfailures, as the caller sees them")
    account = rpc.remote(other, Account, args=(100.0,))
    show_failure("the callee raises", lambda: account.rpc_sync().pay_in(-1.0))
    show_failure(
        "it takes longer than timeout=0.2",
        lambda: rpc.rpc_sync(other, wait_for_the_door, timeout=0.2),
    )
    # The caller has given up, the callee has not: its thread is still in that function.
    rpc.rpc_sync(other, open_the_door)
    show_failure("nobody has that name", lambda: rpc.rpc_sync("worker99", process_of))
    show_failure("nobody could import it", lambda: rpc.rpc_sync(other, lambda: 1))
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
            print("      and below it the traceback, of where it happened in the other process")


def show(what: str, value: object) -> None:
    print(f"  {what:34}{value}", flush=True)


# What a call costs.


def show_costs(worker, other: str, repeats: int) -> None:
    """Round trips in turn: a call that returns its argument; a send that is sent back."""
    rank, last = worker.rank, worker.world_size - 1
    if rank == 0:
        print("\none tensor there and back, median in microseconds")
        print(f"  {'bytes':>12}{'rpc_sync':>12}{'send, recv':>12}{'ratio':>8}")
    for size in SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8)
        calls, messages = [], []
        for _ in range(repeats + 1):
            if rank == 0:
                calls.append(seconds_of(lambda: rpc.rpc_sync(other, echo, args=(tensor,))))  # noqa: B023
            dist.barrier()
            if rank in (0, last):
                messages.append(seconds_of(lambda: there_and_back(tensor, rank, last)))  # noqa: B023
            dist.barrier()
        if rank == 0:  # without the first of each, which opens connections
            call, message = (statistics.median(times[1:]) * 1e6 for times in (calls, messages))
            print(f"  {size:12,}{call:12.0f}{message:12.0f}{call / message:8.1f}", flush=True)
    if rank == 0:
        one = statistics.median(
            seconds_of(lambda: rpc.rpc_sync(other, process_of)) for _ in range(repeats * 10)
        )
        many = statistics.median(seconds_of(lambda: in_flight(other, 100)) for _ in range(repeats))
        print(f"  calls/s of no tensor: {1 / one:,.0f} one after the other", end=", ")
        print(f"{100 / many:,.0f} with 100 in flight")
    dist.barrier()


def there_and_back(tensor: torch.Tensor, rank: int, last: int) -> None:
    if rank == 0:
        dist.send(tensor, last)
        dist.recv(tensor, last)
    else:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def in_flight(other: str, number: int) -> None:
    torch.futures.wait_all([rpc.rpc_async(other, process_of) for _ in range(number)])


def seconds_of(action) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="The kinds of remote calls, their failures, their cost.")
    parser.add_argument("--repeats", type=at_least(1), default=10, help="round trips of each size")
    parser.add_argument("--timeout", type=above(0), default=60, help="seconds, of each call")
    return parser.parse_args()


if __name__ == "__main__":
    main()
