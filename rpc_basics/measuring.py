"""What comparisons share: how far two results lie apart, and which of two ways is faster."""

import statistics
import time
from collections.abc import Callable

import torch


def difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest of all elements, absolute."""
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def rates_in_turn(
    one: Callable[[], None], other: Callable[[], None], count: int, repeats: int
) -> str:
    """Each does `count` things. Three columns: how many a second, and the ratio of the medians.

    The two take turns, so that what else the machine does hits both; the first turn warms up.
    """
    ways, rates = (one, other), ([], [])
    for _ in range(repeats + 1):
        for way, of_way in zip(ways, rates, strict=True):
            begin = time.perf_counter()
            way()
            of_way.append(count / (time.perf_counter() - begin))
    texts, medians = [], []
    for _, *measured in rates:
        medians.append(statistics.median(measured))
        texts.append(f"{medians[-1]:,.0f} ({min(measured):,.0f} to {max(measured):,.0f})")
    return f"{texts[0]:>24}{texts[1]:>24}{medians[0] / medians[1]:7.1f}"
