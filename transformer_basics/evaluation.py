"""The loss of the global batch, and the loss on held-out text."""

import torch
import torch.distributed as dist
from arguments import UserError
from config import Settings
from context_parallel import tokens_of_rank
from data import Windows, batch_part
from model import cross_entropy
from packing import document_starts, tokens_per_rank
from pipeline import Pipeline
from step import full_tensor, torch_regions
from torch.distributed.device_mesh import DeviceMesh


def held_out_windows(shards, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of --eval-batches global batches, spread evenly over the held-out text.

    Raises `UserError` if the text is too short for one batch.
    """
    windows = Windows(shards, settings.block_size, settings.document_masks)
    batches = min(settings.eval_batches, windows.count // settings.batch_size)
    if not batches:
        raise UserError(
            f"the held-out text is too short: {windows.tokens:,} tokens are no batch of "
            f"{settings.batch_size} windows of {settings.block_size} tokens: give "
            "more text, or a smaller --batch-size or --block-size"
        )
    count = batches * settings.batch_size
    return windows.read(torch.arange(count) * windows.count // count)


@torch.no_grad()
def evaluate(
    model, pipeline: Pipeline | None, held_out, mesh: DeviceMesh, settings: Settings
) -> float:
    """Mean loss on the held-out windows, in nats per token, on every rank.

    It uses the micro-batches of training, which are known to fit into memory.
    """
    part, parts = batch_part(mesh)
    # The windows of this rank, split into micro-batches.
    windows = [t[part::parts].split(settings.microbatch_size) for t in held_out]
    targets = tokens_of_rank(mesh["cp"], held_out[1][part::parts].to(mesh.device_type))
    tokens = tokens_per_rank(targets, settings)
    loss_sum = torch.zeros((), device=mesh.device_type)
    model.eval()
    with torch_regions(settings, mesh):
        for microbatch in zip(*windows, strict=True):
            on_device = (tensor.to(mesh.device_type, non_blocking=True) for tensor in microbatch)
            x_BT, y_BT = (tokens_of_rank(mesh["cp"], tensor) for tensor in on_device)
            loss_sum += loss_of(model, pipeline, x_BT, y_BT, settings)
    model.train()
    return mean_over_ranks(loss_sum / tokens, mesh)


def loss_of(model, pipeline: Pipeline | None, x_BT, y_BT, settings: Settings) -> torch.Tensor:
    """The sum of the losses of a micro-batch; 0 on all pipeline stages but the last."""
    in_chunks = model.is_last and model.head.chunks > 1
    inputs = (x_BT, y_BT if in_chunks else None, document_starts(y_BT, settings))
    out = pipeline.forward(*inputs) if pipeline else model(*inputs)
    if out is None:
        return torch.zeros((), device=x_BT.device)
    return full_tensor(out * y_BT.numel() if in_chunks else cross_entropy(out, y_BT, "sum"))


def mean_over_ranks(loss: torch.Tensor, mesh: DeviceMesh) -> float:
    """The mean loss of a global batch, on every rank. Reading the number waits for the GPU.

    loss: this rank's summand, see `train_step`; 0 on all pipeline stages but the last.
    """
    ranks_of_stage = mesh.size() // mesh["pp"].size()
    total = loss.double() / ranks_of_stage
    dist.all_reduce(total)
    return total.item()
