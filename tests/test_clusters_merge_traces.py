"""merge_traces.py: clocks that differ are found, and the rank that every other rank waits for."""

import json
import random
import sys
from pathlib import Path

import pool
import pytest
from helpers import ROOT, python

sys.path.insert(0, str(ROOT / "clusters"))

import merge_traces

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "clusters" / "merge_traces.py"
HOSTS = ("alpha", "alpha", "beta", "beta")
OFFSETS = {"alpha": 0.0, "beta": -3_700_000.0}  # microseconds to add to what its clock shows


def made(folder: Path, seed: int, late: int = 2, collectives: int = 20, hosts=HOSTS) -> list[Path]:
    """Traces of a job in which rank `late` comes 5 ms after the others into each collective."""
    chance = random.Random(seed)
    events, now = [[] for _ in hosts], 1e6
    for _ in range(collectives):
        entries = [now + chance.uniform(0, 500) + 5000 * (r == late) for r in range(len(hosts))]
        done = max(entries) + chance.uniform(100, 200)
        for rank, entry in enumerate(entries):
            end = done + chance.uniform(0, 300)
            events[rank].append(span("gloo:all_reduce", entry, end - entry))
            events[rank].append(span("aten::mm", end, 1000))
            events[rank].append({"ph": "f", "name": "fwdbwd", "id": 1, "pid": 77, "ts": end})
        now = done + 2000
    paths = []
    for rank, host in enumerate(hosts):
        for event in events[rank]:
            event["ts"] -= OFFSETS[host]
        content = {
            "traceEvents": events[rank],
            "host_name": host,
            "distributedInfo": {"rank": rank},
        }
        paths.append(folder / f"trace_{rank}.json")
        paths[-1].write_text(json.dumps(content))
    return paths


def span(name: str, ts: float, dur: float) -> dict:
    return {"ph": "X", "name": name, "pid": 77, "tid": 1, "ts": ts, "dur": dur}


def aligned(paths: list[Path]) -> tuple[list, list]:
    traces = [merge_traces.read(path) for path in paths]
    return traces, merge_traces.align(traces)


def test_the_offset_of_a_clock_is_found(tmp_path):
    for seed in range(20):
        _, clocks = aligned(made(tmp_path, seed))
        for host, clock in zip(HOSTS, clocks, strict=True):
            assert abs(clock.offset - OFFSETS[host]) <= clock.error, f"seed {seed}"
        assert clocks[0] == clocks[1] == merge_traces.Clock(0, 0), f"seed {seed}"
        assert 0 < clocks[2].error < 3000, f"seed {seed}"


def test_a_late_rank_is_named(tmp_path):
    traces, clocks = aligned(made(tmp_path, 0, late=1))
    told = merge_traces.waits(traces, clocks)
    assert told[1][0] == 20
    assert 20 * 4500 < told[1][1] < 20 * (5500 + clocks[2].error)
    assert [count for count, _ in told] == [0, 20, 0, 0]


def test_the_timeline_has_a_process_for_each_rank(tmp_path):
    output = tmp_path / "timeline.json"
    said = python(SCRIPT, *made(tmp_path, 0), "--output", output, timeout=60).check().output
    assert said.count("rank ") == 4
    events = json.loads(output.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {r: f"rank {r} ({host})" for r, host in enumerate(HOSTS)}
    products = [
        [e["ts"] for e in events if e["name"] == "aten::mm" and e["pid"] == r] for r in names
    ]
    assert all(len(times) == 20 for times in products)
    for times in zip(*products, strict=True):  # all had left the same collective
        assert max(times) - min(times) < 300 + 3000
    arrows = {(e["pid"], e["id"]) for e in events if e["ph"] == "f"}
    assert arrows == {(r, f"{r}/1") for r in names}


def test_kernels_count_where_there_are_some(tmp_path):
    """NCCL's other events end when the operation is only in the queue of its stream."""
    paths = made(tmp_path, 0)
    for path in paths:
        content = json.loads(path.read_text())
        for event in list(content["traceEvents"]):
            if event["name"] == "gloo:all_reduce":
                event["name"] = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"
                content["traceEvents"].append(span("nccl:all_reduce", event["ts"], 10))
        content["traceEvents"].append(span("ncclDevKernel_SendRecv(...)", 0, 1))
        path.write_text(json.dumps(content))
    traces, clocks = aligned(paths)
    assert len(traces[0].entries) == 20
    assert abs(clocks[2].offset - OFFSETS["beta"]) <= clocks[2].error


def change(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_text("no json"), "is not a trace of torch.profiler"),
        (lambda path: path.write_text("[1]"), "is not a trace of torch.profiler"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: change(path, distributedInfo={}), "does not say of which rank"),
        (lambda path: change(path, distributedInfo={"rank": 0}), "two traces are of one rank"),
        (lambda path: change(path, traceEvents=[]), "has 0 collectives"),
        (lambda path: change(path, host_name="alpha"), "no clock of alpha fits"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, spoil, says):
    paths = made(tmp_path, 0)
    spoil(paths[2])
    result = python(SCRIPT, *paths, "--output", tmp_path / "timeline.json", timeout=60)
    assert result.returncode == 2
    assert says in result.output
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "timeline.json").exists()


@pytest.mark.slow
def test_traces_of_a_real_job(tmp_path):
    """Two ranks of one host; then the same, as if the second were of another one, 5 s ahead."""
    script = ROOT / "ddp_basics" / "train.py"
    options = ("--epochs", 1, "--profile", "--output-dir", tmp_path)
    pool.run(script, *options, ranks=2, timeout=100).check()
    paths = sorted(tmp_path.glob("trace_*.json"))
    traces, clocks = aligned(paths)
    assert [trace.rank for trace in traces] == [0, 1]
    assert len(traces[0].entries) >= 3  # a bucket or more in each of three steps
    assert clocks == [merge_traces.Clock(0, 0)] * 2
    content = json.loads(paths[1].read_text())
    for event in content["traceEvents"]:
        if "ts" in event:
            event["ts"] += 5e6
    paths[1].write_text(json.dumps(content | {"host_name": "another"}))
    _, clocks = aligned(paths)
    assert abs(clocks[1].offset + 5e6) <= clocks[1].error < 1e6
