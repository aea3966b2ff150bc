"""clusters/ray/: trainings as workers of Ray Train, in one Ray that all tests share."""

import importlib.util
import json
import math
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError

import pool
import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import (
    QUICK_RAY,
    ROOT,
    Job,
    before_others,
    installed,
    learned,
    python,
    reached,
    read_metrics,
)

SCRIPT = ROOT / "clusters/ray/train.py"
DDP, FSDP = ROOT / "ddp_basics/train.py", ROOT / "fsdp_basics/train.py"
PAUSED = ROOT / "tests/workers/paused.py"
MISSING = [x for x in ("ray", "pandas", "pyarrow") if not installed(x)]
needs_ray = pytest.mark.skipif(
    bool(MISSING), reason=f"no {MISSING} here: pip install -r requirements-clusters.txt"
)


@pytest.fixture(scope="module")
def cluster():
    """A Ray of four CPUs, whatever the machine has: (its processes, what a driver must be told)."""
    with tempfile.TemporaryDirectory() as folder:  # short: the names of sockets have a limit
        told = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
        told |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
        told |= QUICK_RAY
        told |= {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}  # a process less in each training
        script = Path(folder) / "ray_head.py"
        script.write_text(RAY)
        with Job(before_others(sys.executable, script), **told) as head:
            found = head.wait_until(lambda: re.search(r"^here: (\S+)\n", head.output, re.M), 200)
            with suppress(OSError):  # it is up: from now on like others
                Path(f"/proc/{head.process.pid}/autogroup").write_text("0")
            yield head, told | {"RAY_ADDRESS": found[1]}


# `ray start` would start three processes more, of which each imports Ray for seconds. A file, so
# that the workers, which this Python starts as it was started itself, are forks: see helpers.py.
RAY = """
import signal, ray
context = ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
print("here:", context.address_info["gcs_address"], flush=True)
signal.pause()
"""


def train(told: dict, *args) -> Job:
    """It takes a row of processes that each import Ray: several seconds to begin."""
    return Job([sys.executable, SCRIPT, *args], **told)


def rank(head: Job, output_dir: Path, number: int) -> psutil.Process:
    """The process of a rank of the training that writes there."""
    ranks = [p for p in head.ranks() if str(output_dir) in p.cmdline()]
    return next(p for p in ranks if p.environ()["RANK"] == str(number))


@needs_ray
@pytest.mark.release
def test_a_killed_rank(cluster, tmp_path):
    """fsdp_basics: Ray restarts both ranks; the result equals torchrun's, bit for bit."""
    head, told = cluster
    vit, alone = tmp_path / "vit", tmp_path / "alone"
    args = (FSDP, "--epochs", 2, "--checkpoint-every", 4, "--log-every", 4, "--output-dir")
    with train(told, PAUSED, tmp_path / "killed", 10, *args, vit) as job:
        job.wait_until(lambda: reached(vit, 8), 200)
        rank(head, vit, 0).kill()
        (tmp_path / "killed").touch()
        output = job.wait(200).check().output
    assert re.search(r"rank 0: .*died with <Signals.SIGKILL: 9>", output)
    assert re.search(r"continuing from .* after step \d+", output)

    pool.run(*args, alone, ranks=2).check()
    assert learned(vit) == learned(alone)
    assert_equal(sharded(vit), sharded(alone))

    last = read_metrics(vit)[-1]
    assert f"test_loss {last['test_loss']:.4g}" in output  # what Ray knows of the run
    snapshot = json.loads((vit / "checkpoint_manager_snapshot.json").read_text())
    known = snapshot["latest_checkpoint_result"]
    assert known["checkpoint_dir_name"] == "checkpoints"
    assert known["metrics"]["test_loss"] == last["test_loss"]
    assert known["metrics"]["step"] == last["step"]


