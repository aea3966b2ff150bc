"""Model parallelism in one screen: each rank has a part of every layer, and all work together.

    python parallel_basics/minimal.py                                      # one process
    torchrun --standalone --nproc_per_node=2 parallel_basics/minimal.py    # two ranks: GPUs or CPU

Look at the losses, which are the same for any number of ranks, and at what rank 0 holds.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def train(device: torch.device, steps: int) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # all ranks, in a line
    torch.manual_seed(0)  # on every rank the same model and, below, the same batches
    model = nn.Sequential(nn.Linear(64, 480), nn.ReLU(), nn.Linear(480, 10)).to(device)

    # Of the first layer a rank keeps some outputs, of the second the inputs that belong to them: so
    # nothing is sent in between. What the second returns is added up over the ranks.
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # of this rank's parts
    images, labels = map(torch.tensor, load_digits(return_X_y=True))  # 1,797 images, 64 pixels each
    images, labels = images.float().to(device) / 16, labels.to(device)
    for step in range(steps):
        batch = torch.randint(len(images), (64,)).to(device)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:3}   loss {loss.item():.6f}")
    if dist.get_rank() == 0:
        numbers = sum(p.numel() for p in model.parameters())
        held = sum(p.to_local().numel() for p in model.parameters())
        print(f"rank 0 holds {held:,} of {numbers:,} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tensor parallelism in its fewest lines.")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    if "RANK" not in os.environ:  # not started by torchrun: one process is a world of size one
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # a GPU for each rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    train(device, args.steps)  # in a function: the model must be gone when the group is destroyed
    dist.barrier()  # nobody leaves while another rank may still read from it
    dist.destroy_process_group()
