"""The global batches on which ddp_basics and fsdp_basics are compared with one process."""

from collections.abc import Iterator

import torch

GLOBAL_BATCH = 24  # divides by 2, 3 and 4 ranks


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(images, labels) of each step, the same in every world."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        images = torch.rand(GLOBAL_BATCH, 1, 8, 8, generator=generator)
        yield images, torch.randint(10, (GLOBAL_BATCH,), generator=generator)
