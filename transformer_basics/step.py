"""One training step on any mesh, and the norm of all gradients."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
import torch.distributed as dist
from config import Settings
from context_parallel import tokens_of_rank, torch_attention
from data import batch_part
from dropout import token_keys
from model import cross_entropy
from packing import document_starts, tokens_per_rank
from pipeline import Pipeline
from stages import second_copy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import get_total_norm


def train_step(
    model,
    pipeline: Pipeline | None,
    x_BT: torch.Tensor,
    y_BT: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    settings: Settings,
    step: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step on this rank's part of the global batch.

    step: the number of the step, which --dropout needs: each step drops other numbers.
    Returns this rank's summand of the mean loss (0 on all pipeline stages but the last): the mean
    over ranks is the mean over all tokens. And the norm of the full model's gradients (of their
    mean over all ranks, before clipping).
    """
    optimizer.zero_grad(set_to_none=True)
    adds_full_gradients = settings.dp_shard * settings.cp == 1 or settings.reduce_once
    keys_BT = keys_of_rank(x_BT, step, mesh, settings) if settings.dropout else None
    x_BT, y_BT = (tokens_of_rank(mesh["cp"], tokens_BT) for tokens_BT in (x_BT, y_BT))
    tokens = tokens_per_rank(y_BT, settings)
    loss_of = loss_function(settings.compile and not settings.loss_parallel)
    with torch_regions(settings, mesh):
        if pipeline:
            starts_BT = document_starts(y_BT, settings)
            pipeline.cross_entropy = loss_of
            loss = pipeline.train(x_BT, y_BT, tokens, starts_BT, keys_BT)
        else:
            loss = torch.zeros((), device=x_BT.device)
            count = settings.accumulate
            keys = [None] * count if keys_BT is None else keys_BT.chunk(count)
            microbatches = zip(x_BT.chunk(count), y_BT.chunk(count), keys, strict=True)
            for i, (x, y, keys_BT) in enumerate(microbatches):
                # A rank with full parameters adds up full gradients, and reduces them in the last
                # backward. A rank with shards reduces in each backward, and adds up shards:
                # otherwise FSDP keeps the full model's gradients on every rank. Replicas
                # all_reduce the sums of their shards in the last backward.
                is_last = i == settings.accumulate - 1
                model.set_requires_gradient_sync(is_last or not adds_full_gradients)
                model.set_requires_all_reduce(is_last)
                # A sum, because backward() adds: over all micro-batches it is the batch's mean.
                # In chunks, the model computes the loss, which never has all logits at once.
                starts_BT = document_starts(y, settings)
                if settings.loss_chunks > 1:
                    part = model(x, y, starts_BT, keys_BT) * y.numel()
                else:
                    part = loss_of(model(x, None, starts_BT, keys_BT), y, "sum")
                part = part / tokens
                part.backward()
                loss += full_tensor(part.detach())
    if pipeline:
        pipeline.add_tied_gradients()
    grad_norm = clip_gradients(model, settings.clip or math.inf, mesh)
    optimizer.step()
    return full_tensor(loss), grad_norm


def keys_of_rank(
    x_BT: torch.Tensor, step: int, mesh: DeviceMesh, settings: Settings
) -> torch.Tensor:
    """The keys of dropout of the tokens that this rank has between the layers: see dropout.py.

    x_BT: the rank's part of the global batch, full sequences. Ranks that have the same tokens (tp,
    pp) get the same keys; ranks that have other sequences (dp_replicate, dp_shard) or other tokens
    of a sequence (cp, and tp with --sequence-parallel) get those of their tokens.
    """
    (part, parts), (count, length) = batch_part(mesh), x_BT.shape
    rows_B = torch.arange(part, part + parts * count, parts, device=x_BT.device)
    positions_T = torch.arange(length, device=x_BT.device)
    keys_BT = tokens_of_rank(mesh["cp"], token_keys(settings.seed, step, rows_B, positions_T))
    if settings.sequence_parallel:
        keys_BT = keys_BT.chunk(settings.tp, dim=1)[mesh["tp"].get_local_rank()]
    return keys_BT


@contextmanager
def torch_regions(settings: Settings, mesh: DeviceMesh) -> Iterator[None]:
    """Where torch replaces the loss (--loss-parallel) and attention (--cp-kernel torch)."""
    replaced_loss = loss_parallel() if settings.loss_parallel else nullcontext()
    with replaced_loss, torch_attention(settings, mesh):
        yield


@cache
def loss_function(is_compiled: bool) -> Callable:
    """cross_entropy. Compiled, it writes no float32 copies of the logits: a step's largest tensors.

    (DTensors, which --loss-parallel gives it, are not compiled.)
    """
    return torch.compile(cross_entropy) if is_compiled else cross_entropy


def clip_gradients(model, max_norm: float, mesh: DeviceMesh) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; returns the norm.

    Each rank adds the squares of the gradients that it holds. If n ranks of a stage hold copies of
    a gradient, each of them adds 1 / n of its squares. One sum over all ranks then counts each
    number once. (The last stage's copy of a tied weight adds none: the first stage counts it.)

    torch.nn.utils.clip_grad_norm_ does the same if all parameters are on one mesh: with FSDP
    alone, and with --sequence-parallel, whose plan includes the norm layers. It fails if the norm
    layers are only on the data-parallel axes, and it leaves out the other stages of a pipeline.
    """
    ranks_of_stage = mesh.size() // mesh["pp"].size()
    by_copies, second = {}, second_copy(model)
    trained = [p for p in model.parameters() if p.grad is not None]
    for p in trained:
        axes = zip(p.grad.placements, p.grad.device_mesh.shape, strict=True)
        # Every placement that is not Replicate is a shard. (FSDP on top of tensor parallelism
        # has a placement of its own, for which is_shard() is False.)
        cuts = math.prod(size for placement, size in axes if not placement.is_replicate())
        if p is not second:
            by_copies.setdefault(ranks_of_stage // cuts, []).append(p.grad.to_local())
    squares = sum(get_total_norm(g) ** 2 / copies for copies, g in by_copies.items())
    dist.all_reduce(squares)
    norm = squares.sqrt()
    if max_norm < math.inf:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)
        for p in trained:
            p.grad.to_local().mul_(scale)
    return norm


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor: with --loss-parallel the loss is a DTensor, replicated on each rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
