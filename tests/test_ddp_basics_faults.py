"""ddp_basics/train.py under faults: kill -9, SIGTERM, broken files, a full disk, the exit."""

import contextlib
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pool
import pytest
import torch
from arguments import UserError
from checkpoint import read_file, saves, write_file
from config import Settings
from helpers import (
    ROOT,
    Job,
    Torchrun,
    clean_environment,
    learned,
    reached,
    read_metrics,
    torchrun,
)
from metrics import Metrics
from rows import Copy
from runtime import Worker

TRAIN = ROOT / "ddp_basics/train.py"
ARGS = ("--epochs", 12, "--log-every", 1)  # 22 steps an epoch


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    pool.run(TRAIN, *ARGS, "--output-dir", folder, ranks=2).check()
    return folder


def last_save(folder):
    return max((folder / "checkpoints").glob("step_*.pt"))


def checkpoint(folder) -> dict:
    return torch.load(last_save(folder), weights_only=True)


def assert_same_end(actual, expected):
    """Model, optimizer, generators equal bit for bit; each loss too."""

    def compare(a, b, where):
        assert type(a) is type(b), where
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), where
        elif isinstance(a, dict):
            assert a.keys() == b.keys(), where
            for key in a:
                compare(a[key], b[key], f"{where}.{key}")
        elif isinstance(a, list | tuple):
            assert len(a) == len(b), where
            for i, pair in enumerate(zip(a, b, strict=True)):
                compare(*pair, f"{where}.{i}")
        else:
            assert a == b, where

    compare(checkpoint(actual), checkpoint(expected), "checkpoint")
    assert learned(actual) == learned(expected)


@pytest.mark.slow
def test_kill_9_in_mid_epoch_under_max_restarts(tmp_path, uninterrupted):
    """An epoch of 22 steps is saved, the next is half done: a rank dies, torchrun restarts both."""
    options = ("--max-restarts=1",)
    with Torchrun(TRAIN, *ARGS, "--output-dir", tmp_path, options=options) as job:
        job.wait_until((tmp_path / "metrics.jsonl").exists)
        rank1 = job.ranks()[1]  # found before it is time: to look for it takes a while
        job.wait_until(lambda: reached(tmp_path, 40))
        rank1.kill()
        result = job.wait(120).check()
    assert result.output.count("continuing from") == 1
    assert_same_end(tmp_path, uninterrupted)


# train.py, which does not go on from step 30 before a rank is asked to stop.
WAITS = """
import sys, time
sys.path.insert(0, {directory!r})
import train
agreed = train.StopRequests.agreed
def wait(stop, step):
    if step == 30:
        print("at step 30", flush=True)
        until = time.monotonic() + 120
        while not stop.asked and {waiting!r} in ("all", train.worker.rank):
            time.sleep(0.01)
            assert time.monotonic() < until
        stop.next_look = step
    return agreed(stop, step)
train.StopRequests.agreed = wait
run = train.train
def noted_run(settings, worker):
    train.worker = worker
    return run(settings, worker)
train.train = noted_run
train.main()
"""
SHORT = ("--epochs", 2, "--log-every", 1)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    pool.run(TRAIN, *SHORT, "--output-dir", folder, ranks=2).check()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_saves_and_the_same_command_continues(tmp_path, short, name):
    """A cluster ends torchrun, Ctrl-C, a closed terminal; SIGUSR1 to one rank: all must leave."""
    number = signal.Signals[name]
    to_one_rank = name == "SIGUSR1"  # which torchrun does not pass on
    script, folder = tmp_path / "waits.py", tmp_path / "run"
    waiting = 1 if to_one_rank else "all"
    script.write_text(WAITS.format(directory=str(TRAIN.parent), waiting=waiting))
    # A cold torchrun signals the processes that load data, too: the ranks need them until they have
    # saved.
    workers = 0 if to_one_rank else 1
    args = (*SHORT, "--workers", workers, "--output-dir", folder)
    with Torchrun(script, *args, cold=name == "SIGTERM") as job:
        job.wait_until(lambda: job.output.count("at step 30") == 2)
        process = job.ranks()[1] if to_one_rank else job.process
        process.send_signal(number)
        result = job.wait(60)
    assert result.returncode != 0
    assert result.output.count(f"stopped by {name} after step 30 of 44: saved to") == 1
    assert checkpoint(folder)["step"] == 30
    if to_one_rank:  # torchrun says which status the ranks had
        assert f"exitcode  : {128 + number}" in result.output
    pool.run(TRAIN, *SHORT, "--output-dir", folder, ranks=2).check()
    assert_same_end(folder, short)


