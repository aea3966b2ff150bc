r"""Context parallelism by ring attention: each of N ranks has T / N tokens of every sequence.

    python parallel_basics/ring_attention.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/ring_attention.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/ring_attention.py \
        --length 1024 --optimizer adamw

A token's query needs the keys and values of all earlier tokens, and most are on other ranks. So the
ranks form a ring: each computes attention to the keys and values that it has, while it sends them
to the next rank and receives those of the previous rank. After N steps every query has met every
key. No rank ever held more than four blocks of keys and values (its own, the one in use, the one
arriving, for a moment the one before; in bf16 also a float32 copy of the one in use), or the scores
of more than 512 queries and keys. In backward keys and values go around the ring
again, together with their gradients.

The log of the denominator combines a softmax that is computed in parts. Over some of the keys, let
out = softmax(scores) @ v and lse = log(sum(exp(scores))). Then, for two sets of keys,

    lse = log(exp(lse_1) + exp(lse_2))
    out = exp(lse_1 - lse) * out_1 + exp(lse_2 - lse) * out_2

Liu et al., Ring Attention (arXiv 2310.01889); Milakov and Gimelshein, Online normalizer calculation
for softmax (arXiv 1805.02867); backward as in Dao et al., FlashAttention (arXiv 2205.14135).

attention_ring.py has the attention and the order of the tokens. This script trains a GPT with it
and compares it with one process, for two ways to distribute the tokens: in order, and balanced
(zigzag). Look at

1. the differences: rounding. (AdamW divides each gradient by its own size: it enlarges the rounding
   of tiny gradients, and would hide a gradient that is wrong by a factor. SGD does neither.)
2. the work: with tokens in order, the last rank has up to twice the mean, and every other rank
   waits for it in every step. Balanced, all ranks have equal work.
3. the bytes sent: they grow with T, while the work grows with T * T. So the longer the sequence,
   the better communication overlaps with computation.
4. the memory: attention that stores all scores needs T * T of them. PyTorch's fused kernel does not
   store them; this ring stores those of 512 queries and keys at a time. The memory saved for
   backward is divided by N, which makes long sequences possible.

Shapes, besides those of model.py:    S = T / N  tokens of a sequence on one rank
                                      L          tokens of a chunk: S, or S / 2 if balanced
"""

from functools import partial

import torch
import torch.distributed as dist
from arguments import UserError
from attention_ring import Ring, own_tokens, ring_attention
from compare_ring_attention import (
    build,
    count_one_process,
    differences,
    make_batches,
    measure,
    read_arguments,
    report,
    train,
)
from context_parallel_model import spread_tokens, sum_gradients
from model import GPT
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

LAYOUTS = {"in order": False, "balanced": True}


@record
def main() -> None:
    args = read_arguments()
    with distributed_worker(args.device) as worker:
        chunks = 2 * worker.world_size
        if args.length % chunks:
            raise UserError(
                f"--length {args.length} does not divide into {chunks} chunks, "
                f"two for each of {worker.world_size} rank(s)"
            )
        compare(args, worker)


def apply_ring_attention(model: GPT, group=None, balanced: bool = True) -> GPT:
    """Change and return `model`: it then maps a rank's tokens (B, S) to their logits (B, S, V)."""
    ring = Ring(group, causal=True, balanced=balanced)

    def positions_of(length: int, device) -> Tensor:  # of this rank's tokens in full sequences
        positions_T = torch.arange(length * ring.size, device=device)
        return own_tokens(positions_T, 0, ring.rank, ring.size, balanced)

    return spread_tokens(model, partial(ring_attention, ring=ring), positions_of)


# ---- the comparison


def compare(args, worker: Worker) -> None:
    rank, ranks, device = worker.rank, worker.world_size, worker.device
    batches = make_batches(args, device)
    expected = train(build(args, device), batches, args.optimizer)  # the single-process baseline
    max_diff, counts = {}, {}
    for name, balanced in LAYOUTS.items():
        model = apply_ring_attention(build(args, device), balanced=balanced)
        local_batches = [
            (own_tokens(x_BT, 1, rank, ranks, balanced), own_tokens(y_BT, 1, rank, ranks, balanced))
            for x_BT, y_BT in batches
        ]
        steps = train(model, local_batches, args.optimizer, sum_gradients)
        max_diff[name] = differences(steps, expected)
        counts[name] = count_ring(args, worker, balanced)
    counts |= count_one_process(args, device)
    of_ranks = [None] * ranks
    dist.all_gather_object(of_ranks, (max_diff, counts))
    if worker.is_main:
        report(args, LAYOUTS, of_ranks)


def count_ring(args, worker: Worker, balanced: bool) -> dict:
    """What one layer's attention computes, sends and saves on this rank."""
    attention = partial(ring_attention, ring=Ring(balanced=balanced))
    return measure(attention, args, worker.world_size, worker.device)


if __name__ == "__main__":
    main()
