r"""async_op=True and Work handles: overlap communication with computation, and measure the gain.

    torchrun --standalone --nproc_per_node=2 collectives/async_work.py
    torchrun --standalone --nproc_per_node=2 collectives/async_work.py \
        --buckets 8 --megabytes 2 --repeats 9 --plot overlap.png
    python collectives/async_work.py                # one rank: handles, but nothing to overlap

Look at

1. the handle. async_op=True returns at once; until wait() has returned, no code may read or
   write the tensor. A chain of then() runs when the result is there; no thread waits for it.
   (With NCCL it runs at once: only streams wait. In torch 2.15 get_future() itself makes the
   current stream wait.)
2. the timelines: the same computation and the same transfers, in two orders. `-` begins when a
   transfer is started and ends when it is complete.
3. what bounds the gain. The first bucket must be computed before any transfer can start, and no
   computation is left to overlap the last transfer. Over loopback the CPU copies the bytes, so a
   transfer overlaps only while a core is idle. NCCL takes some multiprocessors of the GPU instead,
   and between nodes a CPU thread.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least, between
from costs import synchronize, time_calls
from runtime import Worker, distributed_worker
from tables import print_by_rank, print_table
from timelines import draw, plot
from torch.distributed.elastic.multiprocessing.errors import record

ORDERS = ("compute", "communicate", "sequential", "overlapped")


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        # For messages between the CPUs while a collective is in flight in the default group.
        aside = dist.new_group(backend="gloo")
        facts = try_handle(worker.device, aside)
        print_by_rank(worker, f"1. all_reduce, rank {worker.world_size - 1} starts last", **facts)
        tensors = [
            torch.zeros(int(args.megabytes * 2**20) // 4, device=worker.device)
            for _ in range(args.buckets)
        ]
        compute = balanced_compute(tensors[0], args.ratio)
        results = measure_overlap(tensors, compute, args.repeats)
        if worker.is_main:
            report(results, args, worker)
            if args.plot:
                plot(results["spans"], args.plot)


# ---- the handle


def try_handle(device: torch.device, aside=None) -> dict:
    """What a Work handle returns on this rank. Every rank must call this.

    aside: a Gloo group of the same ranks. The last rank starts its all_reduce only after every
    other rank has started its own and has called is_completed(), which must be False then.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    last, gave_up = rank == world_size - 1, "-"
    x = torch.full((2,), float(rank + 1), device=device)
    dist.all_reduce(torch.zeros_like(x))  # in its first call NCCL connects: all ranks must come
    if last:
        dist.barrier(group=aside)
    work = dist.all_reduce(x, async_op=True)
    early = "-" if last else work.is_completed()
    if not last:
        if device.type == "cpu":  # NCCL's wait(timeout) also ends the group when it gives up
            try:
                work.wait(timeout=timedelta(milliseconds=50))
            except RuntimeError:
                gave_up = "raised"  # the transfer itself goes on
        dist.barrier(group=aside)
    work.wait()  # on a GPU: its stream waits, this thread does not
    synchronize(device)

    # value() of the handle's future is a list of tensors. then() returns a future, whose value is
    # what the callback returns.
    y = torch.full((2,), float(rank + 1), device=device)
    total = dist.all_reduce(y, async_op=True).get_future()
    mean = total.then(lambda future: future.value()[0] / world_size)
    text = mean.then(lambda future: f"mean {future.value()[0].item():g}")
    several = [dist.all_reduce(torch.ones(1, device=device), async_op=True) for _ in range(3)]
    all_of_them = torch.futures.collect_all([work.get_future() for work in several])
    return {
        "completed_at_once": early,
        "wait_of_50_ms": gave_up,
        "completed_after_wait()": work.is_completed(),
        "sum": x,
        "then,_then": text.wait(),
        "of_three": f"{len(all_of_them.wait())} complete",
    }


# ---- the two orders


