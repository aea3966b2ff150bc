"""Look at all hosts before a training: which host, link or device is wrong or slow?

    python clusters/preflight.py hosts.txt --directory runs        # one host name per line
    python clusters/lab.py up 3 && python clusters/preflight.py --lab 3    # hosts of lab.py
    python clusters/preflight.py --plan 1000                       # how long would 1000 hosts take?

Compares versions, clocks, devices, disks, names and a directory that all should share; measures
each pair's latency and bandwidth both ways, all_reduce between neighbours, and matrix products.
The verdict names what differs from the best host or from most hosts. Exit status: 0 if there is
nothing, 1 if something is named, 2 if a host could not be asked. No process is left anywhere.
"""

import argparse
import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from preflight_verdict import (
    broken_links,
    differing,
    rounds,
    slow_devices,
    slow_links,
    wrong_clocks,
)

HERE = Path(__file__).resolve().parent
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
SECONDS = 0.2  # for each direction of each pair, and for each device


def main() -> None:
    args = parse_args()
    if args.plan:
        plan(args.plan)
        return
    hosts = [f"host{i}" for i in range(args.lab)] if args.lab else read_hosts(args.hosts)
    fleet = Fleet(hosts, args.lab)
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
    add("hosts", nargs="?", help="a file of names")
    add("--lab", type=int, help="so many hosts of the lab, not a file of hosts")
    add("--directory", default=".", help="that all hosts should share, and may write")
    add("--free", type=float, default=1, help="GB that should be free there")
    add("--slow", type=float, default=0.6, help="name what has less than this share of the best")
    add("--plan", type=int, metavar="HOSTS", help="only say how long that many would take")
    args = parser.parse_args()
    if not (args.plan or args.lab or args.hosts):
        parser.error("a file of hosts, or --lab N, is needed")
    args.directory = os.path.abspath(args.directory)
    return args


def read_hosts(file: str) -> list[str]:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError as error:
        fail(f"{file}: {error.strerror}")
    hosts = [name for line in lines if (name := line.partition("#")[0].strip())]
    if not hosts or len(set(hosts)) < len(hosts):
        fail(f"{file} names {'a host more than once' if hosts else 'no host'}")
    return hosts


def fail(sentence: str):
    print(f"preflight.py: error: {sentence}", file=sys.stderr)
    sys.exit(2)


# ---- what is looked at


def look(fleet: "Fleet", args) -> list[str]:
    """Sentences, each with the name of a host, a link or a device."""
    names, found = [host.rpartition("@")[2] for host in fleet.hosts], []
    fleet.all("clock", seconds=15)  # all are there, and awake
    offsets = []
    for i in range(len(names)):  # the way there and back is short, so halve what it took
        before = time.time()
        (there,) = fleet.ask({i: {"do": "clock"}}).values()
        offsets.append(there - (before + time.time()) / 2)
    found += wrong_clocks(names, offsets)

    known = fleet.all("facts", hosts=names, directory=args.directory, seconds=60)
    for name, about in zip(names, known, strict=True):
        found += [f"{name}: {sentence}" for sentence in about["wrong"]]
        if about["free"] is not None and about["free"] < args.free * 1e9:
            found.append(f"{name}: {about['free'] / 1e9:.1f} GB free in {args.directory}")
    found += differing(names, [about["same"] for about in known])
    has_it = [i for i, about in enumerate(known) if about["free"] is not None]
    found += not_shared(fleet, has_it, args.directory)

    say("pairs")
    latency, rate, broken = measure_pairs(fleet, names)
    found += broken_links(names, broken)
    found += slow_links(names, rate, args.slow, lambda r: f"{r * 8e-6:.0f} Mbit/s")
    # The shortest time is the best; a fraction of a millisecond more or less says nothing.
    speed = {pair: 1 / (seconds + 5e-4) for pair, seconds in latency.items()}
    found += slow_links(names, speed, 0.3, lambda v: f"{(1 / v - 5e-4) * 1e3:.2f} ms", "latency")

    say("all_reduce")
    gpus = [len(about["same"]["GPUs"]) for about in known]
    reduced, failed = measure_all_reduce(fleet, names, gpus, set(broken))
    found += failed
    found += slow_links(names, reduced, args.slow, lambda r: f"{r * 1e-6:.0f} MB/s", "all_reduce")

    say("matmul")
    everyone = range(len(names))
    turns = [[i] for i in everyone] if args.lab else [everyone]  # the lab shares its processors
    speeds = {}
    for turn in turns:
        speeds |= fleet.ask({i: {"do": "matmul", "seconds": SECONDS} for i in turn})
    found += slow_devices(names, [speeds[i] for i in everyone], args.slow)
    return found


def not_shared(fleet: "Fleet", has_it: list[int], directory: str) -> list[str]:
    """Each host writes a file; the first one should see all of them."""
    if not has_it:
        return []
    mark = f".preflight-{uuid.uuid4().hex[:8]}-"
    try:
        fleet.ask(
            {i: {"do": "write", "directory": directory, "name": f"{mark}{i}"} for i in has_it}
        )
        (seen,) = fleet.ask({has_it[0]: listing(directory, mark)}).values()
    finally:
        fleet.ask({i: listing(directory, mark, "remove") for i in has_it})
    first = fleet.hosts[has_it[0]]
    alone = [i for i in has_it if f"{mark}{i}" not in seen]
    return [f"{fleet.hosts[i]}: {directory} is not the one that {first} sees" for i in alone]


def listing(directory: str, prefix: str, do: str = "listing") -> dict:
    return {"do": do, "directory": directory, "prefix": prefix}


