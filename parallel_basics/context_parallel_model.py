"""Context parallelism in a GPT: a model for a rank that has some tokens of every sequence.

Attention is the only layer that mixes tokens. Norms, MLP and loss work on one token at a time, and
stay as they are. ring_attention.py provides the attention.

    S  tokens of a sequence on one rank; the other letters as in model.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from model import GPT
from torch import nn


def spread_tokens(model: GPT, attention: Callable, positions_of: Callable) -> GPT:
    """Change and return `model`: it then maps a rank's tokens (B, S) to their logits (B, S, V).

    attention: (q, k, v), (B, H, S, D) each, of this rank's tokens -> their attention to all tokens.
    positions_of: (S, device=) -> the positions (S) of this rank's tokens in the full sequence.
    Raises ValueError for a model with a window: `attention` has a causal mask only.
    """
    if model.config.window:
        raise ValueError(
            f"ring attention has no window, and this model has one of {model.config.window}"
        )
    model.positions = positions_of
    for block in model.blocks.values():
        block.attention.positions = positions_of
        block.attention.attend = lambda q, k, v, window: attention(q, k, v)
    return model


def sum_gradients(model: nn.Module, group=None) -> None:
    """Sum every parameter's gradient over the ranks: each rank has that of its own tokens.

    For parameters this is data parallelism: the averaging of DDP or FSDP does it, too, with each
    rank's mean loss. Here a rank's loss is divided by N before backward. Both need equally many
    targets on all ranks: otherwise, divide each rank's sum of losses by the targets of all ranks.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    totals = flat.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, totals, strict=True):
        gradient.copy_(total.view_as(gradient))
