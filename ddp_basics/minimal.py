"""DistributedDataParallel in one screen: N processes compute what one would, each 1/N of it.

    python ddp_basics/minimal.py                                      # one process
    torchrun --standalone --nproc_per_node=2 ddp_basics/minimal.py    # two
Look at the accuracy: it is the same."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # now: imported later, it keeps connections open at the end
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    if "RANK" not in os.environ:  # torchrun sets these; plain python is a job of one process
        os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)  # a GPU of its own for each process of this machine
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)  # ranks meet
    train(args.epochs, device)  # a function: at its end nothing is left that uses the group
    dist.barrier()  # nobody leaves while another process still waits for a message
    dist.destroy_process_group()


def train(epochs: int, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()  # who am I, of how many?
    torch.manual_seed(0)  # the same split on all ranks
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    train_set, test_set = random_split(digits, [1440, 357])
    sampler = DistributedSampler(train_set)  # shuffles, and deals the images out to the ranks
    loader = DataLoader(train_set, batch_size=120 // world_size, sampler=sampler)  # 120 in all
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    ddp_model = DistributedDataParallel(model)  # from now on backward() averages over all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # another order in every epoch
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp_model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        x, y = test_set[rank::world_size]  # each rank tests its share
        correct = (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        dist.all_reduce(correct)  # the sum over all ranks
        if rank == 0:  # one rank prints
            print(f"epoch {epoch + 1}: test accuracy {correct / len(test_set):.2%}", flush=True)


if __name__ == "__main__":
    main()
