r"""One job on two hosts: where each rank is, a step that equals one process, how fast the link is.

    torchrun --standalone --nproc_per_node=2 clusters/minimal.py       # on one host first
    torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
        --rdzv-id=my_job clusters/minimal.py                           # then this on each of two

The script does not know how many hosts there are. Look at the hosts and devices, and at the last
line: 100 MB/s is Ethernet of 1 Gbit/s, and 100 times as much is a network for training.
"""

import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

MB = 64


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))  # a GPU of this host
        torch.cuda.set_device(device)
    # The launcher has told each process RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))  # between the CPUs
    rank, world_size = dist.get_rank(), dist.get_world_size()

    places = [None] * world_size
    dist.all_gather_object(places, f"{socket.gethostname()}, {device}")
    if rank == 0:  # before NCCL, which may hang
        lines = [f"rank {number} on {place}" for number, place in enumerate(places)]
        print(*lines, sep="\n", flush=True)
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")

    # One step of data parallelism: each rank has a local batch, and all ranks average.
    torch.manual_seed(0)  # the same numbers on all ranks
    x, weight = torch.randn(8 * world_size, 4), torch.randn(4, requires_grad=True)
    (expected,) = torch.autograd.grad((x @ weight).square().mean(), weight)  # in one process
    my_x = x.chunk(world_size)[rank]
    gradient = torch.autograd.grad((my_x @ weight).square().mean(), weight)[0].to(device)
    dist.all_reduce(gradient, group=group)
    torch.testing.assert_close(gradient.cpu() / world_size, expected)

    numbers = torch.ones(MB * 250_000, device=device)
    for _ in range(2):  # the first time also opens connections
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(numbers, group=group)
        numbers[0].item()  # waits for the GPU
        seconds = time.perf_counter() - begin
    if rank == 0:
        sent = 2 * (world_size - 1) / world_size * MB  # by each rank
        print(f"gradient equals one process's; all_reduce sends {sent / seconds:,.0f} MB/s")

    dist.barrier()  # no rank leaves while another rank still waits for a message
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