@pytest.mark.slow
def test_a_closed_terminal_saves(tmp_path):
    """Nobody reads any more what the run prints, and each print fails with Input/output error."""
    ours, terminal = pty.openpty()
    line = [sys.executable, str(TRAIN), "--epochs", "999", "--log-every", "1"]
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *line, "--output-dir", tmp_path / "run"],
        env=clean_environment(),
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
    )
    os.close(terminal)
    printed = b""
    while b"step     3/" not in printed:
        printed += os.read(ours, 4096)
    os.close(ours)
    process.wait(60)
    assert checkpoint(tmp_path / "run")["step"] >= 3


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path):
    """The first one is remembered, and seen after the step, which here does not end."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK.format(directory=str(TRAIN.parent)))
    with Job([script, "--output-dir", tmp_path / "run"], fork=0) as job:
        job.wait_until(lambda: "in a step" in job.output)
        job.process.send_signal(signal.SIGINT)
        job.wait_until(lambda: "asked once" in job.output)
        job.process.send_signal(signal.SIGINT)
        result = job.wait(20)
    assert result.returncode not in (0, 128 + signal.SIGINT)
    assert "KeyboardInterrupt" in result.output


STUCK = """
import sys, time
sys.path.insert(0, {directory!r})
import train
seen = []
stop_requests = train.StopRequests
train.StopRequests = lambda worker: seen.append(stop_requests(worker)) or seen[0]
def step(*args):
    print("in a step", flush=True)
    while not seen[0].asked:
        time.sleep(0.01)
    print("asked once", flush=True)
    time.sleep(60)
train.train_step = step
train.main()
"""


@pytest.mark.slow
def test_another_number_of_ranks_continues(tmp_path, short):
    """The global batches and so the losses are the same, up to rounding, which 44 steps in fp32
    let grow."""
    shutil.copytree(short, tmp_path / "run")
    newest = last_save(tmp_path / "run")
    newest.unlink()
    output = pool.run(TRAIN, *SHORT, "--output-dir", tmp_path / "run").check().output
    assert "after step 22" in output
    for a, b in zip(learned(tmp_path / "run"), learned(short), strict=True):
        assert a == pytest.approx(b, abs=5e-2)


def handles_sigterm(process) -> bool:
    """Whether the process has its own handler yet: until then SIGTERM just ends it."""
    with open(f"/proc/{process.pid}/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads signal masks from /proc")
def test_sigterm_without_output_dir_says_that_nothing_is_saved():
    with Job([TRAIN, "--epochs", 500], fork=0) as job:
        job.wait_until(lambda: handles_sigterm(job.process))
        job.process.terminate()
        result = job.wait(60)
    assert "of 11000: not saved" in result.output


@pytest.mark.slow
def test_finished_run_is_left_as_it_is(tmp_path):
    args = ("--epochs", 2, "--output-dir", tmp_path)
    first = pool.run(TRAIN, *args).check()
    before = last_save(tmp_path).read_bytes(), read_metrics(tmp_path)
    second = pool.run(TRAIN, *args).check()
    assert "steps 0 of 44" in second.output
    assert first.output.splitlines()[-1] == second.output.splitlines()[-1]
    assert before == (last_save(tmp_path).read_bytes(), read_metrics(tmp_path))


# ---- checkpoint files


SAVER = """
import sys
sys.path.insert(0, {directory!r})
from pathlib import Path
import torch
from checkpoint import write_file
path = Path(sys.argv[1])
write_file(path, {{"step": 0, "run": {{}}, "generators": [], "x": torch.zeros(8)}})
for step in range(1, 10_000):
    x = torch.full((2_000_000,), step)
    write_file(path, {{"step": step, "run": {{}}, "generators": [], "x": x}})
