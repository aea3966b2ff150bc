"""The loss of the global batch, and that of text that is not trained on."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from arguments import UserError
from config import Settings
from data import batch_part, windows
from model import cross_entropy
from pipeline import Pipeline
from step import full_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel


def held_out_windows(tokens, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of --eval-batches global batches, spread evenly over the held-out text.

    Raises `UserError` if it is too short for one.
    """
    available = (len(tokens) - 1) // settings.block_size
    batches = min(settings.eval_batches, available // settings.batch_size)
    if not batches:
        raise UserError(
            f"the held-out text is too short: {len(tokens):,} tokens are no batch of "
            f"{settings.batch_size} windows of {settings.block_size} tokens"
        )
    count = batches * settings.batch_size
    return windows(tokens, torch.arange(count) * available // count, settings.block_size)


@torch.no_grad()
def evaluate(
    model, pipeline: Pipeline | None, held_out, mesh: DeviceMesh, settings: Settings
) -> float:
    """Mean loss on the held-out windows, in nats per token, on every rank."""
    part, parts = batch_part(mesh)
    loss_sum, batches = torch.zeros((), device=mesh.device_type), 0
    model.eval()
    with loss_parallel() if settings.loss_parallel else nullcontext():
        for x_BT, y_BT in zip(*(t.split(settings.batch_size) for t in held_out), strict=True):
            x, y = (t[part::parts].to(mesh.device_type) for t in (x_BT, y_BT))
            logits = pipeline.forward(x) if pipeline else model(x)
            if logits is not None:
                loss_sum += full_tensor(cross_entropy(logits, y))
            batches += 1
    model.train()
    return mean_over_ranks(loss_sum / batches, mesh)


def mean_over_ranks(loss: torch.Tensor, mesh: DeviceMesh) -> float:
    """The mean loss of a global batch, on every rank. A number is read: GPUs are waited for.

    loss: of this rank's part of the batch; 0 on the stages of a pipeline that are not the last.
    """
    ranks_of_stage = mesh.size() // mesh["pp"].size()
    total = loss.double() / ranks_of_stage
    dist.all_reduce(total)
    return total.item()
