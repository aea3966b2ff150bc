"""The traces of all ranks on one timeline, with their clocks brought in line; and who comes last.

    torchrun --standalone --nproc_per_node=2 ddp_basics/train.py --profile --output-dir runs/digits
    python clusters/merge_traces.py runs/digits/trace_*.json --output runs/digits/timeline.json

Opens in https://ui.perfetto.dev: a process for each rank. Look at the table: how sure the clocks
are, and which rank comes last into the collectives, so that every other rank waits for it.

Hosts have different clocks, but no rank leaves an all_reduce before all ranks have entered it. When
rank i has left k collectives, rank j must have entered k. So for every k, with sorted times,

    k-th entry of j + offset of j  <=  k-th exit of i + offset of i

which bounds the offset of j's host against that of rank 0's from both sides. We take the middle of
the narrowest bounds. Ranks of one host have one clock.
"""

import argparse
import gzip
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

# Collectives that every rank must enter before any rank leaves: not broadcast, reduce, send, recv.
# On GPUs we read the kernels: NCCL's other events end when the operation is only queued.
SYNCHRONIZE = r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier)"
KERNELS = re.compile(rf"^nccl(Dev)?Kernel.*{SYNCHRONIZE}", re.IGNORECASE)
ON_CPU = re.compile(rf"^(?!nccl)\w+:{SYNCHRONIZE}", re.IGNORECASE)  # gloo:all_reduce


@dataclass
class Trace:
    """One rank's. Times are microseconds on its own clock, of the collectives in order."""

    rank: int
    host: str
    events: list[dict]
    entries: list[float]
    exits: list[float]


@dataclass
class Clock:
    """What is to be added to a rank's times, microseconds, and by how much it may be wrong."""

    offset: float
    error: float


def main() -> None:
    args = parse_args()
    try:
        traces = sorted((read(path) for path in args.traces), key=lambda trace: trace.rank)
        clocks = align(traces)
    except ValueError as error:
        print(f"merge_traces.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    events = [e for trace, clock in zip(traces, clocks, strict=True) for e in moved(trace, clock)]
    with (gzip.open if args.output.suffix == ".gz" else open)(args.output, "wt") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    show(traces, clocks)
    print(f"{len(events):,} events of {len(traces)} ranks in {args.output}")


def read(path: Path) -> Trace:
    """A trace that torch.profiler has exported. Raises ValueError if it is something else."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            content = json.load(file)
        events = content["traceEvents"]
        zero = content.get("baseTimeNanoseconds", 0) / 1000  # "ts" counts from there
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a trace of torch.profiler") from None
    rank = content.get("distributedInfo", {}).get("rank")
    if rank is None:
        raise ValueError(f"{path} does not say of which rank it is: profile after joining a group")
    spans = [event for event in events if event.get("ph") == "X"]
    chosen = [e for e in spans if KERNELS.match(e["name"])]
    chosen = chosen or [e for e in spans if ON_CPU.match(e["name"])]
    entries = sorted(event["ts"] + zero for event in chosen)
    exits = sorted(event["ts"] + event["dur"] + zero for event in chosen)
    for event in events:
        if "ts" in event:
            event["ts"] += zero
    return Trace(rank, content.get("host_name", "?"), events, entries, exits)


def align(traces: list[Trace]) -> list[Clock]:
    """The clock of each, so that rank 0's host is right.

    Raises ValueError if the traces do not hold the same collectives.
    """
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"two traces are of one rank: {ranks}")
    for trace in traces:
        if not trace.entries or len(trace.entries) != len(traces[0].entries):
            raise ValueError(
                f"rank {trace.rank} has {len(trace.entries)} collectives, rank {traces[0].rank} "
                f"{len(traces[0].entries)}: profile the same steps on all ranks"
            )
    by_host = {trace.host: clock_of(trace.host, traces) for trace in traces}
    return [by_host[trace.host] for trace in traces]


def clock_of(host: str, traces: list[Trace]) -> Clock:
    here = [trace for trace in traces if trace.host == traces[0].host]
    there = [trace for trace in traces if trace.host == host]
    least = max(a - b for i in here for j in there for a, b in pairs(i.entries, j.exits))
    most = min(a - b for i in here for j in there for a, b in pairs(i.exits, j.entries))
    if host == traces[0].host and least <= 0 <= most:
        return Clock(0.0, 0.0)
    if least > most or host == traces[0].host:
        raise ValueError(f"no clock of {host} fits its ranks: are these traces of one run?")
    return Clock((least + most) / 2, (most - least) / 2)


def pairs(some: list[float], others: list[float]):
    return zip(some, others, strict=True)


def moved(trace: Trace, clock: Clock) -> list[dict]:
    """The events on rank 0's clock, as those of a process that is named after the rank."""
    name = f"rank {trace.rank} ({trace.host})"
    events = [
        {"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": name}},
        {
            "ph": "M",
            "name": "process_sort_index",
            "pid": trace.rank,
            "args": {"sort_index": trace.rank},
        },
    ]
    for event in trace.events:
        if event.get("ph") == "M" and event["name"].startswith("process_"):
            continue
        event = {**event, "pid": trace.rank}
        if "ts" in event:
            event["ts"] += clock.offset
        if "id" in event:  # arrows from forward to backward: not to another rank
            event["id"] = f"{trace.rank}/{event['id']}"
        events.append(event)
    return events


def waits(traces: list[Trace], clocks: list[Clock]) -> list[tuple[int, float]]:
    """For each rank: into how many collectives it came last, and how long the others waited for it.

    Microseconds, of the rank that waited longest, summed over those collectives.
    """
    told = [(0, 0.0)] * len(traces)
    for entries in zip(*(trace.entries for trace in traces), strict=True):
        times = [entry + clock.offset for entry, clock in zip(entries, clocks, strict=True)]
        last = times.index(max(times))
        count, total = told[last]
        told[last] = (count + 1, total + max(times) - min(times))
    return told


def show(traces: list[Trace], clocks: list[Clock]) -> None:
    print(f"{'':6}{'host':16}{'clock, ms':>14}{'+/-':>9}{'collectives':>13}", end="")
    print(f"{'came last':>11}{'others waited, ms':>19}")
    rows = zip(traces, clocks, waits(traces, clocks), strict=True)
    for trace, clock, (count, waited) in rows:
        print(f"rank {trace.rank} {trace.host:16}{clock.offset / 1e3:13.3f}", end="")
        print(f"{clock.error / 1e3:9.3f}{len(trace.entries):13}{count:11}{waited / 1e3:19.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, help="one of each rank")
    parser.add_argument("--output", type=Path, default=Path("timeline.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
