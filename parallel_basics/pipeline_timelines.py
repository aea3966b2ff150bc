"""Timelines of pipelines: record, simulate and draw them; the bubble fraction and its formula.

An action is (kind, stage, micro-batch). Kinds: "F" forward, "B" backward. A schedule may split "B"
into "I", the gradient of the stage's input, for which the previous stage waits, and "W", the
gradients of its weights, for which no stage waits. A timeline lists what one rank did: (kind,
stage, micro-batch, start, end), in seconds.
"""

import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from activations import Activations


class Recorder:
    """Records when a rank computes: `with recorder("F", stage, i):` around the computation.

    activations: also counts what autograd saves for backward.
    """

    def __init__(self, device: torch.device, activations: Activations | None = None):
        self.device, self.activations = device, activations
        self.timeline = []

    @contextmanager
    def __call__(self, kind: str, stage: int, i: int) -> Iterator[None]:
        counts = self.activations is not None and kind == "F"
        start = self.clock()
        with self.activations.hooks() if counts else nullcontext():
            yield
        self.timeline.append((kind, stage, i, start, self.clock()))
        if counts:
            self.activations.note()

    def clock(self) -> float:
        """The time, after all computation of this rank so far has finished.

        Kernels run asynchronously: without the wait, the clock would show when they were launched.
        The wait costs some overlap, so a recorded step is slower. Sends run on other
        streams, and may still be in flight.
        """
        if self.device.type != "cpu":
            torch.accelerator.current_stream().synchronize()
        return time.perf_counter()


def simulate(orders: list[list[tuple]], seconds: Callable[[str, int], float]) -> list[list[tuple]]:
    """The timelines of ranks that start an action when they are free and its input has arrived.

    orders: the actions of each rank. seconds: (kind, stage) -> duration; sends take no time.
    Raises ValueError if the ranks would wait for each other for ever.
    """
    last_stage = max(stage for order in orders for _, stage, _ in order)
    done = {}  # ("F" or "gradient", stage, micro-batch) -> when
    timelines = [[] for _ in orders]

    def play(order: list[tuple], timeline: list[tuple]) -> bool:
        """Play this rank's next action, if it can begin."""
        if len(timeline) == len(order):
            return False
        kind, stage, i = order[len(timeline)]
        needs = inputs_of(kind, stage, i, last_stage)
        if not all(need in done for need in needs):
            return False
        free = timeline[-1][4] if timeline else 0.0
        start = max([free, *(done[need] for need in needs)])
        end = start + seconds(kind, stage)
        if kind == "F":
            done["F", stage, i] = end
        elif kind in ("B", "I"):
            done["gradient", stage, i] = end
        timeline.append((kind, stage, i, start, end))
        return True

    played = True
    while played:
        played = False
        for order, timeline in zip(orders, timelines, strict=True):
            while play(order, timeline):
                played = True
    waiting = []
    for rank, (order, timeline) in enumerate(zip(orders, timelines, strict=True)):
        if len(timeline) < len(order):
            waiting.append(f"rank {rank} at {order[len(timeline)]}")
    if waiting:
        raise ValueError(f"the ranks wait for each other for ever: {', '.join(waiting)}")
    return timelines


def inputs_of(kind: str, stage: int, i: int, last_stage: int) -> list[tuple]:
    """What must be finished before an action can start, besides the rank's earlier actions."""
    if kind == "F":
        return [("F", stage - 1, i)] if stage > 0 else []
    if kind == "W":
        return [("gradient", stage, i)]
    needs = [("F", stage, i)]  # "B", or its first half, "I"
    if stage < last_stage:
        needs.append(("gradient", stage + 1, i))
    return needs


def span(timelines: list[list[tuple]]) -> float:
    """Seconds from the first start to the last end."""
    return max(line[-1][4] for line in timelines) - min(line[0][3] for line in timelines)


def idle_share(timelines: list[list[tuple]]) -> float:
    """The bubble fraction: the part of the span in which a rank is idle, mean over ranks."""
    busy = sum(end - start for line in timelines for *_, start, end in line)
    return 1 - busy / len(timelines) / span(timelines)


def expected_idle(stages: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """The bubble fraction of GPipe and 1F1B, (p - 1) / (m + p - 1): Huang et al., arXiv 1811.06965.

    With v smaller stages per rank (interleaved) it is (p - 1) / (v m + p - 1): the first stage is
    done, and the pipeline filled, v times as early. (Narayanan et al., arXiv 2104.04473, section
    2.2, divide by the compute time instead of the total time.) stages: p, the pipeline's ranks.
    """
    return (stages - 1) / (stages_per_rank * microbatches + stages - 1)


def draw(timelines: list[list[tuple]], slot: float) -> str:
    """One line per rank, one character per `slot` seconds, one digit or letter per micro-batch.

    Digits: forward. Small letters: backward, or only the gradient of the input. Capitals: the
    gradients of the weights. Dots: idle.
    """
    letters = {
        "F": string.digits,
        "B": string.ascii_lowercase,
        "I": string.ascii_lowercase,
        "W": string.ascii_uppercase,
    }
    first = min(line[0][3] for line in timelines)
    slots = round(span(timelines) / slot)
    rows = []
    for rank, line in enumerate(timelines):
        row = ["."] * slots
        for kind, _, i, start, end in line:
            letter = letters[kind][i % len(letters[kind])]
            begins, ends = round((start - first) / slot), round((end - first) / slot)
            for at in range(begins, min(ends, slots)):
                row[at] = letter
        rows.append(f"rank {rank}  " + "".join(row))
    return "\n".join(rows)
