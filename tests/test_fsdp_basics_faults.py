"""fsdp_basics: checkpoints under faults, on other numbers of ranks, and the exit."""

import contextlib
import os
import random
import re
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pool
import pytest
import torch
import torch.distributed.checkpoint as dcp
from arguments import UserError
from convert_checkpoint import read_model
from helpers import REPEAT, ROOT, Torchrun, learned, reached, torchrun
from saves import newest, problem_of, saves
from workers.fsdp_traffic import MODEL_BYTES

TRAIN = ROOT / "fsdp_basics/train.py"
SMALL = ("--dim", 32, "--depth", 2, "--log-every", 1)  # 22 steps an epoch
ARGS = (*SMALL, "--epochs", 4)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    pool.run(TRAIN, *ARGS, "--output-dir", folder, ranks=2).check()
    return folder


def assert_same_end(actual, expected):
    """Model, optimizer, settings and generators equal bit for bit; each loss too."""
    a, b = (newest(f / "checkpoints")[1] for f in (actual, expected))
    for state in (a, b):
        state.pop("checksums")
        state["generators"] = [g["cpu"].tolist() for g in state["generators"]]
    assert a == b
    one, other = (everything(f / "checkpoints") for f in (actual, expected))
    assert one.keys() == other.keys()
    assert any(name.startswith("optimizer.") for name in one)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    assert learned(actual) == learned(expected)


def everything(path) -> dict[str, torch.Tensor]:
    """All tensors of the newest save, whole."""
    folder = saves(path)[-1]
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in listed.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_kill_9_in_mid_epoch_under_max_restarts(tmp_path, uninterrupted):
    """An epoch of 22 steps is saved, the next is half done: a rank dies, torchrun restarts both."""
    options = ("--max-restarts=1",)
    with Torchrun(TRAIN, *ARGS, "--output-dir", tmp_path, options=options) as job:
        job.wait_until((tmp_path / "metrics.jsonl").exists)
        rank1 = job.ranks()[1]  # found before it is time: to look for it takes a while
        job.wait_until(lambda: reached(tmp_path, 24))
        rank1.kill()
        result = job.wait(120).check()
    assert result.output.count("continuing from") == 1
    assert_same_end(tmp_path, uninterrupted)


def test_sigterm_saves_and_the_same_command_continues(tmp_path, uninterrupted):
    with Torchrun(TRAIN, *ARGS, "--output-dir", tmp_path) as job:
        job.wait_until(lambda: reached(tmp_path, 10))
        job.process.terminate()
        result = job.wait(60)
    assert result.returncode != 0
    assert result.output.count("stopped by SIGTERM after step") == 1
    step = newest(tmp_path / "checkpoints")[1]["step"]
    assert 10 <= step < 88
    assert f"after step {step} of 88: saved to" in result.output
    pool.run(TRAIN, *ARGS, "--output-dir", tmp_path, ranks=2).check()
    assert_same_end(tmp_path, uninterrupted)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1), (1, 2), (2, 3)])
def test_continues_on_another_number_of_ranks(tmp_path, halves, before, after):
    """Resharding loses nothing: what is loaded is what was saved, and training goes on from it."""
    shutil.copytree(halves[before], tmp_path / "run")
    args = (*SMALL, "--batch-size", 48, "--epochs", 2, "--output-dir", tmp_path / "run")
    result = pool.run(TRAIN, *args, ranks=after).check()
    assert "continuing from" in result.output
    assert "steps 29 of 58" in result.output
    # The global batches are those of one process. In fp32 rounding grows with the steps.
    for a, b in zip(learned(tmp_path / "run"), learned(halves["whole"]), strict=True):
        assert a == pytest.approx(b, abs=1e-5 if a["step"] < 10 else 2e-2), (a, b)


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Runs of two epochs stopped after one, on 1, 2, 4 ranks; and a whole one, in one process."""
    found = {}
    for ranks in (1, 2, 4, "whole"):
        folder = found[ranks] = tmp_path_factory.mktemp(f"half{ranks}")
        script = TRAIN
        if ranks != "whole":
            script = folder / "half.py"
            script.write_text(HALF.format(directory=str(TRAIN.parent)))
        args = (*SMALL, "--batch-size", 48, "--epochs", 2, "--output-dir", folder)
        result = pool.run(script, *args, ranks=1 if ranks == "whole" else ranks)
        assert result.returncode == (0 if ranks == "whole" else 143), result.output
    return found


# Stops as if SIGTERM had come in step 29, at the end of the first epoch.
HALF = """
import signal, sys
sys.path.insert(0, {directory!r})
import stopping, train
stopping.StopRequests.agreed = lambda self, step: signal.SIGTERM if step == 29 else 0
train.main()
"""


def test_sigterm_is_seen_in_time_when_steps_are_slow(tmp_path):
    """torchrun kills 30 s after SIGTERM: with steps of 4 s, every step must look."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(directory=str(TRAIN.parent)))
    args = ("--epochs", 6, "--log-every", 1000, "--output-dir", tmp_path / "run")
    with Torchrun(script, *SMALL, *args) as job:
        job.wait_until(lambda: "a step is done" in job.output)
        job.process.terminate()
        result = job.wait(60)
    assert "stopped by SIGTERM after step" in result.output
    assert newest(tmp_path / "run/checkpoints")[1]["step"] <= 4


