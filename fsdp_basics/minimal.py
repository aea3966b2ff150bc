"""FSDP in its fewest lines: each rank holds a shard of every parameter, and has its own images.

    python fsdp_basics/minimal.py                                        # one process
    torchrun --standalone --nproc_per_node=2 fsdp_basics/minimal.py      # two ranks, equal losses
"""  # fmt: skip

import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(device: torch.device, rank: int, world_size: int) -> None:
    batch = 60  # images per step, over all ranks
    if batch % world_size:
        raise SystemExit(f"error: {batch} images do not divide over {world_size} ranks")
    mesh = dist.init_device_mesh(device.type, (world_size,))  # one axis: all ranks
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16).float().view(-1, 8, 8), torch.tensor(labels))
    sampler = DistributedSampler(digits, drop_last=True)  # shuffles; each rank gets its share
    loader = DataLoader(digits, batch_size=batch // world_size, sampler=sampler, drop_last=True)
    torch.manual_seed(0)  # the same initial values on all ranks; each rank keeps its shard
    options = {"dropout": 0.0, "bias": False, "batch_first": True}
    blocks = [nn.TransformerEncoderLayer(64, 4, 128, **options) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Flatten(), nn.Linear(512, 10)).to(device)
    for block in blocks:  # each rank keeps a shard; forward and backward gather the block
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # all other parameters; backward now averages the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after fully_shard: of shards
    if rank == 0:
        held = sum(p.to_local().numel() for p in model.parameters())
        print(f"rank 0 holds {held:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    for epoch in range(3):
        sampler.set_epoch(epoch)  # another order in each epoch
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)  # of all ranks, to print it
        if rank == 0:
            print(f"epoch {epoch}   loss {loss:.4f}", flush=True)


if __name__ == "__main__":
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
    train(device, rank, world_size)  # a function: the model must end before the group
    gc.collect()  # a model holds cycles; when it is gone, nothing uses the group any more
    dist.barrier()  # no rank leaves while another one still waits for a message
    dist.destroy_process_group()
