"""Train a small network on points of three spirals, in one process: make this distributed.

    python notebooks/capstone/one_process.py

README.md says how. Run it again: it continues from runs/capstone/checkpoint.pt.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH = 24  # points in a step


class Spirals(Dataset):
    """x: float32 of shape (points, 2). y: 0, 1 or 2, or -100, which cross_entropy leaves out."""

    def __init__(self, points: int, seed: int, unlabelled: float = 0):
        generator = torch.Generator().manual_seed(seed)
        radius, noise, chance = torch.rand(3, points, generator=generator)
        self.y = torch.arange(points) % 3
        angle = 5 * radius + 2.1 * self.y + 0.8 * noise
        self.x = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.y[chance < unlabelled] = -100

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self, x: torch.Tensor, dropout: float):
        """x: the points to train on, of shape (points, 2): they give the mean and the spread."""
        super().__init__()
        self.register_buffer("mean", x.mean(dim=0))
        self.register_buffer("std", x.std(dim=0))
        self.hidden, self.out = nn.Linear(2, 64), nn.Linear(64, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden((x - self.mean) / self.std).tanh()
        return self.out(self.dropout(hidden))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    train_set, test_set = Spirals(250, seed=1, unlabelled=0.4), Spirals(100, seed=2)
    loader = DataLoader(train_set, BATCH, shuffle=True, drop_last=True)
    net = Net(train_set.x, args.dropout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    file, first_epoch = args.folder / "checkpoint.pt", 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epochs"]
    for epoch in range(first_epoch, args.epochs):
        net.train()
        for x, y in loader:
            # bf16 has the range of fp32: no GradScaler.
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
                loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        x, y = test_set[:]
        with torch.no_grad():
            correct = (net(x).argmax(dim=1) == y).sum().item()
        print(f"epoch {epoch + 1}: accuracy {correct / len(test_set):.4f}", flush=True)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epochs": epoch + 1}, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)  # a kill leaves the old file, or the new one


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on three spirals.")
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
    train(args)
