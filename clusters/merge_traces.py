"""Merge the traces of all ranks into one timeline with aligned clocks, and find the straggler.

    torchrun --standalone --nproc_per_node=2 ddp_basics/train.py --profile --output-dir runs/digits
    python clusters/merge_traces.py runs/digits/trace_*.json --output runs/digits/timeline.json

Open it in https://ui.perfetto.dev; each rank is a process. Look at the table: the error of each
clock, and the rank that enters the collectives last, so that the other ranks of its group wait.

Hosts have different clocks, but no rank leaves an all_reduce before all ranks of its group have
entered it. So for each collective, and ranks i and j of its group on two hosts,

    entry of j + offset of j's host  <=  exit of i + offset of i's host

which bounds the difference of the two offsets; along a chain of hosts the bounds add up. We take
the middle of the narrowest bounds. A collective inside one host (tensor parallelism, HSDP's shards)
says nothing about clocks. NCCL's kernels carry their group and number; Gloo's events carry neither,
so the groups of a Gloo trace are known only if all of them have the same ranks.
"""

import argparse
import gzip
import json
import math
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from closed_pipe import quiet_if_closed

# Collectives that every rank must enter before any rank leaves: not broadcast, reduce, send, recv.
# On GPUs we read the kernels: NCCL's other events end as soon as the operation is queued.
SYNCHRONIZE = r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier)"
KERNELS = re.compile(rf"^nccl(Dev)?Kernel.*{SYNCHRONIZE}", re.IGNORECASE)
ON_CPU = re.compile(rf"^(?!nccl)\w+:{SYNCHRONIZE}", re.IGNORECASE)  # gloo:all_reduce


class Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]
    numbered: bool  # whether its collectives carry the number that all ranks of the group give them


class Call(NamedTuple):
    """One rank in one collective: microseconds on its own clock."""

    entry: float
    exit: float


@dataclass
class Trace:
    """One rank's trace. calls: each group's collectives by number; without numbers, by order."""

    rank: int
    host: str
    events: list[dict]
    calls: dict[Group, dict[int, Call]]
    unknown: int  # collectives whose group the trace does not name


@dataclass
class Clock:
    """Microseconds to add to a host's times, so that they fit the times of `reference`."""

    offset: float
    error: float
    reference: str  # another host, or this one if no collective connects it with an earlier host


