"""Generate tokens that continue a text, with a model on any mesh."""

import torch
from context_parallel import logits_at, tokens_of_rank
from model import GPT
from pipeline import Pipeline
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def generate(
    model: GPT,
    pipeline: Pipeline | None,
    tokens_BT: Tensor,
    count: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    length_multiple: int = 1,
    cp: DeviceMesh | None = None,
) -> Tensor:
    """Continue each row of `tokens_BT`, int64, by `count` tokens; returns rows of T + count.

    All ranks call this with the same arguments: each step is a forward pass of the whole mesh, and
    all draw the same random numbers. Each token costs a pass over the whole window.
    temperature: values below 1 make likely tokens likelier; 0 takes the likeliest (greedy).
    top_k: draw only from the top_k likeliest tokens; 0: from all.
    length_multiple: pad the tokens of a pass to a multiple of it (sequence or context parallelism).
    cp: the context-parallel axis, if the tokens of a pass are sharded.
    """
    generator = torch.Generator(tokens_BT.device).manual_seed(seed)
    for _ in range(count):
        window = tokens_BT[:, -model.config.block_size :]
        length = window.shape[1]
        # Pad at the end: with causal attention, no earlier token sees the padding.
        window = torch.nn.functional.pad(window, (0, -length % length_multiple))
        window = tokens_of_rank(cp, window) if cp else window
        logits = pipeline.forward(window) if pipeline else model(window)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        if logits is None:  # the last stage has them
            chosen = tokens_BT.new_empty(len(tokens_BT), 1)
        else:
            last = logits_at(length - 1, logits, cp) if cp else logits[:, length - 1]
            chosen = choose(last.float(), temperature, top_k, generator)
        if pipeline:
            chosen = pipeline.broadcast_from_last(chosen)
        tokens_BT = torch.cat([tokens_BT, chosen], dim=1)
    return tokens_BT


def choose(logits_BV: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """One token for each row: (B, 1), int64."""
    if temperature == 0:
        return logits_BV.argmax(1, keepdim=True)
    logits_BV = logits_BV / temperature
    if top_k:
        kth = logits_BV.topk(min(top_k, logits_BV.shape[1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth, -torch.inf)
    return torch.multinomial(logits_BV.softmax(1), 1, generator=generator)