"""


@pytest.mark.parametrize("attempt", range(5))
@pytest.mark.slow
def test_kill_9_during_a_save_leaves_a_whole_checkpoint(tmp_path, attempt):
    """A process that does nothing but save is killed while the temporary file grows."""
    script, path = tmp_path / "saver.py", tmp_path / "checkpoint.pt"
    script.write_text(SAVER.format(directory=str(ROOT / "ddp_basics")))
    temporary = tmp_path / "checkpoint.pt.tmp"
    share = random.Random(attempt).random()  # how far into a file of 16 MB

    def in_the_middle():
        for file in (temporary, path):  # the second, if a save should ever write to it directly
            with contextlib.suppress(FileNotFoundError):
                if max(20_000, share * 16e6) < os.path.getsize(file) < 16e6:
                    return True
        return False

    with Job([script, path], fork=0) as job:
        job.wait_until(in_the_middle)
        job.process.kill()
        job.process.wait(10)
    state = read_file(path)
    assert torch.all(state["x"] == state["step"])


def damaged(content: bytes, damage: str) -> bytes:
    half = len(content) // 2
    return {
        "truncated": content[:half],
        "empty": b"",
        "text": b"not a checkpoint at all\n" * 100,
        "flipped": content[:half] + b"\xff" * 2000 + content[half + 2000 :],
    }[damage]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "flipped"])
def test_broken_checkpoint_is_named(tmp_path, uninterrupted, damage):
    path = tmp_path / "step_00000264.pt"
    path.write_bytes(damaged(last_save(uninterrupted).read_bytes(), damage))
    with pytest.raises(UserError, match="is no readable checkpoint"):
        read_file(path)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_broken_checkpoint_is_passed_over(tmp_path, uninterrupted, damage):
    """The two newest are kept. The newest is broken: the run goes on from the other, and ends the
    same. Once more with both broken: nothing is lost, nothing is overwritten."""
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    older, newer = sorted((tmp_path / "checkpoints").glob("*"))
    assert (older.name, newer.name) == ("step_00000242.pt", "step_00000264.pt")
    broken = damaged(newer.read_bytes(), damage)
    newer.write_bytes(broken)
    result = pool.run(TRAIN, *ARGS, "--output-dir", tmp_path, ranks=2).check()
    assert result.output.count(f"warning: {newer} is no readable checkpoint") == 1
    assert "continuing from" in result.output
    assert "after step 242" in result.output
    assert newer.with_suffix(".broken").read_bytes() == broken
    assert_same_end(tmp_path, uninterrupted)

    for path in (older, newer):
        path.write_bytes(damaged(path.read_bytes(), damage))
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").glob("*")}
    result = pool.run(TRAIN, *ARGS, "--output-dir", tmp_path, ranks=2)
    assert result.returncode == 2
    assert f"train.py: error: {newer} is no readable checkpoint" in result.output
    assert {p.name: p.read_bytes() for p in (tmp_path / "checkpoints").glob("*")} == before


def test_a_checkpoint_that_cannot_be_read_is_not_given_up(tmp_path):
    """An error of the disk may be gone a moment later. (To read a folder fails for root, too.)"""
    newest = tmp_path / "checkpoints/step_00000264.pt"
    newest.mkdir(parents=True)
    result = pool.run(TRAIN, *ARGS, "--output-dir", tmp_path, ranks=2)
    assert result.returncode == 1  # 2 would end a Kubernetes Job for good
    assert f"{newest} cannot be read (Is a directory): start again when it can" in result.output
    assert newest.is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["truncated", "foreign", "other model", "other settings"])
def test_bad_checkpoint_stops_the_job_and_is_not_overwritten(tmp_path, uninterrupted, kind):
    path = tmp_path / "checkpoints" / "step_00000264.pt"
    path.parent.mkdir()
    content = last_save(uninterrupted).read_bytes()
    arguments = ARGS
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
        sentence = f"{path} is no readable checkpoint"
    elif kind == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
        sentence = f"{path} is not a checkpoint of this script"
    elif kind == "other model":
        state = checkpoint(uninterrupted)
        state["model"] = {"x": torch.zeros(3)}
        torch.save(state, path)
        sentence = (
            f"{path.parent} does not fit this model (Error(s) in loading state_dict for SmallCNN: "
        )
    else:
        path.write_bytes(content)
        arguments = (*ARGS, "--lr", 0.1)
        sentence = f"{path.parent} was trained with --lr 0.002, not 0.1"
    before = path.read_bytes()
    start = torchrun if kind == "truncated" else pool.run  # one of them, to see it said once
    result = start(TRAIN, *arguments, "--output-dir", tmp_path)
    assert result.returncode != 0
    assert result.output.count("train.py: error: ") == 1, result.output
    assert f"train.py: error: {sentence}" in result.output
    assert path.read_bytes() == before
    assert not (tmp_path / "metrics.jsonl").exists()


DIES_IN_EVALUATION = """
import os, sys
sys.path.insert(0, {directory!r})
import evaluation, train
train.evaluate = lambda *args: os._exit(9)
train.main()
"""


@pytest.mark.slow
def test_a_crash_in_an_evaluation_loses_no_step(tmp_path, short):
    """It is saved before, and evaluated when it continues: also if the scheduler did not wait."""
    script, folder = tmp_path / "dies.py", tmp_path / "run"
    script.write_text(DIES_IN_EVALUATION.format(directory=str(TRAIN.parent)))
    result = pool.run(script, *SHORT, "--output-dir", folder, ranks=2)
    assert result.returncode == 9
    assert checkpoint(folder)["step"] == 22
    pool.run(TRAIN, *SHORT, "--output-dir", folder, ranks=2).check()
    assert_same_end(folder, short)
    before = (folder / "metrics.jsonl").read_bytes()
    pool.run(TRAIN, *SHORT, "--output-dir", folder, ranks=2).check()
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_copy_of_a_checkpoint_is_none_of_the_run(tmp_path):
    for name in ("step_00000022.pt", "step_00000022_best.pt", "step_best.pt", "step_00000044.pt"):
        (tmp_path / name).touch()
    assert [path.stem for path in saves(tmp_path)] == ["step_00000022", "step_00000044"]


def test_settings_that_a_checkpoint_can_hold(tmp_path):
    """A task's flags may be paths, also in a tuple: weights_only=True would not load these."""

    @dataclass(frozen=True)
    class More(Settings):
        files: tuple[Path, ...] = (Path("a"), Path("b"))
        folder: Path = Path("c")

    write_file(tmp_path / "x.pt", {"step": 1, "generators": [], "run": More().identity()})
    run = read_file(tmp_path / "x.pt")["run"]
    assert run == More().identity()
    assert run["files"] == ["a", "b"]
    assert "folder" not in run


