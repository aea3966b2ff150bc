"""Remote calls in one screen: a process has another one work for it, by the name of a function.

    torchrun --standalone --nproc_per_node=2 rpc_basics/minimal.py

Look at the process numbers: worker0 asks, worker1 works, and has no line that says so.
"""

import os
import warnings

import torch
from torch.distributed import rpc


def multiply(a, b):
    return a @ b, os.getpid()


class Counter:
    def __init__(self):
        self.total = 0

    def add(self, number):
        self.total += number
        return self.total, os.getpid()


def ask(other: str) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    print(f"worker0 is process {os.getpid()}")
    c, process = rpc.rpc_sync(other, multiply, args=(a, b))  # waits: a and b go, the product comes
    print(f"rpc_sync:  process {process} multiplied, right: {torch.equal(c, a @ b)}")
    future = rpc.rpc_async(other, multiply, args=(a, b))  # does not wait: do something else here
    c, process = future.wait()  # now we wait
    print(f"rpc_async: process {process} multiplied, right: {torch.equal(c, a @ b)}")
    counter = rpc.remote(other, Counter)  # the object stays there, here is a reference to it
    for number in (1, 2, 3):
        total, process = counter.rpc_sync().add(number)  # its method runs where it lives
    print(f"remote:    process {process} has counted to {total}")


if __name__ == "__main__":
    if "RANK" not in os.environ:  # not started by torchrun: the one worker asks itself
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torch's own init_rpc passes an object of a deprecated kind, and torch warns of it.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    # Returns when all workers are there. From now on threads of this process answer calls.
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        ask(f"worker{world_size - 1}")
    rpc.shutdown()  # waits until all workers are here and nobody calls any more
