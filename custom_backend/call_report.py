"""Print the calls of all ranks as one table, and write them as one timeline."""

import json
from pathlib import Path

EXPLANATION = """
Means over {ranks} rank(s). Bytes: the size of the tensors passed to and returned by the operation,
not the bytes on the network. Until done: ms from the call to its completion, on the rank with the
shortest and with the longest time.
"""
HEADER = ["operation", "calls", "bytes given", "bytes got", "ms in call", "ms in wait()"]
HEADER += ["ms until done: least", "most", "called from"]
TEXT = {"operation", "called from"}  # left-aligned columns
MS = 1e3  # per second


def print_report(ranks: dict[int, list[list]]) -> None:
    """ranks: for each, rows of (operation, caller, calls, given, got, in call, in wait, done)."""
    found = {}  # (operation, caller) -> {rank: numbers}
    for rank, rows in ranks.items():
        for operation, caller, *numbers in rows:
            found.setdefault((operation, caller), {})[rank] = numbers
    lines = sorted(found.items(), key=lambda item: -total(item[1], 5))
    table = [HEADER, *(line(*key, by_rank, len(ranks)) for key, by_rank in lines)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(EXPLANATION.format(ranks=len(ranks)))
    for cells in table:
        columns = zip(cells, widths, HEADER, strict=True)
        aligned = [c.ljust(w) if name in TEXT else c.rjust(w) for c, w, name in columns]
        print("  ".join(aligned).rstrip())


def line(operation: str, caller: str, by_rank: dict[int, list], ranks: int) -> list[str]:
    calls, given, got, in_call, in_wait = (total(by_rank, i) / ranks for i in range(5))
    done = sorted((numbers[5], rank) for rank, numbers in by_rank.items())
    least, most = (f"{MS * seconds:.1f} rank {rank}" for seconds, rank in (done[0], done[-1]))
    counts = [f"{calls:g}", f"{given:,.0f}", f"{got:,.0f}"]
    times = [f"{MS * in_call:.1f}", f"{MS * in_wait:.1f}", least, most]
    return [operation, *counts, *times, caller]


def total(by_rank: dict[int, list], column: int) -> float:
    return sum(numbers[column] for numbers in by_rank.values())


def write_timeline(folder: Path, ranks: dict[int, list[dict]]) -> Path:
    """Write the Chrome trace format: one process per rank, microseconds since the first call.

    The row "script" shows when a rank is inside a call or inside wait(). The rows below show each
    operation from call to completion.
    """
    first = min((event["call"][0] for events in ranks.values() for event in events), default=0.0)

    def microseconds(moment: float) -> float:
        return round(1e6 * (moment - first), 3)

    trace = []
    for rank, events in ranks.items():
        name = {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        trace.append(name)
        trace.append({**name, "name": "thread_name", "tid": 0, "args": {"name": "script"}})
        for event in events:
            what = {key: event[key] for key in ("name", "caller", "given", "got")}
            spans = [(event["operation"], event["call"])]
            spans += [(f"wait: {event['operation']}", wait) for wait in event["waits"]]
            for title, (start, end) in spans:
                trace.append(
                    {
                        "name": title,
                        "ph": "X",  # a complete span
                        "pid": rank,
                        "tid": 0,
                        "ts": microseconds(start),
                        "dur": microseconds(end) - microseconds(start),
                        "args": what,
                    }
                )
            if event["done"] is None:
                continue
            for phase, moment in (("b", event["call"][0]), ("e", event["done"])):  # begin, end
                trace.append(
                    {
                        "name": event["operation"],
                        "ph": phase,
                        "cat": "operations",
                        "id": f"{rank} {event['name']}",
                        "pid": rank,
                        "tid": 0,
                        "ts": microseconds(moment),
                        "args": what,
                    }
                )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "timeline.json"
    path.write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))
    return path
