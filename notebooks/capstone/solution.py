"""A solution of the capstone: one_process.py on up to 12 ranks that divide a batch of 24.

torchrun --standalone --nproc_per_node=2 notebooks/capstone/solution.py
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_process import BATCH, Net, Spirals
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    train_set, test_set = Spirals(250, seed=1, unlabelled=0.4), Spirals(100, seed=2)
    sampler = DistributedSampler(train_set)  # each rank gets its own points
    loader = DataLoader(train_set, BATCH // world_size, sampler=sampler, drop_last=True)
    net = Net(train_set.x, args.dropout)  # mean and spread of all points, not of a shard
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    file, first_epoch = args.folder / "checkpoint.pt", 0
    if file.exists():  # on all ranks: each has an optimizer and counts epochs
        state = torch.load(file, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epochs"]
    ddp_net = DistributedDataParallel(net)  # backward() averages the gradients of all ranks
    torch.manual_seed(1 + rank)  # from here on dropout draws another mask on each rank
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the right one after a restart
        net.train()
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
                loss = F.cross_entropy(ddp_net(x), y, reduction="sum")
            labelled = (y != -100).sum()
            dist.all_reduce(labelled)  # the ranks hold unequal numbers of labels
            optimizer.zero_grad()
            (loss * world_size / labelled).backward()  # DDP divides by world_size again
            optimizer.step()
        net.eval()
        x, y = test_set[rank::world_size]  # each rank tests its share, without padding
        with torch.no_grad():
            correct = (net(x).argmax(dim=1) == y).sum()
        dist.all_reduce(correct)  # counts are added, not accuracies averaged
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {correct / len(test_set):.4f}", flush=True)
            # Of net, not of ddp_net: no name begins with "module.".
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epochs": epoch + 1}, file.with_suffix(".tmp"))
            os.replace(file.with_suffix(".tmp"), file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on three spirals, distributed.")
    add = parser.add_argument
    add("--epochs", type=int, default=40, help="passes over the data in all (default: 40)")
    add("--dropout", type=float, default=0.2, help="probability of dropout (default: 0.2)")
    add("--precision", choices=("fp32", "bf16"), default="bf16", help="of forward (default: bf16)")
    add(
        "--folder",
        type=Path,
        default="runs/capstone",
        help="of checkpoint.pt (default: runs/capstone)",
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(args, dist.get_rank(), dist.get_world_size())
    dist.barrier()  # no rank leaves while another one waits for a message
    dist.destroy_process_group()
