"""fsdp_basics/lora.py: sharded adapters against W + s B A in one process, without FSDP."""

import re

import lora
import pool
import pytest
import torch
import torch.nn.functional as F
from data import load_dataset
from helpers import ROOT
from model import VisionTransformer
from torch.func import functional_call

SCRIPT = ROOT / "fsdp_basics/lora.py"
WORKER = ROOT / "tests/workers/fsdp_lora.py"
STEPS, BATCH, RANK, ALPHA = 4, 12, 2, 4.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, dict]:
    folder = tmp_path_factory.mktemp("lora")
    for ranks in (2, 1, 3):
        pool.run(WORKER, folder, ranks=ranks).check()
    return {ranks: torch.load(folder / f"{ranks}.pt") for ranks in (1, 2, 3)}


def test_adapters_of_another_library_are_refused(group):
    """load_state_dict(strict=False) would leave them out."""
    with pytest.raises(
        ValueError, match=r"the model has no parameter head\.lora_A\.default\.weight"
    ):
        lora.load_adapters(plain_model(), {"head.lora_A.default.weight": torch.ones(1)})


def test_adapters_of_fewer_blocks_are_refused(group):
    model = plain_model()
    lora.add_adapters(model, 2, 4)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    adapters = {name: torch.ones(1) for name in names if name.startswith("blocks.0.")}
    with pytest.raises(ValueError, match=r"the adapters have no blocks\.1\."):
        lora.load_adapters(model, adapters)


def plain_model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(dim=16, depth=2).double()


def with_adapters(base: dict, adapters: dict) -> dict:
    """W + alpha / rank * B A for each pair, as one writes it in a paper."""
    weights = dict(base)
    for name, b in adapters.items():
        layer, _, kind = name.rpartition(".")
        if kind == "lora_b":
            weights[f"{layer}.weight"] = base[f"{layer}.weight"] + ALPHA / RANK * (
                b @ adapters[f"{layer}.lora_a"]
            )
    return weights


def plain(optimizer_name: str, start: dict):
    """(gradients, adapters) of each step of one process, which begins with these adapters."""
    images, labels = load_dataset("digits")[0][:]
    model = plain_model()
    base = {name: p.detach() for name, p in model.named_parameters()}
    adapters = {n: t.clone().requires_grad_() for n, t in start.items() if ".lora_" in n}
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(adapters.values(), 0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(adapters.values(), 0.01)
    for step in range(STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        logits = functional_call(model, with_adapters(base, adapters), images[batch].double())
        F.cross_entropy(logits, labels[batch]).backward()
        gradients = {name: t.grad.clone() for name, t in adapters.items()}
        optimizer.step()
        yield gradients, {name: t.detach().clone() for name, t in adapters.items()}


def close(actual: dict, expected: dict, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize("ranks", [1, 2, 3])  # of A's 2 rows the third rank has none
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_adapters_equal_one_process(runs, optimizer, ranks):
    seen = runs[ranks][optimizer]
    base = dict(plain_model().named_parameters())
    assert all(not t.any() for name, t in seen["start"].items() if name.endswith("lora_b"))
    for found, expected in zip(seen["steps"], plain(optimizer, seen["start"]), strict=True):
        gradients, adapters = expected
        # float64, sums in another order: 1e-16 for numbers of order one. AdamW divides gradients
        # by their own size, which enlarges that.
        close(found["gradients"], gradients, 1e-12)  # of the adapters, of nothing else
        close({n: found["parameters"][n] for n in adapters}, adapters, 1e-9)
        frozen = {n: t for n, t in found["parameters"].items() if n not in adapters}
        close(frozen, base, 0)
    moved = [(adapters[n] - seen["start"][n]).abs().max() for n in adapters]
    assert len(moved) == 16
    assert min(moved) > 1e-4


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_saved_alone_and_merged(runs, optimizer, ranks):
    seen = runs[ranks][optimizer]
    last = seen["steps"][-1]["parameters"]
    adapters = {name: t for name, t in last.items() if ".lora_" in name}
    assert set(seen["state"]) == set(adapters)  # the optimizer knows nothing else
    close(seen["adapters"], adapters, 0)
    assert seen["gathered"] == len(adapters) * (ranks > 1)  # the base is not gathered
    close(seen["merged"], with_adapters(dict(plain_model().named_parameters()), adapters), 1e-15)
    model = plain_model()
    model.load_state_dict(seen["merged"])
    images = load_dataset("digits")[0][:][0][:20].double()
    # Two ways to add up the same products, in float64.
    torch.testing.assert_close(model(images), seen["logits"], rtol=0, atol=1e-12)


def test_loaded_by_other_numbers_of_ranks(runs):
    for ranks in (1, 3):
        torch.testing.assert_close(
            runs[ranks]["loaded"], runs[2]["sgd"]["logits"], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("ranks", [2, 3])
def test_only_the_adapters_gradients_are_reduced(runs, ranks):
    """Of frozen parameters, in the same unit, there is no gradient to send, nor memory for it."""
    adapters = runs[ranks]["sgd"]["adapters"].values()
    rows = [(-(-t.shape[0] // ranks) * ranks, t.shape[1]) for t in adapters]  # padded
    assert runs[ranks]["sgd"]["reduced"] == 8 * sum(a * b for a, b in rows)


def test_the_script_measures_and_exports(tmp_path):
    options = ("--base-steps", 1, "--steps", 2, "--dim", 16, "--output-dir", tmp_path)
    output = pool.run(SCRIPT, *options, ranks=2).check().output
    rows = dict(re.findall(r"^([a-z. ']+\w) +([\d,]+ +[\d,]+) +[\d.]+$", output, re.MULTILINE))
    rows = {k: [int(n.replace(",", "")) for n in v.split()] for k, v in rows.items()}
    whole = sum(p.numel() for p in VisionTransformer(dim=16, depth=2).parameters())
    trained = 2 * 4 * (16 + 48 + 16 + 16 + 16 + 64 + 64 + 16)  # rank 4: A and B of four layers
    assert rows["... trainable"][1] == rows["... their gradients"][1] == 4 * trained / 2
    assert rows["gradients reduced in a step"] == [4 * whole, 4 * trained]
    assert rows["... the optimizer's state"][1] == 2 * 4 * trained / 2 + 4 * 16  # and 16 counters
    assert "use_orig_params=False: ValueError" in output
    one_block = 4 * (whole - 4 * 16 - 16 - 16 * 16 - 2 * 16 - 170) // 2  # patches to head
    (reduced,) = re.findall(r"use_orig_params=True: ([\d,]+) bytes", output)
    assert int(reduced.replace(",", "")) >= one_block  # frozen ones, too
    model = VisionTransformer(dim=16, depth=2)
    model.load_state_dict(torch.load(tmp_path / "merged.pt"))
    saved = torch.load(tmp_path / "adapters.pt")
    assert saved["rank"] == 4
    assert len(saved["adapters"]) == 16
    assert float(re.search(r"differ by (\S+) at most", output)[1]) < 1e-5


def test_wrong_arguments_are_one_sentence():
    result = pool.run(SCRIPT, "--batch-size", 5, ranks=2)
    assert result.returncode == 2
    assert "error: --batch-size 5 does not divide over 2 rank(s)\n" in result.output
