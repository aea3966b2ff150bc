"""A model and data of our own, for the templates, and the plain loop that they are compared with.

Nothing here imports a template.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, BATCH, EPOCHS = 48, 12, 2
STEPS, HALF = SAMPLES // BATCH * EPOCHS, 5  # HALF: in mid-epoch


class Own(nn.Module):
    """Buffers of all kinds; a layer that may be frozen, one that is not used at first."""

    def __init__(self, norm: bool = False):
        super().__init__()
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.late, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        frequencies = 1 / 10_000 ** (torch.arange(0, 8, 2) / 8)
        self.register_buffer("frequencies", frequencies.repeat(2), persistent=False)
        self.register_buffer("noise", torch.randn(8))
        self.register_buffer("mask", torch.rand(8) < 0.8, persistent=False)
        self.register_buffer("table", torch.randint(100, (3,)))
        self.late_is_used = False

    def forward(self, x):
        x = self.first(self.norm(x)).relu() * torch.cos(self.frequencies) + self.noise
        x = self.second(x).relu() * self.mask
        if self.late_is_used:
            x = x + self.late(x)
        return self.head(x) + self.table / 100


def build(settings=None, frozen=False, norm=False) -> Own:
    model = Own(norm)
    model.second.requires_grad_(not frozen)
    return model


def data(count=SAMPLES, shift=0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 6, generator=generator) + shift
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def compute_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y), {}


def units(model) -> list:
    return [model.first, model.second, [model.late, model.head]]


class Odd(nn.Module):
    """Parameters that are a slice, a transpose, empty."""

    def __init__(self, empty: bool = True):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.slice = nn.Parameter(torch.randn(12, 8).t()[:, 2:10])
        self.transpose = nn.Parameter(torch.randn(3, 8).t())
        self.empty = nn.Parameter(torch.empty(0, 4)) if empty else None

    def forward(self, x):
        x = self.first(x).relu() @ self.slice @ self.transpose
        return x if self.empty is None else x + self.empty.sum()


def plain(name: str, frozen: bool = False, late: bool = True, model=None) -> dict:
    """The whole run: losses, norms, and all tensors at its end."""
    torch.manual_seed(0)
    model = Own() if model is None else model()
    x, y = data().tensors
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
    if name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
    else:
        optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9 if name == "momentum" else 0)
    losses = []
    for step in range(8):
        epoch, place = divmod(step, 4)
        order = torch.randperm(48, generator=torch.Generator().manual_seed(epoch))
        own = order[12 * place : 12 * place + 12]
        if isinstance(model, Own):
            model.second.requires_grad_(step >= 5 or not frozen)
            model.late_is_used = late and step >= 5
        warm_up = (0.5, 1.0)  # 0.3 of 8 steps are two; then half a cosine over six
        factor = warm_up[step] if step < 2 else 0.5 + 0.5 * math.cos(math.pi * (step - 2) / 6)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[own]), y[own])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append((loss.item(), norm.item()))
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {"losses": losses, "last": {name: t.detach() for name, t in found.items()}}
