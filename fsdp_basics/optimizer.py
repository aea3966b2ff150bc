"""What changes the parameters: the optimizer, and its learning rate in each step."""

import math

import torch
from config import Settings
from torch import nn


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Over all parameters, frozen ones too: they may be unfrozen later. Make it after sharding.

    Weight decay is for matrices; biases and what scales a norm do not decay.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}]
    groups += [{"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=0.9)
    # fused: one call for all tensors of a group.
    return torch.optim.AdamW(groups, lr=settings.lr, fused=True)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: int, total_steps: int, settings: Settings
) -> float:
    """Give each group its rate for `step`: its own lr at the start, times the schedule's factor.

    Returns that of the first group.
    """
    factor = schedule(step, total_steps, settings.warmup)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = factor * group["initial_lr"]
    return optimizer.param_groups[0]["lr"]


def schedule(step: int, total_steps: int, warmup: float) -> float:
    """Linear over the fraction `warmup` of all steps up to 1, then half a cosine down to 0."""
    warmup_steps = round(warmup * total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))
