"""collectives/: bandwidth.py and async_work.py. The tests check what is measured, not speed."""

import re
import sys
from itertools import pairwise
from types import SimpleNamespace

import async_work
import bandwidth
import costs
import pool
import pytest
import timelines
import torch
from all_reduce_algorithms import ALGORITHMS
from bandwidth_cases import OPERATIONS
from helpers import ROOT, python, read_metrics

slow = pytest.mark.slow  # each launch of ranks takes some seconds
BANDWIDTH, ASYNC = ROOT / "collectives/bandwidth.py", ROOT / "collectives/async_work.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    """What each of four ranks saved."""
    folder = tmp_path_factory.mktemp("cost")
    pool.run(ROOT / "tests/workers/collectives_cost.py", folder, ranks=4).check()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


# ---- formulas


def test_bus_factors():
    """By counting: the bytes that the busiest rank must send, per byte of the operation."""
    for n in range(1, 9):
        one = {"broadcast", "reduce", "send_recv"}
        twice = {"all_reduce", *ALGORITHMS}
        for operation in OPERATIONS:
            factor = costs.bus_factor(operation, n)
            if operation in one:
                assert factor == 1
            else:  # every rank has 1/n already and needs the other n - 1 parts; all_reduce: twice
                assert factor == pytest.approx((n - 1) * (2 if operation in twice else 1) / n)


@pytest.mark.parametrize("factor", [1.1, 1.125, 2])
def test_sizes_grow_from_the_smallest_that_is_allowed(factor):
    sizes = bandwidth.sizes_between(4, 64, factor, unit=4)
    assert sizes[0] == 4
    assert sizes[-1] in (60, 64)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(("alpha", "beta"), [(5e-6, 1e-10), (2e-3, 1e-9), (1e-3, 0), (0, 1e-8)])
def test_fit_finds_the_line(alpha, beta):
    sizes = [2**k for k in range(10, 27)]
    seconds = [alpha + beta * s for s in sizes]
    assert costs.fit_alpha_beta(sizes, seconds) == pytest.approx((alpha, beta), rel=1e-6, abs=1e-18)
    # 10 per cent of noise without a trend: the line hardly moves at either end.
    noisy = [t * (1.1 if i % 2 else 0.9) for i, t in enumerate(seconds)]
    found = costs.fit_alpha_beta(sizes, noisy)
    assert found == pytest.approx((alpha, beta), rel=0.15, abs=max(alpha, beta * 2**10) * 0.15)


def test_fit_is_never_negative():
    sizes = [1000, 2000, 4000]
    assert costs.fit_alpha_beta(sizes, [3.0, 2.0, 1.0])[1] == 0
    assert costs.fit_alpha_beta(sizes, [1.0, 4.0, 16.0])[0] == 0


# ---- the cases of bandwidth.py


def expected(operation: str, rank: int, world: int, size: int) -> torch.Tensor | None:
    """From all ranks' inputs, which bandwidth.py fills with (3 i + 5 rank) % 11."""
    index = torch.arange(size * world)
    inputs = torch.stack([(3 * index + 5 * r) % 11 for r in range(world)]).float()
    parts = inputs[:, :size].flatten()
    mine = slice(rank * size, (rank + 1) * size)
    if operation in ("gather", "reduce") and rank > 0:
        return None
    return {
        "broadcast": inputs[0],
        "all_gather": parts,
        "gather": parts,
        "scatter": inputs[0, mine],
        "reduce_scatter": inputs.sum(0)[mine],
        "all_to_all": inputs[:, mine].flatten(),
        "send_recv": inputs[rank - 1],
    }.get(operation, inputs.sum(0))


@slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_of_each_operation(seen, operation):
    checked = 0
    for rank, saved in enumerate(seen):
        for (name, world, size), (result, error, of_spoiled) in saved["cases"].items():
            if name != operation:
                continue
            want = expected(operation, rank, world, size)
            assert error is None, (world, size, rank, error)
            if want is not None:
                assert torch.equal(result, want), (world, size, rank)
                assert of_spoiled.startswith("1 values, the first at "), of_spoiled
                checked += 1
    assert checked == 3 * (3 if operation in ("gather", "reduce") else 2 + 3 + 4)


@slow
def test_time_is_that_of_the_slowest_rank(seen):
    assert len(seen[0]["slow"]) == 2
    assert min(seen[0]["slow"]) >= 0.03  # rank 1 sleeps 0.03 s in each call
    assert all(saved["slow"] == seen[0]["slow"] for saved in seen)


