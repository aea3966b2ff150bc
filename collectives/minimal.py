"""torch.distributed itself: processes that know of each other, and three ways to send tensors.

    torchrun --standalone --nproc_per_node=2 collectives/minimal.py
    torchrun --standalone --nproc_per_node=4 collectives/minimal.py

Look at the table: every rank runs this same program, and each ends with numbers of the others.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    # torchrun has started this program several times, and told each its rank and where the others
    # are, in environment variables. Gloo connects CPUs; GPUs take "nccl".
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # All to all, added: afterwards every rank has 0 + 1 + 2 + ...
    total = torch.tensor([rank])
    dist.all_reduce(total)

    # One to all: every rank gets rank 0's numbers, in the tensor that it offers for them.
    settings = torch.tensor([7, 8, 9]) if rank == 0 else torch.zeros(3, dtype=torch.int64)
    dist.broadcast(settings, src=0)

    # One to one: a number passes all ranks in turn, and each adds its own. recv waits for it.
    passed_on = torch.zeros(1, dtype=torch.int64)
    if rank > 0:
        dist.recv(passed_on, src=rank - 1)
    passed_on += rank
    if rank < world_size - 1:
        dist.send(passed_on, dst=rank + 1)

    # Ranks print when they like. For an order, one collects the lines of all and prints them.
    line = f"rank {rank} of {world_size}: all_reduce {total.tolist()}"
    line += f", broadcast {settings.tolist()}, passed on {passed_on.tolist()}"
    lines = [None] * world_size if rank == 0 else None
    dist.gather_object(line, lines, dst=0)
    if rank == 0:
        print("\n".join(lines))

    dist.barrier()  # nobody leaves while another still wants to talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
