"""transformer_basics/float8.py: products of rounded numbers, and the layers that compute so.

The oracle, workers/gpt_float8.py, rounds by arithmetic and multiplies in float64. The meshes are in
the matrix of test_transformer_basics.py.
"""

import copy
import re
import shutil
import sys
from pathlib import Path

import pool
import pytest
import torch
from activation_checkpointing import apply_activation_checkpointing
from arguments import UserError
from float8 import Float8Linear, Product, apply_float8, check_device
from helpers import ROOT, python, read_metrics, torchrun
from lora import add_adapters
from model import GPT, GPTConfig, cross_entropy
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from workers.gpt_float8 import InFloat8, e4m3, use_float8

TRAIN = ROOT / "transformer_basics/train.py"
needs_cpu_kernel = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="no fp8 products on CPUs before torch 2.13"
)
has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8_gpu = pytest.mark.skipif(not has_fp8, reason="needs a GPU that multiplies in fp8")


def float8_linear(inputs: int, outputs: int) -> Float8Linear:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs)
    layer.__class__ = Float8Linear
    return layer


def of_many_sizes(*shape: int) -> torch.Tensor:
    """Rows of other sizes, numbers of other sizes in a row, and a row of zeros."""
    x = torch.randn(shape) * 10 ** torch.linspace(-4, 4, shape[-2])[:, None]
    x = x * torch.logspace(-3, 0, shape[-1])
    x[..., 1, :] = 0
    return x


def gradients(product, x, w, dy) -> list[torch.Tensor]:
    """The output, and the gradients of x and w."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = product(x, w)
    return [y.detach(), *torch.autograd.grad(y, (x, w), dy)]


# ---- the numbers


def test_the_oracle_knows_e4m3():
    """All numbers of the format, and all middles between two of them, as torch rounds these."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert (numbers[-1], numbers[1], len(numbers.unique())) == (448, 2**-9, 127)
    assert torch.equal(e4m3(numbers), numbers)
    middles = (numbers[1:] + numbers[:-1]) / 2
    for x in (middles, middles * (1 + 1e-6), middles * (1 - 1e-6), -middles):
        assert torch.equal(e4m3(x), x.float().to(torch.float8_e4m3fn).double())


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=needs_cpu_kernel),
        pytest.param("cuda", marks=[pytest.mark.gpu, needs_fp8_gpu]),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_output_and_gradients(dtype, tolerance, device):
    if device == "cuda":
        tolerance = max(tolerance, 1e-3)  # Hopper is said to add fp8 products in 14 bits
    torch.manual_seed(1)
    x, dy = (of_many_sizes(2, 7, size).to(device, dtype) for size in (32, 48))
    layer = float8_linear(32, 48).to(device, dtype)
    layer.bias.data.zero_()

    def product(x, w):
        return torch.func.functional_call(layer, {"weight": w}, x)

    w = layer.weight.detach()
    found = gradients(product, x, w, dy)
    # There, too: a GPU divides by 448 as it multiplies by 1 / 448, which may differ in the last bit
    # from the CPU's division, and so round to another number.
    expected = gradients(InFloat8.apply, x.double(), w.double(), dy.double())
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        # Relative to the largest number of a row (for dW, of all). In bf16, a CPU rounds the sum
        # and then its product with the scales: by 2^-9 twice.
        largest = b.abs().amax(-1, keepdim=True) if a is not found[2] else b.abs().max()
        assert largest.max() > 1
        assert ((a.double() - b).abs() <= tolerance * largest).all()


@needs_cpu_kernel
def test_it_rounds_as_e4m3_does():
    """Each factor by a root mean square of 2.6 % of it, so a product by 3.7 %; dW not at all."""
    torch.manual_seed(1)
    x, dy = torch.randn(64, 256), torch.randn(64, 512)
    w = float8_linear(256, 512).weight.detach()
    found = gradients(lambda x, w: x @ w.t(), x, w, dy)
    rounded = gradients(Product.apply, x, w, dy)
    y, dx, dw = ((a - b).norm() / b.norm() for a, b in zip(rounded, found, strict=True))
    assert 0.03 < y < 0.045
    assert 0.03 < dx < 0.045
    assert dw < 1e-6  # of another order of sums; in fp8 it would be as large as dx


@needs_cpu_kernel
def test_tokens_do_not_change_one_another():
    """So that any share of the tokens has the results of all."""
    torch.manual_seed(1)
    layer, x, dy = float8_linear(32, 48), torch.randn(1, 6, 32), torch.randn(1, 6, 48)
    other_x, other_dy = (torch.cat([t[:, :3], 1000 * t[:, 3:]], dim=1) for t in (x, dy))

    def product(x, w):
        return torch.func.functional_call(layer, {"weight": w}, x)

    w = layer.weight.detach()
    alone, together = (gradients(product, *given) for given in ((x, w, dy), (other_x, w, other_dy)))
    assert torch.equal(alone[0][:, :3], together[0][:, :3])
    assert torch.equal(alone[1][:, :3], together[1][:, :3])


