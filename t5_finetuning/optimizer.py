"""AdamW with a learning rate for each group, and the schedule: linear warmup, linear decay."""

import torch
from config import Settings
from task import lr_factor
from torch import nn


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW, with its state sharded like the parameters. Matrices decay, norms do not."""
    groups = {}
    for name, parameter in model.named_parameters():
        lr = settings.lr * (1.0 if settings.model else lr_factor(name))
        weight_decay = settings.weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((lr, weight_decay), []).append(parameter)
    # fused: one call for all shards of a group.
    return torch.optim.AdamW(
        [{"params": ps, "lr": lr, "weight_decay": decay} for (lr, decay), ps in groups.items()],
        fused=True,
    )


def set_learning_rate(optimizer, step: int, total_steps: int, settings: Settings) -> float:
    """Give each group its rate for `step`: its own lr at the start, times the schedule's factor.

    The factor rises linearly to 1 in the warm-up, then falls linearly to 0. Returns --lr times it.
    """
    warmup = round(settings.warmup * total_steps)
    if step < warmup:
        factor = (step + 1) / warmup
    else:
        factor = (total_steps - step) / max(1, total_steps - warmup)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = factor * group["initial_lr"]
    return factor * settings.lr
