"""Pipeline parallelism by hand: GPipe and 1F1B with sends and receives, equal to one process.

    python parallel_basics/pipeline_from_scratch.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/pipeline_from_scratch.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/pipeline_from_scratch.py

The blocks of a GPT are split into stages, one per rank. A batch is split into micro-batches, which
pass through the stages one after another: activations down the ranks, then gradients back up. A
schedule is the order of a rank's work: a list of ("F", micro-batch) and ("B", micro-batch). Two
functions write such lists, and one loop, Pipeline.step, runs any of them.

Look at

1. the differences from one process: rounding, in the loss, in every gradient, in the parameters.
2. the picture: which rank waits when. Both schedules wait equally long.
3. the bubble fraction next to (p - 1) / (m + p - 1), p stages, m micro-batches. With one
   micro-batch (m = 1) only one rank works at a time.
4. the activations saved for backward: GPipe saves those of all micro-batches, 1F1B those of at most
   p. This is the only advantage of 1F1B.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, product

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
from pipeline_timelines import Recorder, draw, expected_idle, idle_share
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

SECONDS = 0.008  # forward of a timer stage


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def gpipe(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """All forwards, then all backwards: Huang et al., arXiv 1811.06965."""
    return [("F", i) for i in range(microbatches)] + [("B", i) for i in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Alternate one forward and one backward, as soon as the first gradient arrives.

    The last stage begins at once. A stage n places earlier first runs n forwards (warm-up). After
    that each backward frees the activations of one micro-batch before the next forward saves more:
    a stage holds at most p - stage micro-batches. (Narayanan et al., arXiv 2104.04473, section 2.2:
    "PipeDream-Flush".)
    """
    ahead = min(stages - 1 - stage, microbatches)
    actions = [("F", i) for i in range(ahead)]
    for i in range(microbatches - ahead):
        actions += [("F", ahead + i), ("B", i)]
    return actions + [("B", i) for i in range(microbatches - ahead, microbatches)]


SCHEDULES = {"GPipe": gpipe, "1F1B": one_f_one_b}


