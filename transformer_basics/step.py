"""One step of training, on whatever mesh the model is spread over."""

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from config import Settings
from model import cross_entropy
from pipeline import Pipeline
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step on this rank's part of the global batch.

    Returns the mean loss of this part (0 on a stage of a pipeline that is not the last), and the
    norm of the gradients of the whole model (of all ranks' mean, before clipping).
    """
    optimizer.zero_grad(set_to_none=True)
    adds_full_gradients = settings.dp_shard == 1 or settings.reduce_once
    with loss_parallel() if settings.loss_parallel else nullcontext():
        if pipeline:
            loss = pipeline.train(x_BT, y_BT)
        else:
            loss = torch.zeros((), device=x_BT.device)
            microbatches = zip(
                x_BT.chunk(settings.accumulate), y_BT.chunk(settings.accumulate), strict=True
            )
            for i, (x, y) in enumerate(microbatches):
                # A rank that holds full parameters adds up full gradients, and sends them in the
                # last backward. A rank that holds shards reduces in each backward and adds up
                # shards: otherwise FSDP keeps the full model's gradients on every rank. Replicas
                # exchange the sums of their shards, in the last backward.
                is_last = i == settings.accumulate - 1
                model.set_requires_gradient_sync(is_last or not adds_full_gradients)
                model.set_requires_all_reduce(is_last)
                # Divided, because backward() adds: the sum over parts is the mean over the batch.
                part = cross_entropy(model(x), y) / settings.accumulate
                part.backward()
                loss += full_tensor(part.detach())
    grad_norm = clip_gradients(model, settings.clip or math.inf, mesh)
    optimizer.step()
    return full_tensor(loss), grad_norm


def clip_gradients(model, max_norm: float, mesh: DeviceMesh) -> torch.Tensor:
    """Scale all gradients so that the norm of them all is at most `max_norm`; returns the norm.

    Each rank adds the squares of what it holds. What several ranks of a stage hold alike counts in
    parts: all ranks together then have each number once, and one sum over them gives the norm.

    torch.nn.utils.clip_grad_norm_ does the same where all parameters lie on one mesh: with FSDP
    alone, and with --sequence-parallel, whose plan has the norms too. It cannot where norms lie on
    the data-parallel axes only, nor add what lies on other stages of a pipeline.
    """
    ranks_of_stage = mesh.size() // mesh["pp"].size()
    by_copies = {}
    for p in model.parameters():
        if p.grad is not None:
            axes = zip(p.grad.placements, p.grad.device_mesh.shape, strict=True)
            # Whatever is not a copy is a cut. (FSDP on top of tensor parallelism has a placement of
            # its own, for which is_shard() is False.)
            cuts = math.prod(size for placement, size in axes if not placement.is_replicate())
            by_copies.setdefault(ranks_of_stage // cuts, []).append(p.grad.to_local())
    squares = sum(get_total_norm(g) ** 2 / copies for copies, g in by_copies.items())
    dist.all_reduce(squares)
    norm = squares.sqrt()
    if max_norm < math.inf:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)
        for gradients in by_copies.values():
            for gradient in gradients:
                gradient.mul_(scale)
    return norm


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """With --loss-parallel the loss is a DTensor, whole on each rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
