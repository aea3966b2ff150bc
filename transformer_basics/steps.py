"""One step of training, and one evaluation, on whatever mesh the model is spread over."""

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from model import cross_entropy
from runtime import Worker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import get_total_norm


def train_step(model, stages, x_BT, y_BT, optimizer, mesh: DeviceMesh, args) -> torch.Tensor:
    """One optimizer step on this rank's share of the global batch.

    Returns the share's mean loss, or 0 on a stage of a pipeline that is not the last.
    """
    optimizer.zero_grad(set_to_none=True)
    with loss_parallel() if args.loss_parallel else nullcontext():
        if stages:
            loss = stages.train(x_BT, y_BT)
        else:
            loss = torch.zeros((), device=x_BT.device)
            parts = zip(x_BT.chunk(args.accumulate), y_BT.chunk(args.accumulate), strict=True)
            for i, (x, y) in enumerate(parts):
                model.set_requires_gradient_sync(i == args.accumulate - 1)
                # Divided, because backward() adds: the sum over parts is the mean over the batch.
                part = cross_entropy(model(x), y) / args.accumulate
                part.backward()
                loss += local(part.detach())
    if args.clip:
        clip_gradients(model, args.clip, mesh)
    optimizer.step()
    return local(loss)


def clip_gradients(model, max_norm: float, mesh: DeviceMesh) -> torch.Tensor:
    """Scale all gradients so that the norm of them all is at most `max_norm`; returns the norm.

    Each rank adds the squares of what it holds. What several ranks of a stage hold alike counts in
    parts: all ranks together then have each number once, and one sum over them gives the norm.
    (clip_grad_norm_ cannot: the DTensors lie on different meshes, and on other stages.)
    """
    ranks = mesh.size() // mesh["pp"].size()
    by_copies = {}
    for p in model.parameters():
        if p.grad is not None:
            axes = zip(p.grad.placements, p.grad.device_mesh.shape, strict=True)
            # Whatever is not a copy is a cut. (FSDP on top of tensor parallelism has a placement of
            # its own, for which is_shard() is False.)
            parts = math.prod(size for placement, size in axes if not placement.is_replicate())
            by_copies.setdefault(ranks // parts, []).append(p.grad.to_local())
    squares = sum(get_total_norm(g) ** 2 / copies for copies, g in by_copies.items())
    dist.all_reduce(squares)
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for gradients in by_copies.values():
        for gradient in gradients:
            gradient.mul_(scale)
    return norm


@torch.no_grad()
def evaluate(model, stages, held_out, mesh: DeviceMesh, args, worker: Worker) -> float:
    """Mean loss on the held-out windows, in nats per token."""
    share, shares = data_parallel(mesh)
    total = torch.zeros((), device=worker.device)
    model.eval()
    with loss_parallel() if args.loss_parallel else nullcontext():
        for x_BT, y_BT in zip(*(t.split(args.batch_size) for t in held_out), strict=True):
            x, y = (t[share::shares].to(worker.device) for t in (x_BT, y_BT))
            logits = stages.forward(x) if stages else model(x)
            if logits is not None:
                total += local(cross_entropy(logits, y))
    model.train()
    (total,) = all_sum([total / (shares * args.tp)], worker)
    return total / (len(held_out[0]) // args.batch_size)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """With --loss-parallel the loss is a DTensor, whole on each rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_sum(values: list, worker: Worker) -> list[float]:
    """Each value summed over all ranks."""
    total = torch.tensor([float(v) for v in values], dtype=torch.float64, device=worker.device)
    dist.all_reduce(total)
    return total.tolist()


def make_optimizer(model, args) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms and biases do not (as GPT-3 was trained: arXiv 2005.14165).

    fused: one call for all tensors of a group, which must lie on one mesh.
    """
    groups = {}
    for p in model.parameters():
        decay = args.weight_decay if p.dim() > 1 else 0.0
        groups.setdefault((decay, p.device_mesh), []).append(p)
    groups = [{"params": ps, "weight_decay": decay} for (decay, _), ps in groups.items()]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, args) -> float:
    """Linear over the warm-up, then half a cosine down to a tenth of --lr."""
    warmup = round(args.warmup * args.steps)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def data_parallel(mesh: DeviceMesh) -> tuple[int, int]:
    """Which share of a global batch this rank works on, and how many there are."""
    replicate, shard = mesh["dp_replicate"], mesh["dp_shard"]
    share = replicate.get_local_rank() * shard.size() + shard.get_local_rank()
    return share, replicate.size() * shard.size()
