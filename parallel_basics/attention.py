"""Attention to the earlier tokens of a window and of a document: with masked scores, or without.

A mask hides most of the T x T scores of a sequence that has several documents, or a window.
scaled_dot_product_attention computes all of them, and masks them afterwards. PyTorch's
FlexAttention compiles a kernel for the function `is_seen` below, which leaves out the blocks of
128 x 128 scores that the mask hides. One layer with documents of 700 tokens on one H100, forward
and backward, 2026-11-27; the last column has one document and a causal mask. (The memory in
the first column was measured when the mask of documents took 8 T x T bytes more.)

    B x T          masked scores     FlexAttention      one document
    2 x 8,192      14 ms, 1.6 GB    3.4 ms, 0.8 GB    3.8 ms, 1.1 GB
    1 x 32,768     121 ms, 13 GB    5.8 ms, 1.4 GB     27 ms, 2.0 GB
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from arguments import UserError
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

BLOCK = 128  # other lengths, such as those of a text that grows, take masked scores


def attend(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int | None, starts_BT=None, flex=False
) -> Tensor:
    """What each token sees: (B, H, T, D). Query head i has key and value head i // (H / K).

    window: a token sees itself and the window - 1 tokens before it; None: all of them.
    starts_BT: the index of the first token of each token's document, int64; None: one document.
    flex: use FlexAttention.
    """
    grouped, length = q_BHTD.shape[1] != k_BKTD.shape[1], q_BHTD.shape[2]
    qkv = (q_BHTD, k_BKTD, v_BKTD)
    if starts_BT is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=grouped)

    def is_seen(b, h, query, key):  # indices: of the sequence, the head and two of its tokens
        seen = key <= query
        if window:  # not else: the differences are T x T integers, eight times the mask
            seen = seen & (query - key < window)
        return seen if starts_BT is None else seen & (key >= starts_BT[b, query])

    # The mask is the same for all heads (None), and without documents for all sequences.
    size = (None if starts_BT is None else len(starts_BT), None, length, length)
    if flex and length % BLOCK == 0:
        blocks = compiled(create_block_mask)(is_seen, *size, device=q_BHTD.device)
        return compiled(flex_attention)(*qkv, block_mask=blocks, enable_gqa=grouped)
    mask = create_mask(is_seen, *size, device=q_BHTD.device)  # (B or 1, 1, T, T)
    return F.scaled_dot_product_attention(*qkv, mask, enable_gqa=grouped)


def compiled(function: Callable) -> Callable:
    """With --compile it is compiled already, as a part of the block."""
    return function if torch.compiler.is_compiling() else torch.compile(function)


def use_flex_attention(model: nn.Module, device_type: str) -> None:
    """Change the attention of all blocks. Raises `UserError` on a CPU."""
    if device_type == "cpu":
        raise UserError("--flex-attention does not run on cpu: FlexAttention has no backward there")
    for block in model.blocks.values():
        block.attention.attend = partial(attend, flex=True)
