r"""Context parallelism by ring attention: each of N ranks has T / N tokens of every sequence.

    python parallel_basics/ring_attention.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/ring_attention.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/ring_attention.py \
        --length 1024 --optimizer adamw

A token's query needs the keys and values of all earlier tokens, and most are on other ranks. So the
ranks form a ring: each computes attention to the keys and values that it has, while it sends them
to the next rank and receives those of the previous rank. After N steps every query has met every
key. No rank ever held more than two blocks of keys and values, or the scores of more than one
block. In backward keys and values go around the ring again, together with their gradients.

The log of the denominator combines a softmax that is computed in parts. Over some of the keys, let
out = softmax(scores) @ v and lse = log(sum(exp(scores))). Then, for two sets of keys,

    lse = log(exp(lse_1) + exp(lse_2))
    out = exp(lse_1 - lse) * out_1 + exp(lse_2 - lse) * out_2

Liu et al., Ring Attention (arXiv 2310.01889); Milakov and Gimelshein, Online normalizer calculation
for softmax (arXiv 1805.02867); backward as in Dao et al., FlashAttention (arXiv 2205.14135).

The script trains a GPT this way and compares it with one process, for two ways to distribute the
tokens: in order, and balanced (zigzag). Look at

1. the differences: rounding. (AdamW divides each gradient by its own size: it enlarges the rounding
   of tiny gradients, and would hide a gradient that is wrong by a factor. SGD does neither.)
2. the work: with tokens in order, the last rank has up to twice the mean, and every other rank
   waits for it in every step. Balanced, all ranks have equal work.
3. the bytes sent: they grow with T, while the work grows with T * T. So the longer the sequence,
   the better communication overlaps with computation.
4. the memory: attention that stores all scores needs T * T of them. PyTorch's fused kernel does not
   store them; a ring stores those of one block at a time. The memory saved for backward is divided
   by N, which makes long sequences possible.

Shapes, besides those of model.py:    S = T / N  tokens of a sequence on one rank
                                      L          tokens of a chunk: S, or S / 2 if balanced
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from arguments import UserError
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
from torch.autograd.function import once_differentiable
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


# ---- which tokens are whose


def chunks_of(rank: int, ranks: int, balanced: bool) -> tuple[int, ...]:
    """The chunks of a sequence that `rank` has.

    In order: one of N. With a causal mask, the first rank's queries see one chunk, the last rank's
    queries all N. Balanced (zigzag): two of 2 N, an early one, whose queries see few keys, and its
    mirror image from the end, whose queries see many, so all ranks have equal work.
    """
    return (rank, 2 * ranks - 1 - rank) if balanced else (rank,)


def own_tokens(x: Tensor, dim: int, rank: int, ranks: int, balanced: bool = True) -> Tensor:
    """The part of `x` that belongs to `rank`; dim `dim` of `x` is a full sequence.

    Raises ValueError if the sequence does not divide into chunks of one size.
    """
    count = ranks * len(chunks_of(rank, ranks, balanced))
    if x.shape[dim] % count:
        raise ValueError(f"{x.shape[dim]} tokens do not divide into {count} chunks")
    chunks = x.chunk(count, dim)
    return torch.cat([chunks[i] for i in chunks_of(rank, ranks, balanced)], dim)


class Ring:
    """The ranks of `group`, each with a neighbour on either side."""

    def __init__(self, group=None, causal: bool = True, balanced: bool = True):
        self.group, self.causal, self.balanced = group, causal, balanced
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def chunks(self, x: Tensor, dim: int = 2) -> tuple[Tensor, ...]:
        return x.chunk(len(chunks_of(self.rank, self.size, self.balanced)), dim)

    def visible(self, step: int) -> Iterator[tuple[int, int, bool]]:
        """Which pairs of chunks have scores to compute in `step`.

        Yields (i, j, masked): this rank's i-th chunk attends to the j-th chunk of the rank whose
        keys are here now. masked: both are the same chunk, so the causal mask is needed.
        """
        source = (self.rank - step) % self.size
        for i, query_chunk in enumerate(chunks_of(self.rank, self.size, self.balanced)):
            for j, key_chunk in enumerate(chunks_of(source, self.size, self.balanced)):
                if key_chunk <= query_chunk or not self.causal:
                    yield i, j, self.causal and key_chunk == query_chunk

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to send `x` to the next rank. The returned function waits for the previous rank's.

        Do not write to `x` before that. All ranks pass on the same tensors in the same order,
        because messages between two ranks do not overtake each other.
        """
        if self.size == 1:
            return lambda: x
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        arriving = torch.empty_like(x)
        send = dist.P2POp(dist.isend, x, group=self.group, group_peer=after)
        receive = dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=before)
        works = dist.batch_isend_irecv([send, receive])

        def wait(sent=x) -> Tensor:  # keeps `x` alive until it is sent
            for work in works:
                work.wait()
            return arriving

        return wait


# ---- one block of scores


def scores_of(q_BHLD: Tensor, k_BHLD: Tensor, masked: bool) -> Tensor:
    scores_BHLL = q_BHLD @ k_BHLD.mT * q_BHLD.shape[-1] ** -0.5
    if masked:
        length = scores_BHLL.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=scores_BHLL.device).triu(1)
        scores_BHLL.masked_fill_(later, -torch.inf)
    return scores_BHLL


