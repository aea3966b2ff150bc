"""custom_backend/counting_backend.py: counts everything, changes nothing."""

import json
import re
import runpy
import threading
from collections import Counter, defaultdict
from itertools import pairwise
from types import SimpleNamespace

import call_log
import pool
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, learned
from torch.torch_version import TorchVersion
from workers import custom_backend_counting as worker

pytestmark = pytest.mark.slow

COUNT = ROOT / "custom_backend/counting_backend.py"
WORKER = ROOT / "tests/workers/custom_backend_counting.py"
PARAMETERS = sum(p.numel() for p in worker.model().parameters())
LINES = WORKER.read_text().splitlines()


def saved(folder) -> list[dict]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def events(folder) -> list[dict]:
    return json.loads((folder / "timeline.json").read_text())["traceEvents"]


def label(event: dict) -> str:
    """The comment on the worker's line that made this call."""
    number = int(re.search(r"\.py:(\d+) ", event["args"]["caller"])[1])
    return LINES[number - 1].rpartition("# ")[2].strip()


def test_an_old_torch_is_one_clear_sentence(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    with pytest.raises(ImportError, match=r"needs torch 2\.14 or newer, this is 2\.13\.0$"):
        runpy.run_path(COUNT)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> SimpleNamespace:
    plain, counted = (tmp_path_factory.mktemp(name) for name in ("plain", "counted"))
    pool.run(WORKER, "gloo", plain, ranks=2).check()
    command = (COUNT, "--trace", counted, WORKER, "gloo", counted)
    output = pool.run(*command, ranks=2, cold=True).check().output  # the table is printed at exit
    return SimpleNamespace(
        plain=saved(plain), counted=saved(counted), events=events(counted), output=output
    )


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_nothing_changes(job):
    for plain, counted in zip(job.plain, job.counted, strict=True):
        assert plain["backend"] == "gloo"
        assert len(plain["ddp, gradients"]) == 4
        assert plain.keys() == counted.keys()
        assert [name for name in plain if not same(plain[name], counted[name])] == []


def calls(job, rank: int) -> list[dict]:
    inside = [e for e in job.events if e["ph"] == "X" and e["pid"] == rank]
    return [e for e in inside if not e["name"].startswith("wait: ")]


BY_EVERYBODY = {
    # DDP's Reducer calls from C++, one bucket per step; FSDP's backward gathers and reduces.
    ("all_reduce", "backward"): worker.STEPS,
    ("all_gather_single", "backward"): 2 * worker.STEPS,
    ("reduce_scatter_single", "backward"): 2 * worker.STEPS,
    ("all_reduce", "dtensor sum"): 1,
    ("all_reduce", "functional all_reduce"): 1,
    ("all_to_all_single", "functional all_to_all"): 1,
    ("broadcast", "functional broadcast"): 1,
    ("all_reduce, coalesced", "functional coalesced"): 1,
    ("all_gather", "all_gather"): 1,
    ("all_to_all", "all_to_all"): 1,
    ("gather", "gather"): 1,
    ("scatter", "scatter"): 1,
    ("reduce", "reduce"): 1,
    ("reduce_scatter", "reduce_scatter"): 1,
    ("all_reduce", "all_reduce"): 1,
    ("send", "batch"): 1,
    ("recv", "batch"): 1,
    ("all_gather_single", "objects"): 2,  # the sizes, then the bytes
    ("monitored_barrier", "monitored"): 1,
    ("all_reduce", "new_group"): 1,
}


def test_every_call_is_counted(job):
    for rank, of_its_own in enumerate([("recv from any", "any"), ("send", "send")]):
        found = Counter((event["name"], label(event)) for event in calls(job, rank))
        assert {key: found[key] for key in BY_EVERYBODY} == BY_EVERYBODY
        assert found[of_its_own] == 1
        # torch may run these as one operation of several tensors.
        for what in ("dtensor gather", "functional all_gather"):
            assert sum(n for (name, at), n in found.items() if at == what and "gather" in name) == 1
        at = "functional reduce_scatter"
        assert sum(n for key, n in found.items() if key[1] == at and "reduce_" in key[0]) == 1
        splits = "groups" in job.plain[0] and job.plain[0]["groups"][0][0].item() == 6
        assert found["all_reduce", "split_group"] == splits  # Gloo splits groups in torch 2.15


def test_bytes_are_those_of_the_model(job):
    sizes = defaultdict(lambda: [0, 0])
    for event in calls(job, 0):
        for i, key in enumerate(("given", "got")):
            sizes[event["name"], label(event)][i] += event["args"][key]
    model = 4 * PARAMETERS * worker.STEPS
    assert sizes["all_reduce", "backward"] == [model, model]
    assert sizes["all_gather_single", "backward"] == [model / 2, model]
    assert sizes["reduce_scatter_single", "backward"] == [model, model / 2]
    assert sizes["all_gather", "all_gather"] == [16, 32]
    assert sizes["send", "batch"] == [16, 0]
    assert sizes["recv", "batch"] == [0, 16]


def table(output: str) -> dict[tuple[str, str], list[str]]:
    """(operation, called from) -> the remaining columns of the printed table."""
    lines = output[output.index("\noperation ") + 1 :].split("\n\n")[0].splitlines()
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    assert {len(row) for row in rows} == {len(rows[0])}
    return {(row[0], row[-1]): row[1:-1] for row in rows}


def test_table_has_what_the_timeline_has(job):
    rows = table(job.output)
    counts, given = Counter(), Counter()
    for rank in range(2):
        for event in calls(job, rank):
            key = event["name"], event["args"]["caller"]
            counts[key] += 1 / 2
            given[key] += event["args"]["given"] / 2
    rows.pop(("operation", "called from"))
    assert {key: float(row[0]) for key, row in rows.items()} == counts
    assert all(float(row[1].replace(",", "")) == given[key] for key, row in rows.items())


def test_timeline_is_one_of_all_ranks(job):
    spans = [e for e in job.events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1}
    assert min(e["ts"] for e in spans) == 0
    begins, ends = (
        {e["id"]: e["ts"] for e in job.events if e["ph"] == phase} for phase in ("b", "e")
    )
    assert begins.keys() == ends.keys()
    assert len(begins) == len(calls(job, 0)) + len(calls(job, 1))
    assert all(begins[key] <= ends[key] for key in begins)
    # No rank completes an all_reduce before all ranks have begun it. (The clocks are compared to
    # within a millisecond on a busy machine.)
    for event in calls(job, 0):
        if event["name"] in ("all_reduce", "barrier", "all_gather_single"):
            both = [f"{rank} {event['args']['name']}" for rank in range(2)]
            assert min(ends[x] for x in both) > max(begins[x] for x in both) - 1000, event


def test_waiting_is_seen(job):
    waits = [e for e in job.events if e["ph"] == "X" and e["name"].startswith("wait: ")]
    assert {"wait: all_gather", "wait: recv", "wait: reduce_scatter_single"} <= {
        e["name"] for e in waits
    }
    for rank in range(2):  # the spans of one row must not overlap
        mine = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in job.events if e["ph"] == "X" and e["pid"] == rank
        )
        pairs = pairwise(mine)
        assert all(end <= start + 0.01 for (_, end), (start, _) in pairs)