SLOW = """
import sys, time
sys.path.insert(0, {directory!r})
import train
train_step = train.train_step

def slow_step(*args):
    result = train_step(*args)
    time.sleep(4)
    print("a step is done", flush=True)
    return result

train.train_step = slow_step
train.main()
"""


def test_a_run_can_be_made_longer(tmp_path, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path / "run")
    args = (*SMALL, "--epochs", 5, "--output-dir", tmp_path / "run")
    result = pool.run(TRAIN, *args, ranks=2).check()
    assert "planned for 88 steps, now for 110: from here on the learning rate" in result.output
    assert "steps 22 of 110" in result.output
    assert [save.name for save in saves(tmp_path / "run/checkpoints")] == [
        "step_00000088", "step_00000110",
    ]  # fmt: skip
    result = pool.run(TRAIN, *SMALL, "--epochs", 4, *args[-2:], ranks=2)
    assert result.returncode == 2
    assert (
        "checkpoints is at step 110, beyond the 88 steps of --epochs 4: choose more epochs, or"
        in result.output
    )


# ---- broken saves


SAVER = """
import sys
sys.path.insert(0, {directory!r})
from pathlib import Path
import torch
from checkpoint import save_checkpoint
from runtime import distributed_worker
from sharding import shard
from torch.distributed.device_mesh import init_device_mesh

def save_forever(worker):
    model = torch.nn.Linear(1000, 1000)
    model.blocks = []
    shard(model, init_device_mesh("cpu", (worker.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, 10_000):
        with torch.no_grad():
            model.weight.fill_(step)
        save_checkpoint(
            Path(sys.argv[1]), {{"model": model, "optimizer": optimizer}}, step, {{}}, worker
        )

with distributed_worker("cpu") as worker:
    save_forever(worker)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_kill_9_during_a_save_leaves_a_whole_one(tmp_path, attempt):
    """Two ranks that do nothing but save are killed while their temporary files grow."""
    script, path = tmp_path / "saver.py", tmp_path / "checkpoints"
    script.write_text(SAVER.format(directory=str(TRAIN.parent)))
    share = random.Random(attempt).random()  # how far into a file of 2 MB

    def in_the_middle():
        with contextlib.suppress(FileNotFoundError):
            sizes = map(os.path.getsize, path.glob("unfinished_*/__1_0.distcp"))
            return saves(path) and any(max(2_000, share * 2e6) < size < 2e6 for size in sizes)
        return False

    with Torchrun(script, path) as job:
        job.wait_until(in_the_middle)
        for rank in job.ranks():
            rank.kill()
        job.kill()
    save, state = newest(path)
    assert problem_of(save) is None
    assert save == saves(path)[-1]  # nothing had to be left out
    assert torch.all(read_model(path)["weight"] == state["step"])


def damage(folder, kind: str) -> str:
    """Break the save in `folder`; return what must be said about it."""
    shard_file, run = folder / "__1_0.distcp", folder / "run.pt"
    content = shard_file.read_bytes()
    half = len(content) // 2
    if kind == "truncated":
        shard_file.write_bytes(content[:half])
    elif kind == "flipped":
        shard_file.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
    elif kind == "missing":
        shard_file.unlink()
        return f"{shard_file} is missing"
    elif kind == "no metadata":
        (folder / ".metadata").unlink()
        return f"{folder / '.metadata'} is missing"
    elif kind == "no run":
        run.unlink()
        return f"{run} is no readable checkpoint"
    elif kind == "foreign run":
        torch.save({"weights": torch.zeros(3)}, run)
        return f"{run} is no checkpoint of this script"
    return f"{shard_file} is broken"


KINDS = ("truncated", "flipped", "missing", "no metadata", "no run", "foreign run")


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_save_is_found(tmp_path, uninterrupted, capsys, kind):
    """Of two saves the older counts then; of two broken ones none."""
    shutil.copytree(uninterrupted / "checkpoints", tmp_path / "saves")
    older, newer = saves(tmp_path / "saves")
    sentence = damage(newer, kind)
    assert newest(tmp_path / "saves")[0] == older
    assert capsys.readouterr().out == f"warning: {said(sentence)}; using the save before it\n"
    damage(older, kind)
    with pytest.raises(UserError) as error:
        newest(tmp_path / "saves")
    assert str(error.value) == f"{said(sentence)}: move {tmp_path / 'saves'} away to start again"


def said(sentence: str) -> str:
    """With the kind of the error, where one is named."""
    return f"{sentence} (FileNotFoundError)" if "no readable" in sentence else sentence


def test_a_broken_save_costs_the_steps_since_the_one_before(tmp_path, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path / "run")
    broken = saves(tmp_path / "run/checkpoints")[-1]
    sentence = damage(broken, "flipped")  # torch itself would load it without a word
    result = pool.run(TRAIN, *ARGS, "--output-dir", tmp_path / "run", ranks=2).check()
    assert result.output.count(f"warning: {sentence}; continuing from the save before it") == 1
    assert "steps 22 of 88" in result.output
    assert_same_end(tmp_path / "run", uninterrupted)
    assert broken.with_name(f"{broken.name}.broken").is_dir()  # kept for diagnosis


def test_only_broken_saves_stop_the_job_and_are_not_overwritten(tmp_path, uninterrupted):
    shutil.copytree(uninterrupted / "checkpoints", tmp_path / "checkpoints")
    older, newer = saves(tmp_path / "checkpoints")
    damage(older, "truncated")
    sentence = damage(newer, "truncated")
    before = listing(tmp_path)
    result = torchrun(TRAIN, *ARGS, "--output-dir", tmp_path, ranks=2)  # itself: it is said once
    assert result.returncode != 0
    assert result.output.count("train.py: error: ") == 1, result.output
    assert f"train.py: error: {sentence}: move {tmp_path / 'checkpoints'} away" in result.output
    assert listing(tmp_path) == before


def test_only_small_things_are_sent(tmp_path):
    """Saving and resuming: each rank writes and reads its shards; no object has a part of them."""
    result = pool.run(ROOT / "tests/workers/fsdp_traffic.py", tmp_path / "saves", ranks=2).check()
    sizes = [int(x) for x in re.search(r"objects of \[(.+)\] bytes", result.output)[1].split(",")]
    assert len(sizes) >= 4
    assert max(sizes) < MODEL_BYTES / 100  # the largest has the state of a random generator
    assert "the parameters are back: True" in result.output


def listing(folder) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--dim", 64), "was trained with dim = 32, not 64"),
        (("--lr", 0.1), "was trained with lr = 0.003, not 0.1"),
    ],
)
def test_other_settings_are_refused(tmp_path, uninterrupted, options, sentence):
    shutil.copytree(uninterrupted / "checkpoints", tmp_path / "checkpoints")
    before = listing(tmp_path)
    result = pool.run(TRAIN, *ARGS, *options, "--output-dir", tmp_path, ranks=2)
    assert f"{sentence}: choose another --output-dir" in result.output
    assert result.output.count("train.py: error: ") == 1
    assert listing(tmp_path) == before


OTHER_DATA = """
import sys
sys.path.insert(0, {directory!r})
import train
load_data = train.load_data
train.load_data = lambda settings: load_data(settings)[::-1]
train.main()
"""


def test_other_data_are_refused(tmp_path, uninterrupted):
    shutil.copytree(uninterrupted / "checkpoints", tmp_path / "checkpoints")
    script = tmp_path / "other.py"
    script.write_text(OTHER_DATA.format(directory=str(TRAIN.parent)))
    result = pool.run(script, *ARGS, "--output-dir", tmp_path, ranks=2)
    assert result.returncode == 2
    was, now = r"(\d+) \+ (\d+) samples, digest \w{8}", r"\2 \+ \1 samples, digest \w{8}"
    assert re.search(f"was trained with data = {was}, not {now}: choose another", result.output)


def test_a_save_of_another_model_is_refused(tmp_path, uninterrupted):
    """The settings are the same, the model is not: model.py has been edited."""
    shutil.copytree(uninterrupted / "checkpoints", tmp_path / "checkpoints")
    script = tmp_path / "edited.py"
    script.write_text(EDITED.format(directory=str(TRAIN.parent)))
    result = pool.run(script, *ARGS, "--output-dir", tmp_path, ranks=2)
    assert re.search(r"does not fit this model \(.*\): choose another --output-dir", result.output)
    assert result.output.count("error: ") == 1


EDITED = """
import sys
sys.path.insert(0, {directory!r})
import task, torch, train