@pytest.mark.slow
def test_files_may_move_and_a_task_may_get_a_new_flag(tmp_path):
    copy = Copy("ddp_basics", tmp_path)
    run = ("--output-dir", tmp_path / "run", "--batch-size", 200)
    copy.run("train.py", *run, "--epochs", 1).check()
    field = "    augment: bool = False\n"
    copy.edit("task.py", field, f"{field}    images: Path | None = None\n    note: int = 1\n")
    flag = '    add("--augment"'
    more = '    add("--images", type=Path)\n    add("--note", type=int)\n'
    copy.edit("task.py", flag, more + flag)
    for epochs, images in ((2, "a"), (3, "b")):
        output = copy.run("train.py", *run, "--epochs", epochs, "--images", images).check().output
        assert f"after step {7 * (epochs - 1)}" in output
    result = copy.run("train.py", *run, "--epochs", 4, "--note", 2)
    assert result.returncode == 2
    assert "was trained with --note 1, not 2: choose another --output-dir" in result.output
    load = "load_dataset(settings.dataset, settings.data_dir)"
    copy.edit("task.py", load, f"({load}[0], Subset({load}[1], range(9)))")
    copy.edit("task.py", "import Dataset", "import Dataset, Subset")
    result = copy.run("train.py", *run, "--epochs", 4)
    assert result.returncode == 2
    was, now = r"1437 \+ 360 samples, digest \w{8}", r"1437 \+ 9 samples, digest \w{8}"
    assert re.search(f"was trained with other data: {was}, not {now}: choose", result.output)
    copy.edit("task.py", "range(9)", "[*range(359), 1]")  # the last label differs
    result = copy.run("train.py", *run, "--epochs", 4)
    assert result.returncode == 2
    assert re.search(f"was trained with other data: {was}, not {was}: choose", result.output)


