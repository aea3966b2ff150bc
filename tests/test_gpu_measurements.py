"""The measurements of benchmarks/gpu.py: what they compute, and that they notice what is wrong."""

import json
import re

import helpers
import pytest
from helpers import EMULATED, HAS_EMULATED, ROOT, Job

BENCHMARKS = ROOT / "benchmarks"


SAVED = """
import sys
sys.path.insert(0, "BENCHMARKS")
import torch
from gpu_measurements import GPT, GPTConfig
config = GPTConfig(256, 64, layers=2, heads=4, dim=128)
block = GPT(config).blocks["0"].bfloat16()
parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
saved = {}
def pack(t):
    saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return t
x = torch.randn(8, 64, 128, dtype=torch.bfloat16, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
    y = block(x)
print("BYTES", sum(n for at, n in saved.items() if at not in parameters), x.numel())
"""


def test_a_block_keeps_the_bytes_of_the_formula(tmp_path):
    script = tmp_path / "saved.py"
    script.write_text(SAVED.replace("BENCHMARKS", str(BENCHMARKS)))
    output = helpers.python(script).check().output
    counted, numbers = map(int, output.split("BYTES ")[1].split())
    # Also means and deviations of the norms, and a log-sum-exp per head, in fp32.
    assert 32 * numbers <= counted <= 34 * numbers


BROKEN = """
import sys
sys.path.insert(0, "BENCHMARKS")
import gpu_measurements
CHANGE
gpu_measurements.main()
"""


def broken(tmp_path, change: str):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.replace("BENCHMARKS", str(BENCHMARKS)).replace("CHANGE", change))
    return script


@pytest.mark.slow
def test_numbers_in_bf16_are_no_fp32(tmp_path):
    fp32, bf16 = '("fp32", "highest", 2e-5, 1e-4)', '("bf16", "highest", 2e-5, 1e-4)'
    assert fp32 in (BENCHMARKS / "gpu_measurements.py").read_text()
    script = broken(tmp_path, f"gpu_measurements.MODES['fp32'] = {bf16}")
    result = helpers.python(script, "numbers", "--device", "cpu", "--size", "124M")
    assert result.returncode == 1
    assert "AssertionError: fp32, loss" in result.output


@pytest.mark.slow
def test_bf16_that_is_fp32_is_noticed(tmp_path):
    change = "modes = gpu_measurements.MODES; "
    change += "modes['bf16'] = ('fp32', *modes['bf16'][1:])"
    result = helpers.python(broken(tmp_path, change), "numbers", "--device", "cpu")
    assert result.returncode == 1
    assert "bf16 was not on" in result.output


@pytest.mark.slow
def test_another_model_on_the_mesh_is_noticed(tmp_path):
    import pool

    change = "first = gpu_measurements.initialize; "
    change += "gpu_measurements.initialize = lambda model, seed: first(model, seed + 1)"
    script = broken(tmp_path, change)
    result = pool.run(script, "equivalence", "--device", "cpu", ranks=2)
    assert result.returncode == 1
    assert re.search(r"AssertionError: dp_replicate=2: loss in step \d differs by", result.output)


VERDICTS = """
import sys
sys.path.insert(0, "BENCHMARKS")
import json, torch
import gpu_measurements as g
import gpu_speed
SXM = "NVIDIA H100 80GB HBM3"
memory = [gpu_speed.verdict_on_memory(ratio, compiled) for compiled in (False, True)
          for ratio in (0.8, 0.9, 1.1, 1.2)]
mfu = [gpu_speed.verdict_on_mfu(*case)["verdict on MFU"] for case in (
    ("124M", 0.44, SXM), ("124M", 0.46, SXM), ("124M", 0.44, "NVIDIA H100 PCIe"),
    ("124M", 0.46, "A100"))]
tf32 = []
for major, minor in ((7, 5), (8, 0), (9, 0)):
    torch.cuda.get_device_capability = lambda device: (major, minor)
    tf32.append(g.has_tf32(torch.device("cuda")))
waited = []
torch.accelerator.synchronize = lambda device: waited.append(str(device))
for device in ("cpu", "cuda:1"):
    gpu_speed.MeshRun.tokens_per_second.__globals__["wait"](torch.device(device))
one = {"loss": torch.tensor(2.0), "gradient of w": torch.tensor([1e-3, 1e-6]),
       "parameter w": torch.tensor([1e-2, 5.0])}
other = {"loss": torch.tensor(2.1), "gradient of w": torch.tensor([1e-3, 2e-6]),
         "parameter w": torch.tensor([1e-2 + 1e-4, 5.0])}
differences = g.relative_differences([one, other], [one, one])
other["gradient of w"][0] = float("nan")
not_a_number = g.relative_differences([other, one], [one, one])["gradient"][0]
print(json.dumps([memory, mfu, tf32, waited, differences, str(not_a_number)]))
"""


