"""Timelines of pipelines: recorded, played by the rules alone, measured against a formula, drawn.

An action is (kind, stage, micro-batch). Kinds: "F" forward, "B" backward; a schedule may cut the
latter into "I", the gradient of the stage's input, which the stage before waits for, and "W", the
gradients of its weights, for which nobody waits. A timeline is a list of (kind, stage, micro-batch,
start, end), in seconds: what one rank did.
"""

import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from activations import Activations


class Recorder:
    """Notes when a rank computes: `with recorder("F", stage, i):` around the computation.

    activations: also counts what autograd keeps for backward.
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
        """Now, when what this rank has computed so far is done.

        A GPU works behind the program: without waiting for it, the clock would say when work was
        ordered. The wait costs some overlap, so that a recorded step is slower than another one.
        Sends are on other streams, and may still go on.
        """
        if self.device.type != "cpu":
            torch.accelerator.current_stream().synchronize()
        return time.perf_counter()


def simulate(orders: list[list[tuple]], seconds: Callable[[str, int], float]) -> list[list[tuple]]:
    """The timelines of ranks that start an action once they are free and its input is there.

    orders: the actions of each rank. seconds: (kind, stage) -> how long it takes; sending takes
    nothing. Raises ValueError if the ranks would wait for each other for ever.
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
    """What must be done before an action can begin, besides the rank's earlier actions."""
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
    """The part of that span in which a rank computes nothing; the mean over the ranks."""
    busy = sum(end - start for line in timelines for *_, start, end in line)
    return 1 - busy / len(timelines) / span(timelines)


def expected_idle(stages: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """(p - 1) / (m + p - 1) of GPipe and of 1F1B: Huang et al., GPipe, arXiv 1811.06965, section 2.

    With v smaller stages per rank (interleaved), (p - 1) / (v m + p - 1): the first of them is
    done, and the pipeline filled, v times as early (Narayanan et al., arXiv 2104.04473, section
    2.2, who divide by the computing time instead of by all of it).
    stages: p, the ranks of the pipeline.
    """
    return (stages - 1) / (stages_per_rank * microbatches + stages - 1)


def draw(timelines: list[list[tuple]], slot: float) -> str:
    """One line per rank, one character per `slot` seconds, one name per micro-batch.

    Digits: forward. Small letters: backward, or the part of it that gives the input's gradient.
    Capitals: the gradients of the weights. Dots: nothing.
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