class StopWatch:
    """Takes times where the work is done: on a CPU now, on a GPU when its stream gets there."""

    def __init__(self, device: torch.device):
        self.device, self.on_gpu = device, device.type != "cpu"
        self.side = torch.Stream(device) if self.on_gpu else None
        self.first = self.now()

    def now(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def at_end(self, work: dist.Work):
        if not self.on_gpu:
            return work.get_future().then(lambda _: time.perf_counter())
        with self.side:  # this stream waits for the transfer only
            work.wait()
            return self.now()

    def seconds(self, mark) -> float:
        """From the start of the watch to `mark`."""
        if not self.on_gpu:
            return (mark if isinstance(mark, float) else mark.wait()) - self.first
        mark.synchronize()
        return self.first.elapsed_time(mark) / 1e3


def run_order(order: str, tensors: list, compute: Callable[[], object], group=None) -> list[tuple]:
    """Compute and all-reduce bucket after bucket, as DDP's backward does.

    Returns per bucket (begin, end of computation, begin, end of transfer) in seconds.
    """
    watch, marks, works = StopWatch(tensors[0].device), [], []
    for tensor in tensors:
        begin = watch.now()
        if order != "communicate":
            compute()
        end = started = done = watch.now()
        if order != "compute":
            work = dist.all_reduce(tensor, group=group, async_op=True)
            if order == "overlapped":
                done = watch.at_end(work)
                works.append(work)
            else:
                work.wait()  # exposed: no computation runs meanwhile
                done = watch.now()
        marks.append((begin, end, started, done))
    for work in works:
        work.wait()  # before any code reads the tensors
    return [tuple(watch.seconds(mark) for mark in bucket) for bucket in marks]


def balanced_compute(tensor: torch.Tensor, ratio: float, group=None) -> Callable[[], None]:
    """Matrix products that take `ratio` times as long as an all_reduce of `tensor`."""
    size = 256 if tensor.device.type == "cpu" else 1024
    a, out = torch.ones(size, size, device=tensor.device), torch.empty(size, size).to(tensor)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    def seconds(run: Callable, calls: int) -> float:
        # All ranks get the same times, or they would not compute equally long.
        return statistics.median(time_calls(run, 5, calls, tensor.device, group))

    transfer = seconds(lambda: dist.all_reduce(tensor, group=group), 3)
    count = 20
    for _ in range(2):  # first a rough count, then a better one
        count = max(1, round(count * ratio * transfer / seconds(lambda c=count: products(c), 1)))
    return lambda: products(count)


def measure_overlap(tensors: list, compute: Callable, repeats: int, group=None) -> dict:
    """Seconds of the four ORDERS on the slowest rank: `repeats` samples each, taken in turn.

    Also "processor": for each order, the median of the CPU seconds of all ranks together; and
    "spans": for each order, what run_order() returned on this rank in its fastest repeat.
    """
    device = tensors[0].device
    taken, spans = {order: [] for order in ORDERS}, {}
    for i in range(repeats + 1):
        for order in ORDERS if i % 2 else ORDERS[::-1]:
            dist.barrier(group=group)
            started, used = time.perf_counter(), time.process_time()
            these_spans = run_order(order, tensors, compute, group)
            synchronize(device)
            sample = time.perf_counter() - started, time.process_time() - used
            if i == 0:
                continue  # the first round warms up
            if all(sample[0] < before[0] for before in taken[order]):
                spans[order] = these_spans
            taken[order].append(sample)
    samples = torch.tensor([taken[order] for order in ORDERS], dtype=torch.float64, device=device)
    slowest, total = samples[..., 0].contiguous(), samples[..., 1].contiguous()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(total, group=group)
    seconds = dict(zip(ORDERS, slowest.tolist(), strict=True))
    processor = dict(zip(ORDERS, map(statistics.median, total.tolist()), strict=True))
    return {**seconds, "processor": processor, "spans": spans}


def hidden(results: dict) -> list[float]:
    """The fraction of the communication that is overlapped, for each repeat."""
    names = ("sequential", "overlapped", "communicate")
    return [(s - o) / c for s, o, c in zip(*(results[n] for n in names), strict=True)]


def bounds(results: dict, buckets: int, cores: int) -> dict[str, float]:
    """Seconds that no order of the same work can beat, and why."""
    alone, sent = (statistics.median(results[name]) for name in ("compute", "communicate"))
    used = results["processor"]["compute"] + results["processor"]["communicate"]
    return {
        "first bucket computed, last one sent, without overlap": max(
            alone + sent / buckets, sent + alone / buckets
        ),
        f"CPU time of all ranks / {cores} cores": used / cores,
    }


# ---- what is shown


def report(results: dict, args, worker: Worker) -> None:
    print(f"\n2. {args.buckets} buckets of {args.megabytes:g} MiB; rank 0, # computes, - sends")
    for order in ("sequential", "overlapped"):
        print(*draw(order, results["spans"]), sep="\n")
    print(f"\n3. ms per order: {args.repeats} repeats, taken in turn")
    rows = [
        [order, *(f"{1e3 * f(results[order]):.1f}" for f in (statistics.median, min, max))]
        for order in ORDERS
    ]
    print_table(["order", "median", "min", "max"], rows)
    if worker.world_size == 1:
        return
    gains = [s / o for s, o in zip(results["sequential"], results["overlapped"], strict=True)]
    gain = [f"{f(gains):.2f}" for f in (statistics.median, min, max)]
    print(f"sequential / overlapped, per repeat: {gain[0]} ({gain[1]} ... {gain[2]})")
    covered = [f"{f(hidden(results)):.0%}" for f in (statistics.median, min, max)]
    print(f"communication overlapped: {covered[0]} ({covered[1]} ... {covered[2]})")
    if worker.device.type == "cpu":
        in_turn, sent = (statistics.median(results[k]) for k in ("sequential", "communicate"))
        print("upper bounds, because no order can take fewer ms than")
        # macOS has no sched_getaffinity.
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        for name, seconds in bounds(results, args.buckets, cores).items():
            most = min(1, (in_turn - seconds) / sent)
            print(f"{1e3 * seconds:7.1f}, overlapping {most:4.0%}: {name}")


def parse_args():
    parser = ArgumentParser(description="Work handles; communication overlapped with computation.")
    add = parser.add_argument
    add("--buckets", type=at_least(1), default=6, help="tensors to compute and all-reduce")
    add("--megabytes", type=between(0.001, 1000), default=4.0, help="MiB of each tensor")
    add(
        "--ratio",
        type=between(0.01, 100),
        default=1.0,
        help="time of computation / time of communication",
    )
    add(
        "--repeats",
        type=at_least(1),
        default=5,
        help="samples per order",
    )
    add("--plot", type=Path, metavar="FILE", help="save the timelines as a picture (PNG, PDF)")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.plot and not args.plot.resolve().parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no such directory")
    return args


if __name__ == "__main__":
    main()
