"""Activation checkpointing: what a block keeps for backward, and what it computes again."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from functools import partial

from model import GPT
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# Matrix products; attention has a name of its own for each kernel. Together they are all but a few
# per cent of a block's operations.
MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm_v2")  # the last: --fp8


def apply_activation_checkpointing(model: GPT, mode: str | int) -> GPT:
    """Let blocks recompute activations in backward instead of keeping them; returns `model`.

    mode: "full": each block keeps only its input (Chen et al., arXiv 1604.06174). A third more
        computation saves the activations of all blocks but one.
    N: blocks N - 1, 2 N - 1, ... do so, and the other blocks keep everything.
    "selective": each block keeps the outputs of its matrix products and of attention, and
        recomputes the cheap rest: norms, activation functions, rotations, residuals (Korthikanti
        et al., arXiv 2205.05198, choose operations by the same ratio of memory to computation).
    Under tensor parallelism, the sum after attention is also communicated again.
    """
    every = mode if isinstance(mode, int) else 1
    options = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_expensive)
    for i, block in model.blocks.items():
        if int(i) % every == every - 1:
            block.forward = recomputing(block.forward, options)
    return model


def recomputing(forward: Callable, options: dict) -> Callable:
    """torch.compile reads a call of `checkpoint`, and so compiles what is in it.

    partial(checkpoint, forward) would leave it nothing to read: no block would be compiled.
    """

    def call(*args, **kwargs):
        return checkpoint(forward, *args, **options, **kwargs)

    return call


def keep_expensive(context, operator, *args, **kwargs) -> CheckpointPolicy:
    """For each operator of a block: keep its output, or compute it again in backward."""
    if operator.name() in MATMULS or "scaled_dot_product" in operator.name():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpointing_mode(text: str) -> str | int:
    """full, selective, or N for every Nth block. Raises `ArgumentTypeError`."""
    if text in ("full", "selective"):
        return text
    if text.isdecimal() and int(text):
        return int(text)
    raise ArgumentTypeError(f"must be full, selective, or an integer of at least 1, not {text}")


CHECKPOINTING = {  # the options of the flag; without a value it means full
    "type": checkpointing_mode,
    "nargs": "?",
    "const": "full",
    "metavar": "full|N|selective",
    "help": "recompute in backward: full blocks, every Nth block, or all but matmuls and attention",
}
