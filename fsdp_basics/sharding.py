"""How the model is sharded, apart from the model and from the training loop."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
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
    """Cut every parameter of `model` into one shard per rank of `mesh`; change and return `model`.

    A parameter becomes a DTensor, of which a rank holds its own rows. Each block is one unit: its
    parameters are gathered together just before the block runs, and its gradients are averaged and
    scattered together just after its backward. What no block holds (patches, position, norm, head)
    is the root's unit.

    mesh: one axis: shards. Two axes (replicate, shard): shards within a row, copies across rows.
    reshard_after_forward: free a block's gathered parameters after its forward, and gather them
        again for its backward (ZeRO-3). False: keep them (ZeRO-2): more memory, fewer bytes.
    compute_dtype: what parameters and inputs are cast to for forward and backward. The shards, the
        reduction of the gradients, and the optimizer stay in float32.
    offload: shards and optimizer live in CPU memory; a block is copied to the GPU when it runs.
    prefetch: gather so many blocks ahead of the one that runs. 0: FSDP's own choice (the next one
        in backward; in forward none, but on GPUs the CPU runs ahead and so issues them early).
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
    )
    options = {"mesh": mesh, "mp_policy": precision}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    # Last, the root takes what is left, and hands the logits to the loss in float32. Its parameters
    # come first in backward, right after its forward: to free them in between would save nothing.
    options["mp_policy"] = replace(precision, output_dtype=torch.float32)
    fully_shard(model, reshard_after_forward=False, **options)
    blocks = list(model.blocks)
    for i, block in enumerate(blocks if prefetch else ()):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - prefetch) : i][::-1])
    return model


def materialize(
    model: nn.Module, build: Callable[[], nn.Module], device: torch.device, is_main: bool
) -> nn.Module:
    """Give a sharded model that was built on the meta device memory and values; all ranks call it.

    build: makes the whole model with its first values, on the CPU. Only rank 0 calls it; each
    parameter is then broadcast, and every rank keeps its shard. So all worlds begin with the
    parameters of one process, and no GPU ever holds more than one whole parameter.
    device: where the shards go: "cpu" with offload.
    """
    model.to_empty(device=device)  # shards only: a meta tensor has a shape and no memory
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, build().state_dict() if is_main else {}, options=options)
    return model
