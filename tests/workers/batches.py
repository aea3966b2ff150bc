"""The global batches on which ddp_basics and fsdp_basics are compared with one process."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

GLOBAL_BATCH = 24  # divides by 2, 3 and 4 ranks
PADDING = -100  # a label that counts for nothing: cross_entropy leaves it out


def batches(steps: int, padded: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(images, labels) of each step, the same in every world.

    padded: labels count for nothing, more of them towards the end of the batch: ranks and
    micro-batches then have different counts.
    """
    generator = torch.Generator().manual_seed(1)
    # A seed with which no gradient is tiny: AdamW would make a full step of its rounding.
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        images = torch.rand(GLOBAL_BATCH, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (GLOBAL_BATCH,), generator=generator)
        if padded:
            odds = torch.linspace(1.1, 0.1, GLOBAL_BATCH)
            labels = labels.where(torch.rand(GLOBAL_BATCH, generator=draw) < odds, PADDING)
        yield images, labels


def padded_loss(model, batch):
    """compute_loss() of a task in which some labels count for nothing."""
    images, labels = batch
    loss_sum = F.cross_entropy(model(images), labels, reduction="sum", ignore_index=PADDING)
    return loss_sum, (labels != PADDING).sum(), {}