class Edited(task.VisionTransformer):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.head = torch.nn.Linear(self.head.in_features, 11)

task.VisionTransformer = Edited
train.main()
"""


def test_finished_run_is_left_as_it_is(tmp_path, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path / "run")
    before = listing(tmp_path)
    result = pool.run(TRAIN, *ARGS, "--output-dir", tmp_path / "run", ranks=2).check()
    assert "steps 0 of 88" in result.output
    assert listing(tmp_path) == before


def test_full_disk_keeps_the_previous_save(tmp_path, halves):
    """A limit on the size of files stands in for the full disk: the write fails part of the way."""
    shutil.copytree(halves[2], tmp_path / "run")
    before = listing(tmp_path / "run/checkpoints")
    wrapper = tmp_path / "limited.py"
    wrapper.write_text(
        "import resource, signal, sys\n"
        f"sys.path.insert(0, {str(TRAIN.parent)!r})\n"
        "import train\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "train.main()\n"
    )
    args = (*SMALL, "--batch-size", 48, "--epochs", 2, "--output-dir", tmp_path / "run")
    result = pool.run(wrapper, *args, ranks=2)
    assert result.returncode == 1, result.output  # 2 would end a Kubernetes Job for good
    assert "those before are untouched" in result.output
    assert result.output.count("error: cannot write") == 1
    assert listing(tmp_path / "run/checkpoints") == before  # no part of the new one


def test_a_disk_that_is_not_shared_is_named_before_training(tmp_path):
    """Two working directories stand in for two hosts: --output-dir is a relative path."""
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for folder in hosts:
        folder.mkdir()
    result = pool.run(TRAIN, *SMALL, "--output-dir", "run", ranks=2, nodes=2, cwd=hosts)
    assert result.returncode == 2
    host = socket.gethostname()
    sentence = f"rank 1 on {host} does not see what rank 0 on {host} writes there"
    where = "train.py: error: run/checkpoints is not on a disk that all ranks share"
    assert where in result.output
    assert sentence in result.output
    assert "step " not in result.output
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


MISSING = """
import sys, time
from datetime import timedelta
sys.path.insert(0, {directory!r})
import torch, train
from config import Settings
from runtime import distributed_worker