def measure_pairs(fleet: "Fleet", names: list[str]) -> tuple[dict, dict, dict]:
    """Seconds for a byte there and back, bytes per second (of the slower way), errors."""
    ports = fleet.all("listen")
    latency, rate, broken = {}, {}, {}
    for pairs in rounds(len(names)):
        told = {}
        for a, b in pairs:
            told[a] = {"do": "serve", "seconds": SECONDS}
            told[b] = {"do": "measure", "host": names[a], "port": ports[a], "seconds": SECONDS}
        answers = fleet.ask(told, errors=True)
        for a, b in pairs:
            pair = (min(a, b), max(a, b))
            errors = [x["error"] for x in (answers[b], answers[a]) if "error" in x]
            if errors:
                broken[pair] = errors[0]
            else:
                latency[pair] = answers[b]["is"]["latency"]
                rate[pair] = min(answers[a]["is"], answers[b]["is"]["rate"])
    return latency, rate, broken


def measure_all_reduce(
    fleet: "Fleet", names: list[str], gpus: list[int], skip: set
) -> tuple[dict, list[str]]:
    """Bytes per second between neighbours of a ring: each host has two, in two or three rounds.

    gpus: of each host. Every GPU gets a rank, of the host with more only as many as the other has.
    """
    count, reduced, failed = len(names), {}, []
    ring = [(i, (i + 1) % count) for i in range(count if count > 2 else count - 1)]
    even, odd = ring[: count // 2 * 2 : 2], ring[1::2]
    last = ring[count - 1 :] if count % 2 and count > 2 else []
    for neighbours in (even, odd, last):
        pairs = [(a, b) for a, b in neighbours if (min(a, b), max(a, b)) not in skip]
        ports = fleet.ask({a: {"do": "store"} for a, _ in pairs})
        told = {}
        for a, b in pairs:
            count = min(gpus[a], gpus[b])
            ranks = {"ranks": count or 1, "device": "cuda" if count else "cpu"}
            where = {"host": names[a], "port": ports[a]}
            for node, host in enumerate((a, b)):
                told[host] = {"do": "all_reduce", "node": node, **ranks, **where}
        answers = fleet.ask(told, seconds=90, errors=True)  # each rank imports torch first
        for a, b in pairs:
            errors = [x["error"] for x in (answers[a], answers[b]) if "error" in x]
            if errors:
                failed.append(f"{names[a]} - {names[b]}: no all_reduce: {errors[0]}")
            else:
                reduced[a, b] = min(answers[a]["is"], answers[b]["is"])
    return reduced, failed


def plan(count: int) -> None:
    pairs = count * (count - 1) // 2
    number, each = len(rounds(count)), 2 * SECONDS + 0.1
    print(f"{count} hosts, {pairs} pairs: {number} rounds, {number * each / 60:.1f} minutes")
    print(f"one pair after another: {pairs * each / 3600:.1f} hours")


def say(stage: str) -> None:
    print(f"{stage} ...", file=sys.stderr, flush=True)


# ---- the agents on the hosts


class Fleet:
    """One agent on each host, asked through ssh's pipes: the network under test is not needed."""

    def __init__(self, hosts: list[str], in_lab: bool):
        self.hosts, self.answers = hosts, queue.Queue()
        self.agents = [start(host, in_lab) for host in hosts]
        self.readers = [
            threading.Thread(target=self.read, args=item, daemon=True)
            for item in enumerate(self.agents)
        ]
        for reader in self.readers:
            reader.start()

    def read(self, number: int, agent: subprocess.Popen) -> None:
        for line in agent.stdout:
            self.answers.put((number, line))
        self.answers.put((number, ""))

    def all(self, do: str, seconds: float = 30, **told) -> list:
        answers = self.ask({i: {"do": do, **told} for i in range(len(self.hosts))}, seconds)
        return [answers[i] for i in range(len(self.hosts))]

    def ask(self, told: dict[int, dict], seconds: float = 30, errors: bool = False) -> dict:
        """Tell some hosts what to do, all at once; their answers. Ends the program without them."""
        for number, request in told.items():
            with contextlib.suppress(OSError):  # it has ended: its last words are read below
                self.agents[number].stdin.write(json.dumps(request) + "\n")
                self.agents[number].stdin.flush()
        answers, until = {}, time.monotonic() + seconds
        while len(answers) < len(told):
            try:
                number, line = self.answers.get(timeout=max(0, until - time.monotonic()))
            except queue.Empty:
                silent = [self.hosts[i] for i in told if i not in answers]
                fail(f"no answer within {seconds:.0f} s from {' and '.join(silent)}")
            if not line:
                last = (self.agents[number].stderr.read().strip().splitlines() or ["it ended"])[-1]
                fail(f"{self.hosts[number]} cannot be asked: {last}")
            answers[number] = json.loads(line)
        if errors:
            return answers
        for number, answer in answers.items():
            if "error" in answer:
                fail(f"{self.hosts[number]}: {answer['error']}")
        return {number: answer["is"] for number, answer in answers.items()}

    def end(self) -> None:
        for agent in self.agents:
            with contextlib.suppress(OSError):
                agent.stdin.close()
        until = time.monotonic() + 5
        for agent in self.agents:
            try:
                agent.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()


def start(host: str, in_lab: bool) -> subprocess.Popen:
    agent = [sys.executable, "-u", str(HERE / "preflight_agent.py")]
    if in_lab:
        number = host.removeprefix("host")
        command = [sys.executable, str(HERE / "lab.py"), "exec", number, "--", *agent]
    else:
        there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(agent)}"
        command = [*SSH, host, there]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes)


if __name__ == "__main__":
    main()
