"""fsdp_basics/minimal.py, as it stands, against one process in plain PyTorch."""

import re

import pytest
import torch
import torch.nn.functional as F
import warm
from helpers import REPEAT, ROOT, python, torchrun
from sklearn.datasets import load_digits
from torch import nn
from workers.fsdp_minimal import STEPS

MINIMAL = ROOT / "fsdp_basics/minimal.py"
WORKER = ROOT / "tests/workers/fsdp_minimal.py"
EPOCHS, BATCH = 3, 60

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_process():
    """The same model on the same batches, without a line of torch.distributed."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16).float().view(-1, 8, 8)
    labels = torch.tensor(labels)
    torch.manual_seed(0)
    options = {"dropout": 0.0, "bias": False, "batch_first": True}
    blocks = [nn.TransformerEncoderLayer(64, 4, 128, **options) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Flatten(), nn.Linear(512, 10))
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_minimal_equals_one_process(one_process, tmp_path, ranks):
    result = warm.run(WORKER, MINIMAL, tmp_path / "results.pt", ranks=ranks).check()
    found = torch.load(tmp_path / "results.pt")
    steps, epoch_losses = one_process
    assert found["steps"].keys() == steps.keys() == set(STEPS)
    for step, expected in steps.items():
        # fp32 sums in another order: 1e-7 at first, a little more with each step of AdamW, which
        # divides gradients by their own size (lr 1e-3).
        atol = 1e-6 if step < 3 else 1e-4
        actual = found["steps"][step]
        for kind, allowed in (("gradients", atol), ("parameters", 10 * atol)):
            torch.testing.assert_close(actual[kind], expected[kind], rtol=0, atol=allowed)
    assert printed_losses(result) == pytest.approx(epoch_losses, abs=5e-3)
    assert found["units"] == 4  # three blocks and the root: not gathered in one piece
    assert found["left"]  # the job


def printed_losses(result) -> list[float]:
    return [float(x) for x in re.findall(r"epoch \d +loss ([\d.]+)", result.output)]


@pytest.mark.timeout(120 + 60 * REPEAT)
@pytest.mark.parametrize("ranks", [1, 2])
def test_minimal_runs_and_ends_with_status_0(one_process, ranks):
    """Started as a person does. REPEAT=30 is the proof that no exit is aborted."""
    for _ in range(REPEAT):
        result = (torchrun(MINIMAL, ranks=2) if ranks == 2 else python(MINIMAL)).check()
        pattern = r"rank 0 holds ([\d,]+) of ([\d,]+) parameters"
        held, total = (int(x.replace(",", "")) for x in re.findall(pattern, result.output)[0])
        assert held == total / ranks  # each first dimension is even
        assert result.output.count("rank 0 holds") == 1
        assert printed_losses(result) == pytest.approx(one_process[1], abs=5e-3)
