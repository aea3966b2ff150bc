"""Answers that wait for the others (async_execution): updates and actions in batches; CartPole."""

import math
import random
import re
import time
from contextlib import ExitStack

import cartpole
import pool
import pytest
import torch
import torch.distributed as dist
from batched_inference import Agent
from batched_server import BatchedServer
from helpers import ROOT

UPDATES = ROOT / "rpc_basics/batched_server.py"
INFERENCE = ROOT / "rpc_basics/batched_inference.py"


def run(script, *args, ranks: int) -> str:
    return pool.run(script, *args, ranks=ranks).check().output


# ---- updates


@pytest.mark.parametrize(
    ("ranks", "args"),
    [(4, ["--threads", 1]), (3, ["--data", "text", "--batch-size", 17])],
    ids=["one thread holds three calls", "text"],
)
def test_one_update_for_all_is_one_process(ranks, args):
    """Tolerance: the same sums of fp32 in another order; AdamW's first steps are of 3e-3 each."""
    output = run(UPDATES, *args, ranks=ranks)
    found = re.search(r"one process: gradient ([\d.e+-]+), parameter ([\d.e+-]+)", output)
    assert float(found[1]) < 1e-6
    assert float(found[2]) < 1e-5
    assert f"{5 * (ranks - 1)} pushes of {ranks - 1} trainers, 5 updates" in output
    assert float(re.search(r"moved by up to ([\d.e+-]+)", output)[1]) > 1e-2


def test_the_last_push_answers_all():
    server = BatchedServer(torch.zeros(2), trainers=2, keep=True)
    first = server.push(2, torch.tensor([1.0, 0.0]))
    assert not first.done()
    second = server.push(1, torch.tensor([3.0, 0.0]))
    values, gradients = server.result()
    assert torch.equal(first.value(), values)
    assert torch.equal(second.value(), values)
    assert torch.equal(gradients[0], torch.tensor([2.0, 0.0]))
    assert not server.push(1, torch.zeros(2)).done()  # waits for the next update


def test_updates_are_measured():
    output = run(UPDATES, "--measure", "--repeats", 1, "--steps", 2, ranks=3)
    rows = re.findall(r"^ *([\d,]+) +[\d,]+ \(.*\) +[\d,]+ \(.*\) +[\d.]+$", output, re.MULTILINE)
    assert rows == ["1,000", "100,000", "1,000,000"]


# ---- CartPole


def test_the_equations():
    """Against the paper's, one by one in fp64; tolerance: fp32 of numbers near 1."""
    generator = random.Random(0)
    for _ in range(50):
        x, v, angle, turning = (generator.uniform(-1, 1) for _ in range(4))
        action = generator.randrange(2)
        force = 10 if action else -10
        total, both = 1.1, 0.1 * 0.5
        numerator = 9.8 * math.sin(angle) + math.cos(angle) * (
            (-force - both * turning**2 * math.sin(angle)) / total
        )
        angular = numerator / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / total))
        swing = turning**2 * math.sin(angle) - angular * math.cos(angle)
        acceleration = (force + both * swing) / total
        expected = [x + 0.02 * v, v + 0.02 * acceleration]
        expected += [angle + 0.02 * turning, turning + 0.02 * angular]
        state = torch.tensor([[x, v, angle, turning]])
        after, fell = cartpole.step(state, torch.tensor([action]))
        torch.testing.assert_close(after[0], torch.tensor(expected), atol=1e-5, rtol=0)
        assert fell.item() == (abs(expected[0]) > 2.4 or abs(expected[2]) > math.radians(12))


# ---- actions


def test_the_last_question_answers_all():
    def answers(order: list[int]) -> dict[int, torch.Tensor]:
        agent = Agent([1, 2, 3], 8, seed=0)
        states = {n: torch.full((2, 4), float(n)) for n in (1, 2, 3)}
        futures = {n: agent.act(n, states[n]) for n in order[:2]}
        assert not any(future.done() for future in futures.values())
        futures[order[2]] = agent.act(order[2], states[order[2]])
        return {n: futures[n].value().tolist() for n in sorted(futures)}

    assert answers([1, 2, 3]) == answers([3, 1, 2])  # drawn alike, whoever asked first


def test_an_observer_that_stops_is_not_waited_for():
    agent = Agent([1, 2], 8, seed=0)
    answer = agent.act(1, torch.zeros(1, 4))
    agent.stop(2)
    assert answer.value().shape == (1,)
    assert agent.act(1, torch.zeros(1, 4)).done()


