"""torch.distributed in one screen: join a job, then send tensors in three ways.

    torchrun --standalone --nproc_per_node=2 collectives/minimal.py
    torchrun --standalone --nproc_per_node=4 collectives/minimal.py

Look at the lines: every rank runs this program, and ends with numbers of the other ranks.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    # torchrun has started this program several times. Environment variables tell each process its
    # rank and where the ranks meet. Gloo sends CPU tensors; "nccl" sends those of GPUs.
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # All ranks to all ranks, added: afterwards every rank has 0 + 1 + 2 + ...
    total = torch.tensor([rank])
    dist.all_reduce(total)

    # One rank to all ranks: every rank receives rank 0's numbers into its own tensor.
    settings = torch.tensor([7, 8, 9]) if rank == 0 else torch.zeros(3, dtype=torch.int64)
    dist.broadcast(settings, src=0)

    # One rank to the next: each rank receives a number, adds its own rank, and sends the sum on.
    passed_on = torch.zeros(1, dtype=torch.int64)
    if rank > 0:
        dist.recv(passed_on, src=rank - 1)
    passed_on += rank
    if rank < world_size - 1:
        dist.send(passed_on, dst=rank + 1)

    # Ranks print in any order. So rank 0 collects the lines of all ranks and prints them.
    line = f"rank {rank} of {world_size}: all_reduce {total.tolist()}"
    line += f", broadcast {settings.tolist()}, passed on {passed_on.tolist()}"
    lines = [None] * world_size if rank == 0 else None
    dist.gather_object(line, lines, dst=0)
    if rank == 0:
        print("\n".join(lines))

    dist.barrier()  # wait until every rank is done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
