"""Shard the GPT over a device mesh, without changes to the model: one function per technique.

`spread_model` applies them in this order: a pipeline stage takes some layers, context parallelism
shards the tokens, tensor parallelism shards the layers, activation checkpointing and compilation
wrap blocks, and FSDP shards the parameters that a rank then holds.
"""

import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from activation_checkpointing import apply_activation_checkpointing
from arguments import UserError
from attention import use_flex_attention
from config import AXES, PRECISIONS, Settings
from context_parallel import apply_context_parallel, fsdp_mesh
from float8 import apply_float8
from lora import add_adapters
from model import GPT, GPTConfig
from pipeline import Pipeline, numbers_of
from stages import StagesOfRank, stage_layers
from timeouts import set_timeout
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.modules.module import register_module_parameter_registration_hook


def spread_model(
    config: GPTConfig, settings: Settings, device: torch.device, mesh: DeviceMesh | None = None
) -> tuple[DeviceMesh, GPT, Pipeline | None]:
    """The mesh of all ranks, this rank's part of the model on it, and the pipeline, if any.

    The parameters have memory, but no values: load a checkpoint, or call `model.initialize`.
    mesh: the mesh that an earlier call returned for equal sizes; None: a new mesh, with new groups.
    """
    if mesh is None:
        # Every rank gets a coordinate on each axis: pp, dp_replicate, dp_shard, cp, tp. Ranks that
        # differ only in one coordinate form a group of that axis. Neighbours on the last axis have
        # adjacent ranks, so they are on one node. That axis is tp, which communicates most.
        mesh = init_device_mesh(device.type, settings.mesh_shape(), mesh_dim_names=AXES)
    set_timeout(settings.timeout, mesh)
    numbers = numbers_of(settings, mesh["pp"].get_local_rank())
    stages = [shard_model(config, settings, mesh, number) for number in numbers]
    for stage in stages:
        materialize(stage, device)  # memory for this rank's part only
    model = StagesOfRank(stages) if len(stages) > 1 else stages[0]
    pipeline = Pipeline(model, mesh["pp"], settings, device) if settings.pp > 1 else None
    return mesh, model, pipeline


def shard_model(config: GPTConfig, settings: Settings, mesh: DeviceMesh, stage: int) -> GPT:
    """This rank's part of a stage on the mesh of all ranks; its parameters have no memory yet."""
    stages = settings.pp * settings.local_stages
    with parameters_without_memory():  # no rank needs room for the full model
        model = GPT(config, stage_layers(config, stages)[stage], settings.dropout)  # some layers
    if settings.cp > 1:  # some tokens of each sequence
        apply_context_parallel(model, mesh["cp"], settings.cp_kernel)
    if settings.flex_attention:  # compute no scores that a mask hides
        use_flex_attention(model, mesh.device_type)
    if model.is_last:
        model.head.chunks = settings.loss_chunks
    if settings.tp > 1:  # some features of each layer
        apply_tensor_parallel(model, mesh["tp"], settings.sequence_parallel, settings.loss_parallel)
    if settings.lora_rank:
        add_adapters(model, settings.lora_rank, settings.lora_alpha)
    if settings.fp8:  # not embeddings, norms, attention and head
        apply_float8(model, mesh.device_type, PRECISIONS[settings.precision])
    if settings.activation_checkpointing:
        apply_activation_checkpointing(model, settings.activation_checkpointing)
    if settings.compile:
        apply_compile(model)
    # Some rows of the parameters that this rank still holds; FSDP averages the gradients.
    # (A pipeline keeps gathered parameters: otherwise every micro-batch would gather them again.)
    apply_fsdp(
        model,
        fsdp_mesh(mesh),
        PRECISIONS[settings.precision],
        reshard_after_forward=not settings.keep_gathered and settings.pp == 1,
    )
    return model


