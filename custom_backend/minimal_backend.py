"""The smallest backend in C++: compile minimal.cpp, register it, train with DDP on it.

    torchrun --standalone --nproc_per_node=2 custom_backend/minimal_backend.py

The first run compiles (half a minute). Look at the last two lines: the gradients of DDP on
this backend equal those of DDP on Gloo.
"""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import ArgumentParser
from compile_once import compile_once
from ddp_gradients import difference_from_gloo
from torch.distributed.elastic.multiprocessing.errors import record

SOURCE = Path(__file__).resolve().parent / "minimal.cpp"


def create_backend(store: dist.Store, rank: int, size: int, timeout: timedelta):
    """torch calls this on all ranks of a new group, with a store for this group alone."""
    # Groups created one after another may share a store, so each rank counts its groups.
    store = dist.PrefixStore(f"life {store.add(f'lives of {rank}', 1)}", store)
    return compile_once("minimal_backend", SOURCE).create(store, rank, size, timeout)


dist.Backend.register_backend("minimal", create_backend, devices=["cpu"])


@record
def main() -> None:
    ArgumentParser(description="Compile minimal.cpp, and train with DDP on it.").parse_args()
    dist.init_process_group("minimal", timeout=timedelta(minutes=3))
    rank = dist.get_rank()

    x = torch.tensor([1.0, 10.0]) * (rank + 1)
    dist.all_reduce(x)
    print(f"rank {rank}: all_reduce gave {x.tolist()}")

    difference = difference_from_gloo()
    print(f"rank {rank}: DDP's gradients differ from those on Gloo by {difference:.1e} at most")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
