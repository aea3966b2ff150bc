r"""A slow network on one machine: latency and bandwidth per link, as specified.

    torchrun --standalone --nproc_per_node=2 custom_backend/slow_backend.py
    torchrun --standalone --nproc_per_node=4 custom_backend/slow_backend.py --links two-level

compares the links with the formula. Any script of this repository runs on them (on the CPU):

    torchrun --standalone --nproc_per_node=4 custom_backend/slow_backend.py \
        --links "default 5ms 100Mbit" ddp_basics/train.py --epochs 1

links.py describes the table of links; slow_wire.py holds each message until it is due;
ring/collectives.py has the collectives. Look at

1. single messages: the formula latency + bytes / rate, the measured time, and the time without any
   link, which the code itself takes. The two overlap, so the longer one counts.
2. an all_reduce on a ring: 2 (p-1) messages of n / p bytes, one after another.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import ArgumentParser, at_least
from links import Links, read_links, ring_seconds
from ring.group import new_ring_group
from run_script import run_script
from runtime import Worker, distributed_worker
from slow_wire import register
from torch.distributed.elastic.multiprocessing.errors import record

SIZES = [10**3, 10**5, 10**6, 4 * 10**6]  # bytes


@record
def main() -> None:
    args = parse_args()
    register(args.links)
    if args.script is not None:
        run_on_slow_links(args.script, args.arguments)
        return
    dist.Backend.register_backend("ring", new_ring_group, extended_api=True, devices=["cpu"])
    with distributed_worker("cpu") as worker:
        # Two backends are measured; the ranks exchange their measurements over Gloo.
        slow, plain = (
            dist.new_group(backend=name, timeout=timedelta(minutes=5)) for name in ("slow", "ring")
        )
        if worker.world_size > 1:
            for other in {1, worker.world_size - 1}:
                show_messages(other, args.links, slow, plain, args.repeats, worker)
        show_all_reduce(args.links, slow, plain, args.repeats, worker)


def run_on_slow_links(script: Path, arguments: list[str]) -> None:
    """Run `python script arguments` with the backend "slow" instead of any other."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the links take CPU tensors only
    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init_slow(backend=None, *args, **kwargs):
        return init_process_group("slow", *args, **kwargs)

    def new_slow(ranks=None, timeout=None, backend=None, *args, **kwargs):
        return new_group(ranks, timeout, "slow", *args, **kwargs)

    dist.init_process_group, dist.new_group = init_slow, new_slow
    run_script(script, arguments)


def show_messages(other: int, links: Links, slow, plain, repeats: int, worker: Worker) -> None:
    """Measure one message at a time from rank 0 to `other`."""
    speed = links.between(0, other)
    if worker.is_main:
        latency, rate = 1e3 * speed.latency, speed.rate / 1e6
        print(f"\n1. One message, rank 0 to {other}: latency {latency:g} ms, {rate:g} MB/s")
        print(f"   {'bytes':>12} {'formula':>10} {'measured':>10} {'without link':>13}   (ms)")
    for nbytes in SIZES:
        x = torch.zeros(nbytes, dtype=torch.uint8)

        send = partial(send_one, x, other)
        row = [speed.seconds(nbytes)]
        row += [statistics.median(seconds_of(send, group, repeats)) for group in (slow, plain)]
        if worker.is_main:
            a, b, c = (1e3 * seconds for seconds in row)
            print(f"   {nbytes:12,} {a:10.2f} {b:10.2f} {c:13.2f}")


def show_all_reduce(links: Links, slow, plain, repeats: int, worker: Worker) -> None:
    if worker.is_main:
        print(f"\n2. all_reduce of n bytes on a ring of {worker.world_size}")
        print(f"   {'n':>12} {'formula':>10} {'measured':>10} {'without link':>13}   (ms)")
    for nbytes in SIZES:
        x = torch.zeros(nbytes // 4)

        reduce = partial(dist.all_reduce, x)
        row = [ring_seconds(links, worker.world_size, nbytes)]
        row += [statistics.median(seconds_of(reduce, group, repeats)) for group in (slow, plain)]
        if worker.is_main:
            a, b, c = (1e3 * seconds for seconds in row)
            print(f"   {nbytes:12,} {a:10.2f} {b:10.2f} {c:13.2f}")


def send_one(x: torch.Tensor, other: int, group) -> None:
    if dist.get_rank() == 0:
        dist.send(x, other, group=group)
    elif dist.get_rank() == other:
        dist.recv(x, 0, group=group)


def seconds_of(run: Callable, group, repeats: int) -> list[float]:
    """Times from the moment when the first rank begins until the last one is done, in seconds."""
    samples = []
    for _ in range(repeats):
        dist.barrier()
        begun = time.monotonic()  # all ranks are on this machine, and share this clock
        run(group=group)
        moments = [None] * dist.get_world_size()
        dist.all_gather_object(moments, (begun, time.monotonic()))
        samples.append(max(end for _, end in moments) - min(begin for begin, _ in moments))
    return samples


def links_of(text: str) -> Links:
    try:
        return read_links(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}") from None


def parse_args():
    parser = ArgumentParser(description="Measure slow links, or run a script on them.")
    add = parser.add_argument
    add("--links", type=links_of, default="slow", help="preset, file or lines: see links.py")
    add(
        "--repeats",
        type=at_least(1),
        default=5,
        help="repeat each measurement N times, take the median",
    )
    add("script", type=Path, nargs="?", help="run it on these links; default: measure them")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser.parse_args()


if __name__ == "__main__":
    main()
