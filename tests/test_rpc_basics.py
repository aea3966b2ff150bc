"""rpc_basics/: what the scripts print is true; failures are reported, and all processes end."""

import re

import pool
import pytest
import torch
from helpers import REPEAT, ROOT
from sklearn.datasets import load_digits

SCRIPTS = ROOT / "rpc_basics"


# ---- minimal.py


@pytest.mark.timeout(100 + 20 * REPEAT)
def test_every_run_ends():
    """With REPEAT=100 it shows that no process aborts when all workers leave."""
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


@pytest.mark.slow
def test_nothing_is_printed_before_the_first_line():
    """torch warns in each worker that joins, once per process; here all processes are new."""
    output = pool.run(SCRIPTS / "minimal.py", ranks=2, timeout=60, cold=True).check().output
    assert output.startswith("worker0 is process"), output


# ---- calls.py


@pytest.fixture(scope="module")
def calls() -> str:
    return pool.run(SCRIPTS / "calls.py", ranks=2, timeout=60).check().output


def test_joining_by_rpc_worker_prints_nothing(calls):
    assert calls.startswith("\ncalls from process"), calls


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
        ("no worker has that name", "RuntimeError|ValueError", "worker99"),
        ("it cannot be imported", r"\w+", "lambda"),
    ],
)
def test_failures_come_back(calls, what, kind, says):
    text = calls[calls.index(f"  {what} ") :]
    first, rest = text.split("\n", 1)
    assert re.search(rf" ({kind}) after", first), first
    assert says in re.split(r"^  \S", rest, maxsplit=1, flags=re.MULTILINE)[0]


def test_a_failure_hurts_no_later_call(calls):
    assert "works: 101.0" in calls


# ---- distributed_autograd.py


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_gradients_over_three_workers_are_those_of_one_process(optimizer):
    """Tolerance: fp32 sums over 120 images in another order; parameters change far more."""
    script = SCRIPTS / "distributed_autograd.py"
    output = pool.run(script, "--optimizer", optimizer, ranks=3, timeout=60).check().output
    found = re.search(r"one process: gradient ([\d.e+-]+), parameter ([\d.e+-]+)", output)
    assert all(float(number) < 1e-6 for number in found.groups()), output
    tensors, moved = re.search(r"(\d+) parameter tensors .* change ([\d.e+-]+)", output).groups()
    assert (int(tensors), float(moved) > 1e-3) == (6, True)
    # DistributedOptimizer warns at each owner, despite all filters; nothing else comes first.
    assert output.count("`TorchScript` support for functional optimizers is deprecated") == 3
    theirs = re.compile("TorchScript|_FunctionalLocalOptimizer")  # a line of theirs is shown, too
    own = [line for line in output.splitlines() if not theirs.search(line)]
    assert own[0].startswith("step 1 "), output
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses == pytest.approx(losses_of_one_process(optimizer), abs=2e-6)
    assert losses[-1] < losses[0]


def losses_of_one_process(optimizer: str) -> list[float]:
    """Written out: the script compares itself with a model that is fed by the same lines."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    layers = []
    for number, (inputs, outputs) in enumerate(((64, 48), (48, 32), (32, 10))):
        torch.manual_seed(number)
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1])
    kinds = {"sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
    kinds |= {"adamw": (torch.optim.AdamW, {"lr": 3e-3})}
    kind, options = kinds[optimizer]
    stepper, losses = kind(model.parameters(), **options), []
    for step in range(5):
        batch = slice(120 * step, 120 * (step + 1))
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


def test_too_few_workers_is_one_sentence():
    result = pool.run(SCRIPTS / "distributed_autograd.py", ranks=2, timeout=60)
    assert result.returncode == 2
    assert result.output.count("needs 3 workers or more, not 2: --nproc_per_node=3") == 1
    assert "Traceback" not in result.output


# ---- ddp_with_rpc.py


# Tolerances: fp32 sums in another order differ by 1e-8 here. AdamW divides a gradient by its size,
# which enlarges the rounding of a gradient close to 0. Parameters change by more than 1e-3.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "optimizer", "tolerance"), [(3, "adamw", 1e-5), (4, "sgd", 1e-6)]
)
def test_table_on_a_server_and_dense_layers_under_ddp(ranks, optimizer, tolerance):
    command = (SCRIPTS / "ddp_with_rpc.py", "--optimizer", optimizer)
    output = pool.run(*command, ranks=ranks, timeout=90).check().output
    losses = [float(loss) for loss in re.findall(r"^step .*loss ([\d.]+)", output, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    moved = re.search(r"largest change .*:((?: [\d.e+-]+)+)", output)[1].split()
    assert len(moved) == 5
    assert all(float(number) > 1e-3 for number in moved), output  # every parameter has learned
    found = re.search(r"one process: gradient ([\d.e+-]+), parameter ([\d.e+-]+)", output)
    assert float(found[1]) < 1e-6, output
    assert float(found[2]) < tolerance, output
    sums = 120 * 24 * 4  # one row of 24 fp32 numbers per image
    sent = f"per step: {sums:,} bytes of sums and {sums:,} of gradients; the table has 104,448"
    assert sent in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "says"),
    [
        ("ddp_with_rpc.py", 2, "needs 3 workers or more, not 2: --nproc_per_node=3"),
        ("ddp_with_rpc.py", 8, "120 images do not divide among 7 trainers"),
        ("batched_server.py", 8, "120 images do not divide among 7 trainers"),
    ],
)
def test_what_does_not_divide_is_one_sentence(script, ranks, says):
    result = pool.run(SCRIPTS / script, ranks=ranks, timeout=90)
    assert result.returncode == 2, result.output
    assert result.output.count(says) == 1
    assert "Traceback" not in result.output


# ---- rref_lifetime.py


@pytest.mark.slow
def test_an_object_lives_as_long_as_the_references_to_it():
    """The script itself waits for the counts that it prints, and fails if they never come."""
    output = pool.run(SCRIPTS / "rref_lifetime.py", "--rounds", 5, ranks=3).check().output
    found = re.findall(r"^(.{42}) *(\d+) +(\d+)$", output, re.MULTILINE)
    told = [(what.strip(), int(references), int(objects)) for what, references, objects in found]
    assert told == [
        ("remote(): created an object", 1, 1),
        ("to_here(): fetched a copy, deleted it", 1, 1),
        ("gave worker2 a reference, which it holds", 2, 1),
        ("deleted its own reference", 1, 1),
        ("made worker2 delete its reference", 0, 0),
        ("5 rounds, each kept a reference", 5, 5),
        ("replaced the references by sums", 0, 0),
        ("5 rounds, each kept a sum", 1, 1),
        ("deleted the loop's variable", 0, 0),
        ("holds one reference at its end", 1, 1),
    ], output
    # Shutdown first deletes references, then waits for the call, so the call sees no object.
    assert "waited for the call: yes; objects when the call ended: [0], now: 0" in output
