"""parallel_basics/minimal.py trains like a single-process script, on any number of ranks."""

import re

import pool
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, python
from sklearn.datasets import load_digits
from torch import nn

MINIMAL = ROOT / "parallel_basics/minimal.py"
STEPS = 40
LINES = re.compile(r"^step +(\d+)   loss (\d+\.\d+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def ordinary() -> list[dict]:
    """The script without its distributed lines, written independently."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 480), nn.ReLU(), nn.Linear(480, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    steps = []
    for _ in range(STEPS):
        batch = torch.randint(len(images), (64,))
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        step = {"loss": loss.item(), "gradients": [p.grad.clone() for p in model.parameters()]}
        optimizer.step()
        steps.append(step | {"parameters": [p.detach().clone() for p in model.parameters()]})
    return steps


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equals_one_process(ordinary, tmp_path, ranks):
    """Tolerance: fp32 sums in another order, some 1e-7 for numbers of order one, over 40 steps."""
    worker = ROOT / "tests/workers/parallel_minimal.py"
    result = pool.run(worker, tmp_path / "steps", "--steps", STEPS, ranks=ranks).check()
    for rank in range(ranks):
        steps = torch.load(tmp_path / f"steps.{rank}")
        assert len(steps) == STEPS
        for step, expected in zip(steps, ordinary, strict=True):
            for kind in ("gradients", "parameters"):
                torch.testing.assert_close(step[kind], expected[kind], rtol=0, atol=2e-6)
        part = 480 // ranks
        assert steps[-1]["held"] == [(part, 64), (part,), (10, part), (10,)]
    check_output(result.output, ordinary, ranks)


def check_output(output: str, ordinary: list[dict], ranks: int) -> None:
    printed = LINES.findall(output)
    assert [step for step, _ in printed] == ["20", "40"]  # once: rank 0 alone prints
    for step, loss in printed:
        assert float(loss) == pytest.approx(ordinary[int(step) - 1]["loss"], abs=5e-6)
    held = 480 * 75 // ranks + 10  # columns and rows of 480, and the bias that all ranks have
    assert output.count(f"rank 0 holds {held:,} of 36,010 parameters") == 1
    assert output.count("rank 0 holds") == 1
    assert "Warning" not in output


def test_it_is_minimal():
    """One screen, no helper module."""
    source = MINIMAL.read_text()
    assert source.count("\n") <= 64
    siblings = {path.stem for path in MINIMAL.parent.glob("*.py")}
    assert not siblings & set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))


def test_the_readme_shows_it():
    assert f"```python\n{MINIMAL.read_text()}```" in (MINIMAL.parent / "README.md").read_text()


@pytest.mark.gpu
def test_on_a_gpu():
    assert "rank 0 holds 36,010 of 36,010" in python(MINIMAL).check().output
