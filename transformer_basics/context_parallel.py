"""Context parallelism: each rank of the cp axis has T / N tokens of every sequence.

Norms, MLP and loss work on one token at a time, and stay as they are. Two things depend on all
tokens: the positions, and attention. A rank has two chunks of 2 N, one from the front and its
mirror image from the back (zigzag): with a causal mask, all ranks then have equal work.

Parameters: each rank has the gradients of its own tokens, so cp is data parallelism for them. FSDP
shards and averages over dp_shard and cp together.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import UserError
from attention_ring import Ring, own_tokens, ring_attention
from config import Settings
from model import GPT
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

WITHOUT_FUSED_RING = ("cpu",)  # devices for whose attention torch has no ring


def apply_context_parallel(model: GPT, mesh: DeviceMesh, kernel: str = "ring") -> GPT:
    """Change and return `model`: it then maps this rank's tokens (B, S) to their logits (B, S, V).

    mesh: its one axis has the ranks that share a sequence. Give the model `tokens_of_rank`.
    kernel: "ring", by hand: it computes scores block by block, on any device. "torch":
        torch's own, with the fused kernels of GPUs; run forward and backward in `torch_attention`.
    Raises `UserError` if the kernel needs GPUs, or the model's window hides something.
    """
    if model.config.window and model.config.window < model.config.block_size:
        raise UserError(f"context parallelism has no window; the model's is {model.config.window}")
    if kernel == "torch" and mesh.device_type in WITHOUT_FUSED_RING:
        raise UserError(
            f"--cp-kernel torch does not run on {mesh.device_type}: give --cp-kernel ring"
        )
    ring = Ring(mesh.get_group())

    def attend(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, window: int | None) -> Tensor:
        return ring_attention(q_BHSD, k_BKSD, v_BKSD, ring)

    # torch.compile stops before the messages of the ring, and goes on after them.
    attend = fused_attend if kernel == "torch" else torch.compiler.disable(attend)
    model.positions = partial(positions_of_rank, mesh)
    for block in model.blocks.values():
        block.attention.positions, block.attention.attend = model.positions, attend
    return model


def tokens_of_rank(mesh: DeviceMesh, tokens_BT: Tensor) -> Tensor:
    """This rank's tokens (B, T / N) of full sequences. Shift the targets before this.

    mesh: its one axis is cp; with one rank, all tokens.
    """
    ranks = mesh.size()
    return own_tokens(tokens_BT, 1, mesh.get_local_rank(), ranks) if ranks > 1 else tokens_BT


def positions_of_rank(mesh: DeviceMesh, length: int, device: torch.device) -> Tensor:
    """The positions of this rank's `length` tokens in their sequences: (S), int64."""
    return tokens_of_rank(mesh, torch.arange(length * mesh.size(), device=device)[None])[0]


def logits_at(position: int, logits_BSV: Tensor, mesh: DeviceMesh) -> Tensor:
    """The logits (B, V) of one token of the full sequences, on every rank of the cp axis."""
    own = positions_of_rank(mesh, logits_BSV.shape[1], logits_BSV.device)
    logits_BV = logits_BSV[:, own == position].sum(1)  # zeros on the ranks that do not have it
    if mesh.size() > 1:
        dist.all_reduce(logits_BV, group=mesh.get_group())
    return logits_BV


def fused_attend(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, window: int | None) -> Tensor:
    """Inside `torch_attention`: attention to the tokens of all ranks, with a fused kernel.

    torch's ring has no grouped heads, so all H heads of keys and values travel. It has no unfused
    kernel either, which torch would choose for grouped heads.
    """
    copies = q_BHSD.shape[1] // k_BKSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(copies, dim=1) for x in (k_BKSD, v_BKSD))
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(fused):
        return F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True)


def torch_attention(settings: Settings, mesh: DeviceMesh) -> AbstractContextManager:
    """Inside, F.scaled_dot_product_attention is to the tokens of all cp ranks, in backward too.

    Without --cp-kernel torch: no change.
    """
    if settings.cp == 1 or settings.cp_kernel != "torch":
        return nullcontext()
    # It shards the tensors that it gets, in the zigzag order of `tokens_of_rank`, and needs one.
    unused = torch.empty(2 * settings.cp, device=mesh.device_type)
    return context_parallel(mesh["cp"], buffers=[unused], buffer_seq_dims=[0])


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """(dp_replicate, shards), or shards alone if there is one copy.

    FSDP shards over dp_shard and cp, flattened to one axis. An axis of one rank is left out: when
    DTensor first meets an operation, it tries all placements on all axes of the mesh.
    """
    shards = mesh["dp_shard"]
    if mesh["cp"].size() > 1:
        # There are no public names for these two methods; fully_shard calls them, too.
        shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    if mesh["dp_replicate"].size() == 1:
        return shards
    if mesh["cp"].size() == 1:
        return mesh["dp_replicate", "dp_shard"]
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])  # no public name
