"""Models over workers train as in one process: every gradient of every step, and the parameters."""

import re

import pool
import pytest
from helpers import ROOT

SCRIPTS = ROOT / "rpc_basics"


def differences(output: str) -> tuple[float, float]:
    found = re.search(r"one process: gradient ([\d.e+-]+), parameter ([\d.e+-]+)", output)
    return float(found[1]), float(found[2])


def check_equals_one_process(output: str, optimizer: str) -> None:
    gradient, parameter = differences(output)
    assert gradient < TOLERANCE[optimizer][0], output
    assert parameter < TOLERANCE[optimizer][1], output


def check_training(output: str, tensors: int, steps: int = 5) -> None:
    losses = [float(loss) for loss in re.findall(r"^step .*loss ([\d.]+)", output, re.MULTILINE)]
    assert len(losses) == steps
    assert losses[-1] < losses[0]
    moved = re.search(r"moved by up to:((?: [\d.e+-]+)+)", output)[1].split()
    assert len(moved) == tensors
    assert all(float(number) > 1e-3 for number in moved), output  # all of them have learned


# The tolerances: fp32 sums in another order give 1e-8 here. AdamW divides by the size of a
# gradient, so that one close to 0 turns the rounding into more; what moved, moved by over 1e-3.
TOLERANCE = {"sgd": (1e-6, 1e-6), "adamw": (1e-6, 1e-5)}


# ---- ddp_with_rpc.py


@pytest.mark.parametrize(
    ("ranks", "servers", "optimizer"),
    [(3, 1, "adamw"), (4, 2, "sgd"), (5, 2, "sgd"), (6, 3, "sgd")],
)
@pytest.mark.slow
def test_table_on_servers_and_dense_layers_under_ddp(ranks, servers, optimizer):
    """5 ranks, two servers: three trainers. Three servers: 1,088 rows do not divide by three."""
    command = (SCRIPTS / "ddp_with_rpc.py", "--servers", servers, "--optimizer", optimizer)
    output = pool.run(*command, ranks=ranks, timeout=90).check().output
    check_training(output, tensors=5)
    check_equals_one_process(output, optimizer)
    sums = servers * 120 * 24 * 4  # of each server for each image a row of 24 fp32 numbers
    assert f"a step: {sums:,} bytes of sums, as many of gradients; the table has 104,448" in output


@pytest.mark.parametrize(
    ("ranks", "arguments", "says"),
    [
        (2, (), "needs 3 workers or more, not 2: --nproc_per_node=3"),
        (8, (), "120 images do not divide among 7 trainers"),
    ],
)
def test_ddp_with_rpc_says_what_does_not_work(ranks, arguments, says):
    result = pool.run(SCRIPTS / "ddp_with_rpc.py", *arguments, ranks=ranks, timeout=90)
    assert result.returncode == 2, result.output
    assert result.output.count(says) == 1
    assert "Traceback" not in result.output


# ---- sharded_embedding.py


@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "sgd"), (2, "adamw"), (3, "sgd")])
def test_table_cut_over_the_ranks(ranks, optimizer):
    """1,088 rows do not divide by three."""
    command = (SCRIPTS / "sharded_embedding.py", "--optimizer", optimizer)
    output = pool.run(*command, ranks=ranks, timeout=60).check().output
    check_training(output, tensors=5)
    check_equals_one_process(output, optimizer)


# ---- rnn_over_workers.py


@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "adamw"), (3, "sgd")])
def test_lstm_between_remote_embedding_and_decoder(ranks, optimizer):
    command = (SCRIPTS / "rnn_over_workers.py", "--optimizer", optimizer)
    output = pool.run(*command, ranks=ranks, timeout=60).check().output
    check_training(output, tensors=7)
    check_equals_one_process(output, optimizer)


def test_rnn_needs_two_workers():
    result = pool.run(SCRIPTS / "rnn_over_workers.py", timeout=60)
    assert result.returncode == 2
    assert result.output.count("needs 2 workers or more, not 1: --nproc_per_node=2") == 1
