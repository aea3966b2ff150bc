"""Make the optimizer, and set its learning rate in each step."""

import math

import torch
from config import Settings
from torch import nn


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """An optimizer of all parameters, also of frozen ones, which may be unfrozen later.

    Call this after sharding. Weight decay applies to matrices, not to biases or scales of norms.
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
    """Set each group's learning rate for `step`: its initial lr times the schedule's factor.

    Returns the rate of the first group.
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