def attend(q_BHLD, k_BHLD, v_BHLD, masked: bool) -> tuple[Tensor, Tensor]:
    """Attention to the keys of one chunk only: out (B, H, L, D), lse (B, H, L, 1)."""
    scores_BHLL = scores_of(q_BHLD, k_BHLD, masked)
    lse_BHL1 = scores_BHLL.logsumexp(-1, keepdim=True)
    return scores_BHLL.sub_(lse_BHL1).exp_() @ v_BHLD, lse_BHL1


def attend_backward(q_BHLD, k_BHLD, v_BHLD, masked: bool, dout_BHLD, lse_BHL1, delta_BHL1):
    """What one block adds to the gradients of its queries, keys and values.

    lse: over all keys, not only these, so `p` is this block of the full softmax.
    delta: sum over all keys of p * dp, which is the sum over D of dout * out.
    """
    p_BHLL = scores_of(q_BHLD, k_BHLD, masked).sub_(lse_BHL1).exp_()  # recomputed, not saved
    dp_BHLL = dout_BHLD @ v_BHLD.mT
    dv_BHLD = p_BHLL.mT @ dout_BHLD
    dscores_BHLL = dp_BHLL.sub_(delta_BHL1).mul_(p_BHLL).mul_(q_BHLD.shape[-1] ** -0.5)
    return dscores_BHLL @ k_BHLD, dscores_BHLL.mT @ q_BHLD, dv_BHLD


# ---- around the ring


class RingAttention(torch.autograd.Function):
    """Computes in float32, or in float64 for float64 inputs."""

    @staticmethod
    def forward(ctx, q_BHSD, k_BHSD, v_BHSD, ring: Ring):
        wide = torch.promote_types(q_BHSD.dtype, torch.float32)
        out_BHSD = torch.zeros_like(q_BHSD, dtype=wide)
        lse_BHS1 = torch.full_like(out_BHSD[..., :1], -torch.inf)  # no key yet: exp(lse) = 0
        queries, outs, lses = (ring.chunks(x) for x in (q_BHSD.to(wide), out_BHSD, lse_BHS1))
        kv = torch.stack([k_BHSD, v_BHSD])  # one message instead of two
        for step in range(ring.size):
            # Sent while this rank computes. After the last step no rank needs them.
            arrives = ring.pass_on(kv) if step < ring.size - 1 else None
            keys, values = (ring.chunks(x.to(wide)) for x in kv)
            for i, j, masked in ring.visible(step):
                out, lse = attend(queries[i], keys[j], values[j], masked)
                both = torch.logaddexp(lses[i], lse)
                outs[i].mul_((lses[i] - both).exp()).add_(out.mul_((lse - both).exp()))
                lses[i].copy_(both)
            if arrives:
                kv = arrives()
        out_BHSD = out_BHSD.to(q_BHSD.dtype)
        ctx.ring, ctx.wide = ring, wide
        ctx.save_for_backward(q_BHSD, k_BHSD, v_BHSD, out_BHSD, lse_BHS1)  # no scores
        return out_BHSD

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_BHSD):
        q_BHSD, k_BHSD, v_BHSD, out_BHSD, lse_BHS1 = ctx.saved_tensors
        ring, wide = ctx.ring, ctx.wide
        dout_BHSD = dout_BHSD.to(wide)
        delta_BHS1 = (dout_BHSD * out_BHSD).sum(-1, keepdim=True)
        dq_BHSD = torch.zeros_like(q_BHSD, dtype=wide)
        of_queries = (q_BHSD.to(wide), dout_BHSD, lse_BHS1, delta_BHS1, dq_BHSD)
        queries, douts, lses, deltas, dqs = (ring.chunks(x) for x in of_queries)
        kv = torch.stack([k_BHSD, v_BHSD])
        gradients_arrive = None
        for step in range(ring.size):
            arrives = ring.pass_on(kv) if step < ring.size - 1 else None
            keys, values = (ring.chunks(x.to(wide)) for x in kv)
            dkv = torch.zeros_like(kv, dtype=wide)
            dks, dvs = (ring.chunks(x) for x in dkv)
            for i, j, masked in ring.visible(step):
                block = (queries[i], keys[j], values[j], masked, douts[i], lses[i], deltas[i])
                dq, dk, dv = attend_backward(*block)
                dqs[i].add_(dq)
                dks[j].add_(dk)
                dvs[j].add_(dv)
            if gradients_arrive:  # the previous ranks' summands for these keys and values
                dkv += gradients_arrive()
            # Gradients follow their keys and values one step later, and return to their own rank.
            gradients_arrive = ring.pass_on(dkv)
            if arrives:
                kv = arrives()
        dk_BHSD, dv_BHSD = gradients_arrive()
        dtype = q_BHSD.dtype
        return dq_BHSD.to(dtype), dk_BHSD.to(dtype), dv_BHSD.to(dtype), None


def ring_attention(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, ring: Ring) -> Tensor:
    """softmax(q @ k.mT / sqrt(D)) @ v over full sequences, of which each rank has S tokens.

    q, k, v, result: (B, H, S, D), the tokens that `own_tokens` gives this rank. Every rank of the
    ring must call this, and backward, in one order. Raises ValueError if S is odd and the ring
    balanced.
    """
    if ring.balanced and q_BHSD.shape[2] % 2:
        raise ValueError(f"{q_BHSD.shape[2]} tokens on a rank do not divide into two chunks")
    return RingAttention.apply(q_BHSD, k_BHSD, v_BHSD, ring)


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
