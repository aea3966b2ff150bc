"""Ring attention: attention over sequences whose tokens are sharded over a group of ranks.

out = ring_attention(q, k, v, Ring(group))    # each rank: own_tokens(x, dim, rank, ranks)

B  sequences    H  heads of queries    K  heads of keys and values    D  width of a head
S  tokens of a sequence on one rank    L  tokens of a chunk: S, or S / 2 if balanced
G  query heads for each key head: H / K
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 512  # scores that exist at a time: of 512 queries and 512 keys

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

    def tiles(self, step: int, tokens: int) -> Iterator[tuple[slice, slice, bool]]:
        """The visible pairs of chunks, cut into tiles of at most TILE queries and TILE keys.

        tokens: S. Yields (rows, columns, masked), slices of this rank's queries and of the keys.
        """
        length = tokens // len(chunks_of(self.rank, self.size, self.balanced))
        starts = range(0, length, TILE)
        for i, j, masked in self.visible(step):
            for row, column in product(starts, starts):
                if column <= row or not masked:
                    places = ((i * length, row), (j * length, column))
                    rows, columns = (slice(c + t, c + min(t + TILE, length)) for c, t in places)
                    yield rows, columns, masked and row == column

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


def scores_of(q_BKGLD: Tensor, k_BK1LD: Tensor, masked: bool) -> Tensor:
    scores_BKGLL = q_BKGLD @ k_BK1LD.mT * q_BKGLD.shape[-1] ** -0.5
    if masked:
        length = scores_BKGLL.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=scores_BKGLL.device).triu(1)
        scores_BKGLL.masked_fill_(later, -torch.inf)
    return scores_BKGLL


def attend(q_BKGLD, k_BK1LD, v_BK1LD, masked: bool) -> tuple[Tensor, Tensor]:
    """Attention to the keys of one chunk only: out (B, K, G, L, D), lse (B, K, G, L, 1)."""
    scores_BKGLL = scores_of(q_BKGLD, k_BK1LD, masked)
    lse_BKGL1 = scores_BKGLL.logsumexp(-1, keepdim=True)
    return scores_BKGLL.sub_(lse_BKGL1).exp_() @ v_BK1LD, lse_BKGL1


def attend_backward(q_BKGLD, k_BK1LD, v_BK1LD, masked: bool, dout_BKGLD, lse_BKGL1, delta_BKGL1):
    """What one block adds to the gradients of its queries, keys and values.

    lse: over all keys, not only these, so `p` is this block of the full softmax.
    delta: sum over all keys of p * dp, which is the sum over D of dout * out.
    """
    p_BKGLL = scores_of(q_BKGLD, k_BK1LD, masked).sub_(lse_BKGL1).exp_()  # recomputed, not saved
    dp_BKGLL = dout_BKGLD @ v_BK1LD.mT
    dv_BKGLD = p_BKGLL.mT @ dout_BKGLD
    dscores_BKGLL = dp_BKGLL.sub_(delta_BKGL1).mul_(p_BKGLL).mul_(q_BKGLD.shape[-1] ** -0.5)
    dk_BKGLD = dscores_BKGLL.mT @ q_BKGLD
    dk_BK1LD, dv_BK1LD = (d.sum(2, keepdim=True) for d in (dk_BKGLD, dv_BKGLD))
    return dscores_BKGLL @ k_BK1LD, dk_BK1LD, dv_BK1LD


# ---- around the ring


class RingAttention(torch.autograd.Function):
    """Computes in float32, or in float64 for float64 inputs."""

    @staticmethod
    def forward(ctx, q_BKGSD, k_BK1SD, v_BK1SD, ring: Ring):
        wide = torch.promote_types(q_BKGSD.dtype, torch.float32)
        out_BKGSD = torch.zeros_like(q_BKGSD, dtype=wide)
        lse_BKGS1 = torch.full_like(out_BKGSD[..., :1], -torch.inf)  # no key yet: exp(lse) = 0
        queries = q_BKGSD.to(wide)
        kv = torch.stack([k_BK1SD, v_BK1SD])  # one message instead of two
        for step in range(ring.size):
            # Sent while this rank computes. After the last step no rank needs them.
            arrives = ring.pass_on(kv) if step < ring.size - 1 else None
            keys, values = kv.to(wide)
            for rows, columns, masked in ring.tiles(step, q_BKGSD.shape[-2]):
                before, so_far = lse_BKGS1[..., rows, :], out_BKGSD[..., rows, :]
                key, value = keys[..., columns, :], values[..., columns, :]
                out, lse = attend(queries[..., rows, :], key, value, masked)
                both = torch.logaddexp(before, lse)
                so_far.mul_((before - both).exp()).add_(out.mul_((lse - both).exp()))
                before.copy_(both)
            if arrives:
                kv = arrives()
        out_BKGSD = out_BKGSD.to(q_BKGSD.dtype)
        ctx.ring, ctx.wide = ring, wide
        ctx.save_for_backward(q_BKGSD, k_BK1SD, v_BK1SD, out_BKGSD, lse_BKGS1)  # no scores
        return out_BKGSD

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_BKGSD):
        q_BKGSD, k_BK1SD, v_BK1SD, out_BKGSD, lse_BKGS1 = ctx.saved_tensors
        ring, wide = ctx.ring, ctx.wide
        dout_BKGSD = dout_BKGSD.to(wide)
        delta_BKGS1 = (dout_BKGSD * out_BKGSD).sum(-1, keepdim=True)
        queries, dq_BKGSD = q_BKGSD.to(wide), torch.zeros_like(q_BKGSD, dtype=wide)
        of_queries = (dout_BKGSD, lse_BKGS1, delta_BKGS1)
        kv = torch.stack([k_BK1SD, v_BK1SD])
        gradients_arrive = None
        for step in range(ring.size):
            arrives = ring.pass_on(kv) if step < ring.size - 1 else None
            keys, values = kv.to(wide)
            dkv = torch.zeros_like(kv, dtype=wide)
            for rows, columns, masked in ring.tiles(step, q_BKGSD.shape[-2]):
                tile = (x[..., rows, :] for x in of_queries)
                key, value = keys[..., columns, :], values[..., columns, :]
                dq, dk, dv = attend_backward(queries[..., rows, :], key, value, masked, *tile)
                dq_BKGSD[..., rows, :] += dq
                dkv[0, ..., columns, :] += dk
                dkv[1, ..., columns, :] += dv
            if gradients_arrive:  # the previous ranks' summands for these keys and values
                dkv += gradients_arrive()
            # Gradients follow their keys and values one step later, and return to their own rank.
            gradients_arrive = ring.pass_on(dkv)
            if arrives:
                kv = arrives()
        dk_BK1SD, dv_BK1SD = gradients_arrive()
        dtype = q_BKGSD.dtype
        return dq_BKGSD.to(dtype), dk_BK1SD.to(dtype), dv_BK1SD.to(dtype), None


def ring_attention(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, ring: Ring) -> Tensor:
    """softmax(q @ k.mT / sqrt(D)) @ v over full sequences, of which each rank has S tokens.

    q, result: (B, H, S, D), k, v: (B, K, S, D), the tokens that `own_tokens` gives this rank. Query
    head i uses key head i // G; only the K heads travel. Every rank of the ring must call this, and
    backward, in one order. Raises ValueError if S is odd and the ring balanced.
    """
    if ring.balanced and q_BHSD.shape[2] % 2:
        raise ValueError(f"{q_BHSD.shape[2]} tokens on a rank do not divide into two chunks")
    q_BKGSD = q_BHSD.unflatten(1, (k_BKSD.shape[1], -1))
    out_BKGSD = RingAttention.apply(q_BKGSD, k_BKSD.unsqueeze(2), v_BKSD.unsqueeze(2), ring)
    return out_BKGSD.flatten(1, 2)
