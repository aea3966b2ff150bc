"""sharded_embedding.py: a table sharded by rows trains like the full table in one process."""

import re

import pool
import pytest
import torch
from helpers import ROOT
from sharded_embedding import make_table, own_words
from sklearn.datasets import load_digits

SCRIPT = ROOT / "parallel_basics/sharded_embedding.py"


# Tolerances: fp32 sums in another order differ by 1e-8 here. AdamW divides a gradient by its size,
# which enlarges the rounding of a gradient close to 0. Parameters change by more than 1e-3.
@pytest.mark.parametrize(
    ("ranks", "optimizer", "tolerance"), [(1, "sgd", 1e-6), (2, "adamw", 1e-5), (3, "sgd", 1e-6)]
)
def test_equals_one_process(ranks, optimizer, tolerance):
    """1,088 rows do not divide by three."""
    args = ("--device", "cpu", "--optimizer", optimizer)
    output = pool.run(SCRIPT, *args, ranks=ranks, timeout=60).check().output
    losses = [float(loss) for loss in re.findall(r"^step .*loss ([\d.]+)", output, re.MULTILINE)]
    assert losses == pytest.approx(losses_of_one_process(optimizer), abs=2e-6)
    assert losses[-1] < losses[0]
    moved = re.search(r"largest change .*:((?: [\d.e+-]+)+)", output)[1].split()
    assert len(moved) == 5
    assert all(float(number) > 1e-3 for number in moved), output  # every parameter has learned
    found = re.search(r"one process: gradient ([\d.e+-]+), parameter ([\d.e+-]+)", output)
    assert float(found[1]) < 1e-6, output
    assert float(found[2]) < tolerance, output
    assert f"rank 0 holds {1088 // ranks:,} of 1,088 rows" in output


def losses_of_one_process(optimizer: str) -> list[float]:
    """Written out: the script compares itself with a model that is fed by the same lines."""
    images, labels = load_digits(return_X_y=True)
    words, labels = torch.tensor(images).long() * 64 + torch.arange(64), torch.tensor(labels)
    torch.manual_seed(0)
    table = (0.1 * torch.randn(64 * 17, 24)).requires_grad_()
    torch.manual_seed(1)
    first, second = torch.nn.Linear(24, 32), torch.nn.Linear(32, 10)
    parameters = [table, *first.parameters(), *second.parameters()]
    kinds = {"sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9})}
    kinds |= {"adamw": (torch.optim.AdamW, {"lr": 3e-3})}
    kind, options = kinds[optimizer]
    stepper, losses = kind(parameters, **options), []
    for step in range(5):
        batch = slice(120 * step, 120 * (step + 1))
        sums = table[words[batch]].sum(dim=1)
        scores = second(torch.tanh(first(torch.tanh(sums))))
        loss = torch.nn.functional.cross_entropy(scores, labels[batch])
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


def test_the_sums_of_parts_are_those_of_the_table():
    words = torch.tensor([[0, 400, 1087], [1, 2, 3], [399, 399, 400]])
    parts = [make_table(*cut)(*own_words(words, *cut)) for cut in ((0, 400), (400, 1088))]
    assert torch.equal(parts[0][1], make_table(0, 1088)(words)[1])  # its words are all in one part
    assert not parts[1][1].any()
    torch.testing.assert_close(sum(parts), make_table(0, 1088)(words))


def test_ranks_that_do_not_divide_the_batch():
    result = pool.run(SCRIPT, "--device", "cpu", ranks=7, timeout=60)
    assert result.returncode == 2
    assert result.output.count("120 images do not divide among 7 ranks") == 1
    assert "Traceback" not in result.output
