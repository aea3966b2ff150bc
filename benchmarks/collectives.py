"""Measure what communication costs; the two sides of every comparison alternate in one run.

    python benchmarks/collectives.py               # everything; writes results/collectives.md
    python benchmarks/collectives.py --repeats 3   # a quick look

(a) our ring (all_reduce_algorithms.py) against Gloo's all_reduce, 2 and 4 ranks, 1 KB to 64 MB
(b) how much communication async_work.py overlaps with computation, over loopback
(c) this overlap over a link of 100 Mbit/s, between two network namespaces, in frames of 1,500 and
    of 9,000 bytes, which the CPU handles one by one. Needs Linux with unshare, ip and tc, and root
    or user namespaces; otherwise (c) is left out, and the report says why. This machine's own
    network is not touched: both namespaces have no name, and end with their processes.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "collectives"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank

import bench
import private_network
import torch
import torch.distributed as dist
from all_reduce_algorithms import ring
from async_work import balanced_compute, bounds, hidden, measure_overlap
from costs import bus_factor, fit_alpha_beta
from runtime import Worker, distributed_worker

SIZES = [2**k for k in range(10, 27, 2)]  # 1 KB to 64 MB
LOOPBACK, SLOW = (8, 4.0), (8, 1.0)  # number of buckets, and size of each in 2^20 bytes
FRAMES = (1500, 9000)  # bytes: Ethernet's usual maximum, and the maximum of "jumbo frames"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="repeats of each measurement")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # what a child measures
    args = parser.parse_args()
    if args.part:
        with distributed_worker("cpu") as worker:
            samples = PARTS[args.part](worker, args.repeats)
            if worker.is_main:
                bench.say(samples)
        return
    options = (__file__, "--repeats", args.repeats, "--part")
    sections = []
    for ranks in (2, 4):
        results = bench.measure(*bench.torchrun(ranks), *options, "against_gloo")
        sections += ring_text(results, ranks)
    results = bench.measure(*bench.torchrun(2), *options, "loopback")
    sections += ["## (b) Overlap over loopback", *overlap_text(results, *LOOPBACK)]
    sections.append("## (c) Overlap over a link of 100 Mbit/s")
    for frame in FRAMES:
        if reason := private_network.why_not():
            sections.append(f"Not measured: {reason}")
            break
        ranks = private_network.two_ranks(frame, sys.executable, *options, "slow")
        sections += slow_text(bench.measure(*ranks), frame)
    bench.write("collectives", "What communication costs", sections)


# ---- (a) seconds per call of the slowest rank


def against_gloo(worker: Worker, repeats: int) -> dict[str, dict]:
    """For each size: samples of both, of the ring's messages and additions alone, CPU seconds."""
    results = {}
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        sides = {
            "gloo": lambda t=tensor: dist.all_reduce(t),
            "ring": lambda t=tensor: ring(t),
            "messages": lambda t=tensor: messages_alone(t, worker),
            "additions": lambda t=tensor: additions_alone(t, worker),
        }
        calls = max(1, min(10, 2**18 // nbytes))
        taken = {name: [] for name in sides}
        for i in range(repeats + 1):
            for name in list(sides) if i % 2 else list(sides)[::-1]:
                dist.barrier()
                started, used = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    sides[name]()
                sample = time.perf_counter() - started, time.process_time() - used
                if i > 0:  # the first round warms up
                    taken[name].append([value / calls for value in sample])
        samples = torch.tensor(list(taken.values()), dtype=torch.float64)
        slowest, total = samples[..., 0].contiguous(), samples[..., 1].contiguous()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        results[nbytes] = dict(zip(sides, slowest.tolist(), strict=True))
        processor = map(statistics.median, total.tolist())
        results[nbytes]["processor"] = dict(zip(sides, processor, strict=True))
    return results


def messages_alone(tensor: torch.Tensor, worker: Worker) -> None:
    """The ring's messages, to the right and from the left, step by step, without additions."""
    chunks, n = tensor.chunk(worker.world_size), worker.world_size
    for step in range(2 * (n - 1)):
        send = dist.P2POp(dist.isend, chunks[step % 2], (worker.rank + 1) % n)
        receive = dist.P2POp(dist.irecv, chunks[(step + 1) % 2], (worker.rank - 1) % n)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()


def additions_alone(tensor: torch.Tensor, worker: Worker) -> None:
    chunks = tensor.chunk(worker.world_size)
    for _ in range(worker.world_size - 1):
        chunks[0].add_(chunks[1])


# ---- (b) and (c)


def loopback(worker: Worker, repeats: int) -> dict:
    return overlap(*LOOPBACK, repeats)


def slow(worker: Worker, repeats: int) -> dict:
    return overlap(*SLOW, repeats)


def overlap(buckets: int, megabytes: float, repeats: int) -> dict:
    tensors = [torch.zeros(int(megabytes * 2**18)) for _ in range(buckets)]
    for _ in range(3):  # until computation and communication take equal time
        results = measure_overlap(tensors, balanced_compute(tensors[0], ratio=1.0), repeats)
        if 0.8 < ratio_of(results) < 1.25:
            break
    del results["spans"]
    return results


def ratio_of(results: dict) -> float:
    """Time to compute / time to communicate; equal on all ranks."""
    return statistics.median(results["compute"]) / statistics.median(results["communicate"])


PARTS = {"against_gloo": against_gloo, "loopback": loopback, "slow": slow}


# ---- the report


def label(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 2**20 else f"{nbytes >> 10} KB"


def ring_text(results: dict, ranks: int) -> list[str]:
    factor, steps = bus_factor("all_reduce", ranks), 2 * (ranks - 1)
    rows = [
        ("size", "Gloo, ms", "ring, ms", "Gloo / ring, pair by pair", "busbw GB/s, Gloo", "ring")
    ]
    header = ("size", "ring, ms", "its messages alone", "its additions alone")
    parts = [(*header, "processor ms of all ranks: Gloo", "ring")]
    small, large = [], []  # sizes at which the ring is slower: label, and why
    for size, sides in results.items():
        nbytes, name = int(size), label(int(size))
        gloo, ours = ([1e3 * t for t in sides[side]] for side in ("gloo", "ring"))
        ratio = bench.ratio_of_pairs(gloo, ours)
        rates = [f"{factor * nbytes / statistics.median(s) / 1e6:.3g}" for s in (gloo, ours)]
        rows.append((name, *map(bench.summary, (gloo, ours, ratio)), *rates))
        ring_ms, sent_ms, added_ms = (
            1e3 * statistics.median(sides[side]) for side in ("ring", "messages", "additions")
        )
        used = [1e3 * sides["processor"][side] for side in ("gloo", "ring")]
        parts.append((name, *(f"{ms:.3g}" for ms in (ring_ms, sent_ms, added_ms, *used))))
        if statistics.median(ratio) < 1 and nbytes < 2**20:
            small.append(f"{name} ({1e3 * ring_ms / steps:.0f} us per step)")
        elif statistics.median(ratio) < 1:
            share = f"messages {sent_ms / ring_ms:.0%}, additions {added_ms / ring_ms:.0%}"
            large.append(f"{name} ({share}; {used[1] / used[0]:.2f})")
    sizes = [int(size) for size in results]
    fits = []
    for side in ("gloo", "ring"):
        medians = [statistics.median(sides[side]) for sides in results.values()]
        alpha, beta = fit_alpha_beta(sizes, medians)
        fits.append(f"{side} {1e6 * alpha:.0f} us + {1e9 * beta:.3g} ns per byte")
    text = [
        f"## (a) The ring against Gloo's all_reduce, {ranks} ranks",
        bench.table(rows),
        "A ratio above 1: the ring is faster. Medians (min ... max). 1 KB = 2^10 bytes.",
        f"Fitted, time = alpha + bytes * beta: {', '.join(fits)}.",
    ]
    if small:
        text.append(
            f"Slower, in the median of the pairs, at {', '.join(small)}: there the number of steps "
            f"matters, not the bytes: Python starts each of the ring's {steps} steps and waits for "
            "it, and each wakes a thread."
        )
    if large:
        text.append(
            f"Slower, in the median of the pairs, at {', '.join(large)}. In brackets: the share of "
            "its time that its messages alone and its additions alone take, then its CPU time "
            "relative to Gloo's. Over loopback, CPU time is the cost of a transfer."
        )
    return [*text, bench.table(parts)]


def overlap_text(results: dict, buckets: int, megabytes: float) -> list[str]:
    cores = bench.cores()
    rows = [
        (
            f"2 ranks, {buckets} buckets of {megabytes:g} MB, one thread per rank",
            "ms: median (min ... max)",
            "processor ms, all ranks",
        )
    ]
    for order in ("compute", "communicate", "sequential", "overlapped"):
        used = f"{1e3 * results['processor'][order]:.0f}"
        rows.append((order, bench.summary([1e3 * t for t in results[order]]), used))
    gain = bench.ratio_of_pairs(results["sequential"], results["overlapped"])
    share = [100 * h for h in hidden(results)]
    rows.append(("sequential / overlapped, pair by pair", bench.summary(gain), ""))
    rows.append(("communication overlapped, per cent", bench.summary(share), ""))
    in_turn, sent = (statistics.median(results[name]) for name in ("sequential", "communicate"))
    limits = [("no order can take fewer ms than", "ms", "overlaps at most, per cent")]
    for name, seconds in bounds(results, buckets, cores).items():
        most = min(100, 100 * (in_turn - seconds) / sent)  # as in hidden()
        limits.append((name, f"{1e3 * seconds:.4g}", f"{most:.3g}"))
    return [bench.table(rows), bench.table(limits)]


def slow_text(results: dict, frame: int) -> list[str]:
    buckets, megabytes = SLOW
    sent = statistics.median(results["communicate"])
    # Between two ranks an all_reduce of S bytes sends S bytes in each direction.
    rate = 8 * buckets * megabytes * 2**20 / sent / 1e6
    share, ratio = statistics.median(hidden(results)), ratio_of(results)
    verdict = "reached" if share >= 0.7 else "missed"
    if not 0.8 < ratio < 1.25:
        verdict = "not comparable, the machine was too busy for equal times"
    return [
        f"### In frames of {frame:,} bytes",
        *overlap_text(results, buckets, megabytes),
        f"Sent at {rate:.0f} Mbit/s in each direction. The aim is 70 % overlap if computation and "
        f"communication take equal time. Here computation took {ratio:.2f} times as long, and "
        f"{share:.0%} of the communication was overlapped: {verdict}.",
    ]


if __name__ == "__main__":
    main()