def seed_generators(seed: int, mesh: DeviceMesh) -> None:
    """Seed torch's global generators, from which nn.Dropout, for example, draws.

    The seed depends on all coordinates but tp: other sequences, tokens, layers get other numbers.
    Ranks that differ only in tp get the same numbers: between the layers they hold copies of the
    same activations, and must drop the same ones. (Where they hold different heads or, with
    --sequence-parallel, different tokens, all use one pattern.)
    The model's own --dropout draws nothing: dropout.py.
    """
    axes = ("pp", "dp_replicate", "dp_shard", "cp")
    coordinates = [mesh[axis].get_local_rank() for axis in axes]
    torch.manual_seed(zlib.crc32(f"{seed} {coordinates}".encode()))


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules that are built inside have parameters on the meta device: shapes, no numbers.

    Their buffers have values. `with torch.device("meta")` would leave buffers without values, too,
    and a state dict restores only the persistent buffers.
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
    """Allocate the parameters that this rank holds; buffers keep their values.

    Raises `UserError` for a buffer without values, which was computed from a parameter.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))  # modules may share one
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise UserError(
                f"the buffer {name} has no values, and nothing fills it: compute it from the "
                "configuration when the module is built, not from a parameter"
            )
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            buffer.copy_(buffers[name])
    model.tie()


def apply_tensor_parallel(
    model: GPT, mesh: DeviceMesh, sequence_parallel: bool = False, loss_parallel: bool = False
) -> GPT:
    """Shard the layers of `model` over the one axis of `mesh`; change and return `model`.

    Layers are sharded in pairs. The first is column-parallel: each rank computes some features. The
    second is row-parallel: each rank uses its own features and returns a partial sum (Shoeybi et
    al., Megatron-LM, arXiv 1909.08053). So a block costs two all_reduces in forward, and two in
    backward.

    sequence_parallel: False: between these pairs every rank has all tokens, and computes their
        norms and residuals. True: a rank has T / N of the tokens. Each all_reduce becomes a
        reduce_scatter, and an all_gather precedes the next pair: the same bytes, less memory
        (Korthikanti et al., arXiv 2205.05198).
    loss_parallel: the logits stay sharded by vocabulary, as a DTensor; compute the loss, and call
        its backward, inside `torch.distributed.tensor.parallel.loss_parallel()`.
    Fewer key heads than ranks: see `share_heads`. Raises `UserError` if heads, MLP or vocabulary do
    not divide by the number of ranks.
    """
    ranks, config = mesh.size(), model.config
    for name in ("heads", "mlp_dim", "vocab_size"):
        value = getattr(config, name)
        if value % ranks:
            raise UserError(f"{name} {value} does not divide by {ranks} tensor-parallel ranks")
    shares_heads = config.kv_heads % ranks > 0
    if shares_heads and ranks % config.kv_heads:
        raise UserError(f"kv_heads {config.kv_heads} does not divide {ranks} ranks, or by them")
    # The activations between the pairs: each rank has all tokens, or its shard of them.
    between = Shard(1) if sequence_parallel else Replicate()
    plan = {}
    if model.is_first:
        # Rows of the table are tokens: a rank looks up the tokens that it has, and returns 0 for
        # all other tokens. The sum over ranks is the embedding.
        plan["token_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        if sequence_parallel and not config.is_llama:
            # (T, C), or (B, T, C) where documents begin at other positions: tokens are dim -2
            plan["position_embedding"] = RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(-2)
            )
    for i in model.blocks:
        block = f"blocks.{i}."
        if sequence_parallel:  # norms need one token at a time: each rank has its own tokens
            plan |= {block + "attention_norm": SequenceParallel()}
            plan |= {block + "mlp_norm": SequenceParallel()}
        # Gather all tokens here, once for query, key and value together: in backward, a rank adds
        # their three gradients before one sum over the ranks.
        all_tokens = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        plan |= {block + "attention": all_tokens, block + "mlp": all_tokens}
        columns = ["attention.query", "mlp.expand"] + ["mlp.gate"] * config.is_llama
        columns += [] if shares_heads else ["attention.key", "attention.value"]
        for name in columns:
            plan[block + name] = ColwiseParallel()  # some of the heads, some of the features
        if config.qk_norm:  # (B, H, T, D): a rank has some heads; its gradient is a part of the sum
            norm_of_heads = SequenceParallel(sequence_dim=1, use_local_output=True)
            plan |= {block + f"attention.{name}_norm": norm_of_heads for name in ("query", "key")}
        for name in ("attention.out", "mlp.contract"):
            plan[block + name] = RowwiseParallel(output_layouts=between)
    if model.is_last:
        if config.tied:  # a last stage's copy, cut by rows as the head is
            plan.setdefault("token_embedding", RowwiseParallel())
        if sequence_parallel:
            plan["norm"] = SequenceParallel()
        # Each rank computes the logits of some of the tokens of the vocabulary. With chunks, the
        # head returns the loss of training, which is the same on all ranks.
        returns_loss = model.head.chunks > 1
        plan["head"] = ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel and not returns_loss else Replicate(),
            use_local_output=not loss_parallel,
        )
    parallelize_module(model, mesh, plan)
    if model.is_first and config.is_llama:
        # The sum over ranks may still be under way. A compiled block that gets it so loses the
        # embedding's gradient (torch 2.15): a copy waits. (GPT-2 adds positions, which waits, too.)
        model.token_embedding.register_forward_hook(lambda module, inputs, y_BTC: y_BTC.clone())
    if shares_heads:
        for block in model.blocks.values():
            share_heads(block.attention.key, mesh, config)
            share_heads(block.attention.value, mesh, config)
    model.tie()  # both weights are sharded by rows of the vocabulary, but are two parameters now
    return model


def share_heads(linear: nn.Linear, mesh: DeviceMesh, config: GPTConfig) -> None:
    """Fewer key (or value) heads than ranks: each rank has all of them, and uses one.

    A rank's query heads belong to one key head. Neighbours share it, and each has the gradient of
    its own query heads only: a part of a sum over ranks. FSDP takes the sum before it shards.
    """
    first = mesh.get_local_rank() * config.kv_heads // mesh.size() * config.head_dim

    def own_head(linear: nn.Module, y_BTC: DTensor, mesh: DeviceMesh) -> Tensor:
        y_BTC = y_BTC.to_local(grad_placements=[Partial()])
        return y_BTC[..., first : first + config.head_dim]

    distribute_module(linear, mesh, output_fn=own_head)  # the same weight on all ranks


def apply_compile(model: GPT) -> GPT:
    """Compile each block on its own: all blocks have the same code, so it is compiled once."""
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

    One all_gather and one reduce_scatter serve one unit. The units are the embeddings, each block,
    and the last norm with the head. (A parameter can be in one unit only, and a tied weight belongs
    to both ends. So the root then has both ends, and stays gathered for the full step.)

    mesh: one axis: shards. Two axes (replicate, shard): shards inside a row, copies across rows; a
        row of one shard is plain data parallelism.
    compute_dtype: dtype of forward and backward. Shards, gradient sums and optimizer are float32.
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
        tables = [model.token_embedding]
        if not model.config.is_llama:
            tables.append(model.position_embedding)
        units.insert(0, tables)
        fully_shard(units[0], reshard_after_forward=reshard_after_forward, **options)
    if model.is_last and not model.config.tied:
        # Backward needs this unit first, right after forward: to free it in between saves nothing.
        units.append([model.norm, model.head])
        fully_shard(units[-1], reshard_after_forward=False, **options)
    # Tensor parallelism returns views; no code here changes an output in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    fully_shard(model, reshard_after_forward=False, **options)  # the root: all other parameters
    # Gather the next unit's parameters while this unit computes. On a GPU that happens anyway,
    # because the program runs ahead of the device; a CPU runs one line after the other.
    for unit, following in pairwise([[model], *units]):
        unit[-1].set_modules_to_forward_prefetch([following[0]])
    return model