# ---- the layers


SMALL = GPTConfig(vocab_size=48, block_size=16, layers=2, heads=2, dim=32)


def float8_model() -> GPT:
    torch.manual_seed(0)
    return apply_float8(GPT(SMALL), "cpu", torch.float32)


@needs_cpu_kernel
def test_layers_of_the_blocks_and_no_others():
    model = float8_model()
    found = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    layers = ("attention.query", "attention.key", "attention.value", "attention.out")
    layers += ("mlp.expand", "mlp.contract")
    assert found == {f"blocks.{i}.{layer}" for i in (0, 1) for layer in layers}
    assert model.state_dict().keys() == GPT(SMALL).state_dict().keys()


@needs_cpu_kernel
def test_adapters_next_to_a_frozen_weight():
    torch.manual_seed(0)
    model = apply_float8(add_adapters(GPT(SMALL), 4, alpha=8.0), "cpu", torch.float32)
    layer = model.blocks["0"].mlp.expand
    with torch.no_grad():
        layer.lora_a.normal_()
        layer.lora_b.normal_()
    x, a, b = (
        t.detach().clone().requires_grad_()
        for t in (torch.randn(2, 5, 32), layer.lora_a, layer.lora_b)
    )
    expected = InFloat8.apply(x, layer.weight.detach()) + 2.0 * (x @ a.t() @ b.t()) + layer.bias
    dy = torch.randn(expected.shape)
    wanted = [expected, *torch.autograd.grad(expected, (x, a, b), dy)]
    y = layer(x)
    found = [y, *torch.autograd.grad(y, (x, layer.lora_a, layer.lora_b), dy)]
    for actual, wish in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, wish, rtol=1e-5, atol=1e-5)
    assert not layer.weight.requires_grad


@needs_cpu_kernel
def test_gradients_of_a_model():
    """They are nearer to those of the oracle than rounding is large, for each parameter."""
    tokens = torch.randint(48, (4, 17), generator=torch.Generator().manual_seed(1))

    def gradients_of(model: GPT) -> dict[str, torch.Tensor]:
        cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    torch.manual_seed(0)
    plain, model = GPT(SMALL), float8_model()
    oracle = copy.deepcopy(plain)
    use_float8(oracle)
    found, expected, without = (gradients_of(each) for each in (model, oracle, plain))
    for name, gradient in found.items():
        rounding = (expected[name] - without[name]).norm()
        assert (gradient - expected[name]).norm() < 0.1 * rounding, name


@needs_cpu_kernel
@pytest.mark.slow
def test_adapters_on_a_mesh_equal_one_process(tmp_path):
    """Only the first step: then a number that is rounded to its other neighbour changes others."""
    worker = ROOT / "tests/workers/gpt_lora.py"
    pool.run(worker, tmp_path / "alone", "fp8 alone", ranks=1).check()
    pool.run(worker, tmp_path / "found", "fp8", ranks=2).check()
    expected = torch.load(tmp_path / "alone")["", "fp8"]
    found = torch.load(tmp_path / "found")
    assert len(found) == 4
    for (mesh, _), actual in found.items():
        assert actual["frozen"]
        assert actual["loss"][0] == pytest.approx(expected["loss"][0], abs=5e-6)
        for name, gradient in expected["gradients"][0].items():
            difference = (actual["gradients"][0][name] - gradient).abs().max()
            assert difference < 2e-5 < 0.1 * gradient.abs().max(), f"{mesh} {name}"


class CountProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "scaled_mm" in function.name()
        return function(*args, **(kwargs or {}))


@needs_cpu_kernel
@pytest.mark.parametrize(("mode", "again"), [(None, 0), ("full", 12), ("selective", 0)])
def test_selective_checkpointing_keeps_the_products(mode, again):
    """12 layers: 12 products in forward, 12 in backward, and those that are computed again."""
    model = float8_model()
    if mode:
        apply_activation_checkpointing(model, mode)
    tokens = torch.randint(48, (2, 16))
    with CountProducts() as products:
        model(tokens).sum().backward()
    assert products.count == 24 + again


