"""The output layer of the GPT, with its loss in chunks: the logits of all tokens never exist whole.

A vocabulary of 128,256 tokens makes 513 kB of float32 logits per token, and the loss needs about
three tensors of that size: 12 GB for one sequence of 8,192 tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Head(nn.Linear):
    """Hidden states (B, T, C) -> logits (B, T, V); with targets (B, T), int64, their mean loss.

    (A target that is left out, below 0, adds 0 to the sum of losses, and 1 to the count.)

    loss: (logits, targets, "sum") -> the sum over the targets.
    token_count: rows from this one on pad the vocabulary: their logits are -inf, so that they add
        nothing to the loss, have gradients of exactly 0, and are never drawn. None: no such rows.

    With targets it computes logits and loss in `chunks` chunks of the B T tokens, one after the
    other. A chunk keeps only its hidden states: backward computes its logits again, which costs a
    third more operations in this layer. So one chunk's logits exist at a time.
    """

    def __init__(
        self,
        width: int,
        vocab_size: int,
        loss: Callable[..., Tensor],
        token_count: int | None = None,
    ):
        super().__init__(width, vocab_size, bias=False)
        self.loss, self.chunks, padding = loss, 1, None
        if token_count is not None and token_count < vocab_size:
            padding = torch.zeros(vocab_size)
            padding[token_count:] = -torch.inf
        # Added to the logits as a bias is. A buffer: nothing trains it.
        self.register_buffer("padding", padding, persistent=False)

    def forward(self, x_BTC: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        if targets_BT is None:
            return self.logits(x_BTC)
        x_NC, targets_N = x_BTC.flatten(0, 1), targets_BT.flatten()
        parts = list(zip(x_NC.chunk(self.chunks), targets_N.chunk(self.chunks), strict=True))
        losses = [checkpoint(self.loss_of, x, y, use_reentrant=False) for x, y in parts]
        return torch.stack(losses).sum() / targets_BT.numel()

    def loss_of(self, x_NC: Tensor, targets_N: Tensor) -> Tensor:
        return self.loss(self.logits(x_NC)[None], targets_N[None], "sum")

    def logits(self, x: Tensor) -> Tensor:
        bias = None if self.padding is None else self.padding.to(x.dtype)
        return F.linear(x, self.weight, bias)


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, reduction: str = "mean") -> Tensor:
    """Over all tokens with a target that is not negative, in nats; computed in float32."""
    logits = logits_BTV.flatten(0, 1).float()
    targets = targets_BT.flatten()
    targets = targets.masked_fill(targets < 0, -100)  # what F.cross_entropy leaves out
    return F.cross_entropy(logits, targets, reduction=reduction)
