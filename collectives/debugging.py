"""Practise debugging a distributed job: one log per rank, pdb on one rank, out of memory.

    torchrun --standalone --nproc_per_node=2 collectives/debugging.py
    torchrun --standalone --nproc_per_node=2 collectives/debugging.py --breakpoint-on=1
    torchrun --standalone --nproc_per_node=2 collectives/debugging.py --fill-memory-on=1  # status 1
    python collectives/debugging.py                                    # a world of one

Each step is one all_reduce and takes 0.1 s; both flags act in step 3. debugging.md uses this
script. Look at

1. --breakpoint-on: one rank shows the pdb prompt, and the other ranks wait for it in a barrier.
2. --fill-memory-on: that rank raises, and the other ranks report that a connection is closed. The
   last lines of torchrun name the rank that failed first.
"""

import time

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from runtime import Worker, distributed_worker
from torch.distributed.elastic.multiprocessing.errors import record

FAULT = 3  # the step of --breakpoint-on and of --fill-memory-on


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        for flag, rank in (
            ("--breakpoint-on", args.breakpoint_on),
            ("--fill-memory-on", args.fill_memory_on),
        ):
            if rank is not None and rank >= worker.world_size:
                raise UserError(f"{flag} {rank}: the last rank is {worker.world_size - 1}")
        print(f"rank {worker.rank} begins", flush=True)
        for step in range(args.steps):
            train_step(step, worker, args)


def train_step(step: int, worker: Worker, args) -> None:
    total = torch.tensor([float(worker.rank)], device=worker.device)
    if step == FAULT and args.breakpoint_on is not None:
        # Every rank calls this: one rank opens pdb, the other ranks wait until it continues.
        dist.breakpoint(rank=args.breakpoint_on)
    if step == FAULT and args.fill_memory_on == worker.rank:
        torch.empty(2**50, dtype=torch.uint8, device=worker.device)  # 1 PiB: no machine has it
    dist.all_reduce(total)
    if worker.is_main:
        print(f"step {step}: the sum of the ranks is {total.item():g}", flush=True)
    time.sleep(0.1)


def parse_args():
    parser = ArgumentParser(description="Practise debugging a job: logs, pdb, out of memory.")
    parser.add_argument(
        "--steps", type=at_least(1), default=20, help="number of steps (default: 20)"
    )
    parser.add_argument(
        "--breakpoint-on", type=at_least(0), help="rank that opens pdb in step 3 (default: none)"
    )
    parser.add_argument(
        "--fill-memory-on",
        type=at_least(0),
        help="rank that runs out of memory in step 3 (default: none)",
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
