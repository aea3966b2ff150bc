"""merge_traces.py: clocks that differ are found, and the rank that every other rank waits for."""

import gzip
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pool
import pytest
from helpers import ROOT, python

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "clusters" / "merge_traces.py"
HOSTS = ("alpha", "alpha", "beta", "beta")
OFFSETS = {
    "alpha": 0.0,
    "beta": -3_700_000.0,
    "gamma": 12_345.0,
}  # microseconds to add to what its clock shows


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
        paths.append(write(folder, rank, host, events[rank], {"0": [*range(len(hosts))]}))
    return paths


def write(folder: Path, rank: int, host: str, events: list[dict], groups: dict) -> Path:
    """As torch.profiler writes it. groups: the ranks of each of this rank's groups, by name."""
    config = [{"pg_name": name, "ranks": ranks} for name, ranks in groups.items()]
    about = {"rank": rank, "pg_config": config}
    content = {"traceEvents": events, "host_name": host, "distributedInfo": about}
    path = folder / f"trace_{rank}.json"
    path.write_text(json.dumps(content))
    return path


def span(name: str, ts: float, dur: float) -> dict:
    return {"ph": "X", "name": name, "pid": 77, "tid": 1, "ts": ts, "dur": dur}


@dataclass
class Row:
    """Of the table that is printed."""

    clock: float
    error: float
    collectives: int
    came_last: int
    waited: float


def table(paths: list[Path]) -> tuple[list[Row], str]:
    """A row for each rank (milliseconds), and the whole output."""
    output = paths[0].parent / "timeline.json"
    said = python(SCRIPT, *paths, "--output", output, timeout=60).check().output
    rows = re.findall(r"^rank \d+ \S+ +(\S+) +(\S+) +(\d+) +(\d+) +(\S+)$", said, re.M)
    assert len(rows) == len(paths), said
    kinds = (float, float, int, int, float)
    return [Row(*(kind(x) for kind, x in zip(kinds, row, strict=True))) for row in rows], said


def test_the_offset_of_a_clock_is_found(tmp_path):
    for seed in range(10):
        rows, said = table(made(tmp_path, seed))
        for host, row in zip(HOSTS, rows, strict=True):
            assert abs(row.clock - OFFSETS[host] / 1e3) <= row.error, (seed, said)
        assert rows[0].error == rows[1].error == 0, (seed, said)
        assert 0 < rows[2].error == rows[3].error < 3, (seed, said)


def test_a_late_rank_is_named(tmp_path):
    rows, _ = table(made(tmp_path, 0, late=1))
    assert [row.came_last for row in rows] == [0, 20, 0, 0]
    assert 20 * 4.5 < rows[1].waited < 20 * (5.5 + rows[2].error)


# ---- collectives of groups


@dataclass
class Cluster:
    """Ranks that compute and join collectives of groups, on hosts whose clocks are wrong."""

    hosts: tuple[str, ...]
    numbered: bool = True  # as NCCL's kernels are; else as Gloo's events

    def __post_init__(self):
        count = len(self.hosts)
        self.chance, self.now = random.Random(0), [1e6] * count
        self.events, self.groups, self.joined = [[] for _ in self.hosts], {}, Counter()

    def group(self, name: str, *ranks: int) -> str:
        self.groups[name] = list(ranks)
        return name

    def compute(self, rank: int, microseconds: float) -> None:
        self.now[rank] += microseconds * self.chance.uniform(1, 1.1)

    def collective(self, group: str) -> None:
        """It ends, for all ranks of the group, a little after the last rank has entered."""
        ranks, kernel = self.groups[group], "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)"
        self.joined[group] += 1
        done = max(self.now[rank] for rank in ranks) + self.chance.uniform(50, 100)
        for rank in ranks:
            entry, self.now[rank] = self.now[rank], done + self.chance.uniform(0, 50)
            name = kernel if self.numbered else "gloo:all_reduce"
            event = span(name, entry - OFFSETS[self.hosts[rank]], self.now[rank] - entry)
            if self.numbered:
                event["args"] = {"Process Group Name": group, "Seq": self.joined[group]}
            self.events[rank].append(event)

    def write(self, folder: Path) -> list[Path]:
        return [
            write(folder, rank, host, self.events[rank], self.groups_of(rank))
            for rank, host in enumerate(self.hosts)
        ]

    def groups_of(self, rank: int) -> dict[str, list[int]]:
        return {name: ranks for name, ranks in self.groups.items() if rank in ranks}


def two_by_two(late: int, numbered: bool = True, every: int = 1) -> Cluster:
    """HSDP, or tensor next to data parallelism: groups 0-1 and 2-3 inside a host, 0-2 and 1-3
    between the hosts. Each step has four collectives inside; every `every`th, one between."""
    cluster = Cluster(HOSTS, numbered)
    inside = [cluster.group("1", 0, 1), cluster.group("2", 2, 3)]
    between = [cluster.group("3", 0, 2), cluster.group("4", 1, 3)] if every else []
    for step in range(20):
        for _ in range(4):
            for rank in range(4):
                cluster.compute(rank, 1000 + 1000 * (rank == late))
            for group in inside:
                cluster.collective(group)
        if every and step % every == 0:
            for group in between:
                cluster.collective(group)
    return cluster


