"""A small network on the handwritten digits, and its training: silent_divergence.py breaks it."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import load_dataset
from runtime import Worker
from torch import Tensor, nn

BATCH = 120  # images per step, over all ranks
LR = 0.3


class SmallNet(nn.Module):
    """Images (batch, 64) -> logits (batch, 10). `extra` may be skipped, as in stochastic depth."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.body, self.norm = nn.Linear(64, 32), norm
        self.extra, self.head = nn.Linear(32, 32), nn.Linear(32, 10)
        self.skip_extra = False

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.body(images)).relu()
        if not self.skip_extra:
            hidden = hidden + self.extra(hidden).relu()
        return self.head(hidden)


def make_model(worker: Worker, norm: nn.Module | None = None) -> SmallNet:
    return SmallNet(norm or nn.Identity()).to(worker.device)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def batches(steps: int, worker: Worker, mislabelled: int | None = None) -> Iterator:
    """This rank's local batch of each step: (images, labels).

    mislabelled: the step in which the last third of the global batch has wrong labels.
    """
    images, labels = load_dataset("digits")[0][:]
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(images)
        wanted = labels[rows]
        if step == mislabelled:
            wanted[-BATCH // 3 :] = (wanted[-BATCH // 3 :] + 1) % 10
        mine = torch.arange(BATCH).chunk(worker.world_size)[worker.rank]
        yield images[rows[mine]].flatten(1).to(worker.device), wanted[mine].to(worker.device)


def train_step(forward: Callable, optimizer, images: Tensor, labels: Tensor) -> float:
    """One step on this rank's images; returns this rank's own loss."""
    optimizer.zero_grad()
    loss = F.cross_entropy(forward(images), labels)
    loss.backward()  # averages the gradients over the ranks, if `forward` was DDP's
    optimizer.step()
    return loss.item()


def mean_over_ranks(loss: Tensor, worker: Worker) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / worker.world_size


@torch.no_grad()
def accuracy(model: nn.Module, worker: Worker) -> float:
    images, labels = load_dataset("digits")[1][:]
    predicted = model.eval()(images.flatten(1).to(worker.device)).argmax(dim=1)
    return (predicted.cpu() == labels).double().mean().item()