def forward(worker):
    settings = Settings(dp_replicate=2, timeout=5)
    with torch.device("meta"):
        model = train.build_model(settings)
    train.shard(model, worker.device, settings, worker)
    if worker.rank == 3:
        time.sleep(300)
    model(torch.zeros(2, 1, 8, 8))

with distributed_worker("cpu", timedelta(seconds=120)) as worker:
    forward(worker)
"""


@pytest.mark.slow
def test_the_timeout_bounds_the_groups_of_a_mesh(tmp_path):
    """The group of all ranks has another one here; groups of a mesh do not take it over."""
    script = tmp_path / "missing.py"
    script.write_text(MISSING.format(directory=str(TRAIN.parent)))
    result = pool.run(script, ranks=4, timeout=200)
    assert result.returncode == 1
    assert "Timed out waiting 5000ms" in result.output


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


def test_a_save_may_take_longer_than_the_timeout(tmp_path):
    """--timeout is how long a rank may be missing, not how long rank 0 may write."""
    script = tmp_path / "slow_disk.py"
    script.write_text(SLOW_DISK.format(directory=str(TRAIN.parent)))
    args = (*SMALL, "--epochs", 1, "--timeout", 20, "--output-dir", tmp_path / "run")
    output = pool.run(script, *args, ranks=2).check().output
    assert output.count("writing\n") == 1
    assert "steps 22 of 22" in output
    assert [save.name for save in saves(tmp_path / "run/checkpoints")] == ["step_00000022"]


# ---- the exit


@pytest.mark.timeout(600 + 30 * REPEAT)
def test_runs_end_with_status_0():
    """REPEAT=100 repeats the proof for sharded models: see test_ddp_basics_faults.py."""
    with ThreadPoolExecutor(2) as threads:
        run = partial(torchrun, TRAIN, *SMALL, "--epochs", 1, cold=True)
        for running in [threads.submit(run) for _ in range(REPEAT)]:
            running.result().check()
