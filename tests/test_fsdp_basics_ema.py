"""fsdp_basics/ema.py: the average of shards against an average in one process without FSDP."""

import re

import ema
import pool
import pytest
import torch
import torch.nn.functional as F
from data import load_dataset
from helpers import ROOT, python
from torch import nn

SCRIPT = ROOT / "fsdp_basics/ema.py"
WORKER = ROOT / "tests/workers/fsdp_ema.py"
STEPS, DECAY, BATCH = 4, 0.9, 12

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, dict]:
    """Ranks -> what they saw. Two ranks save after their steps; one and three continue that."""
    folder = tmp_path_factory.mktemp("ema")
    for ranks in (2, 3, 1):
        pool.run(WORKER, folder / "saves", folder / f"{ranks}.pt", ranks=ranks).check()
    return {ranks: torch.load(folder / f"{ranks}.pt") for ranks in (1, 2, 3)}


def plain(optimizer_name: str, ranks_of_steps: list[int]) -> list[dict]:
    """One process; step i takes the shares of ranks_of_steps[i] ranks, each with its statistics."""
    images, labels = load_dataset("digits")[0][:]
    images = images.double().flatten(1)
    torch.manual_seed(0)
    layers = []
    for _ in range(2):
        layers.append(nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU()))
    model = nn.Sequential(*layers, nn.Linear(64, 10)).double()
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    average = {name: t.clone() for name, t in model.state_dict().items()}
    steps, statistics = [], []
    for step, ranks in enumerate(ranks_of_steps):
        if len(statistics) != ranks:  # the first step, or continued on another number of ranks
            mean = means(statistics) if statistics else dict(model.named_buffers())
            statistics = [{name: t.clone() for name, t in mean.items()} for _ in range(ranks)]
        batch = torch.randint(
            len(images), (BATCH,), generator=torch.Generator().manual_seed(3 + step)
        )
        optimizer.zero_grad()
        for rank in range(ranks):
            model.load_state_dict(statistics[rank], strict=False)
            share = batch[rank::ranks]
            (F.cross_entropy(model(images[share]), labels[share]) / ranks).backward()
            statistics[rank] = {name: t.clone() for name, t in model.named_buffers()}
        optimizer.step()
        own = {name: p.detach().clone() for name, p in model.named_parameters()} | means(statistics)
        for name, value in own.items():
            average[name] = (
                DECAY * average[name] + (1 - DECAY) * value if value.is_floating_point() else value
            )
        steps.append({"own": own, "average": dict(average)})
    return steps


def means(statistics: list[dict]) -> dict[str, torch.Tensor]:
    first = statistics[0]
    return {
        name: sum(s[name] for s in statistics) / len(statistics) if t.is_floating_point() else t
        for name, t in first.items()
    }


def close(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        # float64, sums in another order: 1e-16 for numbers of order one. AdamW divides gradients
        # by their own size, which enlarges that.
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-10)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_average_equals_one_process(runs, optimizer, ranks):
    """Two ranks from the start; one and three ranks go on from what the two have saved."""
    seen = runs[ranks][optimizer]
    expected = plain(optimizer, [2] * STEPS + ([] if ranks == 2 else [ranks] * STEPS))
    assert seen["done"] == (0 if ranks == 2 else STEPS)
    for step, found in enumerate(seen["steps"], start=seen["done"]):
        for what in ("own", "average"):
            close(found[what], expected[step][what])
    assert not seen["calls of update"]  # nothing is sent
    last = expected[-1]
    moved = [(last["own"][n] - last["average"][n]).abs().max().item() for n in last["own"]]
    assert sum(x > 1e-4 for x in moved) >= 10  # not the model itself


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_is_loaded_is_what_was_saved(runs, optimizer):
    saved = runs[2][optimizer]["steps"][-1]["average"]
    for ranks in (1, 3):
        loaded = runs[ranks][optimizer]["loaded"]
        for name, tensor in saved.items():
            # The mean of three equal buffers may differ from them in the last bit.
            tolerance = 1e-15 if name.endswith(("running_mean", "running_var")) else 0
            torch.testing.assert_close(loaded[name], tensor, rtol=tolerance, atol=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_evaluated_in_place_and_back(runs, optimizer):
    """The logits are those of a plain model with the average; then the model is as before."""
    for seen in (run[optimizer] for run in runs.values()):
        average = seen["steps"][1]["average"]
        close(seen["in place"], average)
        model = ema.build_model().double()
        model.load_state_dict(average)
        images = load_dataset("digits")[0][:][0][:20].double().flatten(1)
        torch.testing.assert_close(seen["logits"], model.eval()(images), rtol=0, atol=1e-10)
        assert seen["back"]


def test_infinite_buffers_and_low_precision():
    """What lerp would spoil: inf - inf; and a bfloat16 that a small change does not move."""
    model = nn.Linear(2, 2, bias=False).bfloat16()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    average = ema.EMA(model, 0.999)
    start = model.weight.detach().float().clone()
    with torch.no_grad():
        model.weight += 1
    for _ in range(100):
        average.update(model)
    assert torch.equal(average.state["mask"], model.mask)
    target = model.weight.detach().float()
    expected = target + 0.999**100 * (start - target)
    torch.testing.assert_close(average.state["weight"], expected, rtol=0, atol=1e-4)


def test_complex_parameters_are_averaged_too():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    average = ema.EMA(model, 0.75)
    with torch.no_grad():
        model.weight += 4j
    average.update(model)
    assert average.state["weight"].tolist() == [1j, 1j]


def test_the_script_prints_and_exports(tmp_path):
    options = ("--steps", 60, "--output-dir", tmp_path / "run")
    output = pool.run(SCRIPT, *options, ranks=2).check().output
    assert output.count("FSDP does not support deepcopy") == 2
    assert re.search(r"^an update of the average +none$", output, re.MULTILINE)
    model = ema.build_model()
    model.load_state_dict(torch.load(tmp_path / "run/ema.pt"))
    images, labels = load_dataset("digits")[1][:]
    accuracy = (model.eval()(images.flatten(1)).argmax(1) == labels).float().mean().item()
    assert f"test accuracy of the average {accuracy:.2%}" in output
    output = pool.run(SCRIPT, *options, ranks=3).check().output
    assert "after 60 step(s)" in output
    assert "after step 120: loss" in output


def test_wrong_batch_is_one_sentence():
    result = pool.run(SCRIPT, "--batch-size", 5, ranks=2)
    assert result.returncode == 2
    assert "error: --batch-size 5 does not divide over 2 rank(s)\n" in result.output


def test_a_batch_of_one_image_per_rank_is_refused():
    result = python(SCRIPT, "--batch-size", 1)
    assert result.returncode == 2
    assert "BatchNorm needs two images per rank" in result.output