@needs_cpu_kernel
@pytest.mark.slow
def test_a_compiled_layer_computes_the_same():
    torch.manual_seed(1)
    layer, x, dy = float8_linear(32, 48), torch.randn(2, 5, 32), torch.randn(2, 5, 48)
    compiled = torch.compile(layer, fullgraph=True)
    results = []
    for function in (layer, compiled):
        layer.zero_grad()
        each = x.clone().requires_grad_()
        y = function(each)
        y.backward(dy)
        results.append([y.detach(), each.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# ---- what does not fit


@pytest.mark.slow
@needs_cpu_kernel
@pytest.mark.parametrize(
    ("flags", "where"),
    [("--dim 24 --heads 2 --head-dim 8", "blocks.0.attention.query has 24 inputs and 16"),
     ("--dim 32 --heads 2 --mlp-dim 40", "blocks.0.mlp.expand has 32 inputs and 40")],
)  # fmt: skip
def test_sizes_that_16_does_not_divide(flags, where):
    result = python(TRAIN, "--fp8", "--steps", 1, "--sample", 0, *flags.split())
    assert result.returncode == 2
    assert f"--fp8 needs multiples of 16, but {where} outputs on a rank" in result.output


@pytest.mark.slow
@needs_cpu_kernel
def test_sizes_are_those_of_a_rank():
    flags = ("--fp8", "--steps", 1, "--sample", 0, "--dim", 16, "--heads", 2, "--tp", 2)
    result = pool.run(TRAIN, *flags, ranks=2)
    assert result.returncode == 2
    said = "blocks.0.attention.query has 16 inputs and 8 outputs on a rank"
    assert result.output.count(said) == 1


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "message"),
    [
        ("cuda", (8, 0), torch.bfloat16, "needs a GPU of compute capability 8.9 .* has 8.0"),
        ("cuda", (8, 9), torch.float32, "needs a Hopper GPU: give --precision bf16"),
        ("cuda", (10, 0), torch.float32, "needs a Hopper GPU: give --precision bf16"),
        ("xpu", None, torch.bfloat16, "--fp8 does not run on xpu"),
        ("cuda", (8, 9), torch.bfloat16, None),
        ("cuda", (9, 0), torch.float32, None),
        ("cuda", (10, 0), torch.bfloat16, None),
    ],
)
def test_devices(monkeypatch, device, capability, dtype, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if message is None:
        check_device(device, dtype)
        return
    with pytest.raises(UserError, match=message):
        check_device(device, dtype)


def test_torch_without_the_product_for_cpus(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    with pytest.raises(UserError, match=r"--fp8 on a CPU needs torch 2\.13"):
        check_device("cpu", torch.float32)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cpu"))
    check_device("cpu", torch.float32)


# ---- whole runs

TINY = (
    *("--layers", 2, "--heads", 2, "--dim", 32, "--block-size", 16, "--batch-size", 8),
    *("--steps", 8, "--log-every", 1, "--eval-every", 4, "--eval-batches", 2),
    *("--checkpoint-every", 4, "--sample", 12),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "argparse.py"
    file.write_bytes(Path(sys.modules["argparse"].__file__).read_bytes()[:20_000])
    return file


def run(text, folder, *flags, ranks: int = 1, stop: int = 0) -> str:
    script = ROOT / "tests/workers/gpt_resume.py"
    args = (*TINY, "--output-dir", folder, "--data", text, *flags)
    return pool.run(script, stop, *args, ranks=ranks).check().output


def losses(folder) -> list[float]:
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


@needs_cpu_kernel
@pytest.mark.slow
def test_a_run_moves_to_another_mesh_but_not_out_of_fp8(text, tmp_path):
    straight, moved, plain = (tmp_path / name for name in ("straight", "moved", "plain"))
    run(text, straight, "--fp8")
    run(text, plain)
    said = run(text, moved, "--fp8", "--tp", 2, "--sequence-parallel", ranks=2, stop=3)
    assert re.search(r"stopped by SIGTERM after step [3-7] of 8: saved", said)
    refused = python(TRAIN, *TINY, "--output-dir", moved, "--data", text)
    assert refused.returncode == 2
    assert "was trained with fp8 = True, not False" in refused.output
    assert "continuing from" in run(text, moved, "--fp8", "--dp-shard", 2, ranks=2)
    of_the_mesh, of_rounding = (
        [abs(a - b) for a, b in zip(losses(other), losses(straight), strict=True)]
        for other in (moved, plain)
    )
    assert 1e-4 < max(of_rounding) < 0.1
    # A sum in another order may round a number to its other neighbour, and so change later steps.
    assert of_the_mesh[0] < 2e-5
    assert max(of_the_mesh) < max(of_rounding) / 4


@pytest.mark.gpu
@needs_fp8_gpu
@needs_cpu_kernel
def test_a_gpu_continues_what_the_cpu_began(text, tmp_path):
    flags = (*TINY, "--fp8", "--precision", "bf16", "--data", text)
    for device in ("cpu", "cuda"):
        where = ("--device", device, "--output-dir", tmp_path / device)
        said = torchrun(TRAIN, *flags, *where, ranks=1, timeout=280).check().output
        assert f"rank(s) on {device}" in said
        if device == "cpu":
            save = "checkpoints/step_00000004"
            shutil.copytree(tmp_path / "cpu" / save, tmp_path / "cuda" / save)
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu")[4:], abs=2e-2)
