"""custom_backend/pipe: numbers, training, failures, and the package that pip installs."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pipe
import pool
import pytest
import torch
import torch.distributed as dist
from helpers import REPEAT, ROOT, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]
PIPE = ROOT / "custom_backend" / "pipe"
WORKER = ROOT / "tests" / "workers" / "pipe_cases.py"
THREADS = ROOT / "tests" / "workers" / "pipe_threads.cpp"
SOON = 60  # seconds, on a busy machine; the limits of the cases are 3 and 120 s


def run(case: str, folder: Path, ranks: int = 2) -> list:
    """What each rank saved; None for a rank that saved nothing."""
    pool.run(WORKER, case, folder, ranks=ranks, timeout=300).check()
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def test_the_script_prints_what_it_promises():
    output = torchrun(ROOT / "custom_backend/pipe_backend.py", timeout=900).check().output
    for rank in range(2):
        line = rf"rank {rank}: the call returned after (\S+) ms, wait\(\) after (\S+) ms"
        returned, done = map(float, re.search(line, output).groups())
        assert returned < done
        line = rf"rank {rank}: DDP's gradients differ from those on Gloo by (\S+) at most"
        assert float(re.search(line, output)[1]) < 1e-6


def test_any_script_runs_on_it():
    run_on, script = ROOT / "custom_backend/run_on.py", ROOT / "ddp_basics/minimal.py"
    output = pool.run(run_on, "pipe", script, "--epochs", 1, ranks=2).check().output
    assert "2 rank(s) on cpu, pipe" in output


def test_chapter_22_says_how_long_the_steps_are():
    chapter = (ROOT / "notebooks/22_inside_torch_distributed.ipynb").read_text()
    folder = ROOT / "custom_backend"
    for name, digits in (("minimal.cpp", -2), ("pipe/", -2), ("shm/", -3)):
        files = sorted((folder / name).glob("*.[hc]*")) or [folder / name]
        lines = sum(file.read_text().count("\n") for file in files)
        assert f"[{name}](../custom_backend/{name}) | {round(lines, digits):,d} |" in chapter


# ---- numbers


@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_gloo_in_every_dtype(tmp_path, ranks):
    for dtypes in run("equal", tmp_path, ranks):
        assert {"float16", "bfloat16", "float32", "float64", "uint8", "int8"} <= set(dtypes)
        assert {"int32", "int64", "bool"} <= set(dtypes)


def test_parameters_and_inference_tensors(tmp_path):
    assert run("parameters", tmp_path) == [None, None]


@pytest.mark.parametrize("ranks", [2, 4])
def test_hundreds_of_operations_in_flight(tmp_path, ranks):
    for turn in range(REPEAT):
        folder = tmp_path / str(turn)
        folder.mkdir()
        assert run("many", folder, ranks) == [300] * ranks


def test_a_callback_in_python_may_call_but_not_wait(tmp_path):
    (first, second, waited), (*sums_1, _) = run("callbacks", tmp_path)
    assert first == second == sums_1[0] == sums_1[1] == [2.0, 2.0]
    assert waited.startswith("pipe: a callback runs in the thread of the group, which would wait")


@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp_trains_as_one_process(tmp_path, ranks):
    run("train", tmp_path, ranks)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt")
        for what, count in (("gradients", 5 * 6), ("parameters", 6)):
            assert len(found["ours"][what]) == count
            for ours, alone in zip(found["ours"][what], found["alone"][what], strict=True):
                torch.testing.assert_close(ours, alone, rtol=0, atol=1e-6)  # order of float sums


# ---- failures


@pytest.mark.parametrize("how", ["before", "inside"])
def test_a_killed_rank_ends_the_waiting_of_all(tmp_path, how):
    """Its neighbours name it. A rank that raises and ends may be the next one that is named."""
    *others, killed = run(f"dies:{how}", tmp_path, 3)
    assert killed is None
    for rank, (call, again) in enumerate(others):
        expected = rf"pipe: rank (\d) has ended; rank {rank} waited for it in all_reduce\(.*\)"
        assert re.fullmatch(expected, call["message"])
        assert call["seconds"] < SOON  # not the 120 s of the timeout
        assert again["message"] == call["message"]  # the group stays broken
    first, _ = min(others, key=lambda rank: rank[0]["at"])
    assert first["message"].startswith("pipe: rank 2 has ended; ")


def test_a_missing_rank_is_a_timeout(tmp_path):
    """Rank 2 does not call; rank 0 waits for it, and rank 1 for the sum of rank 0."""
    (first,), (second,), (late,) = run("missing", tmp_path, 3)
    for rank, (call, awaited) in enumerate(((first, 2), (second, 0))):
        assert call["message"] == (
            f"pipe: timeout: rank {rank} waited 3000 ms for rank {awaited} in "
            "all_reduce(Float, 12 bytes)"
        )
        assert call["seconds"] < 3 + SOON
    assert late["message"] == (  # it comes too late, and finds what rank 1 has left in the pipe
        "pipe: the calls do not match: rank 1 called all_reduce(Float, 12 bytes), "
        "rank 2 called barrier()"
    )


def test_a_rank_that_never_joins_is_named(tmp_path):
    ((call,), _) = run("alone", tmp_path)
    assert call["message"].startswith("pipe: rank 1 did not join the group in 3 s: ")
    assert call["seconds"] < 3 + SOON


@pytest.mark.parametrize(
    ("what", "calls"),
    {
        "size": ("all_reduce(Float, 12 bytes)", "all_reduce(Float, 16 bytes)"),
        "dtype": ("all_reduce(Int, 16 bytes)", "all_reduce(Float, 16 bytes)"),
        "root": (
            "broadcast(Float, 12 bytes) from rank 0",
            "broadcast(Float, 12 bytes) from rank 1",
        ),
        "operation": ("all_reduce(Float, 12 bytes)", "broadcast(Float, 12 bytes) from rank 0"),
    }.items(),
)
def test_calls_that_differ_are_errors_on_both_ranks(tmp_path, what, calls):
    called = [f"rank {rank} called {call}" for rank, call in enumerate(calls)]
    for rank, (call,) in enumerate(run(f"mismatch:{what}", tmp_path)):
        expected = f"pipe: the calls do not match: {called[1 - rank]}, {called[rank]}"
        assert call["message"] == expected


def test_an_error_of_one_rank_ends_the_waiting_of_the_other(tmp_path):
    (call, again), (other, _) = run("local", tmp_path)
    assert "can't allocate memory" in call["message"]
    assert again["message"] == call["message"]
    assert other["message"] == (
        "pipe: rank 0 has ended; rank 1 waited for it in all_reduce(Float, 100000000 bytes)"
    )
    assert max(call["seconds"], other["seconds"]) < SOON


def test_ranks_of_two_hosts_or_containers_are_refused(monkeypatch):
    monkeypatch.setattr(pipe, "compiled", lambda: None)
    store = dist.HashStore()
    store.set("life 1/host/1", "another one")
    with pytest.raises(
        RuntimeError,
        match="^pipe: connects processes of one host and container: rank 1 is in another one than "
        r"rank 0\. Take gloo$",
    ):
        pipe.create_backend(store, 0, 2, timedelta(seconds=60))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        RuntimeError, match=r"^pipe: needs Linux \(.*\), this is darwin: take gloo$"
    ):
        pipe.create_backend(store, 0, 2, timedelta(seconds=60))


def test_a_dtype_that_torch_cannot_add_is_an_error_on_all_ranks_at_once(tmp_path):
    for call, x in run("dtype", tmp_path):
        assert "not implemented for 'Float8_e4m3fn'" in call["message"]
        assert call["seconds"] < SOON
        assert x == [2.0] * 3


def test_a_rank_maps_only_the_memory_of_its_group(tmp_path):
    """Rank 0 gave up, and has opened another file under the number that it had told."""
    file = tmp_path / "checkpoint"
    file.write_bytes(b"1" * 10**6)
    store = dist.HashStore()
    here = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    for key, value in {"host": here, "pid": str(os.getpid()), "file": str(file)}.items():
        store.set(f"life 1/{key}/0", value)
    with pytest.raises(RuntimeError, match=r"^pipe: rank 0 has closed the memory of the group"):
        pipe.create_backend(store, 1, 2, timedelta(seconds=10))


def test_a_join_that_fails_leaves_no_file_open():
    pipe.compiled()
    here = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    store = dist.HashStore()
    store.set("life 1/host/1", here)  # rank 1 does not come any further
    gc.collect()  # it may close files of other tests
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match=r"^pipe: rank 1 did not join the group"):
        pipe.create_backend(store, 0, 2, timedelta(seconds=0.3))
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_limit_of_wait_leaves_the_operation_alone(tmp_path):
    (waited, sum_0), (sum_1,) = run("patience", tmp_path)
    assert "timed out" in waited["message"]
    assert waited["seconds"] < SOON
    assert sum_0 == sum_1 == [2.0, 2.0, 2.0]


def test_a_destroyed_group_and_a_fork_refuse_calls(tmp_path):
    for status, call in run("left", tmp_path):
        assert status == 0
        assert call["message"] == "pipe: the group is destroyed"


EARLY_END = """
import os, select, sys, torch, torch.distributed as dist
sys.path.insert(0, {folder!r})
import pipe

