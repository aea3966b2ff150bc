"""The parameter server: equal to one process where it must be, and what it does when one dies."""

import re
import statistics
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pool
import pytest
import server_checkpoint
import torch
import torch.distributed as dist
from compression import KINDS, Compressor, decompress, size_of
from helpers import ROOT, Job, torchrun_command
from parameter_shard import Settings, Shard

SCRIPT = ROOT / "rpc_basics/parameter_server.py"


def run(*args, ranks: int = 4) -> str:
    return pool.run(SCRIPT, *args, ranks=ranks).check().output


def rows(output: str) -> list[dict]:
    """The table that the script prints."""
    lines = output[output.index("mode ") :].splitlines()
    names = lines[0].split()
    words = [line.split() for line in lines if line.startswith(("sync", "async", "hogwild"))]
    return [dict(zip(names, row, strict=True)) for row in words]


def differences(output: str) -> list[tuple[float, float]]:
    found = re.findall(r"one process: gradient ([\d.e+-]+), parameter ([\d.e+-]+)", output)
    return [(float(gradient), float(parameter)) for gradient, parameter in found]


# ---- synchronous: equal to one process


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        (4, []),
        (5, ["--servers", 2, "--data", "text"]),
        (3, ["--batch-size", 121]),  # of which one trainer has 61
        (4, ["--momentum", 0]),
    ],
    ids=["digits", "two servers, text", "uneven shares", "no momentum"],
)
@pytest.mark.slow
def test_synchronous_is_one_process(ranks, args):
    """Tolerance: the same sums of fp32 in another order; what moved, moved 10,000 times as far."""
    output = run("--compare", "--steps", 5, *args, ranks=ranks)
    [(gradient, parameter)] = differences(output)
    assert gradient < 1e-6
    assert parameter < 1e-6
    gradients, moved = re.search(r"(\d+) gradients .* moved by up to ([\d.e+-]+)", output).groups()
    assert int(gradients) == 5
    assert float(moved) > 1e-2


@pytest.mark.slow
def test_compressed_gradients_differ_by_what_they_leave_out():
    """Of gradients up to 0.1: fp16 has 11 bits, int8 one in 127, topk leaves out all but 5 %."""
    output = run("--compare", "--steps", 5, "--compress", *KINDS)
    by_kind = dict(zip(KINDS, differences(output), strict=True))
    assert by_kind["none"][0] < 1e-6 < by_kind["fp16"][0] < 2e-4
    assert by_kind["fp16"][0] < by_kind["int8"][0] < 5e-3 < by_kind["topk"][0]
    sizes = {row["compress"]: float(row["KB/push"]) for row in rows(output)}
    assert sizes == {"none": 9.6, "fp16": 4.8, "int8": 2.4, "topk": 1.0}  # 2,410 parameters


@pytest.mark.parametrize("kind", KINDS)
def test_error_feedback_brings_everything_in_the_end(kind):
    torch.manual_seed(0)
    gradients = torch.randn(50, 101)
    compressor = Compressor(kind)
    messages = [compressor.compress(gradient) for gradient in gradients]
    arrived = sum(decompress(kind, message, 101) for message in messages)
    torch.testing.assert_close(arrived + compressor.owed, gradients.sum(0), atol=1e-4, rtol=0)
    assert size_of(messages[0]) == {"none": 404, "fp16": 202, "int8": 105, "topk": 40}[kind]


# ---- asynchronous: staleness, accuracy


@pytest.mark.slow
def test_asynchronous_learns_what_synchronous_learns():
    """0.05 is 18 of 360 test images. The README has such a table."""
    table = rows(run("--mode", "sync", "async", "hogwild", "--seeds", 5))
    mean = {
        mode: statistics.mean(float(row["accuracy"]) for row in table if row["mode"] == mode)
        for mode in ("sync", "async", "hogwild")
    }
    assert len(table) == 15
    assert mean["sync"] > 0.85
    assert mean["async"] > mean["sync"] - 0.05
    assert mean["hogwild"] > mean["sync"] - 0.05
    updates = {row["mode"]: int(row["updates"]) for row in table}
    assert (updates["sync"], updates["async"]) == (100, 300)  # an update of each trainer's gradient
    assert all(row["staleness"] == "0.0" for row in table if row["mode"] == "sync")


