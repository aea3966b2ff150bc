"""Check all hosts before a training job: which host, link or device is wrong or slow?

    python clusters/preflight.py hosts.txt --directory runs        # over ssh; one name per line
    python clusters/preflight.py --srun --directory runs           # in a job of Slurm: its nodes
    python clusters/lab.py up 3 && python clusters/preflight.py --lab 3    # hosts of lab.py
    python clusters/preflight.py --plan 1000                       # how long would 1000 hosts take?

Compares versions, clocks, devices, network cards, limits, disks, names and a directory that all
hosts should share; measures the latency and both bandwidths of each pair of hosts, all_reduce
between neighbours (all GPUs, each GPU with its peer, the GPUs of a host), and matrix products.
It names hosts that differ from most hosts, that are slower than the best, or do not answer.
Exit status: 0 if nothing is wrong, 1 if it names something. It leaves no process on any host.
"""

import argparse
import os
import subprocess
import sys
import time
import uuid

from preflight_fleet import Fleet, fail, read_hosts
from preflight_verdict import (
    broken_links,
    differing,
    ring,
    rounds,
    slow_devices,
    slow_links,
    wrong_clocks,
)

SECONDS = 0.2  # for each direction of each pair, and for one core of a processor, five times


def main() -> None:
    args = parse_args()
    if args.plan:
        plan(args.plan)
        return
    hosts, transport = fleet_of(args)
    fleet = Fleet(list(hosts), transport, hosts)
    try:
        found = look(fleet, args)
    finally:
        fleet.end()
    for sentence in found:
        print(sentence)
    print(f"{len(found)} thing(s) wrong" if found else f"{len(hosts)} host(s): nothing wrong")
    sys.exit(bool(found))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "hosts",
        nargs="?",
        help="file of hosts to reach by ssh, one per line: a name, or a name and an address",
    )
    add("--srun", action="store_true", help="check the nodes of this Slurm job, reached by srun")
    add("--lab", type=int, metavar="N", help="check the first N hosts of the lab (default: none)")
    add(
        "--directory", default=".", help="directory that all hosts share and may write (default: .)"
    )
    add("--free", type=float, default=1, help="GB that must be free in --directory (default: 1)")
    add(
        "--slow",
        type=float,
        default=0.6,
        help="a link or device is slow below this share of the best one (default: 0.6)",
    )
    add(
        "--gpu-seconds",
        type=float,
        default=10,
        help="seconds for which all GPUs multiply at once (default: 10)",
    )
    add(
        "--plan",
        type=int,
        metavar="HOSTS",
        help="only print how long this many hosts would take (default: none)",
    )
    args = parser.parse_args()
    if not (args.plan or args.lab or args.hosts or args.srun):
        parser.error("a file of hosts, --srun or --lab N is needed")
    if args.srun and "SLURM_JOB_NODELIST" not in os.environ:
        parser.error("--srun: not in a Slurm job: salloc --nodes=N --exclusive --gpus-per-node=8")
    args.directory = os.path.abspath(args.directory)
    return args


def fleet_of(args) -> tuple[dict[str, str | None], str]:
    """The hosts with their addresses, or None; and how the hosts are reached."""
    if args.lab:
        return dict.fromkeys(f"host{i}" for i in range(args.lab)), "lab"
    if args.srun:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            fail("--srun: scontrol does not name the nodes of this job")
        return dict.fromkeys(done.stdout.split()), "srun"
    return read_hosts(args.hosts), "ssh"


# ---- the checks


def look(fleet: Fleet, args) -> list[str]:
    """What is wrong, in sentences that name a host, a link or a device."""
    names = [host.rpartition("@")[2] for host in fleet.hosts]
    fleet.all("clock", seconds=30)  # afterwards every host has answered, or is lost
    found = look_at_those_that_answer(fleet, names, args) if fleet.here else []
    return [f"{names[i]}: {why}" for i, why in sorted(fleet.lost.items())] + found