def test_verdicts_on_memory_and_speed_and_differences(tmp_path):
    script = tmp_path / "verdicts.py"
    script.write_text(VERDICTS.replace("BENCHMARKS", str(BENCHMARKS)))
    output = helpers.python(script).check().output
    memory, mfu, tf32, waited, differences, not_a_number = json.loads(output.splitlines()[-1])
    above, below, right = "more than 15% above", "more than 15% below", "as computed"
    assert memory == [below, right, right, above, "less, compiled", right, right, above]
    assert mfu == ["missed", "reached", "another device", "another device"]
    assert tf32 == [False, True, True]  # a T4 has none: its mode "high" is fp32
    assert waited == ["cuda:1"]  # else tokens/s would be those of queuing the work
    assert {kind: name for kind, (_, name) in differences.items()} == {
        "loss": "loss in step 1",
        "gradient": "gradient of w in step 1",
        "parameter": "parameter w in step 1",
    }
    found = [differences[kind][0] for kind in ("loss", "gradient", "parameter")]
    assert found == pytest.approx([0.05, 1e-3, 2e-5], rel=1e-2)
    assert not_a_number == "inf"


TOKENS = """
import sys
sys.path.insert(0, "BENCHMARKS")
import torch
from types import SimpleNamespace
import gpt_sides as gpt
config = gpt.config_of("124M")
model = torch.nn.Embedding(config.vocab_size, 1)
worker, seen = SimpleNamespace(device=torch.device("cpu")), []
def loss_of(x, y):
    seen.append(x.max().item())
    return model(x).mean()
gpt.loop(model, loss_of, config, worker, batch=2)()
print("SEEN", max(seen), config.vocab_size)
"""


def test_the_plain_loop_draws_its_tokens_from_the_whole_vocabulary_as_ours_does(tmp_path):
    script = tmp_path / "tokens.py"
    script.write_text(TOKENS.replace("BENCHMARKS", str(BENCHMARKS)))
    output = helpers.python(script).check().output
    largest, vocabulary = map(int, output.split("SEEN ")[1].split())
    assert largest > 0.9 * vocabulary


