"""Pipeline parallelism with torch.distributed.pipelining: five schedules, equal to one process.

    torchrun --standalone --nproc_per_node=2 parallel_basics/pipeline_parallel.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/pipeline_parallel.py

    GPipe, 1F1B             one stage per rank; by hand in pipeline_from_scratch.py
    Interleaved1F1B         two smaller stages per rank, stage i on rank i mod p: the pipeline fills
                            and empties in half the time, for twice an inner rank's messages
    InterleavedZeroBubble   interleaved, and backward is split: the previous stage waits for the
                            gradient of the input; the gradients of the weights fill the gaps
    ZBVZeroBubble           split backward, too, but rank 0 has the first and the last stage, so
                            backward starts on the rank where forward did (a V)

A PipelineStage is a part of the model that knows its number. A schedule runs the stages of a rank.

Look at the differences from one process, which are rounding. Then look at the bubble fraction: by
formula; simulated, if each action of the recorded order took exactly its time; measured, with
stages that sleep. Smaller bubbles cost memory: more micro-batches are saved for backward.
"""

from functools import partial

import torch
import torch.distributed as dist
from arguments import UserError
from compare_pipelines import (
    Run,
    compare_with_one_process,
    gather,
    kept_at_most,
    quickest,
    read_arguments,
    say,
    text_batch,
)
from model import GPTConfig, cross_entropy
from pipeline_stages import TimerStage, gpt_stage, timer_loss
from pipeline_timelines import Recorder, draw, expected_idle, idle_share, simulate
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

# name -> (class, stages per rank, whether the stages form a V)
SCHEDULES = {
    "GPipe": (ScheduleGPipe, 1, False),
    "1F1B": (Schedule1F1B, 1, False),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2, False),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, 2, False),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, 2, True),
}
SECONDS = 0.01  # forward of all sleeping stages of one rank together


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if worker.world_size == 1:
            raise UserError("one rank is no pipeline: start at least two with torchrun")
        compare(args, worker)


class Pipeline:
    """This rank's stages, and the schedule that runs them.

    build: (stage, number of stages) -> the stage's model.
    group: the ranks of the pipeline, in order.
    loss_fn: (output of the last stage, targets) of a micro-batch -> its mean loss. The mean of
        these is the batch's if all micro-batches have equally many targets.
    """

    def __init__(self, name: str, microbatches: int, build, loss_fn, device, group=None):
        schedule_class, per_rank, is_v = SCHEDULES[name]
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        second = 2 * ranks - 1 - rank if is_v else ranks + rank
        numbers = [rank, second][:per_rank]
        self.models = [build(number, per_rank * ranks) for number in numbers]
        self.stages = [
            RecordedStage(model, number, per_rank * ranks, device, group=group)
            for number, model in zip(numbers, self.models, strict=True)
        ]

        def loss_of(output: Tensor, targets: Tensor) -> Tensor:
            return loss_fn(output, targets) / microbatches  # backward adds: the batch's mean

        self.schedule = schedule_class(
            self.stages if per_rank > 1 else self.stages[0],
            microbatches,
            loss_of,
            # True, the default, divides all of .grad: what an earlier batch has added, once more.
            scale_grads=False,
        )

    def step(self, x_BT: Tensor, y_BT: Tensor, recorder: Recorder | None = None) -> Tensor:
        """Forward and backward of all micro-batches; gradients are added to the parameters' .grad.

        Every rank passes the full batch. Returns the mean loss on the rank that has the last stage,
        0 on all other ranks.
        """
        for stage in self.stages:
            stage.recorder = recorder or Recorder(x_BT.device)
        # Contiguous: torch 2.11 refuses micro-batches that are views of longer sequences.
        inputs = [x_BT.contiguous()] if any(stage.is_first for stage in self.stages) else []
        if not any(stage.is_last for stage in self.stages):
            self.schedule.step(*inputs)
            return torch.zeros((), device=x_BT.device)
        losses = []  # the schedule appends the loss of each micro-batch
        self.schedule.step(*inputs, target=y_BT.contiguous(), losses=losses)
        return torch.stack(losses).detach().sum()


class RecordedStage(PipelineStage):
    """A PipelineStage that tells a recorder when it computes.

    The schedule calls these three methods. It receives before each call, and sends after it.
    """

    recorder: Recorder

    def forward_one_chunk(self, i, *args, **kwargs):
        with self.recorder("F", self.stage_index, i):
            return super().forward_one_chunk(i, *args, **kwargs)

    def backward_one_chunk(self, i, loss=None, full_backward=True, **kwargs):
        kwargs |= {"loss": loss, "full_backward": full_backward}
        with self.recorder("B" if full_backward else "I", self.stage_index, i):
            return super().backward_one_chunk(i, **kwargs)

    def backward_weight_one_chunk(self, i, **kwargs):
        with self.recorder("W", self.stage_index, i):
            return super().backward_weight_one_chunk(i, **kwargs)


