"""Context parallelism in a GPT: a model for a rank that has some tokens of every sequence.

Attention is the only layer that mixes tokens. Norms, MLP and loss work on one token at a time, and
stay as they are. ring_attention.py provides the attention.

    S  tokens of a sequence on one rank; the other letters as in model.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from model import GPT, Attention
from torch import Tensor, nn


def spread_tokens(model: GPT, attention: Callable, positions_of: Callable) -> GPT:
    """Change and return `model`: it then maps a rank's tokens (B, S) to their logits (B, S, V).

    attention: (q, k, v), (B, H, S, D) each, of this rank's tokens -> their attention to all tokens.
    positions_of: (S, device) -> the positions (S) of this rank's tokens in the full sequence.
    """
    for block in model.blocks.values():
        block.attention = ContextParallelAttention(block.attention, attention)

    def own_positions(module, inputs):  # the model counts its tokens 0, 1, ... S - 1
        return (positions_of(len(inputs[0]), inputs[0].device),)

    if model.is_first:
        model.position_embedding.register_forward_pre_hook(own_positions)
    return model


class ContextParallelAttention(Attention):
    """`layer` with the same parameters under the same names, for S tokens of T."""

    def __init__(self, layer: Attention, attention: Callable):
        nn.Module.__init__(self)
        self.head_dim, self.attention = layer.head_dim, attention
        self.query, self.key, self.value, self.out = layer.query, layer.key, layer.value, layer.out

    def forward(self, x_BSC: Tensor) -> Tensor:
        q_BHSD, k_BHSD, v_BHSD = (
            y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)
            for y in (self.query(x_BSC), self.key(x_BSC), self.value(x_BSC))
        )
        seen_BHSD = self.attention(q_BHSD, k_BHSD, v_BHSD)
        return self.out(seen_BHSD.transpose(1, 2).flatten(2))


def sum_gradients(model: nn.Module, group=None) -> None:
    """Sum every parameter's gradient over the ranks: each rank has that of its own tokens.

    For parameters this is data parallelism: the averaging of DDP or FSDP does it, too, with each
    rank's mean loss. Here a rank's loss is divided by N before backward.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    totals = flat.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, totals, strict=True):
        gradient.copy_(total.view_as(gradient))
