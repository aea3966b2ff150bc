"""fsdp_basics/minimal.py, as it stands, against one process in plain PyTorch."""

import re

import pool
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from sklearn.datasets import load_digits
from torch import nn
from workers.fsdp_minimal import STEPS

MINIMAL = ROOT / "fsdp_basics/minimal.py"
WORKER = ROOT / "tests/workers/fsdp_minimal.py"
EPOCHS, BATCH = 3, 60

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_process():
    """The same model on the same batches, without a line of torch.distributed; in float64."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16).view(-1, 8, 8)
    labels = torch.tensor(labels)
    torch.manual_seed(0)
    options = {"dropout": 0.0, "bias": False, "batch_first": True, "dtype": torch.float64}
    blocks = [nn.TransformerEncoderLayer(64, 4, 128, **options) for _ in range(3)]
    first, last = nn.Linear(8, 64, dtype=torch.float64), nn.Linear(512, 10, dtype=torch.float64)
    model = nn.Sequential(first, *blocks, nn.Flatten(), last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps, epoch_losses = {}, []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        batches = order[: len(order) // BATCH * BATCH].split(BATCH)
        for i, batch in enumerate(batches):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            if epoch * len(batches) + i in STEPS:
                parameters = [p.detach().clone() for p in model.parameters()]
                steps[epoch * len(batches) + i] = {"gradients": gradients, "parameters": parameters}
        epoch_losses.append(loss.item())
    return steps, epoch_losses


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.release)])
def test_minimal_equals_one_process(one_process, tmp_path, ranks):
    result = pool.run(WORKER, MINIMAL, tmp_path / "results.pt", ranks=ranks).check()
    found = torch.load(tmp_path / "results.pt")
    steps, epoch_losses = one_process
    assert found["steps"].keys() == steps.keys() == set(STEPS)
    for step, expected in steps.items():
        # float64: sums in another order, some 1e-16 for numbers of order one. AdamW divides the
        # gradients by their own size, which magnifies that with each step.
        for kind in ("gradients", "parameters"):
            actual = found["steps"][step][kind]
            torch.testing.assert_close(actual, expected[kind], rtol=0, atol=1e-9)
    assert printed_losses(result) == pytest.approx(epoch_losses, abs=5e-3)
    assert found["units"] == 4  # three blocks and the root: not gathered in one piece
    assert found["end"] == ["barrier", "destroy_process_group"]


def printed_losses(result) -> list[float]:
    return [float(x) for x in re.findall(r"epoch \d +loss ([\d.]+)", result.output)]


def test_one_process_and_two_ranks_print_the_same_losses():
    losses = []
    for ranks in (1, 2):
        result = pool.run(MINIMAL, ranks=ranks).check()
        pattern = r"rank 0 holds ([\d,]+) of ([\d,]+) parameters"
        held, total = (int(x.replace(",", "")) for x in re.findall(pattern, result.output)[0])
        assert held == total / ranks  # each first dimension is even
        assert result.output.count("rank 0 holds") == 1
        losses.append(printed_losses(result))
    assert len(losses[0]) == EPOCHS
    assert losses[1] == pytest.approx(losses[0], abs=5e-3)  # in float32
