"""The scripts on emulated GPUs (emulated_gpu/), with NCCL's rules, next to the same on the CPU.

Everything here runs in .venv-emulated, whose PyTorch is a CPU-only one with that device.
"""

import json
import re
import shutil
from pathlib import Path

import pool
import pytest
from helpers import EMULATED, HAS_EMULATED, ROOT, Job, learned
from on_demand import OnDemand

HOW = "`make .venv-emulated/installed` has not run or found no CPU-only torch and C++ compiler"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_EMULATED, reason=HOW)]

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
    "--layers 2 --heads 2 --dim 16 --block-size 16 --batch-size 8 "
    "--steps 6 --eval-every 3 --eval-batches 1 --sample 8 --checkpoint-every 3"
)
SHORT_GPT = f"tests/workers/gpt_without_peak.py {GPT}"
TRAIN |= {
    "gpt": SHORT_GPT,
    "gpt_fsdp": f"{SHORT_GPT} --dp-shard 2",
    "gpt_tp": f"{SHORT_GPT} --tp 2 --sequence-parallel --loss-parallel",
    "gpt_pp": f"{SHORT_GPT} --pp 2",
}
FOUR = {
    "hsdp": f"{TRAIN['fsdp']} --dp-replicate 2",
    "gpt_3d": f"{SHORT_GPT} --pp 2 --tp 2",
    "gpt_2d": f"{SHORT_GPT} --dp-shard 2 --tp 2 --sequence-parallel",
}
COMMANDS = TRAIN | FOUR
WORKER = "tests/workers/emulated_faults.py"
MARK = "@pytest.mark.device"
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
    directory = "transformer_basics" if GPT in command else command.split("/")[0]
    return ("--log-every", 1, *data.get(directory, ()))


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
    number = r"\d+\.\d+"
    found, expected = map("\n".join, lines)
    assert re.sub(number, "", found) == re.sub(number, "", expected) != ""
    numbers = [[float(n) for n in re.findall(number, text)] for text in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-4)  # the last digit printed


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


# Autocast has other lists of operations on CUDA, and CUDA scales fp16 losses: near fp32, not equal.
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_half_precision_learns_nearly_what_fp32_does(name, precision, runs, tmp_path):
    flags = ("--log-every", 1, "--precision", precision, "--output-dir", tmp_path)
    run(COMMANDS[name], *flags, gpus=2).check()
    losses = [[m["loss"] for m in learned(f) if "loss" in m] for f in (tmp_path, runs[name, 0])]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_fp16_with_offload_is_refused():
    """GradScaler copies 1 / scale to the CPU and does not wait for it."""
    result = run(TRAIN["fsdp"], "--precision", "fp16", "--offload", gpus=2)
    assert result.returncode == 2
    assert "--offload does not work with --precision fp16" in result.output


def test_equivalence_tests_pass_with_their_ranks_on_gpus():
    """pytest --device cuda: the quick ones, of each strategy."""
    files = [path for path in (ROOT / "tests").glob("test_*.py") if MARK in path.read_text()]
    command = [EMULATED, "-m", "pytest", "-q", "--device", "cuda", "-m", "quick or not slow"]
    with Job([*command, *files], EMULATED_GPUS="4") as job:
        said = job.wait().check().output
    assert int(re.search(r"(\d+) passed", said)[1]) > 40, said
    assert not re.search(r"\d+ (skipped|failed)", said), said


# ---- where the GPUs are


@pytest.mark.parametrize("directory", ["ddp", "fsdp"])
def test_each_rank_sees_one_gpu_of_its_own(directory):
    """As Slurm's --gpus-per-task=1 does: on two nodes with two ranks each, all on their cuda:0."""
    visible = {"CUDA_VISIBLE_DEVICES": ["0", "1", "0", "1"]}
    said = run(TRAIN[directory], gpus=2, ranks=4, nodes=2, **visible).check().output
    assert "4 rank(s) on cuda" in said


def test_minimal_says_what_it_takes_where_a_rank_sees_one_gpu():
    said = run("ddp_basics/minimal.py --epochs 1", gpus=2, CUDA_VISIBLE_DEVICES=["0", "1"]).check()
    assert re.search(r"^2 rank\(s\) on (cuda, nccl|cpu, gloo)$", said.output, re.M)


@pytest.mark.parametrize("script", ["spawn.py", "zero_optimizer.py"])
def test_idea_runs_where_each_rank_sees_one_gpu(script):
    run(f"ddp_basics/{script}", gpus=2, CUDA_VISIBLE_DEVICES=["0", "1"]).check()


@pytest.mark.parametrize("directory", ["ddp_basics", "fsdp_basics"])
def test_backend_nccl_alone_trains(directory):
    name = directory.removesuffix("_basics")
    said = run(TRAIN[name], "--backend", "nccl", gpus=2).check().output
    assert "2 rank(s) on cuda" in said


IDEAS = {
    "tensor_parallel": "",
    "sequence_parallel": "",
    "pipeline_parallel": "",
    "ring_attention": "--length 64",
}


@pytest.mark.parametrize("name", IDEAS)
def test_idea_of_parallel_basics_runs_on_gpus(name):
    """Each compares itself with one process, and prints by how much it differs."""
    said = run(f"parallel_basics/{name}.py {IDEAS[name]}", gpus=2).check().output
    assert "2 rank(s) on cuda" in said


