r"""Hello world: every rank prints its rank, local rank, world size, backend, host and device.

    torchrun --standalone --nproc_per_node=2 collectives/hello_world.py
    torchrun --standalone --nproc_per_node=8 collectives/hello_world.py --device cpu
    python collectives/hello_world.py                                  # a world of one

    # two nodes, four ranks each: the same command on both
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
        collectives/hello_world.py

Look at

1. the greetings: one line per rank, in an order that changes from run to run.
2. the table: rank 0 gathers one row per rank and prints it. The rank counts over all nodes, the
   local rank on one node. The local rank chooses the GPU.
3. the last line: an all_reduce adds up the ranks, so the ranks are connected.
"""

import os
import socket

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser
from runtime import Worker, distributed_worker
from tables import print_by_rank
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        # Every process runs this line. Nothing orders the processes, so nothing orders the lines.
        print(f"hello from rank {worker.rank} of {worker.world_size}", flush=True)
        dist.barrier()  # returns when every rank has called it: all greetings are printed
        print_by_rank(worker, "One row per rank, in order", **identity(worker))
        total = sum_over_ranks(worker.rank, worker.device)
        if worker.is_main:
            n = worker.world_size
            print(f"\nsum of all ranks: {total} by all_reduce, {n * (n - 1) // 2} by n (n - 1) / 2")


def identity(worker: Worker) -> dict:
    """What this rank knows about itself. Needs a process group."""
    return {
        "local_rank": worker.local_rank,
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "device": device_name(worker.device),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return f"{device}, {torch.get_num_threads()} thread(s)"


def sum_over_ranks(value: float, device: torch.device | str = "cpu", group=None) -> float:
    """The sum of every rank's `value`, on every rank of the group: the smallest collective."""
    x = torch.tensor(value, dtype=torch.float64, device=device)  # float32: exact up to 16,777,216
    dist.all_reduce(x, group=group)
    return x.item()


def parse_args():
    parser = ArgumentParser(description="Print who every rank is.")
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
