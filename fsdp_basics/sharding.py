"""Shard a model with fully_shard: its units, mixed precision, offloading, prefetching."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype = torch.float32,
    offload: bool = False,
    prefetch: int = 0,
) -> nn.Module:
    """Shard every parameter of `model` over the ranks of `mesh`; change and return `model`.

    A parameter becomes a DTensor, of which a rank holds its own rows. Each block is one unit: its
    parameters are all-gathered together just before the block runs, and its gradients are
    reduce-scattered together just after its backward. The root is the unit of all other parameters
    (patches, position, norm, head). train.py has lines of its own for this.

    mesh: one axis: shards. Two axes (replicate, shard): shards inside a row, copies across rows.
    reshard_after_forward: free a block's gathered parameters after its forward, and gather them
        again for its backward (ZeRO-3). False: keep them (ZeRO-2): more memory, fewer bytes.
    compute_dtype, offload: see `unit_options`. prefetch: see `prefetch_blocks`.
    """
    block_options, root_options = unit_options(mesh, compute_dtype, offload)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **block_options)
    # Last, the root takes all other parameters. Backward needs them first, right after forward: to
    # free them in between would save nothing.
    fully_shard(model, reshard_after_forward=False, **root_options)
    prefetch_blocks(list(model.blocks), prefetch)
    return model


def unit_options(
    mesh: DeviceMesh, compute_dtype: torch.dtype = torch.float32, offload: bool = False
) -> tuple[dict, dict]:
    """Keyword arguments of `fully_shard` for the blocks, and for the root.

    compute_dtype: dtype of parameters and inputs in forward and backward. The shards, the reduction
        of the gradients, and the optimizer stay in float32. With float32, FSDP casts nothing: a
        model in float64 computes and reduces in float64.
    offload: shards and optimizer stay in CPU memory; a block is copied to the GPU when it runs.
    """
    block_policy = root_policy = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        block_policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32)
        # The root returns the logits in float32. (An inner block must not: the next block would
        # get inputs of another dtype than its parameters.)
        root_policy = MixedPrecisionPolicy(
            compute_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    options = {"mesh": mesh}
    if offload:
        pinned = mesh.device_type == "cuda"  # pinned memory is for copies to a GPU
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
    return options | {"mp_policy": block_policy}, options | {"mp_policy": root_policy}


def prefetch_blocks(blocks: list[nn.Module], count: int) -> None:
    """Gather `count` blocks ahead of the one that runs, in forward and in backward.

    With 0, FSDP gathers one block ahead in backward and none in forward. (On GPUs the CPU runs
    ahead of the device, and so issues the all_gathers of forward early.)
    """
    if count == 0:
        return
    for i, block in enumerate(blocks):
        next_in_forward = blocks[i + 1 : i + 1 + count]
        next_in_backward = blocks[max(0, i - count) : i][::-1]
        block.set_modules_to_forward_prefetch(next_in_forward)
        block.set_modules_to_backward_prefetch(next_in_backward)


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def shard_batch_norms(
    model: nn.Module, compute_dtype: torch.dtype, options: dict
) -> list[nn.Module]:
    """With mixed precision, make each BatchNorm of `model` a unit with float32 parameters.

    Its running statistics are buffers, which FSDP leaves in float32, and its kernel takes no
    parameters of another dtype than these. Returns these modules, which no other unit may have.
    options: keyword arguments of `fully_shard` for the other units.
    """
    if compute_dtype == torch.float32:
        return []
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    policy = MixedPrecisionPolicy(output_dtype=compute_dtype)
    for norm in norms:
        fully_shard(norm, **options | {"mp_policy": policy})
    return norms
