"""Evaluate a model on the test set: means over all ranks, each sample counted once."""

import math

import torch
import torch.distributed as dist
from arguments import UserError
from loading import Seeded, to_device
from runtime import Worker
from stopping import obey_the_rank_only
from task import collate, compute_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: Dataset, batch_size: int, workers: int, worker: Worker
) -> dict[str, float]:
    """All ranks call this. Means over the whole data set, each sample counted once: "loss", and
    whatever else the task sums.

    A DistributedSampler would repeat samples until all ranks have equally many. Here the ranks have
    equally many batches, since under FSDP each forward pass is a collective; a batch of a rank that
    has no samples left is computed and not counted. A sample with random noise has the same noise
    on any number of ranks, and in each evaluation.
    Raises `UserError` if `compute_loss` returns other names for another batch.
    """
    own = range(worker.rank, len(dataset), worker.world_size)
    longest = math.ceil(len(dataset) / worker.world_size)  # what rank 0 has
    shares = [own[start : start + batch_size] for start in range(0, longest, batch_size)]
    loader = DataLoader(
        Seeded(dataset, seed=0),
        batch_sampler=[[(0, index) for index in share or [0]] for share in shares],
        collate_fn=collate,
        num_workers=workers,
        worker_init_fn=obey_the_rank_only,
        pin_memory=worker.device.type != "cpu",
        generator=torch.Generator(),  # or it would draw from the global one
    )
    names, total = [], torch.zeros((), dtype=torch.float64, device=worker.device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for share, batch in zip(shares, loader, strict=True):
        loss_sum, count, others = compute_loss(model, to_device(batch, worker.device))
        if names and names != ["loss", *others]:
            raise UserError(f"compute_loss returned {names}, then {['loss', *others]}")
        names, values = ["loss", *others], [count, loss_sum, *others.values()]
        # Filled in by a kernel: a number that is copied to a GPU waits for all work before it.
        sums = [v.to(total) if isinstance(v, Tensor) else total.new_full((), v) for v in values]
        total = total + torch.stack(sums) * (len(share) > 0)
    for module, mode in modes:  # a frozen BatchNorm, for example, stays in eval mode
        module.training = mode
    dist.all_reduce(total)
    count, *sums = total.tolist()
    return {name: value / (count or 1) for name, value in zip(names, sums, strict=True)}
