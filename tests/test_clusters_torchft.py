"""clusters/torchft/: groups are killed, the other groups continue, and at the end all are equal."""

import argparse
import importlib.util
import itertools
import math
import runpy
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import ROOT, Job, free_port, installed, python, read_lines

if not installed("torchft"):
    pytest.skip("needs torchft: pip install -r requirements-clusters.txt", allow_module_level=True)
FOLDER, BENCHMARKS = ROOT / "clusters/torchft", ROOT / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    """The benchmark's torchft_kills.py, and train.py, and no other train.py."""
    folders = [str(BENCHMARKS), str(FOLDER)]
    sys.path[:0] = folders
    before = sys.modules.pop("train", None)
    yield importlib.import_module("torchft_kills"), importlib.import_module("train")
    for folder in folders:
        sys.path.remove(folder)
    del sys.modules["train"], sys.modules["torchft_kills"]
    if before:
        sys.modules["train"] = before


def arguments(steps: int) -> argparse.Namespace:
    return argparse.Namespace(groups=2, steps=steps)


# train.py, in which a group that has been alone for 10 steps takes 3 s longer for each: the end
# must not come before the other one is back, which takes half a minute on a busy machine.
WAITS = """
import runpy, sys, time
import torchft
participants, sleep, alone = torchft.Manager.num_participants, time.sleep, 0
def num_participants(manager):
    global alone
    groups = participants(manager)
    alone = alone + 1 if groups < 2 else 0
    return groups
torchft.Manager.num_participants = num_participants
time.sleep = lambda seconds: sleep(seconds + 3 * (alone > 10))
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def killed(modules, tmp_path_factory):
    """60 steps of two groups, each of which is killed once. (What was counted, the logs' lines, the
    two states at the end.)"""
    kills, _ = modules
    folder = tmp_path_factory.mktemp("torchft")
    (folder / "train.py").write_text(WAITS.format(script=str(FOLDER / "train.py")))
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kills, "TRAIN", folder / "train.py")
        found = kills.replica_groups(arguments(60), [(8, 1), (15, 0)], folder, "--pause", "0.4")
    assert not set(psutil.Process().children(recursive=True)) - before
    lines = [kills.read(folder / f"group{group}.jsonl") for group in range(2)]
    states = [torch.load(folder / f"group{group}.pt", weights_only=True) for group in range(2)]
    return found, lines, states


def committed(lines: list[dict]) -> dict[int, int]:
    """How many groups have taken part in each step."""
    return {line["step"]: line["ranks"] for line in lines if line.get("committed")}


@pytest.mark.slow
def test_a_killed_group_is_missed_and_healed(killed):
    """Group 1 is killed first, and is in again before group 0 is. Each was alone for a time."""
    found, lines, _ = killed
    alone, tried = [], []
    for group in range(2):
        steps = committed(lines[group]).items()
        alone.append([step for step, groups in steps if step >= 8 and groups == 1])
        tried.append([(x["step"], x["ranks"]) for x in lines[group] if "batch" in x])
    assert max(alone[0]) < max(alone[1])
    assert any((step, 2) in tried[1] for step in range(max(alone[0]), max(alone[1]) + 1))
    assert found["all end with the same bits"] == "yes"
    assert found["lost steps"] <= 2  # a kill costs the step that was under way, or none


@pytest.mark.slow
def test_every_batch_is_trained_on_once(killed):
    found, lines, _ = killed
    assert (found["batches left out"], found["batches trained on twice"]) == (0, 0)
    assert sum((committed(lines[0]) | committed(lines[1])).values()) > 60  # they did share


@pytest.mark.slow
def test_the_end_is_that_of_one_process(killed, modules):
    """It takes as many batches in each step as there were groups: parameters and momentum."""
    _, lines, states = killed
    train = modules[1]
    images, labels = train.load_data()
    steps = committed(lines[0]) | committed(lines[1])
    assert sorted(steps) == list(range(60))
    model, optimizer = train.new_model()
    batch = 0
    for step in range(60):
        optimizer.zero_grad()
        for _ in range(steps[step]):
            indices = train.indices_of(batch, len(images))
            loss = F.cross_entropy(model(images[indices]), labels[indices])
            (loss / steps[step]).backward()
            batch += 1
        optimizer.step()
    one = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for state in states:
        torch.testing.assert_close(state, one, rtol=0, atol=1e-5)
    assert F.cross_entropy(model(images), labels) < 1 < math.log(10)  # it has learned


@pytest.mark.release
def test_restarts_do_steps_again(modules, tmp_path):
    """There is a save every 20 steps: what was done since is done again."""
    kills, _ = modules
    found = kills.restarts(arguments(120), [(30, 1)], tmp_path)
    steps = [line["step"] for line in kills.read(tmp_path / "log.jsonl")]
    assert sorted(set(steps)) == list(range(1, 121))
    last = [before for before, after in itertools.pairwise(steps) if after <= before]
    assert found["lost steps"] == sum(before % 20 for before in last)
    assert found["no rank trains, s (median)"] > 0.5  # a restart, and no step


# ---- what is counted


def attempt(step: int, groups: int, batch: int, done: bool | None) -> list[dict]:
    """done: None if the group was killed on the way."""
    tried = {"step": step, "ranks": groups, "batch": batch}
    return [tried, {"step": step, "ranks": groups, "committed": done}][: 1 + (done is not None)]


def test_count(modules):
    kills, _ = modules
    lines = [
        *attempt(0, 2, 0, True),
        *attempt(0, 2, 1, None),  # killed after the gradients were in
        *attempt(1, 2, 2, False),
        *attempt(1, 2, 3, None),  # killed before
        *attempt(1, 1, 2, True),
        *attempt(2, 1, 5, True),
        *attempt(3, 1, 5, True),
    ]
    assert kills.count(lines, groups=2) == {
        "lost steps": 1,
        "steps without all ranks": 3,
        "batches left out": 2,
        "batches trained on twice": 1,
    }


def test_waits(modules):
    kills, _ = modules
    done = [0, 1, 2, 5, 6, 7, 17, 18]
    assert kills.median_wait(done, [2.5]) == 10  # nothing else was there until the end
    assert kills.median_wait(done, [2.5, 7.5]) == 6.5  # 3 and 10
    assert kills.median_wait([3, 1, 2], [1.5]) == 1  # of several logs


def test_bits(modules):
    kills, _ = modules
    a = {"x": torch.zeros(2), "y": {0: 1.5}}
    assert kills.same_bits(a, {"x": torch.zeros(2), "y": {0: 1.5}})
    for other in ({"x": torch.tensor([0, 1e-30])}, {"y": {0: 1.6}}, {"y": {1: 1.5}}):
        assert not kills.same_bits(a, a | other)


def test_random_kills(modules):
    kills, _ = modules
    plan = kills.random_kills(300, 6, 3, seed=1)
    assert plan == kills.random_kills(300, 6, 3, seed=1) != kills.random_kills(300, 6, 3, seed=2)
    steps, ranks = zip(*plan, strict=True)
    assert sorted(set(steps)) == list(steps)
    assert all(30 <= step < 225 for step in steps)
    assert set(ranks) <= {0, 1, 2}


# ---- bad input


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("train", [], "TORCHFT_LIGHTHOUSE is not set: start torchft_lighthouse, set its"),
        ("train", ["--group", "2"], "--group 2: must be 0 to 0 (--groups 1)"),
        ("train", ["--steps", "0"], "--steps must be at least 1, and seconds must not be negative"),
        ("train", ["two ranks"], "one rank per group: --standalone --nproc-per-node=1"),
        (
            "torchft_kills",
            ["--groups", "1"],
            "--groups 1: must be 2 to 12, so that a group survives a kill",
        ),
        ("torchft_kills", ["--kills", "999"], "--kills 999: 600 steps have room for 1 to 390"),
        ("torchft_kills", ["--output-dir", str(FOLDER)], "is not empty"),
    ],
)
def test_bad_input(modules, name, words, says, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2" if words == ["two ranks"] else "1")
    if words:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:1")
    monkeypatch.setattr(sys, "argv", [name, *[word for word in words if word != "two ranks"]])
    with pytest.raises(SystemExit) as caught:
        {module.__name__: module for module in modules}[name].parse_args()
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.fixture
def group():
    """What torchrun would tell the one rank of a group."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    yield told | {"MASTER_PORT": str(store.port), "RUST_LOG": "warn"}
    del store


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