def connect(ranks: list[int]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """One group for activations and one for gradients; `ranks`, ascending, have the stages.

    Two groups, because NCCL runs the calls of one group in order: a send whose receiver is not
    ready would block a receive behind it. Every rank of the job must call this, also a rank that is
    not in `ranks`. Raises ValueError if they do not ascend: new_group sorts them.
    """
    if ranks != sorted(ranks):
        raise ValueError(f"the ranks {ranks} of a pipeline do not ascend")
    return dist.new_group(ranks), dist.new_group(ranks)


class Pipeline:
    """One rank's stage, and its connections to the previous and the next stage.

    loss_fn: (output of the last stage, targets) of a micro-batch -> its mean loss. The mean of
        these is the batch's if all micro-batches have equally many targets.

    Receives wait, sends do not. (A stage waits only for a gradient that it sent p messages ago, and
    gradients arrive in order.) So a rank waits only for an action of a neighbour, and a schedule
    that `simulate` can play to its end cannot deadlock, with Gloo. All stages must take the
    micro-batches in one order, because messages carry no number. (On several GPUs it has not run.
    NCCL does not promise progress of two groups at once: torch's schedules batch their sends.)
    """

    def __init__(self, model, loss_fn, groups: tuple[dist.ProcessGroup, dist.ProcessGroup]):
        self.model, self.loss_fn = model, loss_fn
        self.down, self.up = groups
        self.stage, self.stages = dist.get_rank(self.down), dist.get_world_size(self.down)
        self.is_first, self.is_last = self.stage == 0, self.stage == self.stages - 1

    def step(
        self,
        schedule: list[tuple[str, int]],
        x_BT: Tensor,
        y_BT: Tensor,
        recorder: Recorder | None = None,
    ) -> Tensor:
        """Run a schedule; gradients are added to the parameters' .grad, as backward() does.

        Every rank passes the full batch: the first stage uses the inputs, the last the targets.
        Returns the batch's mean loss on the last stage, 0 on all other stages.
        """
        microbatches = len(schedule) // 2
        if len(x_BT) % microbatches:
            raise ValueError(
                f"{len(x_BT)} sequences do not divide into {microbatches} micro-batches"
            )
        self.inputs, self.targets = x_BT.chunk(microbatches), y_BT.chunk(microbatches)
        self.loss = torch.zeros((), device=x_BT.device)
        self.computed = {}  # micro-batch -> (input, output), from its forward to its backward
        self.sends, self.gradient_sends = {}, []
        self.record = recorder or (lambda *action: nullcontext())
        for kind, i in schedule:
            if kind == "F":
                self.forward(i)
            else:
                self.backward(i)
        for work in self.gradient_sends:
            work.wait()
        return self.loss

    def forward(self, i: int) -> None:
        if self.is_first:
            x = self.inputs[i]
        else:
            x = self.receive(i, self.down, self.stage - 1).requires_grad_()
        with self.record("F", self.stage, i):
            output = self.model(x)
            if self.is_last:
                # Backward adds gradients up: divided losses sum up to the batch's mean loss.
                output = self.loss_fn(output, self.targets[i]) / len(self.inputs)
                self.loss += output.detach()
        self.computed[i] = x, output
        if not self.is_last:
            to_send = output.detach().contiguous()
            self.sends[i] = dist.isend(to_send, group=self.down, group_dst=self.stage + 1)

    def backward(self, i: int) -> None:
        # Backward starts from the loss; without a loss, from the gradient of the stage's output.
        gradient = None if self.is_last else self.receive(i, self.up, self.stage + 1)
        x, output = self.computed.pop(i)  # frees the saved activations after backward
        with self.record("B", self.stage, i):
            if output.requires_grad:  # not of a first stage whose parameters are all frozen
                output.backward(gradient)
        if not self.is_last:
            self.sends.pop(i).wait()  # already complete: its gradient has come back
        if not self.is_first:
            work = dist.isend(x.grad, group=self.up, group_dst=self.stage - 1)
            self.gradient_sends.append(work)
            if len(self.gradient_sends) > self.stages:  # a Work holds its tensor until wait()
                self.gradient_sends.pop(0).wait()

    def receive(self, i: int, group, stage: int) -> Tensor:
        """(B, T, C) of a micro-batch: its activations, or their gradient.

        All stages compute in the dtype of their parameters.
        """
        shape, like = self.inputs[i].shape, next(self.model.parameters())
        tensor = torch.empty(*shape, self.model.config.dim, dtype=like.dtype, device=like.device)
        dist.irecv(tensor, group=group, group_src=stage).wait()
        return tensor


# ---- the comparison


def compare(args, worker: Worker) -> None:
    p, rank, device = worker.world_size, worker.rank, worker.device
    config = GPTConfig(block_size=args.length, layers=args.layers or 2 * p, dim=args.dim)
    batch_size, counts = args.batch_size or 4 * p, args.microbatches or [1, p, 4 * p]
    check(config.layers, batch_size, counts, p)
    say(f"{config.layers} blocks in {p} stage(s), {batch_size} sequences of {args.length} tokens")
    groups = connect(list(range(p)))
    timer_stage = TimerStage(config, rank, p, SECONDS, device)
    timers = Pipeline(timer_stage, timer_loss, groups)

    runs, timer_runs = {}, {}
    for name, m in product(SCHEDULES, counts):
        schedule = SCHEDULES[name](rank, p, m)
        model = gpt_stage(config, rank, p, args.seed, device)
        pipeline = Pipeline(model, cross_entropy, groups)
        runs[name, m] = Run([model], partial(pipeline.step, schedule))
        timer_runs[name, m] = Run([timers.model], partial(timers.step, schedule))
    compare_with_one_process(runs, config, args, batch_size, worker)

    m, ms = min(2 * p, 10), round(1e3 * SECONDS)
    say(f"\n{m} micro-batches through stages that sleep: {ms} ms forward, {2 * ms} ms backward")
    say(f"(one character is {ms} ms; 0: forward of micro-batch 0, a: its backward, dot: idle)")
    batch = text_batch(0, m, args.length, device)
    for name, schedule in SCHEDULES.items():
        run = Run([timers.model], partial(timers.step, schedule(rank, p, m)))
        say(f"{name}\n" + draw(quickest(run, *batch), SECONDS))

    batch = text_batch(0, batch_size, args.length, device)
    say("\nbubble fraction, mean over ranks, in the fastest of 3 steps")
    say("schedule  micro-batches  (p-1)/(m+p-1)  sleeping stages  GPT stages")
    for (name, m), run in runs.items():
        waits, computes = quickest(timer_runs[name, m], *batch), quickest(run, *batch)
        shares = f"{expected_idle(p, m):15.1%}{idle_share(waits):17.1%}{idle_share(computes):12.1%}"
        say(f"{name:9} {m:13}{shares}")
    # macOS has no sched_getaffinity.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    if device.type == "cpu" and p > cores:
        say(f"(GPT stages also wait for a core: {p} ranks share {cores} core(s))")

    say("\npeak saved for backward: micro-batches, and MB counted by autograd's hooks")
    say("schedule  micro-batches" + "".join(f"{f'rank {r}':>14}" for r in range(p)))
    for (name, m), run in runs.items():
        of_ranks = gather((alive(SCHEDULES[name](rank, p, m)), kept_at_most(run, *batch)))
        cells = "".join(f"{count:6}{nbytes / 1e6:8.2f}" for count, nbytes in of_ranks)
        say(f"{name:9} {m:13}{cells}")


def check(layers: int, batch_size: int, counts: list[int], stages: int) -> None:
    if layers < stages:
        raise UserError(f"--layers {layers} are too few for {stages} stages: one each at least")
    for m in counts:
        if batch_size % m:
            raise UserError(f"--batch-size {batch_size} does not divide into {m} micro-batches")


def alive(schedule: list[tuple[str, int]]) -> int:
    """The peak number of micro-batches between their forward and their backward."""
    return max(accumulate(1 if kind == "F" else -1 for kind, _ in schedule))


def parse_args():
    return read_arguments("Pipeline schedules by hand, equal to one process.", "1, p and 4 p", 3)


if __name__ == "__main__":
    main()
