"""Pipeline parallelism by hand: GPipe and 1F1B on point-to-point calls, equal to one process.

    python parallel_basics/pipeline_from_scratch.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/pipeline_from_scratch.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/pipeline_from_scratch.py

The blocks of a GPT are cut into stages, one per rank. A batch is cut into micro-batches, which pass
through the stages one after another: forward down the ranks, then their gradients back up. When a
rank does what is its schedule: a list of ("F", micro-batch) and ("B", micro-batch). Two functions
write such lists, and one loop, Pipeline.step, runs any of them.

Look at

1. the differences to one process: rounding, in the loss, in every gradient, in the parameters.
2. the picture: who waits when. Both schedules wait equally long.
3. the idle share next to (p - 1) / (m + p - 1), p stages, m micro-batches. One micro-batch (m = 1)
   is a pipeline in which only one rank works at a time.
4. the activations that are kept for backward: GPipe keeps those of all micro-batches, 1F1B those of
   at most p. That is all that 1F1B is better at.
"""

import itertools
import os
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
    span,
    text_batch,
    timer_loss,
)
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

SECONDS = 0.008  # of a timer stage's forward


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def gpipe(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """All forwards, then all backwards: Huang et al., arXiv 1811.06965."""
    return [("F", i) for i in range(microbatches)] + [("B", i) for i in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """One forward, one backward, as soon as there is something to do backward.

    The last stage can do that at once. A stage that is n before it must send n micro-batches ahead
    until the first gradient can come back. From then on each backward frees the activations of one
    micro-batch before the next forward adds some: at most p - stage are kept. (Narayanan et al.,
    arXiv 2104.04473, section 2.2: "PipeDream-Flush".)
    """
    ahead = min(stages - 1 - stage, microbatches)
    actions = [("F", i) for i in range(ahead)]
    for i in range(microbatches - ahead):
        actions += [("F", ahead + i), ("B", i)]
    return actions + [("B", i) for i in range(microbatches - ahead, microbatches)]


SCHEDULES = {"GPipe": gpipe, "1F1B": one_f_one_b}


def connect(ranks: list[int]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A group for activations and one for gradients; `ranks` have the stages, in order.

    Two, because NCCL does what one group is asked for in that order: a send that nobody receives
    yet would hold up a receive behind it. Every rank of the job must call this, also if it is in
    none of them.
    """
    return dist.new_group(ranks), dist.new_group(ranks)


class Pipeline:
    """One rank's stage, and its connections to the stages before and after it.

    loss_fn: (output of the last stage, targets) of a micro-batch -> its mean loss.
    """

    def __init__(self, model, loss_fn, groups: tuple[dist.ProcessGroup, dist.ProcessGroup]):
        self.model, self.loss_fn = model, loss_fn
        self.down, self.up = groups
        self.stage, self.stages = dist.get_rank(self.down), dist.get_world_size(self.down)

    def step(
        self, schedule: list[tuple[str, int]], x_BT: Tensor, y_BT: Tensor, activations=None
    ) -> tuple[Tensor, list[tuple]]:
        """Run a schedule; gradients are added to the parameters' .grad, as backward() does.

        Every rank passes the whole batch: the first stage uses the inputs, the last the targets.
        Returns the batch's mean loss on the last stage, 0 elsewhere, and this rank's timeline.

        Only a receive waits, a send never does. So a rank waits for nothing but an action of a
        neighbour, and a schedule that `simulate` can play to its end cannot deadlock.
        """
        m, first, last = len(schedule) // 2, self.stage == 0, self.stage == self.stages - 1
        if len(x_BT) % m:
            raise ValueError(f"{len(x_BT)} sequences do not divide into {m} micro-batches")
        xs, ys, loss = x_BT.chunk(m), y_BT.chunk(m), torch.zeros((), device=x_BT.device)
        started, sends, gradient_sends, timeline = {}, {}, [], []
        for kind, i in schedule:
            if kind == "F":
                x = xs[i] if first else self.receive(xs[i], self.down, self.stage - 1)
                x.requires_grad_(not first)
                start = clock(x)
                with activations.hooks() if activations else nullcontext():
                    out = self.model(x)
                    if last:
                        # Gradients are added up: the sum over micro-batches is the batch's mean.
                        out = self.loss_fn(out, ys[i]) / m
                        loss += out.detach()
                started[i] = x, out
                timeline.append((kind, self.stage, i, start, clock(x)))
                if activations:
                    activations.note()
                if not last:
                    sends[i] = dist.isend(
                        out.detach().contiguous(), group=self.down, group_dst=self.stage + 1
                    )
            else:
                gradient = None if last else self.receive(xs[i], self.up, self.stage + 1)
                start = clock(x_BT)
                x, out = started.pop(i)
                out.backward(
                    gradient
                )  # where this stage's output has no loss yet: from its gradient
                timeline.append((kind, self.stage, i, start, clock(x_BT)))
                if not last:
                    sends.pop(i).wait()  # it has arrived: its gradient is here
                if not first:
                    gradient_sends.append(
                        dist.isend(x.grad, group=self.up, group_dst=self.stage - 1)
                    )
                del x, out  # and with them, what autograd kept for this micro-batch
        for work in gradient_sends:
            work.wait()
        return loss, timeline

    def receive(self, tokens_BT: Tensor, group, stage: int) -> Tensor:
        """(B, T, C) of a micro-batch: its activations, or their gradient."""
        tensor = torch.empty(*tokens_BT.shape, self.model.config.dim, device=tokens_BT.device)
        dist.irecv(tensor, group=group, group_src=stage).wait()
        return tensor


def clock(tensor: Tensor) -> float:
    """Now, when this rank's computation is done. Other streams may still send."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()


def compare(args, worker: Worker) -> None:
    p, rank, device = worker.world_size, worker.rank, worker.device
    config = GPTConfig(block_size=args.length, layers=args.layers or 2 * p, dim=args.dim)
    batch_size, counts = args.batch_size or 4 * p, args.microbatches or [1, p, 4 * p]
    check(config.layers, batch_size, counts, p)
    batches = [text_batch(step, batch_size, args.length, device) for step in range(args.steps)]
    groups = connect(list(range(p)))
    say = print if worker.is_main else lambda *_: None
    say(f"{config.layers} blocks in {p} stage(s), {batch_size} sequences of {args.length} tokens")

    runs = {}
    for name, m in itertools.product(SCHEDULES, counts):
        model = initialize(GPT(config, cut(config.layers, p)[rank]).to(device), args.seed)
        optimizer = OPTIMIZERS[args.optimizer](model.parameters())
        runs[name, m] = Pipeline(model, cross_entropy, groups), optimizer
    one = Reference(config, cross_entropy, args.optimizer, args.seed, device)
    worst = torch.zeros(len(runs), 3, device=device)
    for x_BT, y_BT in batches:
        expected = one.step(x_BT, y_BT)
        for row, ((name, m), (pipeline, optimizer)) in zip(worst, runs.items(), strict=True):
            optimizer.zero_grad()
            loss, _ = pipeline.step(SCHEDULES[name](rank, p, m), x_BT, y_BT)
            optimizer.step()
            row.copy_(row.maximum(one.differences([pipeline.model], expected, loss)))
    say(f"\nlargest difference to one process, in {args.steps} steps with {args.optimizer}")
    say("schedule  micro-batches       loss   gradient  parameter")
    for (name, m), row in zip(runs, worst.tolist(), strict=True):
        say(f"{name:9} {m:13}" + "".join(f"{value:11.1e}" for value in row))

    timers = Pipeline(TimerStage(config, rank, p, SECONDS), timer_loss, groups)
    m, ms = min(2 * p, 10), round(1e3 * SECONDS)
    say(f"\n{m} micro-batches through stages that only wait, {ms} ms forward and {2 * ms} backward")
    say(f"(a character is {ms} ms; 0 is a forward, a the backward of the same; a dot is idle)")
    x_BT, y_BT = text_batch(0, m, args.length, device)
    for name, schedule in SCHEDULES.items():
        timelines, _ = quickest(timers, schedule(rank, p, m), x_BT, y_BT)
        say(f"{name}\n" + draw(timelines, SECONDS))

    (x_BT, y_BT), memory = batches[0], []
    say("\nidle share, mean over ranks, in the quickest of 3 steps")
    say("schedule  micro-batches  (p-1)/(m+p-1)  stages that wait  GPT stages")
    for (name, m), (pipeline, _) in runs.items():
        order = SCHEDULES[name](rank, p, m)
        (waits, _), (computes, most) = (
            quickest(pipe, order, x_BT, y_BT) for pipe in (timers, pipeline)
        )
        shares = f"{expected_idle(p, m):15.1%}{idle_share(waits):18.1%}{idle_share(computes):12.1%}"
        say(f"{name:9} {m:13}{shares}")
        memory.append([name, m, gather((alive(order), most))])
    if device.type == "cpu" and p > (os.cpu_count() or 1):
        say(f"({p} ranks share {os.cpu_count()} cores, for which GPT stages wait as well)")

    say("\nkept for backward at most: micro-batches, and MB as counted by the hooks of autograd")
    say("schedule  micro-batches" + "".join(f"{f'rank {r}':>14}" for r in range(p)))
    for name, m, ranks in memory:
        cells = "".join(f"{count:6}{most / 1e6:8.2f}" for count, most in ranks)
        say(f"{name:9} {m:13}{cells}")


def check(layers: int, batch_size: int, counts: list[int], stages: int) -> None:
    if layers < stages:
        raise UserError(f"--layers {layers} are too few for {stages} stages: one each at least")
    for m in counts:
        if batch_size % m:
            raise UserError(f"--batch-size {batch_size} does not divide into {m} micro-batches")


def alive(schedule: list[tuple[str, int]]) -> int:
    """The most micro-batches whose forward is done and whose backward is not."""
    return max(itertools.accumulate(1 if kind == "F" else -1 for kind, _ in schedule))


def quickest(pipeline: Pipeline, schedule, x_BT, y_BT, steps: int = 3) -> tuple[list, int]:
    """The timelines of all ranks in the quickest of some steps, and the activations kept at most.

    Other programs on the machine make a step longer, never shorter.
    """
    found, activations = [], Activations(pipeline.model)
    pipeline.step(schedule, x_BT, y_BT, activations)  # counting takes time: a step of its own
    for _ in range(steps):
        dist.barrier()
        _, timeline = pipeline.step(schedule, x_BT, y_BT)
        found.append(gather(timeline))
    return min(found, key=span), activations.most


def parse_args():
    return read_arguments("Pipeline schedules by hand, equal to one process.", "1, p and 4 p", 3)


if __name__ == "__main__":
    main()