@pytest.mark.slow
def test_a_lost_lighthouse_ends_all_groups(group, tmp_path):
    """It is back at once, and yet the question that was under way is not answered any more."""
    port = free_port()
    serve = [Path(sys.executable).with_name("torchft_lighthouse"), "--min_replicas", 1]
    serve += ["--bind", f"[::]:{port}"]
    train = [sys.executable, FOLDER / "train.py", "--steps", 100_000, "--timeout", 3]
    address, log = f"http://localhost:{port}", tmp_path / "group0.jsonl"
    with ExitStack() as stack:
        lighthouse = stack.enter_context(Job(serve))
        lighthouse.wait_until(lambda: listens(port), 60)
        command = [*train, "--pause", 0.05, "--output-dir", tmp_path]
        job = stack.enter_context(Job(command, TORCHFT_LIGHTHOUSE=address, **group))
        job.wait_until(lambda: len(committed(read_lines(log))) >= 5, 120)
        lighthouse.kill()
        steps = len(committed(read_lines(log)))
        stack.enter_context(Job(serve))
        result = job.wait(60)
    assert result.returncode == 1
    assert "TimeoutError: status: Cancelled" in result.output
    assert len(committed(read_lines(log))) <= steps + 1  # the one that was under way


@pytest.mark.slow
def test_no_lighthouse(group):
    address = f"http://localhost:{free_port()}"
    script = FOLDER / "train.py"
    result = python(script, "--timeout", 1, timeout=60, TORCHFT_LIGHTHOUSE=address, **group)
    assert result.returncode == 2
    assert f"train.py: error: no lighthouse at {address}: " in result.output


@pytest.mark.parametrize("script", [FOLDER / "train.py", BENCHMARKS / "torchft_kills.py"])
def test_without_torchft(script, monkeypatch, capsys):
    for module in ("torchft", "torchft.coordination"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(script), run_name="__main__")
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{script.name}: error: import of torchft")
    assert said.endswith(": pip install -r requirements-clusters.txt\n")