MEMORY = """
import gc, sys
sys.path.insert(0, "BENCHMARKS")
import torch
import gpu_measurements
import gpu_speed as g
layers, heads, batch, length = 4, 4, 4, 128
config = gpu_measurements.GPTConfig(512, length, layers, heads, 256)
gpu_measurements.SIZES["tiny"] = (config, batch)
gc.disable()
with gpu_measurements.distributed_worker("cuda") as worker:
    for flags in ({}, {"activation_checkpointing": "full"}):
        peak = g.train_fast(worker, "tiny", flags, batch)["peak memory_mb"] * 1e6
        before = torch.cuda.memory_allocated()
        g.free_memory(worker.device)
        left = torch.cuda.memory_allocated()
        # CUDA's attention keeps no scores; the emulated GPU's keeps them (6 bytes each).
        scores = 6 * batch * heads * length**2 * (1 if flags else layers)
        expected = g.expected_bytes(config, batch, bool(flags)) + scores
        print("SEEN", peak / expected, before, left, flush=True)
    for fits in (64, 8, 2):
        for share in (0.84, 0.86):
            free = int(g.expected_bytes(config, fits, False) / share)
            torch.cuda.mem_get_info = lambda device, free=free: (free, 0)
            print("FITS", g.batch_that_fits(config, worker.device, False), flush=True)
    torch.cuda.mem_get_info = lambda device: (10**6, 10**6)
    g.speed(worker, "tiny")
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> str:
    """What MEMORY has printed on one emulated GPU."""
    script = tmp_path_factory.mktemp("memory") / "memory.py"
    script.write_text(MEMORY.replace("BENCHMARKS", str(BENCHMARKS)))
    with Job([EMULATED, script], EMULATED_GPUS="1") as job:
        return job.wait(300).check().output


on_emulated_gpus = pytest.mark.skipif(not HAS_EMULATED, reason="make .venv-emulated/installed")


@pytest.mark.slow
@on_emulated_gpus
def test_peak_memory_is_that_of_the_formula_and_is_freed(measured):
    rows = [list(map(float, row.split())) for row in re.findall("SEEN (.*)", measured)]
    assert len(rows) == 2
    for ratio, before, left in rows:
        assert ratio == pytest.approx(1, abs=0.05)
        assert left < 1e6 < before  # the model of the variant before, in its reference cycles


@pytest.mark.slow
@on_emulated_gpus
def test_the_largest_batch_that_fits_is_chosen(measured):
    """With memory for 64, 8 and 2 sequences, and with a little less. One takes as much as two:
    18 bytes per parameter, at the end of backward."""
    assert re.findall("FITS (.*)", measured) == ["64", "32", "8", "4", "2", "0"]


@pytest.mark.slow
@on_emulated_gpus
def test_a_gpt_that_does_not_fit_is_left_out_with_the_reason(measured):
    rows = [json.loads(line) for line in re.findall("SAMPLES (.*)", measured)]
    texts = [row["left out"] for reported in rows for row in reported.values()]
    assert len(texts) == 4
    for text in texts:
        assert re.fullmatch(r"one sequence needs 0\.\d+ GB, more than 85% of the .* memory", text)


TRAIN = """
import torch
def train_step(number):
    if number == WAITS:
        torch.ones((), device="cuda").item()
def main():
    for number in range(1, 11):
        train_step(number)
"""


@pytest.mark.parametrize(
    ("waits", "mode_works", "says"),
    [
        (
            1,
            True,
            "from step 3 to step 8 torch reported no wait for the GPU",
        ),  # before the watched steps
        (3, True, "RuntimeError: it waits"),
        (7, True, "RuntimeError: it waits"),
        (8, True, "from step 3 to step 8 torch reported no wait for the GPU"),
        (3, False, "set_sync_debug_mode has no effect here: .item() raised no error"),
    ],
)
def test_a_hot_step_that_waits_for_the_gpu_fails(tmp_path, waits, mode_works, says):
    """With a stand-in for CUDA: there is no GPU here."""
    (tmp_path / "train.py").write_text(TRAIN.replace("WAITS", str(waits)))
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"import sys, torch\nsys.path.insert(0, {str(BENCHMARKS)!r})\nimport gpu_syncs\n"
        "mode = ['default']\n"
        "class Number:\n"
        "    def item(self):\n"
        f"        if mode[0] == 'error' and {mode_works}:\n"
        "            raise RuntimeError('it waits')\n"
        "torch.cuda.is_initialized = lambda: True\n"
        "torch.cuda.set_sync_debug_mode = lambda new: mode.__setitem__(0, new)\n"
        "torch.ones = lambda *_, device: Number()\n"
        "gpu_syncs.main()\n"
    )
    result = helpers.python(driver, tmp_path)
    assert says in result.output
    assert result.returncode == (0 if "no wait" in says else 1)


def test_a_training_too_short_for_hot_steps_fails():
    script = BENCHMARKS / "gpu_syncs.py"
    flags = ("--epochs", 1, "--batch-size", 512, "--device", "cpu")
    result = helpers.python(script, "ddp_basics", *flags)
    assert result.returncode == 1
    assert "train_step was called 2 times, not 8" in result.output
