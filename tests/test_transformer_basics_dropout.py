"""transformer_basics: --dropout's masks follow from the place of a number, and only training drops.

test_transformer_basics.py compares a step with dropout on every mesh with one process, whose masks
come from workers/gpt_masks.py.
"""

import math
import os
from itertools import combinations

import pool
import pytest
import torch
import torch.nn.functional as F
from config import Settings
from dropout import drop, fold_in, token_keys
from evaluation import evaluate
from helpers import ROOT, read_metrics
from model import GPT, initialize
from parallelize import spread_model
from sampling import generate
from step import train_step
from workers.gpt_masks import GAMMA, output

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
SIZES = ("--layers", 2, "--heads", 2, "--dim", 16, "--block-size", 16, "--batch-size", 8)


def masks(rate: float, seed: int = 0, step: int = 0, layer: int = 1, site: int = 0):
    """Of 16 sequences of 32 tokens with 64 features: 1 where a number stays."""
    keys_BT = token_keys(seed, step, torch.arange(16), torch.arange(32))
    keys_BT = fold_in(fold_in(keys_BT, layer), site)
    return (drop(torch.ones(16, 32, 64), rate, keys_BT) != 0).double()


# ---- the numbers


def test_the_hash_is_splitmix64():
    """The published first outputs for the seed 1234567, and others in Python's integers."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    key = 1234567 * pow(GAMMA, -1, 2**64) % 2**64  # key x GAMMA is the seed
    key = torch.tensor(key - 2**64 if key >> 63 else key)
    assert [fold_in(key, i).item() % 2**64 for i in range(3)] == published
    keys = torch.tensor([[-1], [2**62]])
    found = fold_in(keys, torch.arange(5))
    assert found.dtype == torch.int64
    for row, key in enumerate((-1, 2**62)):
        assert [z % 2**64 for z in found[row].tolist()] == [output(key, i) for i in range(5)]
    assert fold_in(None, 3) is None


@pytest.mark.device
@pytest.mark.slow
def test_compiled_it_drops_the_same():
    """The block is compiled with its dropouts, and shapes of sizes that no vector divides."""
    keys_BT = token_keys(5, 3, torch.arange(4, device=DEVICE), torch.arange(6, device=DEVICE))
    compiled = torch.compile(drop)
    for width in (24, 7):
        x_BTC = torch.ones(4, 6, width, device=DEVICE)
        assert torch.equal(compiled(x_BTC, 0.5, keys_BT), drop(x_BTC, 0.5, keys_BT))
    on_cpu = drop(x_BTC.cpu(), 0.5, keys_BT.cpu())
    assert torch.equal(drop(x_BTC, 0.5, keys_BT).cpu(), on_cpu)


def test_what_is_kept_is_scaled_and_the_rest_is_zero():
    keys_BT = token_keys(0, 0, torch.arange(16), torch.arange(32))
    for dtype in (torch.float32, torch.bfloat16):
        x_BTC = torch.randn(16, 32, 64).to(dtype).requires_grad_()
        y_BTC = drop(x_BTC, 0.25, keys_BT)
        y_BTC.sum().backward()
        factors = torch.where(y_BTC == 0, 0, torch.tensor(1 / 0.75, dtype=dtype))
        assert y_BTC.dtype == dtype
        torch.testing.assert_close(y_BTC, x_BTC * factors)
        torch.testing.assert_close(x_BTC.grad, factors)
        assert 0.2 < (y_BTC == 0).float().mean() < 0.3
    assert drop(x_BTC, 0.0, keys_BT) is x_BTC
    assert drop(x_BTC, 0.25, None) is x_BTC


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.99])
def test_the_share_that_is_dropped_is_the_rate(rate):
    for step in range(4):
        kept, deviation = masks(rate, step=step), math.sqrt(rate * (1 - rate))
        for shares in (kept.mean(), kept.mean((0, 1)), kept.mean((1, 2)), kept.mean((0, 2))):
            n = kept.numel() / shares.numel()
            assert ((shares - (1 - rate)).abs() < 5 * deviation / math.sqrt(n)).all()


def test_masks_of_different_places_are_independent():
    """Two masks agree as often as two independent ones: 5 deviations of the mean of n products."""
    places = {
        "first": masks(0.3),
        "seed": masks(0.3, seed=1),
        "step": masks(0.3, step=1),
        "layer": masks(0.3, layer=2),
        "site": masks(0.3, site=1),
    }
    first = places["first"]
    for distance in (1, 2, 8):
        for dim, name in enumerate(("sequence", "position", "feature")):
            places[f"{name} + {distance}"] = first.roll(distance, dim)
    for (one, a), (other, b) in combinations(places.items(), 2):
        products = (a - 0.7) * (b - 0.7) / (0.3 * 0.7)  # each of mean 0 and deviation 1
        assert abs(products.mean()) < 5 / math.sqrt(products.numel()), (one, other)


def test_a_mask_takes_one_byte_per_number_until_backward():
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    keys_BT = token_keys(0, 0, torch.arange(4), torch.arange(8))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        drop(torch.ones(4, 8, 16, requires_grad=True), 0.5, keys_BT)
    assert sum(kept) == 4 * 8 * 16


# ---- where it is on and off


def test_only_training_drops(group):
    settings = Settings(layers=2, heads=2, dim=16, block_size=16, batch_size=4, dropout=0.5).on(1)
    mesh, model, _ = spread_model(settings.model(50), settings, torch.device("cpu"))
    initialize(model, seed=3)
    plain = initialize(GPT(settings.model(50)), seed=3)
    tokens = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    expected = F.cross_entropy(plain(x).flatten(0, 1), y.flatten()).item()
    assert evaluate(model, None, (x, y), mesh, settings) == pytest.approx(expected, abs=1e-6)
    texts = [generate(m, None, x[:, :4], 8, temperature=0) for m in (model, plain)]
    assert torch.equal(*texts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = [
        train_step(model, None, x, y, optimizer, mesh, settings, step)[0].item()
        for step in (0, 1, 0)
    ]
    assert losses[0] == losses[2]
    assert min(abs(losses[0] - losses[1]), abs(losses[0] - expected)) > 1e-4


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_masks_on_another_mesh(tmp_path):
    """A signal after step 3 on dp 2 x tp 2 with sequence parallelism; then pp 2 x cp 2."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"abcdefghi\n" * 950 + b"98 76 54\n" * 60)
    args = (*SIZES, "--steps", 6, "--log-every", 1, "--eval-every", 6, "--eval-batches", 1)
    args = (*args, "--sample", 0, "--data", text, "--dropout", 0.4, "--lr", 1e-3)
    script = ROOT / "tests/workers/gpt_resume.py"

    def losses(folder: str, *jobs) -> list[float]:
        for stop, ranks, *mesh in jobs:
            run = (stop, *args, *mesh, "--output-dir", tmp_path / folder)
            pool.run(script, *run, ranks=ranks).check()
        lines = [line for line in read_metrics(tmp_path / folder) if "loss" in line]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        return [line["loss"] for line in lines]

    straight = losses("straight", (0, 1))
    first = (3, 4, "--dp-shard", 2, "--tp", 2, "--sequence-parallel")
    second = (0, 4, "--pp", 2, "--cp", 2, "--accumulate", 4)
    assert losses("stopped", first, second) == pytest.approx(straight, abs=1e-5)
