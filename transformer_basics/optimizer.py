"""AdamW, and the learning rate of each step."""

import math

import torch
from config import Settings


def make_optimizer(model, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms and biases do not (as GPT-3 was trained: arXiv 2005.14165).

    fused: one call for all tensors of a group; a group has the tensors of one mesh.
    """
    groups = {}
    for p in (p for p in model.parameters() if p.requires_grad):
        decay = settings.weight_decay if p.dim() > 1 else 0.0
        groups.setdefault((decay, p.device_mesh), []).append(p)
    groups = [{"params": params, "weight_decay": decay} for (decay, _), params in groups.items()]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, settings: Settings) -> float:
    """Give each group its rate for `step`: its own lr at the start, times the schedule's factor.

    Returns the rate of the first group.
    """
    factor = schedule(step, settings)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = factor * group["initial_lr"]
    return optimizer.param_groups[0]["lr"]


def schedule(step: int, settings: Settings) -> float:
    """Linear over the warm-up to 1, then half a cosine down to a tenth."""
    warmup = round(settings.warmup * settings.steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
