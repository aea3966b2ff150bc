"""ddp_basics/two_networks.py: both networks of a GAN equal one process; wrong ways are wrong."""

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

SCRIPT = ROOT / "ddp_basics/two_networks.py"
STEPS, BATCH = 10, 48
GENERATOR = 4 * (16 * 64 + 64 + 64 * 64 + 64)  # bytes of parameters
DISCRIMINATOR = 4 * (64 * 64 + 64 + 64 + 1)

RIGHT = {  # way -> gradient bytes that a rank hands to all_reduce in a step
    "two wrappers, frozen": GENERATOR + DISCRIMINATOR,
    "not frozen": GENERATOR + 2 * DISCRIMINATOR,
    "frozen, bare discriminator": GENERATOR + DISCRIMINATOR,
    "one wrapper, find_unused": 2 * (GENERATOR + DISCRIMINATOR),
}
ERRORS = ("one layer frozen", "one wrapper")


@pytest.fixture(scope="module", params=[1, 2, 3])
def ran(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("two_networks") / "right.pt"
    output = pool.run(SCRIPT, "--output", file, ranks=request.param).check().output
    return request.param, output, torch.load(file, weights_only=True)


def row(output: str, way: str) -> list[str]:
    line = next(line for line in output.splitlines() if re.match(f"{re.escape(way)}   ", line))
    return line.removeprefix(way).split()


@pytest.mark.parametrize("way", RIGHT)
def test_right_ways_equal_one_process(ran, way):
    _, output, _ = ran
    gradients, parameters, size = row(output, way)
    # fp32 sums in another order; the gradients are of order 0.1.
    assert float(gradients) < 1e-6
    assert float(parameters) < 1e-6
    assert int(size.replace(",", "")) == RIGHT[way]


def test_past_the_wrapper_is_wrong_without_an_error(ran):
    ranks, output, _ = ran
    gradients, parameters, size = row(output, "generator past its wrapper")
    assert int(size.replace(",", "")) == DISCRIMINATOR
    if ranks > 1:
        assert float(gradients) > 1e-3
        assert float(parameters) > 1e-4
    else:
        assert float(gradients) == float(parameters) == 0


@pytest.mark.parametrize("way", ERRORS)
def test_a_wrapper_waits_for_all_gradients_or_none(ran, way):
    words = " ".join(row(ran[1], way))
    assert words == "Expected to have finished reduction in the prior iteration"


def test_a_second_forward_changes_what_the_first_has_kept(ran):
    ranks, output, _ = ran
    rows = output.partition("images, by rank")[2].splitlines()[1 : 1 + ranks]
    for rank, line in enumerate(rows):
        number, forward, backward, forward_once, backward_once = map(float, line.split())
        # Half of the old scale, 1, and half of the mean of the images: real, or real and fake.
        assert (number, forward) == (rank, 0.5 + (1 + rank) / 2)
        assert backward == 1.0  # rank 0's, on all ranks
        assert forward_once == backward_once == 0.5 + 1.5 * (1 + rank) / 2


def test_both_networks_equal_a_plain_gan(ran):
    _, _, right = ran
    gradients, parameters = plain_gan()
    assert len(right["gradients"]) == 2 * STEPS
    # fp32 sums in another order, for 10 steps.
    torch.testing.assert_close(right["gradients"], gradients, rtol=0, atol=1e-6)
    torch.testing.assert_close(right["parameters"], parameters, rtol=0, atol=1e-6)


def plain_gan() -> tuple[list, list]:
    """One process, functions only: the two losses of a GAN, their gradients, SGD with momentum."""
    images, labels = load_digits(return_X_y=True)
    rows, _ = train_test_split(range(1797), test_size=0.2, stratify=labels, random_state=0)
    images = torch.tensor(images[rows] / 16).float()
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)]
    weights = [p.detach().clone().requires_grad_() for layer in layers for p in layer.parameters()]
    velocity = [torch.zeros_like(p) for p in weights]
    generator, discriminator = slice(0, 4), slice(4, 8)

    def generate(z):
        a, b, c, d = weights[generator]
        return torch.sigmoid(F.linear(F.linear(z, a, b).clamp(min=0), c, d))

    def logits(x):
        a, b, c, d = weights[discriminator]
        hidden = F.linear(x, a, b)
        return F.linear(torch.where(hidden > 0, hidden, 0.2 * hidden), c, d)

    all_gradients = []

    def update(network, loss):
        gradients = torch.autograd.grad(loss, weights[network])
        all_gradients.append(list(gradients))
        with torch.no_grad():
            for p, v, g in zip(weights[network], velocity[network], gradients, strict=True):
                v.mul_(0.5).add_(g)
                p -= 0.1 * v

    for step in range(STEPS):
        real = images[step * BATCH : (step + 1) * BATCH]
        noise = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
        # -log sigmoid(real) - log(1 - sigmoid(fake)), then -log sigmoid(fake).
        log_real, fake = torch.sigmoid(logits(real)).log(), torch.sigmoid(logits(generate(noise)))
        update(discriminator, -(log_real.mean() + (1 - fake).log().mean()))
        update(generator, -torch.sigmoid(logits(generate(noise))).log().mean())
    return all_gradients, [p.detach() for p in weights]


def test_a_batch_that_does_not_divide_is_one_sentence():
    result = pool.run(SCRIPT, "--batch-size", 49, ranks=2)
    assert result.returncode == 2
    assert result.output.count("--batch-size 49 does not divide over 2 rank(s)") == 1, result.output