# ---- the comparison


def compare(args, worker: Worker) -> None:
    p, device = worker.world_size, worker.device
    config = GPTConfig(block_size=args.length, layers=args.layers or 2 * p, dim=args.dim)
    batch_size, counts = args.batch_size or 4 * p, args.microbatches or [2 * p]
    check(config.layers, batch_size, counts, p)
    say(f"{config.layers} blocks, {p} ranks, {batch_size} sequences of {args.length} tokens")
    build = partial(gpt_stage, config, seed=args.seed, device=device)
    runs = {}
    for name in SCHEDULES:
        for m in counts:
            pipeline = Pipeline(name, m, build, cross_entropy, device)
            runs[name, m] = Run(pipeline.models, pipeline.step)
    compare_with_one_process(runs, config, args, batch_size, worker)
    show_timelines(runs, counts, config, text_batch(0, batch_size, args.length, device), worker)


def show_timelines(runs: dict, counts: list[int], config: GPTConfig, batch, worker: Worker) -> None:
    """Bubble fraction and memory of each schedule, and a picture with the first m."""
    ranks = "".join(f"  rank {r}" for r in range(worker.world_size))
    say("\nbubble fraction, mean over ranks         formula simulated  measured   peak MB saved")
    say(f"{'schedule':22} micro-batches{'':31}{ranks}")
    pictures = []
    for (name, m), run in runs.items():
        kept = gather(kept_at_most(run, *batch) / 1e6)
        timelines = timer_timelines(name, m, config, batch, worker.device)
        orders = [[event[:3] for event in line] for line in timelines]
        per_rank = SCHEDULES[name][1]
        played = idle_share(simulate(orders, durations(SECONDS / per_rank)))
        formula = "" if "Zero" in name else f"{expected_idle(worker.world_size, m, per_rank):.1%}"
        shares = f"{formula:>12}{played:10.1%}{idle_share(timelines):10.1%}"
        say(f"{name:22} {m:13}{shares}" + "".join(f"{mb:8.2f}" for mb in kept))
        if m == counts[0]:
            pictures.append(f"{name}\n" + draw(timelines, SECONDS / 2))
    say(f"\n{counts[0]} micro-batches. 0: forward of micro-batch 0; a: its backward, or only the")
    say(f"gradient of its input; A: those of its weights; dot: idle; {500 * SECONDS:.0f} ms each")
    say("\n".join(pictures))


def timer_timelines(name: str, m: int, config: GPTConfig, batch, device) -> list[list[tuple]]:
    """The timelines of all ranks, with stages that sleep."""
    build = partial(TimerStage, config, seconds=SECONDS / SCHEDULES[name][1], device=device)
    pipeline = Pipeline(name, m, build, timer_loss, device)
    return quickest(Run(pipeline.models, pipeline.step), *batch, steps=2)


def durations(seconds: float):
    """(kind, stage) -> seconds that TimerStage takes."""
    units = {"F": 1, "B": 2, "I": 1, "W": 1}
    # torch computes all gradients of the first stage in "W": no stage needs that of its input.
    units_of_first = {"F": 1, "B": 2, "I": 0, "W": 2}
    return lambda kind, stage: seconds * (units if stage > 0 else units_of_first)[kind]


def check(layers: int, batch_size: int, counts: list[int], ranks: int) -> None:
    """Raise `UserError` if the sizes do not fit, before any rank waits for another one."""
    if layers < 2 * ranks:
        raise UserError(f"--layers {layers} are too few: {ranks} ranks with two stages each")
    for m in counts:
        if m < ranks:
            raise UserError(f"{m} micro-batches do not fill {ranks} stages: at least as many")
        rounds = m // ranks
        if m % rounds:
            raise UserError(
                f"interleaved schedules take the micro-batches in {rounds} rounds, into which "
                f"{m} do not divide: choose a multiple of {ranks}"
            )
        if batch_size % m:
            raise UserError(f"--batch-size {batch_size} does not divide into {m} micro-batches")


def parse_args():
    return read_arguments("The pipeline schedules of torch, equal to one process.", "2 p", 2)


if __name__ == "__main__":
    main()
