"""ddp_basics/silent_divergence.py: each planted fault is named, each cure equals one process."""

import re

import pool
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

pytestmark = pytest.mark.slow  # each launch of ranks takes some seconds

SCRIPT = ROOT / "ddp_basics/silent_divergence.py"
STEPS, BATCH = 20, 120

# case -> the first step after which the ranks differ (None: it depends on the losses), and where
EXPECTED = {
    "past-the-wrapper": (1, "body.weight"),
    "unfrozen": (11, "body.weight"),  # unfrozen after 10 steps; the head is averaged all along
    "replaced": (1, "head.weight"),  # the body is averaged
    "static-graph": (12, "body.weight"),  # the first step that skips a layer
    "seed": (1, "body.weight"),
    "batchnorm": (1, "norm.running_mean"),  # all parameters are equal
    "local-skip": (None, "body.weight"),
    "local-schedule": (None, "body.weight"),
}


@pytest.fixture(scope="module", params=[2, 3])
def ran(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("divergence") / "cured.pt"
    output = pool.run(SCRIPT, "--output", file, ranks=request.param).check().output
    return request.param, output, torch.load(file, weights_only=True)


def section(output: str, case: str) -> str:
    return output.split(f"\n\n{case}: ")[1].split("\n\n")[0]


@pytest.mark.parametrize("case", EXPECTED)
def test_each_fault_is_named(ran, case):
    ranks, output, _ = ran
    text = section(output, case)
    rows = re.findall(r"^ +(\d+) +(\d\.\d+) +(\d\.\d+) +[\d.]+%$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(ranks))
    if case not in ("local-skip", "local-schedule"):
        assert all(float(last) < float(first) for _, first, last in rows)  # the losses look right
    says = r"check_replicas says: step (\d+): ranks 0 and (\d+) hold different numbers, "
    step, rank, tensor = re.search(says + r"first in (\S+)", text).groups()
    expected_step, expected_tensor = EXPECTED[case]
    assert tensor == expected_tensor
    assert 0 < int(rank) < ranks
    assert int(step) == (expected_step or int(step))
    later = "DDP says later: step 13: Expected to have finished reduction in the prior iteration"
    assert (later in text) == (case == "static-graph")
    assert ("DDP says" in text) == (case == "static-graph")


@pytest.mark.parametrize("case", EXPECTED)
def test_each_cure_equals_one_process(ran, case):
    ranks, output, cured = ran
    with_it = f"\nwith the fix: equal bits on {ranks} rank(s) after each of {STEPS} steps\n"
    assert with_it in section(output, case) + "\n"
    expected = plain_training(case, ranks).state_dict()
    # fp32 sums in another order, magnified by 20 steps with a momentum of 0.9.
    torch.testing.assert_close(cured[case], expected, rtol=0, atol=2e-5)


def test_one_process_cannot_diverge():
    output = pool.run(SCRIPT, "--steps", 4).check().output
    assert "one rank alone cannot diverge" in output
    assert output.count("check_replicas says: no difference") == len(EXPECTED)
    assert output.count("with the fix: equal bits on 1 rank(s) after each of 4 steps") == len(
        EXPECTED
    )


def test_a_batch_that_does_not_divide_is_one_sentence():
    result = pool.run(SCRIPT, ranks=7)
    assert result.returncode == 2
    message = "the global batch of 120 images does not divide over 7 rank(s)"
    assert result.output.count(message) == 1, result.output


# ---- one process: what the cured cases are to compute, from scikit-learn and torch.nn only


class Plain(nn.Module):
    def __init__(self, normalized: bool):
        super().__init__()
        self.norm = nn.BatchNorm1d(32) if normalized else nn.Identity()
        self.body = nn.Linear(64, 32)
        self.extra = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x, with_extra: bool):
        x = self.norm(self.body(x)).relu()
        return self.head(x + self.extra(x).relu() if with_extra else x)


def global_batches(case: str):
    images, labels = load_digits(return_X_y=True)
    rows, _ = train_test_split(range(1797), test_size=0.2, stratify=labels, random_state=0)
    images, labels = torch.tensor(images[rows] / 16).float(), torch.tensor(labels[rows])
    for step in range(STEPS):
        at = [i % len(rows) for i in range(step * BATCH, (step + 1) * BATCH)]
        x, y = images[at], labels[at]
        if case == "local-skip" and step == 15:
            y = torch.cat([y[:80], (y[80:] + 1) % 10])
        yield step, x, y


def plain_training(case: str, ranks: int) -> Plain:
    torch.manual_seed(0)
    if case == "replaced":  # its first head is drawn, then its second
        model = Plain(False)
        model.head = nn.Linear(32, 10)
    else:
        model = Plain(case == "batchnorm")
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    rate, best, limit = 0.3, float("inf"), float("inf")
    for step, x, y in global_batches(case):
        skips = case == "static-graph" and step >= 10 and step % 2 == 1
        # What a rank sees matters to BatchNorm alone.
        parts = ranks if case == "batchnorm" else 1
        before = {name: b.clone() for name, b in model.named_buffers()}
        after = {name: [] for name in before}
        loss, grads = 0.0, {}
        for images, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            part = F.cross_entropy(model(images, not skips), labels) / parts
            loss += part.item()
            found = torch.autograd.grad(part, list(model.parameters()), allow_unused=True)
            for (name, _), grad in zip(model.named_parameters(), found, strict=True):
                if grad is not None:
                    grads[name] = grads.get(name, 0) + grad
            for name, buffer in model.named_buffers():
                after[name].append(buffer.clone())
        for name, buffer in model.named_buffers():
            buffer.copy_(torch.stack(after[name]).double().mean(0))
        if loss > limit:
            continue
        limit = 1.1 * loss if case == "local-skip" else limit
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                frozen = case == "unfrozen" and step < 10 and name.startswith("body")
                if name in grads and not frozen:
                    velocity[name].mul_(0.9).add_(grads[name])
                    parameter -= rate * velocity[name]
        if case == "local-schedule":
            if loss < best * (1 - 1e-4):
                best = loss
            else:
                rate /= 2
    return model
