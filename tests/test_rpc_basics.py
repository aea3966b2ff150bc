"""Remote calls: what the scripts of rpc_basics print is so, and what fails says so and ends."""

import re

import pool
import pytest
from helpers import REPEAT, ROOT

SCRIPTS = ROOT / "rpc_basics"


# ---- minimal.py


@pytest.mark.timeout(100 + 20 * REPEAT)
def test_every_run_ends():
    """REPEAT=100 is the proof: what is left of a job when all have left aborts no process."""
    for turn in range(REPEAT):
        result = pool.run(SCRIPTS / "minimal.py", ranks=2 + turn % 2, timeout=60)
        assert result.returncode == 0, f"run {turn}: {result.output}"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_minimal(ranks):
    output = pool.run(SCRIPTS / "minimal.py", ranks=ranks, timeout=60).check().output
    caller = re.search(r"worker0 is process (\d+)", output)[1]
    callees = re.findall(r": +process (\d+) ", output)
    assert len(callees) == 3
    assert len(set(callees)) == 1
    assert (callees[0] == caller) == (ranks == 1)
    assert output.count("right: True") == 2
    assert "has counted to 6" in output


# ---- calls.py


@pytest.fixture(scope="module")
def calls() -> str:
    return pool.run(SCRIPTS / "calls.py", "--repeats", 1, ranks=2, timeout=60).check().output


def test_calls_run_at_the_callee(calls):
    caller = re.search(r"calls from process (\d+)", calls)[1]
    assert re.search(r"ran in process (\d+)", calls)[1] != caller
    assert f"sum of the answers {sum(range(100))}\n" in calls
    assert re.search(r"one of torch's +\[3.0, 3.0\]", calls)
    assert "to_here() fetches a copy: [3.0, 3.0]" in calls


def test_references_stay_at_their_owner(calls):
    told = dict(re.findall(r"^  (\S.*?)  +(\S+)$", calls, re.MULTILINE))
    assert told["its owner"] == "worker1"
    assert told["is it ours?"] == "False"
    assert told["rpc_sync().pay_in(20)"] == "120.0"
    assert told["rpc_async().pay_in(5).wait()"] == "125.0"
    assert told["confirmed by the owner"] == "True"
    assert told["after to_here().pay_in(1000)"] == "125.0"  # the copy was paid
    assert told["double(account) ran at the owner"] == "True"
    assert told["balance"] == "250.0"


@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("the callee raises", "ValueError", "the amount must be above 0, not -1.0"),
        ("it takes longer than timeout=0.2", "RuntimeError", "timeout"),
        ("nobody has that name", "RuntimeError|ValueError", "worker99"),
        ("nobody could import it", r"\w+", "lambda"),
    ],
)
def test_failures_come_back(calls, what, kind, says):
    text = calls[calls.index(f"  {what} ") :]
    first, rest = text.split("\n", 1)
    assert re.search(rf" ({kind}) after", first), first
    assert says in re.split(r"^  \S", rest, maxsplit=1, flags=re.MULTILINE)[0]


def test_a_failure_hurts_no_later_call(calls):
    assert "works: 101.0" in calls


def test_costs_are_printed(calls):
    rows = re.findall(r"^ +([\d,]+) +(\d+) +(\d+) +[\d.]+$", calls, re.MULTILINE)
    assert [int(row[0].replace(",", "")) for row in rows] == [0, 2**10, 2**16, 2**20, 2**24]
    assert all(int(number) > 0 for row in rows for number in row[1:])
    assert "with 100 in flight" in calls


# ---- distributed_autograd.py


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_gradients_over_three_workers_are_those_of_one_process(optimizer):
    """The tolerance: fp32 sums over 120 images in another order. What moved, moved far more."""
    script = SCRIPTS / "distributed_autograd.py"
    output = pool.run(script, "--optimizer", optimizer, ranks=3, timeout=60).check().output
    found = re.search(r"one process: gradient ([\d.e+-]+), parameter ([\d.e+-]+)", output)
    assert all(float(number) < 1e-6 for number in found.groups()), output
    tensors, moved = re.search(r"(\d+) parameter tensors .* up to ([\d.e+-]+)", output).groups()
    assert (int(tensors), float(moved) > 1e-3) == (6, True)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_too_few_workers_is_one_sentence():
    result = pool.run(SCRIPTS / "distributed_autograd.py", ranks=2, timeout=60)
    assert result.returncode == 2
    assert result.output.count("needs 3 workers or more, not 2: --nproc_per_node=3") == 1
    assert "Traceback" not in result.output