def test_a_backend_of_its_own_name(job, tmp_path):
    output = pool.run(WORKER, "counting", tmp_path, ranks=2).check().output
    for plain, counted in zip(job.plain, saved(tmp_path), strict=True):
        assert counted["backend"] == "counting"
        for name in ("ddp", "ddp, gradients"):
            assert same(plain[name], counted[name])
    line = next(i for i, text in enumerate(LINES, 1) if text.endswith("# backward"))
    row = table(output)["all_reduce", f"{WORKER.name}:{line} train"]
    assert row[:2] == [str(worker.STEPS), f"{4 * PARAMETERS * worker.STEPS:,}"]


ON_CPUS = """
import sys
sys.path.insert(0, "FOLDER")
import counting_backend, torch
import torch.distributed as dist
torch.cuda.is_available = lambda: True
dist.init_process_group("counting")
dist.barrier()
print(dist.group.WORLD._get_backend(torch.device("cpu")).name(), "carries tensors of CPUs")
dist.destroy_process_group()
"""


def test_a_job_on_the_cpus_of_a_machine_with_gpus_takes_gloo_alone(tmp_path):
    script = tmp_path / "on_cpus.py"
    script.write_text(ON_CPUS.replace("FOLDER", str(COUNT.parent)))
    output = pool.run(script, ranks=2).check().output
    assert output.count("gloo carries tensors of CPUs") == 2


def test_a_script_that_is_nobodys(tmp_path):
    """ddp_basics/train.py: counting changes no loss and no checkpoint, and counts its bytes."""
    train = ROOT / "ddp_basics/train.py"
    options = ("--epochs", "1", "--device", "cpu", "--output-dir")
    plain, counted = tmp_path / "plain", tmp_path / "counted"
    pool.run(train, *options, plain, ranks=2).check()
    output = pool.run(COUNT, train, *options, counted, ranks=2).check().output
    assert learned(plain)
    assert learned(plain) == learned(counted)
    sent = [
        int(row[1].replace(",", ""))
        for (operation, caller), row in table(output).items()
        if operation == "all_reduce" and caller.endswith(" train_step")
    ]
    steps = learned(plain)[-1]["step"]
    (checkpoint,) = counted.rglob("*.pt")
    model = torch.load(checkpoint, weights_only=True)["model"].values()
    # Each step sends all gradients, and two numbers of 8 bytes: sum and count of the losses.
    assert sorted(sent) == [16 * steps, 4 * sum(p.numel() for p in model) * steps]


def test_a_script_that_fails_says_so(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "raise SystemExit('my own words')\n"
    )
    result = pool.run(COUNT, script)
    assert result.returncode == 1
    assert "my own words" in result.output
    assert "called from" not in result.output


def test_a_script_that_ends_with_status_0_is_counted(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(
        "import sys\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "sys.exit(0)\n"
    )
    assert "called from" in pool.run(COUNT, script).check().output


def test_clocks_are_compared(monkeypatch):
    """Two threads stand for two machines whose clocks are 1000 s apart."""

    def clock() -> float:
        ahead = 1000 if threading.current_thread().name == "1" else 0
        return call_log.time.perf_counter() + ahead

    monkeypatch.setattr(call_log.CallLog, "clock", staticmethod(clock))
    store, offsets = dist.HashStore(), {}

    def rank(number: int) -> None:
        offsets[number] = call_log.offset_of_rank_0(store, number, 2)

    threads = [threading.Thread(target=rank, args=(i,), name=str(i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert offsets[0] == 0
    assert offsets[1] == pytest.approx(-1000, abs=0.01)
