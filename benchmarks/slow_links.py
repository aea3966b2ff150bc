"""Compare the slow backend with a real slow link, and both with the formula.

    python benchmarks/slow_links.py               # writes results/slow_links.md
    python benchmarks/slow_links.py --repeats 3

The real link has 100 Mbit/s between two network namespaces (private_network.py), over which the
backend "ring" sends. The other is the backend "slow" of custom_backend/ over loopback, set to the
rate that such a link leaves for data. Both run twice, in turn. Needs Linux with unshare, ip and
tc, and root or user namespaces. The real link has almost no latency: to add some, the kernel needs
netem, and the report says whether this kernel has it.
"""

import argparse
import os
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "custom_backend"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank

import bench
import private_network
import torch
import torch.distributed as dist
from links import read_links, ring_seconds
from ring.group import new_ring_group
from runtime import distributed_worker
from slow_backend import seconds_of, send_one
from slow_wire import register

SIZES = [10**4, 10**5, 10**6, 4 * 10**6]
FRAME = 1500
# A full frame has 1,514 bytes: 1,448 bytes of data and the headers of Ethernet (14), IP (20) and
# TCP (32).
TABLE = f"default 0 {100 * 1448 / 1514:.1f}Mbit"
LINKS = read_links(TABLE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="repeats of each measurement")
    parser.add_argument("--part", choices=("ring", "slow"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        measure_part(args.part, args.repeats)
        return
    if reason := private_network.why_not():
        sys.exit(f"nothing was measured: {reason}")
    command = (__file__, "--repeats", args.repeats, "--part")
    real = private_network.two_ranks(FRAME, sys.executable, *command, "ring")
    ours = (*bench.torchrun(2), *command, "slow")
    rounds = [(bench.measure(*real), bench.measure(*ours)) for _ in range(2)]
    sections = [text(rounds, "message"), text(rounds, "all_reduce"), about()]
    bench.write(
        "slow_links", "A slow link: one of 100 Mbit/s next to the backend that plays one", sections
    )


def measure_part(backend: str, repeats: int) -> None:
    dist.Backend.register_backend("ring", new_ring_group, extended_api=True, devices=["cpu"])
    register(LINKS)
    with distributed_worker("cpu") as worker:
        group = dist.new_group(backend=backend, timeout=timedelta(minutes=2))
        results = {"message": {}, "all_reduce": {}}
        for nbytes in SIZES:
            x = torch.zeros(nbytes // 4)
            for name, run in (
                ("message", partial(send_one, x, 1)),
                ("all_reduce", partial(dist.all_reduce, x)),
            ):
                # The first repeat warms up.
                results[name][nbytes] = seconds_of(run, group, repeats + 1)[1:]
        if worker.is_main:
            bench.say(results)


def text(rounds: list, operation: str) -> str:
    formula = {
        "message": LINKS.between(0, 1).seconds,
        "all_reduce": partial(ring_seconds, LINKS, 2),
    }[operation]
    rows = [("bytes", "formula, ms", "real link", "slow backend", "real, again", "slow, again")]
    for nbytes in SIZES:
        cells = [
            bench.summary([1e3 * seconds for seconds in side[operation][str(nbytes)]])
            for pair in rounds
            for side in pair
        ]
        rows.append((f"{nbytes:,}", f"{1e3 * formula(nbytes):.4g}", *cells))
    return f"## {operation}, 2 ranks\n\n{bench.table(rows)}"


def about() -> str:
    netem = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root netem delay 1ms"
    done = subprocess.run(
        [*private_network.UNSHARE, "sh", "-c", netem], capture_output=True, text=True, timeout=10
    )
    says = "works" if done.returncode == 0 else f"fails: {done.stderr.strip().rstrip('.')}"
    return (
        f"Table of links: `{TABLE}`. Milliseconds, medians (min ... max); the columns in the order "
        "in which they were measured.\n\nThe real link's filter (tbf) lets 64 KB pass at once "
        "after a pause, for which the formula has 5.5 ms. In an all_reduce each way also carries "
        "the acknowledgements of the other.\n\nLatency on the real link: "
        f"`tc qdisc add ... netem delay` {says}."
    )


if __name__ == "__main__":
    main()