def look_at_those_that_answer(fleet: Fleet, names: list[str], args) -> list[str]:
    offsets = {}
    for i in fleet.here:  # the round trip is short: take its middle
        before = time.time()
        for there in fleet.ask({i: {"do": "clock"}}).values():
            offsets[names[i]] = there - (before + time.time()) / 2
    found = wrong_clocks([*offsets], [*offsets.values()])

    asked = [fleet.addresses[i] for i in fleet.here]
    known = fleet.all("facts", hosts=asked, directory=args.directory, seconds=300)
    for i, about in known.items():
        found += [f"{names[i]}: {sentence}" for sentence in about["wrong"]]
        if about["free"] is not None and about["free"] < args.free * 1e9:
            found.append(f"{names[i]}: {about['free'] / 1e9:.1f} GB free in {args.directory}")
    found += differing([names[i] for i in known], [about["same"] for about in known.values()])
    has_it = [i for i, about in known.items() if about["free"] is not None]
    found += not_shared(fleet, has_it, args.directory)

    say("pairs")
    latency, rate, broken = measure_pairs(fleet)
    found += broken_links(names, broken, len(fleet.here))
    found += slow_links(names, rate, args.slow, lambda r: f"{r * 8e-6:.0f} Mbit/s")
    # The shortest time is the best; differences below half a millisecond do not matter.
    speed = {pair: 1 / (seconds + 5e-4) for pair, seconds in latency.items()}
    found += slow_links(names, speed, 0.3, lambda v: f"{(1 / v - 5e-4) * 1e3:.2f} ms", "latency")

    say("all_reduce")
    gpus = {i: len(known[i]["same"]["GPUs"]) for i in fleet.here if i in known}
    found += measure_all_reduce(fleet, names, gpus, set(broken), args.slow)

    say("matmul")
    turns = [[i] for i in fleet.here] if args.lab else [fleet.here]  # the lab shares its processors
    cores, on_gpus = measure_products(fleet, turns, args.gpu_seconds)
    for i, about in on_gpus.items():
        found += [f"{names[i]}: {sentence}" for sentence in about["wrong"]]
    speeds = [[cores[i], *about["speeds"]] for i, about in on_gpus.items()]
    found += slow_devices([names[i] for i in on_gpus], speeds, args.slow)
    return found


def not_shared(fleet: Fleet, has_it: list[int], directory: str) -> list[str]:
    """Each host writes a file; the first host should see all files."""
    mark = f".preflight-{uuid.uuid4().hex[:8]}-"
    try:
        told = {i: {"do": "write", "directory": directory, "name": f"{mark}{i}"} for i in has_it}
        wrote = [i for i, answer in fleet.try_to(told).items() if "is" in answer]
        seen = fleet.ask({i: listing(directory, mark) for i in wrote[:1]})
    finally:
        fleet.ask({i: listing(directory, mark, "remove") for i in has_it})
    for first, files in seen.items():
        alone = [fleet.hosts[i] for i in wrote if f"{mark}{i}" not in files]
        first = fleet.hosts[first]
        return [f"{host}: {directory} is not the one that {first} sees" for host in alone]
    return []


def listing(directory: str, prefix: str, do: str = "listing") -> dict:
    return {"do": do, "directory": directory, "prefix": prefix}


def measure_pairs(fleet: Fleet) -> tuple[dict, dict, dict]:
    """Seconds for a byte's round trip, bytes per second (of the slower direction), errors."""
    ports = fleet.all("listen")
    latency, rate, broken = {}, {}, {}
    for pairs in rounds(len(fleet.hosts)):
        told, here = {}, set(fleet.here) & ports.keys()
        pairs = [(a, b) for a, b in pairs if {a, b} <= here]
        for a, b in pairs:
            told[a] = {"do": "serve", "seconds": SECONDS}
            where = {"host": fleet.addresses[a], "port": ports[a]}
            told[b] = {"do": "measure", **where, "seconds": SECONDS}
        answers = fleet.try_to(told)
        for a, b in pairs:
            if {a, b} & fleet.lost.keys():  # it is named already
                continue
            pair = (min(a, b), max(a, b))
            errors = [x["error"] for x in (answers[b], answers[a]) if "error" in x]
            if errors:
                broken[pair] = errors[0]
            else:
                latency[pair] = answers[b]["is"]["latency"]
                rate[pair] = min(answers[a]["is"], answers[b]["is"]["rate"])
    return latency, rate, broken