@pytest.mark.slow
def test_staleness_is_measured_and_bounded(tmp_path):
    picture = tmp_path / "staleness.png"
    args = ("--mode", "async", "--steps", 60, "--pull-every")
    fresh, stale = rows(run(*args, 1, 16, "--plot", picture))
    assert float(stale["staleness"]) > 4 * float(fresh["staleness"])
    assert float(stale["accuracy"]) < float(fresh["accuracy"]) - 0.1
    assert picture.read_bytes().startswith(b"\x89PNG")
    [bounded] = rows(run(*args, 16, "--max-staleness", 4))
    assert int(bounded["most"]) <= 4
    assert int(bounded["refused"]) > 0
    assert float(bounded["accuracy"]) > float(stale["accuracy"]) + 0.1


def make_shard(mode: str, **changes) -> Shard:
    settings = dict(
        data="digits", mode=mode, steps=10, batch_size=4, lr=1.0, momentum=0.0, pull_every=1,
        max_staleness=None, compress="none", seed=0, trainers=(1,), slow=0, patience=0.1,
        save=None, save_every=1,
    )  # fmt: skip
    return Shard(0, torch.zeros(1), Settings(**settings | changes), None)


def test_a_shard_counts_and_refuses():
    shard = make_shard("async", max_staleness=2)
    one = [torch.ones(1)]
    assert all(shard.push(1, 0, one, 4) for _ in range(3))  # of the same version: 0, 1, 2 old
    assert not shard.push(1, 0, one, 4)
    assert shard.counts() == (3, {0: 1, 1: 1, 2: 1}, 1)
    assert shard.pull() == (3, torch.tensor([-3.0]))


def test_a_shard_goes_on_without_a_trainer_and_takes_it_back(capfd):
    shard = make_shard("sync", trainers=(1, 2))
    assert shard.push(1, 0, [torch.ones(1)], 4)  # trainer 2 does not come: 0.1 s
    assert "goes on without worker2" in capfd.readouterr().out
    assert shard.pull() == (1, torch.tensor([-1.0]))
    assert not shard.push(2, 0, [torch.ones(1)], 4)  # too late
    assert shard.push(2, 1, [torch.ones(1)], 4)  # back; now trainer 1 does not come
    assert shard.pull() == (2, torch.tensor([-2.0]))
    assert shard.trainers == {2}


def test_servers_continue_from_a_version_that_all_have(tmp_path):
    state = {"values": torch.ones(1), "settings": {"lr": 0.1}}
    for server, versions in ((0, (5, 10, 15)), (1, (5, 10))):  # killed before its third save
        for version in versions:
            server_checkpoint.save(tmp_path, server, version, state)
    assert server_checkpoint.newest(tmp_path, 2) == 10
    assert server_checkpoint.newest(tmp_path, 1) == 15
    assert server_checkpoint.newest(tmp_path, 3) == 0
    assert len(saved(tmp_path)) == 2  # the first was deleted
    assert torch.equal(
        server_checkpoint.load(tmp_path, 1, 10, {"lr": 0.1})["values"], torch.ones(1)
    )


# ---- bad input


@pytest.mark.parametrize(
    ("ranks", "args", "says"),
    [
        (2, ["--servers", 2], "needs 3 workers or more, not 2: --nproc_per_node=3"),
        (4, ["--batch-size", 2], "--batch-size 2 is too small for 3 trainers"),
        (1, ["--role", "boss"], "--role: invalid choice: 'boss'"),
        (1, ["--role", "trainer"], "--role trainer: rank 0 is a server; servers are the first 1"),
        (1, ["--patience", 40], "--patience 40 must be at most half of --timeout 60"),
        (1, ["--save", "saves", "--seeds", 2], "--save is for one run, not 2"),
    ],
)
def test_a_mistake_is_one_sentence(ranks, args, says, tmp_path):
    result = pool.run(SCRIPT, *args, ranks=ranks, timeout=30, cwd=tmp_path)
    assert result.returncode == 2, result.output
    assert result.output.count(says) == 1
    assert "Traceback" not in result.output