def test_objects_with_tensors_go_from_gpu_to_gpu():
    said = run("collectives/object_collectives.py", gpus=2).check().output
    assert "2 rank(s) on cuda" in said


def test_fsdp1_with_offload_compares_itself_on_gpus():
    run("fsdp_basics/fsdp1_to_fsdp2.py --steps 1", gpus=2).check()


# ---- what a step costs


@pytest.mark.parametrize("name", ["ddp", "fsdp", "gpt"])
def test_the_host_does_not_wait_for_the_gpu_in_a_step(name, data):
    """Only to print, to evaluate and to save: as often in a run of twice as many steps."""
    if name == "gpt":
        lengths, evaluations = ("--steps 4 --eval-every 100", "--steps 8 --eval-every 100"), (0, 0)
    else:  # the evaluation waits once for each of its batches, of 360 images
        lengths, evaluations = ("--batch-size 128", "--batch-size 64"), (3, 6)
    waits = []
    for length in lengths:
        script, *flags = f"{COMMANDS[name]} {length}".split()
        told = (ROOT / script, *flags, *flags_of(COMMANDS[name], data), "--log-every", 100)
        said = run("tests/workers/emulated_waits.py", *told, gpus=2).check().output
        waits.append(max(int(count) for count in re.findall(r"waits: (\d+)", said)))
    assert waits[0] - evaluations[0] == waits[1] - evaluations[1] > 0


def test_gpu_with_too_little_memory_ends_the_run():
    result = run(TRAIN["ddp"], gpus=2, EMULATED_GPU_BYTES="1000000")
    assert result.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory" in result.output


# ---- programs that break a rule

FAULTS = {
    "cpu_and_gpu": "RuntimeError: aten::add.*same device.*cuda:0 and cpu",
    "two_gpus": "RuntimeError: aten::.*same device.*cuda:0 and cuda:1",
    "generator_of_the_cpu": "RuntimeError: .*generator",
    "numpy_of_a_gpu": "TypeError: can't convert cuda:0",
    "device_that_is_not_there": "RuntimeError: CUDA error: invalid device ordinal 7",
    "read_too_early": r"AssertionError: \[nan, nan, nan\]",
    "change_what_is_sent": r"AssertionError: \[2.0, 2.0, 2.0\]",
    "no_wait_before": "CUDA race: aten::mul_ on stream .* writes what aten::.* on stream 0 of",
    "no_wait_after": "CUDA race: aten::sum on stream 0 of cuda:0 reads what aten::mul_ on stream",
    "event_before_the_kernel": "CUDA race: aten::sum .* reads what aten::mul_",
    "freed_too_early": "CUDA race: memory was freed while aten::sum on stream",
    "out_of_memory": "OutOfMemoryError: CUDA out of memory",
}
NO_CORRECTION = {"two_gpus", "numpy_of_a_gpu", "device_that_is_not_there"}
NO_CORRECTION |= {"event_before_the_kernel", "out_of_memory"}
RIGHT = ["two_readers_fixed", "two_halves_fixed", "memory_fixed"]
FAULTS_OF_TWO = {
    "cpu_tensor_for_nccl": "Tensors must be CUDA and dense|No backend type associated.*cpu",
    "not_contiguous": "Tensors must be contiguous",
    "bits_of_nccl": "Cannot use ReduceOp",
    "no_wait_for_work": "CUDA race: aten::.* reads what nccl:all_reduce on stream",
}


def outcomes(output: str) -> list[dict]:
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda each: each["rank"])


@pytest.fixture(scope="module")
def alone():
    fixed = [f"{name}_fixed" for name in FAULTS if name not in NO_CORRECTION]
    return outcomes(run(WORKER, *FAULTS, *fixed, *RIGHT, gpus=2, ranks=1).check().output)[0]


@pytest.fixture(scope="module")
def pair():
    names = (*FAULTS_OF_TWO, "no_wait_for_work_fixed", "operations_fixed")
    return outcomes(run(WORKER, *names, gpus=2).check().output)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_an_error_and_its_correction_is_none(name, alone):
    assert re.search(FAULTS[name], alone[name])
    assert name in NO_CORRECTION or alone[f"{name}_fixed"] == "fine"


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_allowed_is_no_error(name, alone):
    assert alone[name] == "fine"


@pytest.mark.parametrize("name", FAULTS_OF_TWO)
def test_fault_of_two_ranks_is_an_error_on_both(name, pair):
    for rank in pair:
        assert re.search(FAULTS_OF_TWO[name], rank[name])
        assert name != "no_wait_for_work" or rank[f"{name}_fixed"] == "fine"


def test_operations_of_nccl_are_right(pair):
    assert [rank["operations_fixed"] for rank in pair] == ["fine", "fine"]


def test_gpu_of_another_rank_is_refused():
    """Rank 0 may use it and waits for rank 1: only that one says what is wrong."""
    said = run(WORKER, "cpu_tensor_for_nccl", "gpu_of_another_rank", gpus=2, timeout=60)
    assert "a tensor on cuda:0, but the communicator of rank 1 is on cuda:1" in said.output


def test_two_ranks_on_one_gpu_are_refused():
    said = run(WORKER, "two_ranks_on_one_gpu", gpus=1)
    assert said.returncode == 1
    assert "Duplicate GPU detected : rank" in said.output