def measure_all_reduce(
    fleet: Fleet, names: list[str], gpus: dict[int, int], skip: set, slow: float
) -> list[str]:
    """Measure all_reduce between neighbours in a ring of the hosts, in two or three rounds.

    gpus: the number of each host's GPUs. Every GPU gets a rank; both hosts of a pair get the
    smaller of their two numbers. Each pair measures all ranks together; each rank with its peer on
    the other host, for which NCCL uses the network card next to the GPU; and the ranks of each
    host, over NVLink. Returns what is slow or fails, in sentences.
    """
    between, peers, inside, failed = {}, {}, {}, []
    for neighbours in ring(sorted(gpus)):
        pairs = [(a, b) for a, b in neighbours if (min(a, b), max(a, b)) not in skip]
        ports = fleet.ask({a: {"do": "store"} for a, _ in pairs})
        pairs = [(a, b) for a, b in pairs if a in ports and b in fleet.here]
        told = {}
        for a, b in pairs:
            count = min(gpus[a], gpus[b])
            ranks = {"ranks": count or 1, "device": "cuda" if count else "cpu"}
            where = {"host": fleet.addresses[a], "port": ports[a]}
            for node, host in enumerate((a, b)):
                told[host] = {"do": "all_reduce", "node": node, **ranks, **where}
        answers = fleet.try_to(told, seconds=180)  # each rank imports torch first
        for a, b in pairs:
            if {a, b} & fleet.lost.keys():  # it is named already
                continue
            errors = [x["error"] for x in (answers[a], answers[b]) if "error" in x]
            if errors:
                failed.append(f"{names[a]} - {names[b]}: no all_reduce: {errors[0]}")
                continue
            rates = answers[a]["is"], answers[b]["is"]
            between[a, b] = min(both["all"] for both in rates)
            for gpu, both in enumerate(zip(*(each["peers"] for each in rates), strict=True)):
                peers[gpu, a, b] = min(both)
            for host, each in zip((a, b), rates, strict=True):
                if each["inside"]:  # several ranks were there
                    inside[host] = max(each["inside"], inside.get(host, 0))
    found = failed + slow_links(names, between, slow, per_second, "all_reduce")
    best = max(peers.values(), default=0)
    for gpu in range(max(gpus.values(), default=0)):
        values = {(a, b): rate for (i, a, b), rate in peers.items() if i == gpu}
        what = f"all_reduce of GPU {gpu} with its peer"
        found += slow_links(names, values, slow, per_second, what, best)
    best = max(inside.values(), default=0)
    return found + [
        f"{names[i]}: all_reduce inside is slow: {per_second(rate)}, the best {per_second(best)}"
        for i, rate in sorted(inside.items())
        if rate < slow * best
    ]


def measure_products(
    fleet: Fleet, turns: list[list[int]], gpu_seconds: float
) -> tuple[dict[int, float], dict[int, dict]]:
    """FLOP per second of one core of each host, the best of five times: the load of a moment is
    not a slow processor. And what the agent's `gpu_products` says of its GPUs."""
    cores, on_gpus = {}, {}
    for turn in turns * 5:
        told = {i: {"do": "products", "seconds": SECONDS} for i in turn}
        for i, speed in fleet.ask(told, seconds=60).items():
            cores[i] = max(speed, cores.get(i, 0))
    for turn in turns:
        told = {i: {"do": "gpu_products", "seconds": gpu_seconds} for i in turn}
        on_gpus |= fleet.ask(told, seconds=60 + gpu_seconds)
    return cores, on_gpus


def per_second(rate: float) -> str:
    return f"{rate * 1e-6:.0f} MB/s"


def plan(count: int) -> None:
    pairs = count * (count - 1) // 2
    number, each = len(rounds(count)), 2 * SECONDS + 0.1
    print(f"{count} hosts, {pairs} pairs: {number} rounds, {number * each / 60:.1f} minutes")
    print(f"one pair after another: {pairs * each / 3600:.1f} hours")


def say(stage: str) -> None:
    print(f"{stage} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
