"""The scripts on emulated GPUs (emulated_gpu/), with NCCL's rules, next to the same on the CPU.

Everything here runs in .venv-emulated, whose PyTorch is a CPU-only one with that device.
"""

import json
import re
import shutil
from pathlib import Path

import pool
import pytest
from helpers import EMULATED, ROOT, learned
from on_demand import OnDemand

INSTALLED = (EMULATED.parent.parent / "installed").exists()
HOW = "`make .venv-emulated/installed` has not run or found no CPU-only torch and C++ compiler"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not INSTALLED, reason=HOW)]

TRAIN = {
    "ddp": "ddp_basics/train.py --epochs 1 --batch-size 256",
    "ddp_accumulate": "ddp_basics/train.py --epochs 1 --batch-size 256 --accumulate 2",
    "fsdp": "fsdp_basics/train.py --epochs 1 --batch-size 256 --dim 32 --depth 2",
    "fsdp_offload": "fsdp_basics/train.py --epochs 1 --batch-size 256 --dim 32 --depth 2 --offload",
    "fsdp_prefetch": "fsdp_basics/train.py --epochs 1 --batch-size 256 --dim 32 --depth 2 "
    "--prefetch 1 --keep-gathered --activation-checkpointing --async-save",
    "t5": "t5_finetuning/train.py --dim 32 --layers 1 --vocab-size 301 --max-source 16 "
    "--max-target 8 --epochs 1 --batch-size 12 --dropout 0 --show 1 --lr 1e-3",
}
GPT = (
    "transformer_basics/train.py --layers 2 --heads 2 --dim 16 --block-size 16 --batch-size 8 "
    "--steps 6 --eval-every 3 --eval-batches 1 --sample 8 --checkpoint-every 3"
)
TRAIN |= {
    "gpt": GPT,
    "gpt_fsdp": f"{GPT} --dp-shard 2",
    "gpt_tp": f"{GPT} --tp 2 --sequence-parallel --loss-parallel",
    "gpt_pp": f"{GPT} --pp 2",
}
FOUR = {
    "hsdp": f"{TRAIN['fsdp']} --dp-replicate 2",
    "gpt_3d": f"{GPT} --pp 2 --dp-shard 1 --tp 2",
    "gpt_2d": f"{GPT} --dp-shard 2 --tp 2 --sequence-parallel",
}
COMMANDS = TRAIN | FOUR
MINIMAL = {
    "ddp_basics": "--epochs 1",
    "fsdp_basics": "",
    "parallel_basics": "--steps 20",
    "t5_finetuning": "",
    "transformer_basics": "",
}


def run(command: str, *more, gpus: int = 0, ranks: int = 2, **told):
    """Run it with `gpus` emulated GPUs on each node; with 0 it takes the CPU."""
    script, *flags = command.split()
    told |= {"ranks": ranks, "interpreter": EMULATED, "EMULATED_GPUS": str(gpus)}
    return pool.run(ROOT / script, *flags, *more, **told)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small data for the templates that would read more than they need here."""
    folder = tmp_path_factory.mktemp("data")
    pairs = [{"text": f"def add_{i}(a, b)", "summary": f"Add {i}."} for i in range(36)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "text.py").write_text((ROOT / "tests/helpers.py").read_text()[:12_000])
    pairs = ("--train-file", folder / "pairs.jsonl", "--eval-file", folder / "pairs.jsonl")
    return {"t5_finetuning": pairs, "transformer_basics": ("--data", folder / "text.py")}


def flags_of(command: str, data: dict) -> tuple:
    return ("--log-every", 1, *data.get(command.split("/")[0], ()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """(name, number of GPUs) -> the output directory of that template's run."""

    def train(key: tuple[str, int]):
        name, gpus = key
        ranks = 4 if name in FOUR else 2
        folder = tmp_path_factory.mktemp(name)
        flags = (*flags_of(COMMANDS[name], data), "--output-dir", folder)
        said = run(COMMANDS[name], *flags, gpus=gpus, ranks=ranks).check().output
        where = "cuda, cpu:gloo,cuda:nccl" if gpus else "cpu, gloo"
        assert f"{ranks} rank(s) on {where}, torch" in said
        return folder

    return OnDemand(train)


def assert_same(found: Path, expected: Path, tolerance: float = 2e-4) -> None:
    """The metrics of two runs. The kernels are the same; a sum over ranks or over a list of
    tensors is computed in another order."""
    found, expected = learned(found), learned(expected)
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    assert any("loss" in line for line in expected)
    for line, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert line[name] == pytest.approx(value, rel=tolerance, abs=tolerance), (name, line)


# ---- the templates and the shortest scripts, next to the CPU


@pytest.mark.parametrize("directory", MINIMAL)
def test_minimal_prints_what_it_prints_on_the_cpu(directory):
    command = f"{directory}/minimal.py {MINIMAL[directory]}"
    on_gpus, on_cpu = (run(command, gpus=gpus).check().output for gpus in (2, 0))
    assert "2 rank(s) on cuda, nccl\n" in on_gpus
    assert "2 rank(s) on cpu, gloo\n" in on_cpu
    lines = [re.findall("^(?:epoch|step|rank).*", said, re.M) for said in (on_gpus, on_cpu)]
    assert lines[0] == lines[1] != []


@pytest.mark.parametrize("name", COMMANDS)
def test_template_learns_what_it_learns_on_the_cpu(name, runs):
    assert_same(runs[name, 4 if name in FOUR else 2], runs[name, 0])


@pytest.mark.parametrize("name", ["ddp", "fsdp", "gpt_fsdp"])
def test_checkpoint_goes_from_the_gpus_to_the_cpu_and_back(name, runs, data, tmp_path):
    """Half on GPUs and half on CPUs is the same in both orders."""
    longer = ("--steps", 12) if name == "gpt_fsdp" else ("--epochs", 2)
    for first, second in ((2, 0), (0, 2)):
        folder = shutil.copytree(runs[name, first], tmp_path / str(first))
        flags = (*flags_of(COMMANDS[name], data), *longer, "--output-dir", folder)
        said = run(COMMANDS[name], *flags, gpus=second).check().output
        assert f"continuing from {folder}" in said
    assert_same(tmp_path / "2", tmp_path / "0")