@pytest.mark.parametrize("every", [1, 5])
def test_collectives_inside_a_host_say_nothing_about_clocks(tmp_path, every):
    """Rank 2's host comes 1 ms late into each collective of its own: the clocks of the hosts follow
    from the few between them, and the rank is found."""
    rows, said = table(two_by_two(late=2, every=every).write(tmp_path))
    for host, row in zip(HOSTS, rows, strict=True):
        assert abs(row.clock - OFFSETS[host] / 1e3) <= row.error, said
        assert row.collectives == 80 + 20 / every
    assert 0 < rows[2].error == rows[3].error < 10, said
    assert rows[2].came_last >= 80
    assert rows[2].waited == max(row.waited for row in rows) > 80 * 0.7, said
    assert rows[0].waited + rows[1].waited < rows[2].waited / 4, said


def test_without_a_common_collective_clocks_stay_as_they_are(tmp_path):
    rows, said = table(two_by_two(late=2, every=0).write(tmp_path))
    assert [(row.clock, row.error) for row in rows] == [(0, 0)] * 4
    assert "no collective connects beta with alpha: beta keeps its own clock\n" in said
    assert [row.came_last for row in rows][2:] == [80, 0], said
    assert rows[2].waited > 80 * 0.7, said


def test_clocks_of_a_chain_of_hosts(tmp_path):
    """Pipeline stages: alpha meets beta, and beta meets gamma, in groups of their own."""
    cluster = Cluster(("alpha", "beta", "gamma"))
    pairs = [cluster.group("1", 0, 1), cluster.group("2", 1, 2)]
    for _ in range(20):
        for rank in range(3):
            cluster.compute(rank, 1000)
        for group in pairs:
            cluster.collective(group)
    rows, said = table(cluster.write(tmp_path))
    for host, row in zip(cluster.hosts, rows, strict=True):
        assert abs(row.clock - OFFSETS[host] / 1e3) <= row.error < 5, said


def test_groups_that_a_trace_does_not_name(tmp_path):
    """Gloo's events say nothing of a group: where there are several, none of them is used."""
    rows, said = table(two_by_two(late=2, numbered=False).write(tmp_path))
    assert [(row.clock, row.error, row.collectives) for row in rows] == [(0, 0, 0)] * 4
    assert "400 collectives left out: the traces do not name their group\n" in said
    assert "no collective connects beta with alpha: beta keeps its own clock\n" in said


def test_collectives_are_matched_by_number(tmp_path):
    """A rank's trace begins two collectives later than the others: as many are left out."""
    cluster = two_by_two(late=2)
    cluster.events[3] = cluster.events[3][10:]  # two steps
    rows, said = table(cluster.write(tmp_path))
    for host, row in zip(HOSTS, rows, strict=True):
        assert abs(row.clock - OFFSETS[host] / 1e3) <= row.error < 10, said
    assert [row.collectives for row in rows] == [100, 100 - 2, 100 - 8, 90], said
    assert rows[2].waited == max(row.waited for row in rows), said


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
    rows, _ = table(paths)
    assert rows[0].collectives == 20
    assert abs(rows[2].clock - OFFSETS["beta"] / 1e3) <= rows[2].error


def change(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_text("no json"), "is not a trace of torch.profiler"),
        (lambda path: path.write_text("[1]"), "is not a trace of torch.profiler"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: change(path, distributedInfo={}), "does not name its rank"),
        (
            lambda path: change(path, distributedInfo={"rank": 0, "pg_config": []}),
            "two traces are of one rank",
        ),
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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b'{"traceEvents": []}')[:-12], "is not a trace of torch.profiler"),
        (b'{"traceEvents": []}', "Not a gzipped file"),
    ],
    ids=["truncated", "not compressed"],
)
def test_a_compressed_trace_that_cannot_be_read(tmp_path, content, says):
    path = tmp_path / "trace_0.json.gz"
    path.write_bytes(content)
    result = python(SCRIPT, path, "--output", tmp_path / "timeline.json", timeout=60)
    assert result.returncode == 2
    assert result.output.startswith(f"merge_traces.py: error: {path}")
    assert says in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("{folder}/none/timeline.json", "No such file or directory"),
        ("/dev/full", "No space left on device"),
    ],
)
def test_an_output_that_cannot_be_written(tmp_path, output, says):
    output = output.format(folder=tmp_path)
    if output.startswith("/dev") and not Path(output).exists():
        pytest.skip("there is no /dev/full here")
    result = python(SCRIPT, *made(tmp_path, 0), "--output", output, timeout=60)
    assert (result.returncode, result.output) == (
        2,
        f"merge_traces.py: error: {output}: {says}\n",
    )


@pytest.mark.slow
def test_traces_of_a_real_job(tmp_path):
    """Two ranks of one host; then the same, as if the second were of another one, 5 s ahead."""
    script = ROOT / "ddp_basics" / "train.py"
    options = ("--epochs", 1, "--profile", "--output-dir", tmp_path)
    pool.run(script, *options, ranks=2, timeout=100).check()
    paths = sorted(tmp_path.glob("trace_*.json"))
    rows, _ = table(paths)
    assert rows[0].collectives == rows[1].collectives >= 3  # a bucket or more in each of 3 steps
    assert [(row.clock, row.error) for row in rows] == [(0, 0)] * 2
    content = json.loads(paths[1].read_text())
    for event in content["traceEvents"]:
        if "ts" in event:
            event["ts"] += 5e6
    paths[1].write_text(json.dumps(content | {"host_name": "another"}))
    rows, _ = table(paths)
    assert abs(rows[1].clock + 5e3) <= rows[1].error < 1e3
