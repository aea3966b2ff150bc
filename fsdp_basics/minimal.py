"""FSDP in its fewest lines: each rank holds a part of every parameter, and works on its own images.

    python fsdp_basics/minimal.py                                        # one process
    torchrun --standalone --nproc_per_node=2 fsdp_basics/minimal.py      # two ranks: GPUs or CPUs

Look at the parameters that rank 0 holds, and at the loss: it is the same for any number of ranks.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))  # all ranks, in a line
    images, labels = map(torch.tensor, load_digits(return_X_y=True))  # 1,797 images
    dataset = TensorDataset((images / 16).float().view(-1, 8, 8), labels)  # of 8 rows of 8 pixels
    # One shuffled order, dealt out to the ranks. In a step they take 60 images together.
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=60 // world_size, sampler=sampler, drop_last=True)

    torch.manual_seed(0)  # the same first values on all ranks, of which each keeps its part
    options = {"dropout": 0.0, "bias": False, "batch_first": True}
    blocks = [nn.TransformerEncoderLayer(64, 4, 128, **options) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Flatten(), nn.Linear(512, 10)).to(device)
    for block in blocks:  # each rank keeps a part; forward and backward gather it for a moment
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # what is in no block; backward now averages the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after fully_shard: of the shards
    if rank == 0:
        held = sum(p.to_local().numel() for p in model.parameters())
        print(f"rank 0 holds {held:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    for epoch in range(3):
        sampler.set_epoch(epoch)  # else each epoch would have the order of the first
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)  # each rank has seen the loss of its own images
        if rank == 0:
            print(f"epoch {epoch}   loss {loss.item():.4f}")


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started without torchrun: a world of one
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):  # a GPU for each
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)  # one GPU per rank, or all of them would take the first
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # the ranks meet
    train(device)  # the model ends with this function: before the group that it talks through
    dist.barrier()  # nobody closes a connection that another rank still reads from
    dist.destroy_process_group()