@slow
def test_limits_are_measured_on_all_ranks(seen):
    names = ["memory copy, all ranks at once", "socket, rank 0 to rank 1"]
    assert list(seen[0]["limits"]) == [*names, "socket, every rank to its next"]
    for rates in seen[0]["limits"].values():
        assert len(rates) == 3
        assert min(rates) > 0
    assert all(saved["limits"] == seen[0]["limits"] for saved in seen)


# ---- bandwidth.py itself


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    options = ("--min-bytes", 100, "--max-bytes", "64K", "--factor", 25, "--repeats", 3)
    run = pool.run(BANDWIDTH, *options, "--verify", "--output-dir", folder, ranks=2).check()
    return run.output, read_metrics(folder), folder


@slow
def test_json_lines_are_complete(sweep):
    _, lines, folder = sweep
    rows = [line for line in lines if "operation" in line]
    sizes = [96, 2496, 62496]  # whole elements, as many for each of two ranks
    assert [(r["operation"], r["bytes"]) for r in rows] == [
        (operation, size) for operation in OPERATIONS for size in sizes
    ]
    for row in rows:
        assert (row["ranks"], row["backend"], row["values"]) == (2, "gloo", "ok")
        assert len(row["seconds"]) == 3
        median = sorted(row["seconds"])[1]
        assert row["algbw"] == pytest.approx(row["bytes"] / median)
        factor = costs.bus_factor(row["operation"], 2)
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)
    fits = {line["fit"]: line for line in lines if "fit" in line}
    assert list(fits) == list(OPERATIONS)
    for operation, fit in fits.items():
        mine = [row for row in rows if row["operation"] == operation]
        medians = [sorted(row["seconds"])[1] for row in mine]
        line = costs.fit_alpha_beta(sizes, medians)
        assert (fit["alpha"], fit["beta"]) == pytest.approx(line)
        assert fit["best_busbw"] == max(row["busbw"] for row in mine)
    limits = [line for line in lines if "limit" in line]
    assert len(limits) == 3
    assert len(rows) + len(fits) + len(limits) == len(lines)
    picture = (folder / "bandwidth.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


@slow
def test_table_shows_what_the_lines_hold(sweep):
    output, lines, _ = sweep
    table = [line.split() for line in output.split("time per call")[1].splitlines()[2:]]
    rows = [line for line in lines if "operation" in line]
    for shown, row in zip(table, rows, strict=False):
        us = [f"{1e6 * f(row['seconds']):.0f}" for f in (lambda s: sorted(s)[1], min, max)]
        rates = [f"{row[key] / 1e9:.3f}" for key in ("algbw", "busbw")]
        assert shown == [row["operation"], str(row["bytes"]), *us, *rates, "ok"]
    assert "missing here" not in output


PLANTED = """
import sys
from itertools import pairwise
sys.path.insert(0, {folder!r})
sys.argv = ["bandwidth.py", "--verify", "--repeats", "1", "--max-bytes", "4K", *sys.argv[1:]]
import all_reduce_algorithms

def forgets_one(tensor, group=None):
    tensor[-1] += 2

all_reduce_algorithms.ALGORITHMS["ring"] = forgets_one
import bandwidth
bandwidth.main()
"""


@slow
def test_verify_catches_a_wrong_result(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(PLANTED.format(folder=str(ROOT / "collectives")))
    result = pool.run(script, "--operations", "all_reduce", "ring")
    assert result.returncode == 1, result.output
    shown = re.findall(r"^(all_reduce|ring) +4096 .* (\w+)$", result.output, flags=re.MULTILINE)
    assert shown == [("all_reduce", "ok"), ("ring", "wrong")]
    # Alone, rank 0 keeps its input; of 1024 numbers the last is 3 * 1023 % 11 = 0.
    assert "WRONG: ring, 4096 bytes, rank 0: 1 values, the first at 1023: 2, not 0" in result.output


# ---- async_work.py


@slow
def test_handle(seen):
    for rank, saved in enumerate(seen):
        last = rank == 3
        facts = {name: value for name, value in saved["handle"].items() if name != "sum"}
        assert facts == {
            "completed_at_once": "-" if last else False,  # the last rank had not started
            "wait_of_50_ms": "-" if last else "raised",
            "completed_after_wait()": True,
            "then,_then": "mean 2.5",
            "of_three": "3 complete",
        }
        assert saved["handle"]["sum"].tolist() == [10.0, 10.0]


@slow
def test_transfers_go_on_while_ranks_compute(seen):
    for saved in seen:
        for order in ("sequential", "overlapped"):
            assert saved["overlap"][order] == [True] * 4, order
        assert all((tensor == 6).all() for tensor in saved["sums"])  # 0 + 1 + 2 + 3


@slow
def test_computing_does_not_wait_for_transfers(seen):
    assert seen[3]["ahead"]  # the last rank had sent nothing when rank 0 computed its last bucket


@slow
def test_timelines_are_consistent(seen):
    for saved in seen:
        spans = saved["measured"]["spans"]
        assert set(spans) == set(async_work.ORDERS)
        for order, buckets in spans.items():
            assert len(buckets) == 3
            for begin, end, started, done in buckets:
                assert 0 <= begin <= end <= started <= done
            for before, after in pairwise(buckets):
                assert before[1] <= after[0]  # a rank computes one bucket at a time
                if order != "overlapped":
                    assert before[3] <= after[0]  # sent before the next one is computed
        assert all(done == started for _, _, started, done in spans["compute"])
    for order in async_work.ORDERS:
        samples = [saved["measured"][order] for saved in seen]
        assert samples == samples[:1] * 4  # the slowest rank's, on all ranks
        assert len(samples[0]) == 3
        for saved in seen:  # a rank's last timeline fits into the last sample
            assert saved["measured"]["spans"][order][-1][3] <= samples[0][-1]


def test_hidden_and_bounds():
    results = {
        "compute": [0.8, 0.8, 0.8],
        "communicate": [0.4, 0.4, 0.4],
        "sequential": [1.2, 1.3, 1.2],
        "overlapped": [0.9, 0.9, 1.2],
        "processor": {"compute": 1.6, "communicate": 0.6, "sequential": 2.2, "overlapped": 2.2},
    }
    assert async_work.hidden(results) == pytest.approx([0.75, 1.0, 0.0])
    pipeline, processor = async_work.bounds(results, buckets=4, cores=2).values()
    assert pipeline == pytest.approx(0.9)  # 0.8 s of computing, then the last quarter of 0.4 s
    assert processor == pytest.approx(1.1)
    short = {**results, "compute": [0.2] * 3}
    assert next(iter(async_work.bounds(short, 4, 2).values())) == pytest.approx(0.45)


def test_drawing():
    spans = {
        "sequential": [(0, 0.1, 0.1, 0.2), (0.2, 0.3, 0.3, 0.4)],
        "overlapped": [(0, 0.1, 0.1, 0.2), (0.1, 0.2, 0.2, 0.3)],
    }
    assert timelines.draw("sequential", spans, width=8) == [
        "sequential, 400.0 ms", "  0 |##--", "  1 |    ##--",
    ]  # fmt: skip
    assert timelines.draw("overlapped", spans, width=8) == [
        "overlapped, 300.0 ms", "  0 |##--", "  1 |  ##--",
    ]  # fmt: skip


@slow
def test_async_work_shows_both_orders(tmp_path):
    options = ("--buckets", 3, "--megabytes", 0.5, "--repeats", 2, "--plot", tmp_path / "a.png")
    output = pool.run(ASYNC, *options, ranks=2).check().output
    assert re.search(
        r"^ +0  False +raised +True +\[3.0, 3.0\] +mean 1.5 +3 complete$", output, re.M
    )
    for order in ("sequential", "overlapped"):
        lines = output.split(f"\n{order}, ")[1].splitlines()
        total = float(lines[0].split()[0])
        assert total > 0
        for i, line in enumerate(lines[1:4]):
            assert re.fullmatch(rf"  {i} \| *#* *-*", line), line
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+)$", output, re.M)
    assert [row[0] for row in rows] == list(async_work.ORDERS)
    for _, *numbers in rows:
        median, low, high = map(float, numbers)
        assert low <= median <= high
    assert "no order can take fewer ms than" in output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("device", "nbytes", "calls"),
    [("meta", 4096, 20), ("meta", 2**30, 20), ("cpu", 4096, 10), ("cpu", 2**20, 1)],
)
def test_calls_per_sample(monkeypatch, device, nbytes, calls):
    """On a GPU (here the meta device) there are as many calls as in nccl-tests."""
    asked = []

    def time_calls(run, repeats, calls, device):
        asked.append(calls)
        return [1.0] * repeats

    monkeypatch.setattr(bandwidth, "time_calls", time_calls)
    monkeypatch.setattr(bandwidth, "prepare", lambda *_: SimpleNamespace(run=None))
    monkeypatch.setattr(bandwidth.dist, "get_backend", lambda: "nccl")
    worker = SimpleNamespace(device=torch.device(device), world_size=2)
    bandwidth.measure("all_reduce", nbytes, 2, "ok", worker)
    assert asked == [calls]