def test_the_gradient_of_the_policy():
    """Against each step of each game by itself; tolerance: sums of fp32 in another order."""
    agent = Agent([1, 2], 8, seed=0)
    generator = torch.Generator().manual_seed(0)
    lengths = {1: torch.tensor([3, 1]), 2: torch.tensor([2, 4])}
    for step in range(4):
        for observer in (1, 2):
            if step < lengths[observer].max():
                agent.act(observer, torch.randn(2, 4, generator=generator))
            else:
                agent.stop(observer)
    gradient = agent.gradient(lengths)
    steps = [
        (agent.seen[observer][step][0][game], agent.seen[observer][step][1][game], n - step)
        for observer in (1, 2)
        for game, n in enumerate(lengths[observer].tolist())
        for step in range(n)
    ]
    returns = torch.tensor([float(left) for _, _, left in steps])
    advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
    loss = sum(
        -agent.policy(state).log_softmax(0)[action] * advantage
        for (state, action, _), advantage in zip(steps, advantages, strict=True)
    ) / len(steps)
    expected = torch.autograd.grad(loss, agent.policy.parameters())
    assert len(steps) == 10
    for ours, theirs in zip(gradient, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_the_reward_rises():
    """16 games a round, 48 in three rounds. Over five seeds it became 2.4 to 3.8 times as much."""
    output = run(INFERENCE, "--games", 8, "--rounds", 15, ranks=3)
    begin, end = re.search(r"first 3 rounds ([\d.]+), of the last 3 ([\d.]+)", output).groups()
    assert 10 < float(begin) < 40  # chance
    assert float(end) > 2 * float(begin)


@pytest.mark.slow
def test_two_agents_learn_one_policy():
    output = run(INFERENCE, "--agents", 2, "--games", 2, "--rounds", 3, ranks=5)
    assert "2 agent(s) with the same policy: True" in output


def test_answers_are_measured():
    output = run(INFERENCE, "--measure", "--asks", 3, "--repeats", 1, ranks=3)
    rows = re.findall(r"^ *(\d+) +[\d,]+ \(.*\) +[\d,]+ \(.*\) +[\d.]+$", output, re.MULTILINE)
    assert rows == ["64", "512", "2048"]


# ---- what goes wrong


@pytest.mark.parametrize(
    ("script", "args", "says"),
    [
        (UPDATES, [], "needs 2 workers or more, not 1: --nproc_per_node=2"),
        (INFERENCE, ["--agents", 2], "needs 3 workers or more, not 1: --nproc_per_node=3"),
        (INFERENCE, ["--rounds", 2], "--rounds: must be an integer of at least 3, not 2"),
    ],
)
def test_a_mistake_is_one_sentence(script, args, says):
    result = pool.run(script, *args, timeout=30)
    assert result.returncode == 2, result.output
    assert result.output.count(says) == 1
    assert "Traceback" not in result.output


def kill_one(script, *args, says: str, ranks: int = 4) -> tuple[list, float]:
    """Kill the last worker once worker 0 has said so much; how all ended, and after how long."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(pool.Rank(script, *args, **pool.environment(rank, ranks, store)))
            for rank in range(ranks)
        ]
        jobs[0].wait_until(lambda: says in jobs[0].output, 90)
        jobs[-1].process.kill()
        begin = time.monotonic()
        return [job.wait(60) for job in jobs], time.monotonic() - begin


@pytest.mark.slow
def test_an_observer_that_is_killed_and_the_others_go_on():
    args = ("--games", 2, "--rounds", 15, "--timeout", 20)
    results, _ = kill_one(INFERENCE, *args, says="round   5")
    assert results[-1].returncode == -9
    for result in results[:-1]:
        result.check()
    assert "worker3 is gone, the others go on" in results[0].output
    assert "round  15" in results[0].output


@pytest.mark.slow
def test_a_trainer_that_is_killed_ends_the_batched_server():
    """It waits for all of them, so it has to end; nobody waits for longer than --timeout."""
    args = ("--steps", 100_000, "--timeout", 10)
    results, seconds = kill_one(UPDATES, *args, says="trainers, an update", ranks=3)
    assert results[-1].returncode == -9
    assert seconds < 40
    for result in results[:-1]:
        assert result.returncode == 1
    # worker1 may have noticed it first, and left.
    says = r"worker0: RuntimeError: no answer from (worker1, )?worker2: the update waits for all"
    assert re.search(says, results[0].output)
