"""DistributedDataParallel in one screen: each of N processes computes 1/N of every batch.

    python ddp_basics/minimal.py                                      # one process
    torchrun --standalone --nproc_per_node=2 ddp_basics/minimal.py    # two: the same accuracy
"""  # fmt: skip

import argparse
import gc
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def train(device: torch.device, rank: int, world_size: int, epochs: int) -> None:
    batch = 120  # images per step, over all ranks
    if batch % world_size:
        raise SystemExit(f"error: {batch} images do not divide over {world_size} ranks")
    torch.manual_seed(0)  # the same split on all ranks
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    train_set, test_set = random_split(digits, [1440, 357])
    sampler = DistributedSampler(train_set)  # shuffles, and gives each rank its share of the images
    loader = DataLoader(train_set, batch_size=batch // world_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    ddp_model = DistributedDataParallel(model)  # backward() averages gradients over all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # a different order in every epoch
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp_model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            x, y = test_set[rank::world_size]  # each rank tests its share
            correct = (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        dist.all_reduce(correct)  # the sum over all ranks
        if rank == 0:
            print(f"epoch {epoch + 1}: test accuracy {correct / len(test_set):.2%}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DistributedDataParallel in one screen.")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (default: 10)")
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
    train(device, rank, world_size, args.epochs)  # a function: the model must end before the group
    gc.collect()  # a model holds cycles; when it is gone, nothing uses the group any more
    dist.barrier()  # no rank leaves while another one still waits for a message
    dist.destroy_process_group()