def test_timers_wait_for_any_accelerator(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for device in ("cpu", "cuda:1", "xpu:0"):
        costs.synchronize(torch.device(device))
    assert waited == [torch.device("cuda:1"), torch.device("xpu:0")]


@pytest.mark.gpu
def test_on_one_gpu(tmp_path):
    options = ("--device", "cuda", "--max-bytes", "4K", "--repeats", 2, "--verify")
    output = python(BANDWIDTH, *options, "--output-dir", tmp_path).check().output
    assert "1 rank(s) on cuda, cpu:gloo,cuda:nccl" in output
    rows = [line for line in read_metrics(tmp_path) if "operation" in line]
    assert [row["operation"] for row in rows] == [o for o in OPERATIONS if o != "send_recv"]
    assert {(row["backend"], row["values"]) for row in rows} == {("cpu:gloo,cuda:nccl", "ok")}
    output = python(ASYNC, "--device", "cuda", "--repeats", 2).check().output
    assert "mean 1 " in output
    assert [line.split()[0] for line in output.splitlines()[-4:]] == list(async_work.ORDERS)


# ---- bad arguments; the benchmark where it cannot run


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (
            bandwidth,
            ["--operations", "ring", "rign"],
            "--operations: invalid choice: 'rign'",
        ),
        (
            bandwidth,
            ["--min-bytes", "4X"],
            "--min-bytes: must be from 4 to 16G bytes, such as 64K",
        ),
        (bandwidth, ["--max-bytes", "1K"], "--min-bytes 4096 is above --max-bytes 1024"),
        (bandwidth, ["--factor", "1"], "--factor: must be a number from 1.1 to 1024, not 1"),
        (bandwidth, ["--repeats", "0"], "--repeats: must be an integer of at least 1, not 0"),
        (async_work, ["--buckets", "0"], "--buckets: must be an integer of at least 1, not 0"),
        (async_work, ["--ratio", "nan"], "--ratio: must be a number from 0.01 to 100, not nan"),
        (async_work, ["--plot", "/no/such/a.png"], "--plot /no/such/a.png: there is no such dir"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, module, arguments, message):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        module.parse_args()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith(f"{module.__name__}.py: error: {message}")


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import bench
    import private_network

    return SimpleNamespace(network=private_network, bench=bench)


def test_benchmark_says_why_it_leaves_the_slow_link_out(benchmarks, monkeypatch):
    network = benchmarks.network
    refused = [sys.executable, "-c", "import sys; sys.exit('unshare: not permitted')"]
    monkeypatch.setattr(network, "UNSHARE", refused)
    monkeypatch.setattr(network.shutil, "which", lambda name: name)  # whatever this machine has
    assert network.why_not() == "no slow link could be made (unshare: not permitted)"
    monkeypatch.setattr(network.shutil, "which", lambda name: None if name == "tc" else name)
    assert network.why_not() == "needs tc, which this machine lacks"


def test_benchmark_reads_what_a_part_says_or_fails(benchmarks):
    said = "print('a line'); print('SAMPLES {\"gloo\": [1.5]}')"
    assert benchmarks.bench.measure(sys.executable, "-c", said) == {"gloo": [1.5]}
    with pytest.raises(RuntimeError, match="boom"):
        benchmarks.bench.measure(sys.executable, "-c", "raise ValueError('boom')")


def test_a_summary_is_read_without_counting_zeros(benchmarks):
    assert benchmarks.bench.summary([0.5, 15_134.2, 99.961]) == "99.96 (0.5 ... 15,134)"


def test_own_address_is_that_of_the_route_to_the_master(monkeypatch):
    """On the master's host it is the name by which the others found it, never 127.0.1.1."""
    monkeypatch.setenv("MASTER_PORT", "29400")
    for master in ("127.0.0.1", "localhost"):
        monkeypatch.setenv("MASTER_ADDR", master)
        assert costs.own_address() == master