dist.init_process_group("pipe")
pid = torch.tensor([os.getpid()])
dist.broadcast(pid, src=0)
rank_0 = os.pidfd_open(pid.item())
dist.barrier()
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(9), async_op=True)  # rank 1 never calls it
    sys.exit("rank 0 ends here")
select.select([rank_0], [], [])  # until it has ended
"""


def test_a_rank_that_ends_early_does_not_wait_for_the_timeout(tmp_path):
    """Rank 0's operation would wait for half an hour; its exit status is 1 and no abort."""
    script = tmp_path / "ends.py"
    script.write_text(EARLY_END.format(folder=str(PIPE.parent)))
    result = pool.run(script, ranks=2, timeout=120, cold=True)
    assert result.returncode == 1
    assert "rank 0 ends here" in result.output


# ---- races


def threads(headers: Path, folder: Path) -> Path:
    program = folder / "threads"
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-I", headers]
    command = [os.environ.get("CXX", "g++"), *flags, THREADS, "-o", program]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if "cannot find -ltsan" in built.stderr or "tsan" in built.stderr:
        pytest.skip("needs a C++ compiler with ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    return program


def run_threads(program: Path, seed: int, ranks: int) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    command = [program, str(seed), "100", str(ranks)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def test_no_race(tmp_path):
    program = threads(PIPE, tmp_path)
    for ranks in (2, 3):
        result = run_threads(program, ranks, ranks)
        assert result.returncode == 0, result.stderr[-5000:]
        assert f"100 operations of {ranks} ranks" in result.stdout


PLANTED = {
    "bytes that arrive after their number": (
        "pipe.written.store(written, std::memory_order_release);",
        "pipe.written.store(written, std::memory_order_relaxed);",
    ),
    "bytes that are overwritten while they are read": (
        "pipe.read.store(read, std::memory_order_release);",
        "pipe.read.store(read, std::memory_order_relaxed);",
    ),
    "a reader that looks at the bytes first": (
        "ready = pipe.written.load(std::memory_order_acquire) - read;",
        "ready = pipe.written.load(std::memory_order_relaxed) - read;",
    ),
    "a writer that writes before it looks": (
        "pipe.read.load(std::memory_order_acquire));",
        "pipe.read.load(std::memory_order_relaxed));",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_race_is_caught(tmp_path, mistake):
    right, wrong = PLANTED[mistake]
    source = (PIPE / "pipe.h").read_text()
    assert source.count(right) == 1
    (tmp_path / "pipe.h").write_text(source.replace(right, wrong))
    result = run_threads(threads(tmp_path, tmp_path), 1, 3)
    assert result.returncode == 66
    assert "ThreadSanitizer: data race" in result.stderr


# ---- the package


USER = """
import sys, torch, torch.distributed as dist

dist.init_process_group("pipe")
x = torch.ones(3)
dist.all_reduce(x)
line = f"rank {dist.get_rank()}: {x.tolist()} by {sys.modules['pipe.compiled'].__file__}"
sys.stdout.write(line + chr(10))  # one write: the ranks share the pipe
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.release
def test_after_pip_install_a_script_imports_torch_only(tmp_path):
    project, installed, folder = (tmp_path / name for name in ("project", "installed", "user"))
    shutil.copytree(PIPE, project / "pipe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(PIPE.parent / name, project)
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--target", installed]
    command = [sys.executable, "-m", "pip", "install", *options, project]
    built = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    files = {file.name.partition(".")[0] for file in (installed / "pipe").glob("*.*")}
    assert files == {"__init__", "compiled"}
    folder.mkdir()
    script = folder / "user.py"
    script.write_text(USER)
    result = torchrun(script, ranks=2, timeout=300, PYTHONPATH=str(installed), cwd=folder)
    output = result.check().output
    for rank in range(2):
        assert f"rank {rank}: [2.0, 2.0, 2.0] by {installed}/pipe/compiled" in output
    # Without the entry points torch does not know the name: they, and nothing else, registered it.
    off = torchrun(
        script,
        ranks=2,
        timeout=300,
        PYTHONPATH=str(installed),
        cwd=folder,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert off.returncode != 0
    assert "Unknown backend type pipe" in off.output
