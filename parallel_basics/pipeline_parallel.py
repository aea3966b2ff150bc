"""Pipeline parallelism with torch.distributed.pipelining: five schedules, equal to one process.

    torchrun --standalone --nproc_per_node=2 parallel_basics/pipeline_parallel.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/pipeline_parallel.py

    GPipe, 1F1B             one stage per rank; by hand in pipeline_from_scratch.py
    Interleaved1F1B         two smaller stages per rank, stage i on rank i mod p: the pipeline fills
                            and empties in half the time, for twice the messages
    InterleavedZeroBubble   the same stages; backward is cut in two: the gradient of the input, for
                            which the stage before waits, and the gradients of the weights, which
                            fill the gaps
    ZBVZeroBubble           so, too, but rank 0 has the first and the last stage: the way back up
                            begins where the way down does (a V)

A PipelineStage is a part of the model that knows its number. A schedule runs the stages of a rank.

Look at the differences to one process, which are rounding. Then at the idle share: by formula; if
each action took exactly its time (the recorded order, played); measured, with stages that wait on a
timer. And at what the smaller gaps cost: more micro-batches are kept for backward.
"""

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from arguments import UserError
from model import GPT, GPTConfig, cross_entropy, initialize
from pipeline_tools import (
    OPTIMIZERS,
    Activations,
    Reference,
    TimerStage,
    cut,
    draw,
    expected_idle,
    gather,
    idle_share,
    read_arguments,
    simulate,
    span,
    text_batch,
    timer_loss,
)
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

# name -> (class, number of stages per rank, has the second of them the V's place)
SCHEDULES = {
    "GPipe": (ScheduleGPipe, 1, False),
    "1F1B": (Schedule1F1B, 1, False),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2, False),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, 2, False),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, 2, True),
}
SECONDS = 0.01  # a rank's stages together need as long for forward, when they only wait


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if worker.world_size == 1:
            raise UserError("one rank is no pipeline: start at least two with torchrun")
        compare(args, worker)


class TimedStage(PipelineStage):
    """A PipelineStage that notes when it computes, and counts the activations that it keeps.

    timeline, activations: shared by the stages of a rank. The schedule calls these three methods,
    and receives before and sends after them.
    """

    timeline: list[tuple]
    activations: Activations | None = None

    def forward_one_chunk(self, i, *args, **kwargs):
        with self.activations.hooks() if self.activations else nullcontext():
            output = self.timed("F", i, super().forward_one_chunk, *args, **kwargs)
        if self.activations:
            self.activations.note()
        return output

    def backward_one_chunk(self, i, loss=None, full_backward=True, **kwargs):
        kind = "B" if full_backward else "I"
        kwargs |= {"loss": loss, "full_backward": full_backward}
        return self.timed(kind, i, super().backward_one_chunk, **kwargs)

    def backward_weight_one_chunk(self, i, **kwargs):
        return self.timed("W", i, super().backward_weight_one_chunk, **kwargs)

    def timed(self, kind: str, i: int, function, *args, **kwargs):
        start = self.clock()
        result = function(i, *args, **kwargs)
        self.timeline.append((kind, self.stage_index, i, start, self.clock()))
        return result

    def clock(self) -> float:
        if self.device.type == "cuda":  # not of all streams: others may still send
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()


class Pipeline:
    """This rank's stages, and the schedule that runs them.

    build: (stage, number of stages) -> the stage's model.
    group: the ranks of the pipeline, in order.
    """

    def __init__(self, name: str, microbatches: int, build, loss_fn, device, group=None):
        kind, parts, is_v = SCHEDULES[name]
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        mine = [rank, 2 * ranks - 1 - rank if is_v else rank + ranks][:parts]
        self.models = [build(stage, parts * ranks) for stage in mine]
        self.stages = [
            TimedStage(model, stage, parts * ranks, device, group=group)
            for stage, model in zip(mine, self.models, strict=True)
        ]
        # Gradients are divided by the number of micro-batches (scale_grads): the batch's mean.
        stages = self.stages[0] if parts == 1 else self.stages
        self.schedule = kind(stages, microbatches, loss_fn, scale_grads=True)

    def step(
        self, x_BT: Tensor, y_BT: Tensor, activations: Activations | None = None
    ) -> tuple[Tensor, list[tuple]]:
        """Forward and backward of all micro-batches; gradients are added to the parameters' .grad.

        Returns the mean loss on the rank that has the last stage, 0 elsewhere, and the timeline.
        """
        timeline, losses = [], []
        for stage in self.stages:
            stage.timeline, stage.activations = timeline, activations
        inputs = [x_BT] if any(stage.is_first for stage in self.stages) else []
        last = any(stage.is_last for stage in self.stages)
        self.schedule.step(*inputs, **({"target": y_BT, "losses": losses} if last else {}))
        loss = torch.stack(losses).detach().mean() if last else torch.zeros((), device=x_BT.device)
        return loss, timeline


