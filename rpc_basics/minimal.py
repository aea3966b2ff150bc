"""Remote calls (RPC) in one screen: one process calls a function in another process.

    torchrun --standalone --nproc_per_node=2 rpc_basics/minimal.py

Look at the process numbers: worker0 calls, worker1 works, although no line of worker1 says so.
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
    c, process = rpc.rpc_sync(other, multiply, args=(a, b))  # sends a and b, waits for the product
    print(f"rpc_sync:  process {process} multiplied, right: {torch.equal(c, a @ b)}")
    future = rpc.rpc_async(other, multiply, args=(a, b))  # does not wait: do other work here
    c, process = future.wait()  # waits for the answer
    print(f"rpc_async: process {process} multiplied, right: {torch.equal(c, a @ b)}")
    counter = rpc.remote(other, Counter)  # the object stays there; this is a reference to it (RRef)
    for number in (1, 2, 3):
        total, process = counter.rpc_sync().add(number)  # the method runs in the object's process
    print(f"remote:    process {process} has counted to {total}")


if __name__ == "__main__":
    if "RANK" not in os.environ:  # not started by torchrun: the only worker calls itself
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torch's own init_rpc uses a deprecated object, and torch warns of it.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    # Returns when all workers have joined. From now on threads of this process answer calls.
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        ask(f"worker{world_size - 1}")
    rpc.shutdown()  # waits until all workers have called it and all calls are answered