def sharded(output_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint of fsdp_basics, in one piece."""
    save = sorted(output_dir.glob("checkpoints/step_*"))[-1]
    listed = dcp.FileSystemReader(save).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in listed.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=save, no_dist=True)
    return state


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@needs_ray
@pytest.mark.slow
def test_a_killed_worker(cluster, tmp_path):
    """ddp_basics loses a Ray worker during the run: its rank ends with it, and all restart."""
    head, told = cluster
    hurt, alone = tmp_path / "hurt", tmp_path / "alone"
    script = PAUSED.relative_to(ROOT)  # as printed: relative to where the command is typed
    args = (tmp_path / "killed", 30, DDP, "--epochs", 10, "--output-dir", hurt)
    with train(told, script, *args) as job:
        job.wait_until(lambda: reached(hurt, 22), 200)
        child = rank(head, hurt, 1)
        child.parent().kill()  # the worker
        assert not psutil.wait_procs([child], timeout=5)[1]
        (tmp_path / "killed").touch()
        job.wait(200).check()
    pool.run(DDP, "--epochs", 10, "--output-dir", alone, ranks=2).check()
    assert learned(hurt) == learned(alone)
    ends = [folder / "checkpoints/step_00000220.pt" for folder in (hurt, alone)]
    assert_equal(*(torch.load(end, weights_only=True)["model"] for end in ends))


@needs_ray
@pytest.mark.slow
def test_more_workers_than_there_are_processors(cluster, tmp_path):
    args = ("--workers", 5, DDP, "--output-dir", tmp_path)
    result = python(SCRIPT, *args, timeout=120, **cluster[1])
    says = "train.py: error: --workers 5 needs 5 CPUs, but Ray has 4\n"
    assert (result.returncode, result.output.endswith(says)) == (2, True), result.output


@pytest.fixture(scope="module")
def module():
    """clusters/ray/train.py, in this process."""
    spec = importlib.util.spec_from_file_location("ray_train_script", SCRIPT)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.slow
@needs_ray
def test_mistakes_are_one_sentence(module, capsys, monkeypatch):
    for words, says in [
        (["none.py", "--output-dir", "a"], "there is no script none.py"),
        ([str(DDP)], "the script needs --output-dir: restarted ranks continue from there"),
        (["--workers", "0", str(DDP)], "--workers 0: at least 1 is needed"),
    ]:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        with pytest.raises(SystemExit) as end:
            module.main()
        assert end.value.code == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"train.py: error: {says}"


@pytest.mark.slow
@needs_ray
def test_wrong_arguments_are_not_tried_again(module, capsys):
    callback = module.TellFailures()
    mistake, crash = (CalledProcessError(status, ["train.py"]) for status in (2, 1))
    callback.after_exception(None, {0: crash})
    with pytest.raises(CalledProcessError, match="status 2"):
        callback.after_exception(None, {0: crash, 1: mistake})
    assert "rank 1: Command '['train.py']' returned non-zero exit status 2." in (
        capsys.readouterr().out
    )
    ended, failed = module.ray.train.ControllerError, module.ray.train.WorkerGroupError
    assert module.status_of(ended(mistake)) == 2
    assert module.status_of(failed("", {0: crash})) == 1


@pytest.mark.slow
@needs_ray
def test_what_is_reported_belongs_to_the_save(module, tmp_path):
    saves = tmp_path / "checkpoints"
    assert module.newest_step(saves) == 0
    for name in (
        "step_00000008.pt",
        "step_00000012",
        "step_00000016.pt.tmp",
        "step_00000020.broken",
    ):
        (saves / name).mkdir(parents=True)
    assert module.newest_step(saves) == 12
    lines = [{"step": 8, "loss": 2.0}, {"step": 12, "loss": 1.0}, {"step": 12, "test_loss": 3.0}]
    lines += [{"step": 13, "loss": math.pi}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 1')
    assert module.metrics_until(12, tmp_path) == {"step": 12, "loss": 1.0, "test_loss": 3.0}
    for count, goes_on in enumerate((False, False, False, True, True)):
        (tmp_path / "metrics.jsonl").write_text("".join(text.splitlines(keepends=True)[:count]))
        assert module.goes_on(12, tmp_path) == goes_on, count


@pytest.mark.slow
def test_without_ray_one_sentence_says_how_to_get_it(tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError\n")
    result = python(SCRIPT, timeout=60, PYTHONPATH=str(tmp_path))
    says = "train.py: error: Ray is not installed: pip install -r requirements-clusters.txt\n"
    assert (result.returncode, result.output) == (2, says)
