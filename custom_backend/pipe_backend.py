"""An asynchronous backend in C++: a worker thread, a pipe in shared memory, and DDP on top.

    torchrun --standalone --nproc_per_node=2 custom_backend/pipe_backend.py
    torchrun --standalone --nproc_per_node=3 custom_backend/pipe_backend.py --numel 10000000

The first run compiles pipe/backend.cpp (half a minute). Look at the first line of each rank: the
call returns before the sum is there, wait() when it is there. Then read pipe/pipe.h.
"""

import time
from datetime import timedelta

import pipe  # registers the backend
import torch
import torch.distributed as dist
from arguments import ArgumentParser, at_least
from ddp_gradients import difference_from_gloo
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    pipe.compiled()  # before the timeout counts
    dist.init_process_group("pipe", timeout=timedelta(minutes=3))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    x = torch.full((args.numel,), float(rank + 1))
    dist.barrier()
    began = time.perf_counter()
    work = dist.all_reduce(x, async_op=True)
    returned = time.perf_counter()
    work.wait()
    done = time.perf_counter()
    assert (x == world_size * (world_size + 1) / 2).all()
    print(
        f"rank {rank}: the call returned after {1e3 * (returned - began):.1f} ms, "
        f"wait() after {1e3 * (done - began):.1f} ms"
    )

    difference = difference_from_gloo()
    print(f"rank {rank}: DDP's gradients differ from those on Gloo by {difference:.1e} at most")

    dist.barrier()
    dist.destroy_process_group()


def parse_args():
    parser = ArgumentParser(description="Train with DDP on an asynchronous backend in C++.")
    add = parser.add_argument
    add("--numel", type=at_least(1), default=4_000_000, help="reduce N floats (default: 4000000)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
