"""The two parameter servers: equal to one process, staleness, and workers that die."""

import re
from argparse import Namespace
from contextlib import ExitStack
from types import SimpleNamespace

import parameter_server
import pool
import pytest
import torch
import torch.distributed as dist
from batched_server import BatchedServer
from helpers import ROOT
from torch import nn

ASYNCHRONOUS = ROOT / "rpc_basics/parameter_server.py"
SYNCHRONOUS = ROOT / "rpc_basics/batched_server.py"


def settings(**changes) -> Namespace:
    told = dict(steps=10, batch_size=40, lr=0.1, momentum=0.9, pull_every=1)
    return Namespace(**told | dict(max_staleness=None, seed=0) | changes)


class Reference:
    """A reference to an object in this process: it calls methods directly."""

    def __init__(self, value):
        self.value = value

    def rpc_sync(self):
        return self.value


# ---- synchronous


@pytest.mark.parametrize(("ranks", "threads"), [(4, 1), (3, 16)])
def test_one_update_for_all_is_one_process(ranks, threads):
    """Tolerance: fp32 sums in another order; AdamW's first steps are 3e-3 each.

    One thread of the server holds the calls of three trainers.
    """
    output = pool.run(SYNCHRONOUS, "--threads", threads, ranks=ranks).check().output
    found = re.search(r"one process: gradient ([\d.e+-]+), parameter ([\d.e+-]+)", output)
    assert float(found[1]) < 1e-6
    assert float(found[2]) < 1e-5
    trainers = ranks - 1
    assert output.startswith(f"{trainers} trainers\n{5 * trainers} pushes, 5 updates\n")
    assert float(re.search(r"largest change ([\d.e+-]+)", output)[1]) > 1e-2


def test_the_last_push_answers_all():
    server = BatchedServer(trainers=2)
    before, one = server.pull(), torch.ones(2410)
    first = server.push(2, one)
    assert not first.done()
    assert torch.equal(server.pull(), before)
    second = server.push(1, 3 * one)
    assert torch.equal(first.value(), server.pull())
    assert torch.equal(second.value(), server.pull())
    assert not torch.equal(server.pull(), before)
    assert torch.equal(server.gradients[0], 2 * one)
    assert not server.push(1, one).done()  # waits for the next update


# ---- asynchronous


def test_one_trainer_is_one_process():
    """With one trainer no gradient is stale: plain SGD, with the same bits."""
    args = settings(seed=3)
    server = parameter_server.Server(args, trainers=1)
    parameter_server.train(Reference(server), args, SimpleNamespace(rank=1))
    assert server.pushes == [(1, 0)] * 10

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = parameter_server.read_digits()
    generator = torch.Generator().manual_seed(3001)
    for _ in range(10):
        rows = torch.randint(1437, (40,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(server.values.detach(), expected)


def test_staleness_is_counted_and_bounded():
    server = parameter_server.Server(settings(max_staleness=2, lr=2.0, momentum=0.0), trainers=2)
    version, before = server.pull()
    one = torch.ones(2410)
    assert version == 0
    assert [server.push(trainer, 0, one) for trainer in (1, 2, 1)] == [True] * 3
    assert not server.push(2, 0, one)  # three updates old
    assert server.pushes == [(1, 0), (2, 1), (1, 2)]
    assert (server.version, server.refused) == (3, 1)
    # Half of the rate for each of two trainers. The pulled tensor has not changed meanwhile.
    torch.testing.assert_close(server.pull()[1], before - 3 * one)


def test_no_update_after_the_last_one():
    server = parameter_server.Server(settings(steps=1), trainers=2)
    one = torch.ones(2410)
    assert server.push(1, 0, one)
    assert server.push(2, 0, one)
    assert server.pull() is None
    assert not server.push(1, 1, one)
    assert (server.version, server.refused) == (2, 0)


def result_of(output: str) -> tuple[int, float, int, float]:
    """Refused gradients, mean and largest staleness, accuracy."""
    updates, refused = re.search(r"^(\d+) of .* refused (\d+)$", output, re.MULTILINE).groups()
    assert int(updates) == 180
    mean, most = re.search(r"staleness: mean ([\d.]+), largest (\d+)", output).groups()
    return int(refused), float(mean), int(most), float(output.split("accuracy: ")[1])


@pytest.mark.slow
def test_stale_gradients_spoil_training_and_a_bound_helps():
    """0.1 is chance. The README has such a table."""
    args = ("--steps", 60, "--pull-every")
    fresh, stale, bounded = (
        result_of(pool.run(ASYNCHRONOUS, *args, *changed, ranks=4).check().output)
        for changed in ((1,), (16,), (16, "--max-staleness", 4))
    )
    assert fresh[1] < 3
    assert stale[1] > 4 * max(1, fresh[1])
    assert fresh[3] > 0.8
    assert stale[3] < 0.5
    assert bounded[0] > 0
    assert bounded[2] <= 4
    assert bounded[3] > 0.7


# ---- what goes wrong


@pytest.mark.parametrize("script", [ASYNCHRONOUS, SYNCHRONOUS])
def test_a_trainer_is_needed(script):
    result = pool.run(script, timeout=30)
    assert result.returncode == 2, result.output
    assert result.output.count("needs 2 workers or more, not 1: --nproc_per_node=2") == 1
    assert "Traceback" not in result.output


def kill_one(victim: int, script, *args, ranks: int) -> list:
    """Kill a worker during training; returns how all workers ended.

    The workers are started one by one: torchrun would end all of them when the first one dies.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(pool.Rank(script, *args, **pool.environment(rank, ranks, store)))
            for rank in range(ranks)
        ]
        jobs[0].wait_until(lambda: " trainers\n" in jobs[0].output, 90)  # all have joined
        jobs[victim].process.kill()
        return [job.wait(20) for job in jobs]  # RPC by itself would wait for 60 s


@pytest.mark.slow
def test_a_trainer_that_is_killed_and_the_others_go_on():
    """They make its updates, too. (Who makes how many is left to chance: nobody waits.)"""
    first, *others, killed = kill_one(3, ASYNCHRONOUS, "--steps", 1000, ranks=4)
    assert killed.returncode == -9
    (counts,) = re.findall(r"3000 of 3000 updates: (.*); refused 0", first.check().output)
    by_trainer = dict(part.split() for part in counts.split(", "))
    assert by_trainer.keys() <= {"worker1", "worker2", "worker3"}
    assert sum(map(int, by_trainer.values())) == 3000
    for other in others:
        other.check()


@pytest.mark.slow
@pytest.mark.parametrize(("script", "victim"), [(ASYNCHRONOUS, 0), (SYNCHRONOUS, 2)])
def test_where_one_is_needed_its_death_ends_the_job(script, victim):
    """The server, and each trainer of the synchronous one; it ends within --timeout."""
    args = (script, "--steps", 100_000, "--timeout", 10)
    results = kill_one(victim, *args, ranks=3)
    assert results[victim].returncode == -9
    for rank in {0, 1, 2} - {victim}:
        assert results[rank].returncode == 1, results[rank].output
        assert f"worker{rank}: RuntimeError: " in results[rank].output
    if victim:
        assert "worker0 leaves before the end: no answer from worker2" in results[0].output
