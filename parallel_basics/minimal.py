"""Tensor parallelism in one screen: each rank holds a shard of every layer.

    python parallel_basics/minimal.py                                      # one process
    torchrun --standalone --nproc_per_node=2 parallel_basics/minimal.py    # two: the same losses
"""  # fmt: skip

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def train(device: torch.device, rank: int, world_size: int, steps: int) -> None:
    features = 480  # of the hidden layer, over all ranks
    if features % world_size:
        raise SystemExit(f"error: {features} features do not divide over {world_size} ranks")
    mesh = dist.init_device_mesh(device.type, (world_size,))  # all ranks, in a line
    torch.manual_seed(0)  # every rank builds the same model and, below, draws the same batches
    model = nn.Sequential(nn.Linear(64, features), nn.ReLU(), nn.Linear(features, 10)).to(device)
    # Each rank keeps some outputs of the first layer and the matching inputs of the second, so it
    # sends nothing in between. The outputs of the second are added up over the ranks.
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # of this rank's shards
    images, labels = map(torch.tensor, load_digits(return_X_y=True))  # 1,797 images, 64 pixels each
    images, labels = images.float().to(device) / 16, labels.to(device)
    for step in range(1, steps + 1):
        batch = torch.randint(len(images), (64,)).to(device)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:  # every rank has the same loss
            print(f"step {step:3}   loss {loss:.6f}", flush=True)
    if rank == 0:
        held = sum(p.to_local().numel() for p in model.parameters())
        print(f"rank 0 holds {held:,} of {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tensor parallelism in its fewest lines.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: 100)")
    args = parser.parse_args()
    if "RANK" not in os.environ:  # torchrun sets these; plain python is a job of one process
        os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    device = torch.device("cpu")
    count = 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()
    if count >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):  # a GPU for each rank of this machine
        device = torch.device(int(os.environ.get("LOCAL_RANK", 0)))  # this rank's own: cuda:0, ...
        torch.accelerator.set_device_index(device)
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device.index)
    rank, world_size = dist.get_rank(), dist.get_world_size()  # who am I, of how many?
    if rank == 0:  # one rank prints
        print(f"{world_size} rank(s) on {device.type}, {dist.get_backend()}", flush=True)
    train(device, rank, world_size, args.steps)  # a function: the model must end before the group
    gc.collect()  # a model holds cycles; when it is gone, nothing uses the group any more
    dist.barrier()  # no rank leaves while another one still waits for a message
    dist.destroy_process_group()