def test_a_folder_that_cannot_take_a_save_is_an_error_before_training(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    result = pool.run(TRAIN, "--output-dir", tmp_path, ranks=2)
    assert result.returncode == 2
    assert result.output.count(f"error: cannot save to {tmp_path}/checkpoints: File exists") == 1
    assert "step " not in result.output


def test_what_a_killed_save_has_left_goes_with_the_next(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step_00000020.pt.tmp").write_text("half a save")
    pool.run(TRAIN, "--epochs", 1, "--output-dir", tmp_path).check()
    assert [path.name for path in folder.iterdir()] == ["step_00000022.pt"]


def test_a_metrics_file_that_is_a_folder(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl is not a file of this script"):
        Metrics(tmp_path, 0, 9, Worker(0, 0, 1, torch.device("cpu")))


@pytest.mark.slow
def test_foreign_metrics_file_is_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("my notes\nof last year\n")
    result = pool.run(TRAIN, "--output-dir", tmp_path)
    assert "metrics.jsonl is not a file of this script" in result.output
    assert result.output.count("train.py: error: ") == 1
    assert (tmp_path / "metrics.jsonl").read_text() == "my notes\nof last year\n"


@pytest.mark.slow
def test_full_disk_keeps_the_previous_checkpoint(tmp_path):
    """A limit on the size of files stands in for the full disk: the write fails part of the way."""
    args = ("--epochs", 2, "--output-dir", tmp_path)
    with Job([TRAIN, *args], fork=0) as job:
        job.wait_until(lambda: list((tmp_path / "checkpoints").glob("*.pt")))
        job.kill()
    before = checkpoint(tmp_path)["step"], last_save(tmp_path).read_bytes()
    wrapper = tmp_path / "limited.py"
    wrapper.write_text(
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        f"sys.path.insert(0, {str(TRAIN.parent)!r})\n"
        f"sys.argv[0] = {str(TRAIN)!r}\n"
        f"runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n"
    )
    result = pool.run(wrapper, "--epochs", 3, *args[2:])
    assert result.returncode == 1, result.output
    assert "cannot write" in result.output
    assert "those before are untouched" in result.output
    assert before == (checkpoint(tmp_path)["step"], last_save(tmp_path).read_bytes())
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


SLOW_DISK = """
import sys, time
sys.path.insert(0, {directory!r})
import checkpoint, train
write_file = checkpoint.write_file
def slowly(file, state):
    print("writing", flush=True)
    time.sleep(24)
    write_file(file, state)
checkpoint.write_file = slowly
train.main()
"""


@pytest.mark.slow
def test_a_save_may_take_longer_than_the_timeout(tmp_path):
    """--timeout is how long a rank may be missing, not how long rank 0 may write."""
    script, folder = tmp_path / "slow_disk.py", tmp_path / "run"
    script.write_text(SLOW_DISK.format(directory=str(TRAIN.parent)))
    args = ("--epochs", 1, "--timeout", 20, "--output-dir", folder)
    output = pool.run(script, *args, ranks=2).check().output
    assert output.count("writing\n") == 1
    assert f"rank 0 is writing {folder}/checkpoints/step_00000022.pt ...\n" in output  # after 10 s
    assert "steps 22 of 22" in output


@pytest.mark.slow
def test_sigterm_constant_is_the_exit_status(tmp_path):
    """143, as a shell reports it: a script behind `train.py && next` must not go on."""
    with Job([TRAIN, "--epochs", 500, "--output-dir", tmp_path], fork=0) as job:
        job.wait_until(lambda: reached(tmp_path, 22))
        job.process.terminate()
        assert job.wait(60).returncode == 128 + signal.SIGTERM