def compare(args, worker: Worker) -> None:
    p, device = worker.world_size, worker.device
    config = GPTConfig(block_size=args.length, layers=args.layers or 2 * p, dim=args.dim)
    batch_size, counts = args.batch_size or 4 * p, args.microbatches or [2 * p]
    check(config.layers, batch_size, counts, p)
    batches = [text_batch(step, batch_size, args.length, device) for step in range(args.steps)]
    say = print if worker.is_main else lambda *_: None
    say(f"{config.layers} blocks, {p} ranks, {batch_size} sequences of {args.length} tokens")
    one = Reference(config, cross_entropy, args.optimizer, args.seed, device)
    runs = {}
    for name in SCHEDULES:
        for m in counts:
            build = gpt_stages(config, args.seed, device)
            pipeline = Pipeline(name, m, build, cross_entropy, device)
            parameters = [q for model in pipeline.models for q in model.parameters()]
            runs[name, m] = pipeline, OPTIMIZERS[args.optimizer](parameters)
    worst = torch.zeros(len(runs), 3, device=device)
    for x_BT, y_BT in batches:
        expected = one.step(x_BT, y_BT)
        for row, (pipeline, optimizer) in zip(worst, runs.values(), strict=True):
            optimizer.zero_grad()
            loss, _ = pipeline.step(x_BT, y_BT)
            optimizer.step()
            row.copy_(row.maximum(one.differences(pipeline.models, expected, loss)))
    say(f"\nlargest difference to one process, in {args.steps} steps with {args.optimizer}")
    say("schedule               micro-batches       loss   gradient  parameter")
    for (name, m), row in zip(runs, worst.tolist(), strict=True):
        say(f"{name:22} {m:13}" + "".join(f"{value:11.1e}" for value in row))

    show_timelines(runs, counts, config, batches[0], worker)


def show_timelines(runs: dict, counts: list[int], config: GPTConfig, batch, worker: Worker) -> None:
    """Idle share and memory of each schedule, and a picture with the fewest micro-batches."""
    say = print if worker.is_main else lambda *_: None
    ranks = "".join(f"  rank {r}" for r in range(worker.world_size))
    say("\nidle share, mean over ranks              formula    played  measured   MB kept at most")
    say(f"{'schedule':22} micro-batches{'':31}{ranks}")
    pictures = []
    for (name, m), (pipeline, _) in runs.items():
        activations = Activations(*pipeline.models)
        pipeline.step(*batch, activations)
        kept = gather(activations.most / 1e6)
        timelines = quickest(name, m, config, *batch, worker.device)
        parts = SCHEDULES[name][1]
        played = idle_share(simulate(orders(timelines), durations(SECONDS / parts)))
        formula = "" if "Zero" in name else f"{expected_idle(worker.world_size, m, parts):.1%}"
        shares = f"{formula:>12}{played:10.1%}{idle_share(timelines):10.1%}"
        say(f"{name:22} {m:13}{shares}" + "".join(f"{mb:8.2f}" for mb in kept))
        if m == counts[0]:
            pictures.append(f"{name}\n" + draw(timelines, SECONDS / 2))
    say(
        f"\n{counts[0]} micro-batches: 0 is a forward, a its backward or the gradient of its input,"
    )
    say(f"A those of its weights; a dot is idle, a character {500 * SECONDS:.0f} ms")
    say("\n".join(pictures))


def gpt_stages(config: GPTConfig, seed: int, device):
    """A function that builds a stage of the GPT, with the first values of the whole one."""
    return lambda stage, stages: initialize(
        GPT(config, cut(config.layers, stages)[stage]).to(device), seed
    )


def check(layers: int, batch_size: int, counts: list[int], ranks: int) -> None:
    """Raise `UserError` for what would not work, before any rank waits for another."""
    if layers < 2 * ranks:
        raise UserError(f"--layers {layers} are too few: {ranks} ranks with two stages each")
    for m in counts:
        if m < ranks:
            raise UserError(f"{m} micro-batches do not fill {ranks} stages: at least as many")
        if m % (m // ranks):
            raise UserError(
                f"interleaved schedules take the micro-batches in {m // ranks} rounds, into which "
                f"{m} do not divide: choose a multiple of {ranks}"
            )
        if batch_size % m:
            raise UserError(f"--batch-size {batch_size} does not divide into {m} micro-batches")


def durations(seconds: float):
    """(kind, stage) -> seconds, as TimerStage takes them."""
    parts = {"F": 1, "B": 2, "I": 1, "W": 1}
    # torch computes all of the first stage's gradients in "W": nobody waits for that of its input.
    first = parts | {"I": 0, "W": 2}
    return lambda kind, stage: seconds * (parts if stage else first)[kind]


def orders(timelines: list[list[tuple]]) -> list[list[tuple]]:
    return [[event[:3] for event in line] for line in timelines]


def quickest(name, m: int, config: GPTConfig, x_BT, y_BT, device, steps: int = 2) -> list:
    """The timelines of all ranks in the quickest of some steps of stages that only wait.

    Other programs on the machine make a step longer, never shorter.
    """
    seconds = SECONDS / SCHEDULES[name][1]
    waits = Pipeline(name, m, lambda i, n: TimerStage(config, i, n, seconds), timer_loss, device)
    found = []
    for step in range(steps + 1):
        dist.barrier()
        _, timeline = waits.step(x_BT, y_BT)
        if step:  # in the first, the stages tell each other shapes
            found.append(gather(timeline))
    return min(found, key=span)


def parse_args():
    return read_arguments("The pipeline schedules of torch, equal to one process.", "2 p", 2)


if __name__ == "__main__":
    main()