# ---- one that dies


@contextmanager
def started_by_hand(*args, ranks: int = 4):
    """Each worker a job of its own: torchrun would end them all with the first that dies."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        yield [
            stack.enter_context(pool.Rank(SCRIPT, *args, **pool.environment(rank, ranks, store)))
            for rank in range(ranks)
        ]


def saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("version_????????.server0"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_trainer_that_is_killed_and_the_others_go_on(mode, tmp_path):
    args = ("--mode", mode, "--save", tmp_path, "--save-every", 5, "--slow", 0.05)
    with started_by_hand(*args) as jobs:
        jobs[0].wait_until(lambda: saved(tmp_path), 90)
        jobs[3].process.kill()
        begin = time.monotonic()
        first, second, third, killed = [job.wait(40) for job in jobs]
    assert time.monotonic() - begin < 30
    assert killed.returncode == -9
    assert "worker3 is gone: the others go on" in first.check().output
    assert "goes on without worker3" in first.output
    [row] = rows(first.output)
    assert int(row["updates"]) == {"sync": 100, "async": 300}[mode]
    assert float(row["accuracy"]) > 0.8
    second.check()
    third.check()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_is_killed_ends_all(victim, tmp_path):
    args = ("--servers", 2, "--save", tmp_path, "--save-every", 5, "--slow", 0.05)
    with started_by_hand(*args) as jobs:
        jobs[0].wait_until(lambda: saved(tmp_path), 90)
        jobs[victim].process.kill()
        begin = time.monotonic()
        results = [job.wait(40) for job in jobs]
    assert time.monotonic() - begin < 30
    assert results[victim].returncode == -9
    for rank in {0, 1, 2, 3} - {victim}:
        assert results[rank].returncode == 1
        says = f"worker{rank} leaves before the end: no answer from worker0"
        if rank == 0:
            says = "worker0: RuntimeError: worker1, a server, is gone"
        assert says in results[rank].output


@pytest.mark.slow
def test_torchrun_restarts_a_killed_server_and_nothing_else_differs(tmp_path):
    """To the last bit: what is saved is all that the next updates depend on."""
    options = ("--steps", 40, "--save-every", 5)
    run(*options, "--save", tmp_path / "undisturbed", ranks=3)
    args = (*options, "--save", tmp_path / "killed", "--slow", 0.05, "--compare")
    with Job(torchrun_command(SCRIPT, *args, ranks=3, options=("--max-restarts=1",))) as job:
        job.wait_until(lambda: saved(tmp_path / "killed"), 90)
        job.ranks()[0].kill()
        output = job.wait(90).check().output
        assert not job.kill()
    assert re.search(r"continuing from version (5|10|15) ", output)
    assert differences(output)[0][1] < 1e-6
    last, undisturbed = (
        torch.load(saved(tmp_path / folder)[-1]) for folder in ("killed", "undisturbed")
    )
    assert last["version"] == undisturbed["version"] == 40
    assert torch.equal(last["values"], undisturbed["values"])
    assert torch.equal(last["velocity"], undisturbed["velocity"])


def test_a_save_that_is_broken_or_of_another_run(tmp_path):
    args = ("--steps", 3, "--save-every", 3, "--save", tmp_path)
    run(*args, ranks=2)
    result = pool.run(SCRIPT, *args, "--lr", 0.5, ranks=2, timeout=30)
    assert "is of a run with lr 0.1, not 0.5" in result.output
    path = tmp_path / "version_00000003.server0"
    path.write_bytes(path.read_bytes()[:100])
    result = pool.run(SCRIPT, *args, ranks=2, timeout=30)
    assert "version_00000003.server0 is no readable save" in result.output
