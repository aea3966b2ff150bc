"""Run the same steps in one process and on any mesh, and record all values that must be equal."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from comparing import OPTIMIZERS, as_it_is, batches, norm_of, train
from config import Settings
from counting_by_axis import CountByAxis
from data import batch_part
from evaluation import mean_over_ranks
from model import GPT, GPTConfig, cross_entropy, initialize
from pipeline import Pipeline
from runtime import Worker
from step import train_step
from torch.distributed.device_mesh import DeviceMesh


def one_process(config: GPTConfig, args, worker: Worker) -> list[dict]:
    """The single-process baseline, on every rank: the unsharded model on the global batch."""
    model = initialize(GPT(config).to(worker.device), args.seed)
    return train(model, cross_entropy, norm_of, as_it_is, args, worker.device)


def train_on_mesh(
    model: GPT, pipeline: Pipeline | None, mesh: DeviceMesh, settings: Settings, args
) -> tuple[list[dict], CountByAxis]:
    """The same steps on a mesh, with train.py's own `train_step`.

    Returns the results like `comparing.train`, and the collectives of the last step.
    """
    device = torch.device(mesh.device_type)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    part, parts = batch_part(mesh)
    steps, sent = [], CountByAxis(mesh)
    for i, (x_BT, y_BT) in enumerate(batches(args, device)):
        is_last_step = i == args.steps - 1
        x, y = x_BT[part::parts], y_BT[part::parts]
        with sent if is_last_step else nullcontext():
            loss, norm = train_step(model, pipeline, x, y, optimizer, mesh, settings)
        step = {"loss": torch.tensor(mean_over_ranks(loss, mesh)), "norm": norm}
        step |= of_all_stages("gradient of ", model, lambda p: p.grad, settings.pp)
        if is_last_step:
            step |= of_all_stages("parameter ", model, torch.Tensor.detach, settings.pp)
        steps.append({name: tensor.to(device) for name, tensor in step.items()})
    return steps, sent


def of_all_stages(prefix: str, model: GPT, get, stages: int) -> dict[str, torch.Tensor]:
    """Name -> full tensor that `get` returns, for each parameter of the model in all stages."""
    tensors = {prefix + name: as_it_is("", get(p)) for name, p in model.named_parameters()}
    if stages > 1:
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, {name: t.cpu() for name, t in tensors.items()})
        tensors = {name: tensor for stage in of_ranks for name, tensor in stage.items()}
    return tensors
