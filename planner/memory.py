"""The bytes that a training step holds on one GPU: one function per part."""

import numpy as np
from pipeline import stage_layers, stage_parameters
from shapes import Cluster, Mesh, Model, Number
from stacks import Stack
from step_time import BF16, kept_bytes, score_bytes

GIB = 2**30
USABLE = 0.9  # of a GPU's memory: what is left for fragments, NCCL and surprises


def in_flight(mesh: Mesh, stage: Number = 0) -> Number:
    """Micro-batches whose activations a stage (0: the first) holds at once, under 1F1B.

    The first holds pp of them, each later stage one less; with v interleaved stages per rank
    (pp - 1 - 2 stage) / v more than pp. Never more than a step has. [Narayanan et al. 2021;
    Korthikanti et al. 2022, section 4.2.3]
    """
    more = (mesh.pp - 1 - 2 * stage) / mesh.virtual_stages
    held = np.where(mesh.virtual_stages > 1, mesh.pp + more, mesh.pp - stage)
    return np.minimum(held, mesh.accumulation)


def zero_bytes(
    weights: Number, shards: Number, stage: Number, widths: tuple[Number, Number, Number]
) -> dict[str, Number]:
    """Bytes of a rank: stage 1 of ZeRO shards the optimizer state, 2 also the gradients, 3 all.

    widths: bytes per weight of parameters, gradients, optimizer state. [Rajbhandari et al. 2020,
    figure 1]
    """
    kinds = zip(("parameters", "gradients", "optimizer"), widths, (3, 2, 1), strict=True)
    return {kind: weights * w / np.where(stage >= first, shards, 1) for kind, w, first in kinds}


def state_bytes(mesh: Mesh, stack: Stack, weights: Number) -> dict[str, Number]:
    """Bytes of the weights of a stage, of their gradients and optimizer state."""
    widths = (BF16, stack.resident_bytes - BF16, stack.optimizer_bytes)
    return zero_bytes(weights, mesh.shards, mesh.zero_stage, widths)


def gathered_bytes(model: Model, mesh: Mesh) -> Number:
    """FSDP's unsharded weights: two layers and the embedding tables, in bf16."""
    tables = (2 - model.tied) * model.embedding_parameters
    return np.where(mesh.zero_stage == 3, BF16 * (2 * model.layer_parameters + tables) / mesh.tp, 0)


def layer_bytes(model: Model, mesh: Mesh, stack: Stack) -> Number:
    """What one layer keeps of one micro-batch.

    Selective checkpointing keeps no attention scores. [Korthikanti et al. 2022, section 5]
    """
    selective = mesh.selective_checkpointing
    kept = kept_bytes(model, mesh) - selective * score_bytes(model, mesh)
    kept = stack.activation_factor * kept * np.where(selective == 1, stack.selective_bytes, 1)
    inputs = BF16 * model.width / np.where(mesh.sequence_parallel == 1, mesh.tp, 1)
    return mesh.tokens * np.where(mesh.full_checkpointing == 1, inputs, kept)


def activation_bytes(
    model: Model, mesh: Mesh, stack: Stack, layers: Number, held: Number
) -> Number:
    """Bytes that the layers of a stage keep of the micro-batches in flight.

    One layer, with selective checkpointing its scores, is kept in full while it is computed again.
    """
    layer = layer_bytes(model, mesh, stack)
    again = mesh.selective_checkpointing * score_bytes(model, mesh)
    again = np.where(mesh.full_checkpointing == 1, kept_bytes(model, mesh), again)
    again = stack.activation_factor * mesh.tokens * again
    waiting = np.where(mesh.pp == 1, 1, np.maximum(0, held - 2))
    gathered = stack.gathered_bytes * model.width * mesh.tokens * waiting
    gathered = np.where(mesh.sequence_parallel == 1, gathered * (1 - 1 / mesh.tp), 0)
    return layers * (layer * held + gathered) + again


def stage_bytes(model: Model, mesh: Mesh, stack: Stack) -> list[dict[str, Number]]:
    """Bytes by part of the stages that may be the fullest: the first, the second, the last.

    The first holds most micro-batches, the second may have a layer more, and the last one holds the
    logits. A stage that is not there holds nothing. The rows of a balanced pipeline (nanotron,
    BLOOM) measured the first stage.
    """
    logits = stack.logit_bytes * mesh.tokens * model.vocab / mesh.tp
    one, unbalanced = mesh.pp == 1, stack.balanced == 0
    there = (True, mesh.pp > 2, (mesh.pp > 1) & unbalanced)
    places = (0, 1, mesh.pp - 1)
    layers, weights = stage_layers(model, mesh, stack), stage_parameters(model, mesh, stack)
    found = []
    for i, place in enumerate(places):
        held = in_flight(mesh, place)
        parts = state_bytes(mesh, stack, weights[i])
        parts["activations"] = activation_bytes(model, mesh, stack, layers[i], held)
        parts["logits"] = logits * (one if i == 0 else i == 2)
        found.append({part: size * there[i] for part, size in parts.items()})
    return found


def fullest_stage(model: Model, mesh: Mesh, stack: Stack) -> Number:
    """0: the first stage holds most bytes; 1: the second; 2: the last."""
    totals = [sum(parts.values()) for parts in stage_bytes(model, mesh, stack)]
    return np.argmax(np.broadcast_arrays(*totals), axis=0)


def memory_parts(model: Model, mesh: Mesh, stack: Stack) -> dict[str, Number]:
    """GiB of the fullest GPU by what holds them; their sum is the peak."""
    stages, fullest = stage_bytes(model, mesh, stack), fullest_stage(model, mesh, stack)
    gib = {name: np.choose(fullest, [parts[name] for parts in stages]) / GIB for name in stages[0]}
    return gib | {"buffers": gathered_bytes(model, mesh) / GIB + stack.base_gib}


def memory_gib(model: Model, mesh: Mesh, stack: Stack) -> Number:
    """Peak GiB of the fullest GPU."""
    return sum(memory_parts(model, mesh, stack).values())


def has_empty_stage(model: Model, mesh: Mesh, stack: Stack) -> Number:
    """Whether a balanced pipeline runs out of blocks, which ends the job.

    The blocks after the last layer (norm, output layer, cast, loss) fill three stages more at most.
    """
    head = model.embedding_parameters / model.layer_parameters
    share = np.maximum(1, (model.layers + head) / mesh.pp)
    with_layers = np.ceil((model.layers - 1) / share)
    return (stack.balanced == 1) & (mesh.pp > 1) & (with_layers + 3 < mesh.pp)


def fits(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """Whether the peak stays within the usable share of a GPU's memory ("80 GB" are 80 GiB)."""
    within = memory_gib(model, mesh, stack) <= USABLE * cluster.gpu_memory_gb
    return within & ~has_empty_stage(model, mesh, stack)