@quiet_if_closed()
def main() -> None:
    args = parse_args()
    try:
        traces = sorted((read(path) for path in args.traces), key=lambda trace: trace.rank)
        collectives = matched(traces)
        clocks = align(traces, collectives)
    except ValueError as error:
        print(f"merge_traces.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    events = [e for trace in traces for e in moved(trace, clocks[trace.host])]
    try:
        with (gzip.open if args.output.suffix == ".gz" else open)(args.output, "wt") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    except OSError as error:
        print(f"merge_traces.py: error: {args.output}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    show(traces, collectives, clocks)
    print(f"{len(events):,} events of {len(traces)} ranks in {args.output}")


def read(path: Path) -> Trace:
    """Read a trace that torch.profiler has exported. Raises ValueError for any other file."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            content = json.load(file)
        events = content["traceEvents"]
        zero = content.get("baseTimeNanoseconds", 0) / 1000  # "ts" counts from there
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None  # gzip's have none
    except (ValueError, KeyError, TypeError, EOFError):
        raise ValueError(f"{path} is not a trace of torch.profiler") from None
    about = content.get("distributedInfo", {})
    if about.get("rank") is None:
        raise ValueError(f"{path} does not name its rank: profile after joining a group")
    for event in events:
        if "ts" in event:
            event["ts"] += zero
    spans = [event for event in events if event.get("ph") == "X"]
    chosen = [e for e in spans if KERNELS.match(e["name"])]
    chosen = chosen or [e for e in spans if ON_CPU.match(e["name"])]
    ranks_of = {pg["pg_name"]: tuple(pg["ranks"]) for pg in about.get("pg_config", [])}
    calls, unknown = calls_of(chosen, ranks_of)
    return Trace(about["rank"], content.get("host_name", "?"), events, calls, unknown)


def calls_of(spans: list[dict], ranks_of: dict[str, tuple]) -> tuple[dict, int]:
    """The calls of each group, and the number of spans whose group is unknown.

    ranks_of: each group of this rank by name.
    """
    groups, unknown = defaultdict(list), 0
    for span in spans:
        name = span.get("args", {}).get("Process Group Name")
        if name in ranks_of:
            groups[name, ranks_of[name]].append(span)
        elif len(set(ranks_of.values())) == 1:
            groups["", next(iter(ranks_of.values()))].append(span)
        else:
            unknown += 1
    calls = {}
    for (name, ranks), members in groups.items():
        numbered = all("Seq" in span.get("args", {}) for span in members)
        calls[Group(name, ranks, numbered)] = by_number(members) if numbered else by_order(members)
    return calls, unknown


def by_number(spans: list[dict]) -> dict[int, Call]:
    calls = {}
    for span in spans:  # a collective of several tensors may have several kernels
        number, entry, end = span["args"]["Seq"], span["ts"], span["ts"] + span["dur"]
        before = calls.get(number, Call(entry, end))
        calls[number] = Call(min(before.entry, entry), max(before.exit, end))
    return calls


def by_order(spans: list[dict]) -> dict[int, Call]:
    """Sort entries and exits separately: when a rank has left k, all ranks have entered k."""
    entries = sorted(span["ts"] for span in spans)
    exits = sorted(span["ts"] + span["dur"] for span in spans)
    return dict(enumerate(map(Call, entries, exits)))


def matched(traces: list[Trace]) -> list[dict[int, Call]]:
    """The collectives that occur in several traces, each with the calls of its ranks.

    Raises ValueError if ranks of a group have different numbers of collectives without a number.
    """
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"two traces are of one rank: {ranks}")
    for trace in traces:
        if not trace.calls and not trace.unknown:
            raise ValueError(f"rank {trace.rank} has 0 collectives: profile some steps of training")
    found = []
    for group in dict.fromkeys(group for trace in traces for group in trace.calls):
        here = {t.rank: t.calls.get(group, {}) for t in traces if t.rank in group.ranks}
        (first, calls), *others = here.items()
        for rank, theirs in others:
            if not group.numbered and len(theirs) != len(calls):
                raise ValueError(
                    f"rank {rank} has {len(theirs)} collectives of the group {list(group.ranks)}, "
                    f"rank {first} {len(calls)}: profile the same steps on all ranks"
                )
        common = set(calls).intersection(*(theirs for _, theirs in others))
        if others:
            found += [{rank: here[rank][number] for rank in here} for number in sorted(common)]
    return found


def align(traces: list[Trace], collectives: list[dict[int, Call]]) -> dict[str, Clock]:
    """The clock of each host. Raises ValueError if none fits the collectives."""
    host_of = {trace.rank: trace.host for trace in traces}
    hosts = list(dict.fromkeys(host_of.values()))
    # offset[b] - offset[a] <= limits[a, b]: b's last rank has entered before a's first rank leaves.
    limits = defaultdict(lambda: math.inf)
    for calls in collectives:
        first_exit, last_entry = {}, {}
        for rank, call in calls.items():
            host = host_of[rank]
            first_exit[host] = min(first_exit.get(host, math.inf), call.exit)
            last_entry[host] = max(last_entry.get(host, -math.inf), call.entry)
        for a, leaves in first_exit.items():
            for b, enters in last_entry.items():
                limits[a, b] = min(limits[a, b], leaves - enters)
    clocks = {}
    for reference in hosts:
        if reference in clocks:
            continue
        most = narrowest(hosts, limits, reference)
        least = narrowest(hosts, {(b, a): limit for (a, b), limit in limits.items()}, reference)
        clocks[reference] = Clock(0.0, 0.0, reference)
        for host in hosts:
            if host not in clocks and math.isfinite(most[host]):
                middle, half = (most[host] - least[host]) / 2, (most[host] + least[host]) / 2
                clocks[host] = Clock(middle, half, reference)
    return clocks


def narrowest(hosts: list[str], limits: dict, start: str) -> dict[str, float]:
    """How far each host's offset may lie above that of `start`: shortest paths (Bellman-Ford)."""
    far = dict.fromkeys(hosts, math.inf) | {start: 0.0}
    for _ in hosts:
        changed = None
        for (a, b), limit in limits.items():
            if far[a] + limit < far[b]:
                far[b], changed = far[a] + limit, b
        if changed is None:
            return far
    raise ValueError(f"no clock of {changed} fits its ranks: are these traces of one run?")


def moved(trace: Trace, clock: Clock) -> list[dict]:
    """The events on the reference's clock, in a process named after the rank."""
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
        if "id" in event:  # arrows from forward to backward, within this rank
            event["id"] = f"{trace.rank}/{event['id']}"
        events.append(event)
    return events


def waits(
    traces: list[Trace], collectives: list[dict[int, Call]], clocks: dict[str, Clock]
) -> dict[int, tuple[int, int, float]]:
    """For each rank: its collectives, how many it entered last, and how long its group waited then.

    Microseconds of the rank that waited longest, summed over the collectives that this rank entered
    last. A rank that waited in one group is late in the next: the straggler has the longest sum.
    """
    offset = {trace.rank: clocks[trace.host].offset for trace in traces}
    sums = {trace.rank: (0, 0, 0.0) for trace in traces}
    for calls in collectives:
        times = {rank: call.entry + offset[rank] for rank, call in calls.items()}
        last = max(times, key=times.get)
        waited = times[last] - min(times.values())
        for rank in times:
            count, came_last, total = sums[rank]
            is_last = rank == last
            sums[rank] = count + 1, came_last + is_last, total + waited * is_last
    return sums


def show(traces: list[Trace], collectives: list[dict[int, Call]], clocks: dict[str, Clock]) -> None:
    print(f"{'':6}{'host':16}{'clock, ms':>14}{'+/-':>9}{'collectives':>13}", end="")
    print(f"{'came last':>11}{'others waited, ms':>19}")
    sums = waits(traces, collectives, clocks)
    for trace in traces:
        clock, (count, came_last, waited) = clocks[trace.host], sums[trace.rank]
        print(f"rank {trace.rank} {trace.host:16}{clock.offset / 1e3:13.3f}", end="")
        print(f"{clock.error / 1e3:9.3f}{count:13}{came_last:11}{waited / 1e3:19.1f}")
    unknown = sum(trace.unknown for trace in traces)
    if unknown:
        print(f"{unknown} collectives left out: the traces do not name their group")
    first, *others = dict.fromkeys(clock.reference for clock in clocks.values())
    for host in others:
        print(f"no collective connects {host} with {first}: {host} keeps its own clock")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("traces", nargs="+", type=Path, help="trace files, one per rank")
    parser.add_argument("--output", type=Path, default=Path("timeline.json"), help="merged trace")
    return parser.parse_args()


if __name__ == "__main__":
    main()
