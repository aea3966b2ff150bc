"""How the GPT is spread over a device mesh, apart from the model: one function per technique.

`spread_model` applies them, each to what the one before left: a pipeline stage has some layers,
tensor parallelism shards these, activation checkpointing and compilation wrap blocks, FSDP shards
what a rank then holds.
"""

import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from arguments import UserError
from config import AXES, PRECISIONS, Settings
from model import GPT, GPTConfig
from pipeline import Pipeline, stage_layers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.modules.module import register_module_parameter_registration_hook


def spread_model(
    config: GPTConfig, settings: Settings, device: torch.device
) -> tuple[DeviceMesh, GPT, Pipeline | None]:
    """The mesh of all ranks, this rank's part of the model on it, and the pipeline, if any.

    The parameters have memory, but no values: load a checkpoint, or call `model.initialize`.
    """
    # Every rank gets a coordinate on each axis: pp, dp_replicate, dp_shard, tp. Ranks that differ
    # in one coordinate only are that axis' group. Neighbours on the last axis are neighbours in
    # rank, so on one node: tensor parallelism communicates most.
    mesh = init_device_mesh(device.type, settings.mesh_shape(), mesh_dim_names=AXES)
    if hasattr(dist, "set_timeout"):  # new in torch 2.15; before, these groups wait 30 minutes
        for group in mesh.get_all_groups():
            dist.set_timeout(timedelta(seconds=settings.timeout), group)
    with parameters_without_memory():  # no rank needs room for the full model
        model = GPT(config, stage_layers(config.layers, mesh["pp"]))  # some layers
    if settings.tp > 1:  # some features of each layer
        apply_tensor_parallel(model, mesh["tp"], settings.sequence_parallel, settings.loss_parallel)
    if settings.activation_checkpointing:
        apply_activation_checkpointing(model)
    if settings.compile:
        apply_compile(model)
    # Some rows of what is left by now; each rank's gradients are averaged over all its copies.
    # (A pipeline keeps what is gathered: it would gather again for every micro-batch.)
    apply_fsdp(
        model,
        mesh["dp_replicate", "dp_shard"],
        PRECISIONS[settings.precision],
        reshard_after_forward=not settings.keep_gathered and settings.pp == 1,
    )
    materialize(model, device)  # memory for this rank's part only
    pipeline = Pipeline(model, mesh["pp"], settings, device) if settings.pp > 1 else None
    return mesh, model, pipeline


def seed_generators(seed: int, mesh: DeviceMesh) -> None:
    """Seed torch's global generators: what dropout, for example, draws from.

    By the data-parallel coordinates and the stage: other sequences and other layers get other
    numbers. Ranks that differ in tp only get the same: between the layers they hold copies of the
    same activations, which one of them must not drop alone. (Where they hold different ones, heads
    or, with --sequence-parallel, tokens, each of them uses the same pattern.)
    """
    coordinates = [mesh[axis].get_local_rank() for axis in ("pp", "dp_replicate", "dp_shard")]
    torch.manual_seed(zlib.crc32(f"{seed} {coordinates}".encode()))


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules that are built inside have parameters on the meta device: shapes, no numbers.

    Their buffers are computed as always. `with torch.device("meta")` would leave these without
    values, too; a state dict brings back some of them, but not those that are not persistent.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None):
        if parameter is None or parameter.is_meta:  # a tied weight stays one parameter
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def materialize(model: GPT, device: torch.device) -> None:
    """Memory for the parameters that this rank holds; buffers keep their values.

    Raises `UserError` for a buffer without values: one that was computed from a parameter.
    """
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise UserError(
                f"the buffer {name} has no values, and nothing fills it: compute it from the "
                "configuration when the module is built, not from a parameter"
            )
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    model.tie()


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


def apply_activation_checkpointing(model: GPT) -> GPT:
    """Each block keeps only its input, and computes the rest again in backward.

    A third more computation for activations of one block instead of all (Chen et al., arXiv
    1604.06174). Under tensor parallelism the sum after attention is communicated again, too.
    """
    for block in model.blocks.values():
        block.recompute = True
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
) -> GPT:
    """Shard every parameter over the last axis of `mesh`; change and return `model`.

    A unit is what one collective gathers, and one reduces: the embeddings, each block, and the last
    norm with the head. (A tied weight belongs to both ends. So the root has these then, gathered
    for the whole step: a parameter can be in one unit only.)

    mesh: one axis: shards. Two axes (replicate, shard): shards within a row, copies across rows; a
        row of one shard is plain data parallelism.
    compute_dtype: of forward and backward. Shards, sums of gradients, optimizer: float32.
    reshard_after_forward: False keeps the gathered parameters until backward (ZeRO-2).
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
    )
    reshard_after_forward = reshard_after_forward and mesh.shape[-1] > 1
    options = {"mesh": mesh, "mp_policy": precision}
    units = [[block] for block in model.blocks.values()]
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    if model.is_first and not model.config.tied:
        units.insert(0, [model.token_embedding, model.position_embedding])
        fully_shard(units[0], reshard_after_forward=reshard_after_forward, **options)
    if model.is_last and not model.config.tied:
        # Backward begins with them, right after forward: to free them in between saves nothing.
        units.append([model.norm, model.head])
        fully_shard(units[-1], reshard_after_forward=False, **options)
    # What tensor parallelism returns is a view; we change no output in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    fully_shard(model, reshard_after_forward=False, **options)  # the root takes what is left
    # Gather the next unit's parameters while this one computes. With a GPU that happens anyway,
    # since the program issues work ahead of the device; a processor does one line after the other.
    for unit, following in pairwise([[model], *units]):
        unit[-1].set_modules_to_forward_prefetch([following[0]])
    return model
