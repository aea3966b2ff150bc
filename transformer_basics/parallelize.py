"""How the GPT is spread over a device mesh, apart from the model: one function per technique.

Applied in this order, each to what the one before left: tensor parallelism cuts layers, activation
checkpointing and compilation wrap blocks, FSDP shards what a rank then holds.
"""

import warnings
from itertools import pairwise

import torch
from arguments import UserError
from model import GPT
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def apply_tensor_parallel(
    model: GPT, mesh: DeviceMesh, sequence_parallel: bool = False, loss_parallel: bool = False
) -> GPT:
    """Cut the layers of `model` over the one axis of `mesh`; change and return `model`.

    A pair of layers is cut together: the first by columns, so that each rank computes some of the
    features, the second by rows, so that it uses just those; what the second returns is a part of a
    sum (Shoeybi et al., Megatron-LM, arXiv 1909.08053). So a block costs two sums over the ranks in
    forward, and two in backward.

    sequence_parallel: between these pairs every rank has all tokens, and computes norms and
        residuals of all of them. With True it has T / N of the tokens: each sum becomes a
        reduce_scatter, and an all_gather comes before the next pair. The same bytes, less memory
        (Korthikanti et al., arXiv 2205.05198).
    loss_parallel: the logits stay cut by vocabulary, as a DTensor; compute the loss, and call its
        backward, inside `torch.distributed.tensor.parallel.loss_parallel()`.
    Raises `UserError` if heads or vocabulary do not divide by the number of ranks.
    """
    ranks, config = mesh.size(), model.config
    for name, value in (("heads", config.heads), ("vocab_size", config.vocab_size)):
        if value % ranks:
            raise UserError(f"{name} {value} does not divide by {ranks} tensor-parallel ranks")
    # What lies between the pairs: each rank has all of it, or its part of the tokens.
    between = Shard(1) if sequence_parallel else Replicate()
    plan = {}
    if model.is_first:
        # Rows of the table are tokens: a rank looks up those it has, and 0 for the others. The sum
        # over ranks is the embedding.
        plan["token_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        if sequence_parallel:  # the positions' own dim 0 is what is dim 1 of the sum with tokens
            plan["position_embedding"] = RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(0)
            )
    for i in model.blocks:
        block = f"blocks.{i}."
        if sequence_parallel:  # norms look at one token at a time: each rank takes its own tokens
            plan |= {block + "attention_norm": SequenceParallel()}
            plan |= {block + "mlp_norm": SequenceParallel()}
        # All tokens are gathered here, once for query, key and value together: in backward their
        # three gradients are added on the rank before one sum over the ranks.
        all_tokens = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        plan |= {block + "attention": all_tokens, block + "mlp": all_tokens}
        for name in ("attention.query", "attention.key", "attention.value", "mlp.expand"):
            plan[block + name] = ColwiseParallel()  # some of the heads, some of the features
        for name in ("attention.out", "mlp.contract"):
            plan[block + name] = RowwiseParallel(output_layouts=between)
    if model.is_last:
        if sequence_parallel:
            plan["norm"] = SequenceParallel()
        # Each rank computes the logits of some of the tokens of the vocabulary.
        plan["head"] = ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        )
    parallelize_module(model, mesh, plan)
    model.tie()  # both weights were cut by rows of the vocabulary, but into two parameters
    return model


def apply_activation_checkpointing(model: GPT, every: int = 1) -> GPT:
    """Every `every`-th block keeps only its input, and computes the rest again in backward.

    A third more computation for activations of one block instead of all (Chen et al., arXiv
    1604.06174). Under tensor parallelism the sum after attention is communicated again, too.
    """
    for i, block in enumerate(model.blocks.values()):
        block.recompute = i % every == 0
    return model


def apply_compile(model: GPT) -> GPT:
    """Compile each block on its own: all have the same code, so the compiler works once."""
    for block in model.blocks.values():
        block.compile()
    return model


def apply_fsdp(
    model: GPT,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    group: int = 1,
) -> GPT:
    """Shard every parameter over the last axis of `mesh`; change and return `model`.

    mesh: one axis: shards. Two axes (replicate, shard): shards within a row, copies across rows; a
        row of one shard is plain data parallelism.
    compute_dtype: of forward and backward. Shards, sums of gradients, optimizer: float32.
    reshard_after_forward: False keeps the gathered parameters until backward (ZeRO-2).
    group: blocks that are gathered, and whose gradients are reduced, together. One collective for
        several small blocks: each costs its latency.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
    )
    reshard_after_forward = reshard_after_forward and mesh.shape[-1] > 1
    options = {"mesh": mesh, "mp_policy": precision}
    blocks = list(model.blocks.values())
    for i in range(0, len(blocks), group):
        fully_shard(blocks[i : i + group], reshard_after_forward=reshard_after_forward, **options)
    # What tensor parallelism returns is a view; we change no output in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    # Last, the root takes embeddings, norm and head. Its parameters are the first that backward
    # needs, right after forward: to free them in between would save nothing.
    fully_shard(model, reshard_after_forward=False, **options)
    # Gather the next block's parameters while this one computes. With a GPU that happens anyway,
    # since the program issues work ahead of the device; a processor does one line after the other.
    for unit, following in pairwise([model, *blocks[::group]]):
        unit.set_modules_to_forward_prefetch([following])
    return model
