"""The scripts on emulated GPUs (emulated_gpu/), with NCCL's rules, next to the same on the CPU.

Everything here runs in .venv-emulated, whose PyTorch is a CPU-only one with that device.
"""

import json
import re
import shutil
from itertools import pairwise
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
    "gpt_cp": f"{SHORT_GPT} --cp 2",
    "gpt_pp": f"{SHORT_GPT} --pp 2",
}
FOUR = {
    "hsdp": f"{TRAIN['fsdp']} --dp-replicate 2",
    "gpt_3d": f"{SHORT_GPT} --pp 2 --tp 2",
    "gpt_2d": f"{SHORT_GPT} --dp-shard 2 --tp 2 --sequence-parallel",
}
COMMANDS = TRAIN | FOUR
# The CPU trains each model once, whatever spreads it over the GPUs.
ON_CPU = {name: name.split("_")[0] for name in COMMANDS} | {"hsdp": "fsdp"}
# Each rank sees one GPU of its own, as with Slurm's --gpus-per-task=1: all are on their cuda:0.
TWO_NODES = {"nodes": 2, "CUDA_VISIBLE_DEVICES": ["0", "1", "0", "1"]}
WORKER = "tests/workers/emulated_faults.py"
MARK = "@pytest.mark.device"
MINIMAL = {
    "ddp_basics": "--epochs 1",
    "fsdp_basics": "",
    "parallel_basics": "--steps 20",
    "t5_finetuning": "",
    "transformer_basics": "",
}
FEWER_STEPS = {  # (what the script has, what is enough here); the others have a flag, or few steps
    "fsdp_basics": ("epoch in range(3)", "epoch in range(1)"),
    "transformer_basics": ("STEPS = 32, 64, 50", "STEPS = 32, 64, 20"),
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
        where = TWO_NODES if name == "hsdp" and gpus else {}
        said = run(COMMANDS[name], *flags, gpus=gpus, ranks=ranks, **where).check().output
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
def test_minimal_prints_what_it_prints_on_the_cpu(directory, tmp_path):
    text = (ROOT / directory / "minimal.py").read_text()
    old, new = FEWER_STEPS.get(directory, (text, text))
    assert text.count(old) == 1
    (tmp_path / "minimal.py").write_text(text.replace(old, new))
    command = f"{tmp_path}/minimal.py {MINIMAL[directory]}"
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
    assert_same(runs[name, 4 if name in FOUR else 2], runs[ON_CPU[name], 0])


@pytest.mark.parametrize("name", ["ddp", "fsdp", "gpt_fsdp"])
def test_checkpoint_goes_from_the_gpus_to_the_cpu_and_back(name, runs, data, tmp_path):
    """Half on GPUs and half on CPUs is the same in both orders."""
    longer = ("--steps", 12) if name == "gpt_fsdp" else ("--epochs", 2)
    for first, second in ((2, 0), (0, 2)):
        saved = runs[name if first else ON_CPU[name], first]
        folder = shutil.copytree(saved, tmp_path / str(first))
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


def test_a_model_with_buffers_is_offloaded_and_goes_on(tmp_path):
    """Its shards are on the CPU, and BatchNorm's statistics on the GPU."""
    shutil.copytree(ROOT / "fsdp_basics", tmp_path / "own")
    line, model = "        self.norm = nn.LayerNorm(dim)\n", tmp_path / "own/model.py"
    normalized = "        self.norm = nn.BatchNorm1d((image_size // patch_size) ** 2)\n"
    assert model.read_text().count(line) == 1
    model.write_text(model.read_text().replace(line, normalized))
    train = TRAIN["fsdp"].replace("fsdp_basics", str(tmp_path / "own"))
    for name, flags in (("plain", ()), ("offloaded", ("--offload",))):
        for epochs in (1, 2):  # the second run continues the first one's
            more = ("--log-every", 1, "--epochs", epochs, "--output-dir", tmp_path / name)
            run(train, *flags, *more, gpus=2).check()
    assert_same(tmp_path / "offloaded", tmp_path / "plain")


def test_fp16_with_offload_is_refused():
    """GradScaler copies 1 / scale to the CPU and does not wait for it."""
    result = run(TRAIN["fsdp"], "--precision", "fp16", "--offload", gpus=2)
    assert result.returncode == 2
    assert "--offload does not work with --precision fp16" in result.output


def pytest_on_gpus(*arguments, gpus: int) -> str:
    command = ["tests/workers/run_pytest.py", "-q", "--device", "cuda", *arguments]
    with Job(command, fork=0, interpreter=EMULATED, EMULATED_GPUS=str(gpus)) as job:
        return job.wait().check().output


@pytest.mark.release
def test_equivalence_tests_pass_with_their_ranks_on_gpus():
    """pytest --device cuda: the quick ones, of each strategy."""
    files = [path for path in (ROOT / "tests").glob("test_*.py") if MARK in path.read_text()]
    said = pytest_on_gpus("-m", "quick or not slow", *files, gpus=4)
    assert int(re.search(r"(\d+) passed", said)[1]) > 40, said
    assert not re.search(r"\d+ (skipped|failed)", said), said


def test_ranks_that_share_a_gpu_and_would_send_are_left_out_with_a_reason():
    names = ("parallel_basics_context", "parallel_basics_pipeline", "parallel_basics_tied")
    files = [ROOT / f"tests/test_{name}.py" for name in names]
    said = pytest_on_gpus(*files, gpus=1)
    assert re.search(r"^\d+ skipped, \d+ deselected", said, re.M), said
    for ranks in (2, 3, 4):
        assert f"{ranks} ranks share a GPU through Gloo, which lacks what they use" in said


# ---- where the GPUs are


def test_ddp_trains_where_each_rank_sees_one_gpu():
    """So does HSDP, above."""
    said = run(TRAIN["ddp"], gpus=2, ranks=4, **TWO_NODES).check().output
    assert "4 rank(s) on cuda" in said


def test_minimal_says_what_it_takes_where_a_rank_sees_one_gpu():
    said = run("ddp_basics/minimal.py --epochs 1", gpus=2, CUDA_VISIBLE_DEVICES=["0", "1"]).check()
    assert re.search(r"^2 rank\(s\) on cpu, gloo$", said.output, re.M)


@pytest.mark.parametrize("directory", MINIMAL)
def test_minimal_counts_the_gpus_of_a_node(directory):
    """Two nodes of one GPU each: rank 1 is on its node's GPU 0."""
    command = f"{directory}/minimal.py {MINIMAL[directory]}"
    told = {"nodes": 2, "CUDA_VISIBLE_DEVICES": ["0", "1"]}
    assert "2 rank(s) on cuda, nccl\n" in run(command, gpus=2, **told).check().output


@pytest.mark.parametrize(("gpus", "device"), [(2, "cuda:1"), (1, "cpu")])
def test_the_hosts_are_listed_before_nccl_connects(gpus, device):
    """With fewer GPUs than ranks the CPU is used, and Gloo."""
    said = run("clusters/minimal.py", gpus=gpus).check().output
    assert re.search(rf"^rank 1 on \S+, {device}$", said, re.M)
    assert "gradient equals one process's" in said


@pytest.mark.parametrize("script", ["spawn.py", "zero_optimizer.py"])
def test_idea_runs_where_each_rank_sees_one_gpu(script):
    run(f"ddp_basics/{script}", gpus=2, CUDA_VISIBLE_DEVICES=["0", "1"]).check()


@pytest.mark.parametrize("directory", ["ddp_basics", "fsdp_basics"])
def test_backend_nccl_alone_trains(directory, waits):
    assert "2 rank(s) on cuda, cpu:gloo,cuda:nccl" in waits[directory.removesuffix("_basics")]


@pytest.mark.parametrize("directory", ["ddp_basics", "fsdp_basics"])
def test_each_rank_draws_on_from_its_checkpoint(directory, tmp_path):
    """Dropout on a GPU draws from the GPU's generator."""
    said = run("tests/workers/gpu_generator.py", directory, tmp_path, gpus=2).check().output
    ranks = [json.loads(line) for line in said.splitlines() if line.startswith("[")]
    assert [before == after for before, after in ranks] == [True, True]
    assert ranks[0] != ranks[1]


IDEAS = [  # each compares itself with one process, or says what came out wrong
    "collectives/backends.py",
    "collectives/object_collectives.py",
    "ddp_basics/uneven_inputs_join.py",
    "parallel_basics/pipeline_parallel.py",
    "parallel_basics/ring_attention.py --length 64",
    "parallel_basics/sequence_parallel.py",
    "parallel_basics/tensor_parallel.py",
]


@pytest.mark.parametrize("command", IDEAS)
def test_idea_runs_on_gpus(command):
    said = run(command, gpus=2).check().output
    assert "2 rank(s) on cuda" in said
    if "join" in command:  # gradients, and the momentum that was sent to all
        diffs = re.findall(r"^(?: +\d.*|momentum after.*) (\S+)$", said, re.M)
        assert len(diffs) == 6
        assert max(map(float, diffs)) < 1e-6
    if "backends" in command:
        table = [re.split("  +", line) for line in said.splitlines()]
        tried = {row[0]: row[1:] for row in table if len(row) == 4}
        assert tried["all_reduce"] == tried["all_to_all"] == ["yes"] * 3
        assert tried["isend, irecv"][0] == tried["isend, irecv"][2] == "yes"
        assert "Gloo sends CPU tensors only" in tried["isend, irecv"][1]
        assert tried["all_reduce, PREMUL_SUM"][2] == "yes"


@pytest.mark.release
def test_fsdp1_with_offload_compares_itself_on_gpus():
    run("fsdp_basics/fsdp1_to_fsdp2.py --steps 1", gpus=2).check()


# ---- what a step costs


@pytest.fixture(scope="module")
def waits(data, tmp_path_factory):
    """Name of a template -> what it and emulated_waits.py have printed."""

    def train(name: str) -> str:
        script, *flags = f"{COMMANDS[name]} {STEPS_TO_WATCH[name]}".split()
        told = (ROOT / script, *flags, *flags_of(COMMANDS[name], data), "--log-every", 100)
        told += ("--output-dir", tmp_path_factory.mktemp(name))
        return run("tests/workers/emulated_waits.py", *told, gpus=2).check().output

    return OnDemand(train)


STEPS_TO_WATCH = {  # of which none is logged, evaluated or saved before the last
    "ddp": "--batch-size 128 --backend nccl",
    "fsdp": "--batch-size 128 --backend nccl",
    "fsdp_offload": "",
    "gpt": "--steps 8 --eval-every 100 --checkpoint-every 100",
    "t5": "--eval-samples 2 --batch-size 6",
}


@pytest.mark.parametrize("name", STEPS_TO_WATCH)
def test_the_host_does_not_wait_for_the_gpu_in_a_step(name, waits):
    """With --offload it waits for the gradient of each of 29 parameters, and for their factor."""
    expected = 30 if name == "fsdp_offload" else 0
    ranks = re.findall(r"waits: (.+)", waits[name])
    assert len(ranks) == 2
    for rank in ranks:
        _, *steps, end = map(int, rank.split())
        assert len(steps) >= 3
        assert [b - a for a, b in pairwise(steps)] == [expected] * (len(steps) - 1), rank
        assert end > steps[-1]  # to print


@pytest.mark.parametrize("directory", ["ddp_basics", "fsdp_basics"])
def test_the_host_waits_for_no_batch_of_an_evaluation(directory):
    said = run("tests/workers/emulated_evaluation.py", directory, gpus=1, ranks=1).check().output
    found = re.findall(r"batches: (\d+) waits: (\d+)", said)
    assert found == [("2", "1"), ("6", "1")]  # for the sums of all batches


def test_nccl_connects_before_its_first_operation(waits):
    assert sorted(re.findall(r"connected to (\S+)", waits["ddp"])) == ["cuda:0", "cuda:1"]


WITH_SMALL_PEAK = """
import runpy, sys
sys.path.insert(0, FOLDER)
import report
first = report.matmul_peak  # on a GPU with matrices of 8192 x 8192
report.matmul_peak = lambda device, dtype: first(device, dtype, seconds=0, size=1024)
runpy.run_path(FOLDER + "/train.py", run_name="__main__")
"""


def test_peak_memory_is_that_of_the_training(data, tmp_path):
    """Not that of the matrices with which the GPT measures the peak of MFU: here 12 MB."""
    script = tmp_path / "train.py"
    script.write_text(WITH_SMALL_PEAK.replace("FOLDER", repr(str(ROOT / "transformer_basics"))))
    flags = (*GPT.split(), *data["transformer_basics"], "--log-every", 1, "--output-dir", tmp_path)
    pool.run(script, *flags, ranks=1, interpreter=EMULATED, EMULATED_GPUS="1").check()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    peaks = [line["memory_mb"] for line in lines if "memory_mb" in line]
    assert 0 < max(peaks) < 4


def test_gpu_with_too_little_memory_ends_the_run():
    result = run(TRAIN["ddp"], gpus=2, EMULATED_GPU_BYTES="1000000")
    assert result.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory" in result.output


# ---- programs that break a rule

FAULTS = {
    "cpu_and_gpu": "RuntimeError: aten::add.*same device.*cuda:0 and cpu",
    "stack_with_the_cpu": "RuntimeError: aten::.*same device.*cuda:0 and cpu",
    "product_with_the_cpu": "RuntimeError: aten::addmm.*same device.*cuda:0 and cpu",
    "index_on_the_gpu": "RuntimeError: aten::index: indices should be either on cpu or",
    "values_on_the_cpu": "RuntimeError: aten::.*index_put.*same device.*cuda:0 and cpu",
    "two_gpus": "RuntimeError: aten::.*same device.*cuda:0 and cuda:1",
    "generator_of_the_cpu": "RuntimeError: .*generator",
    "numpy_of_a_gpu": "TypeError: can't convert cuda:0",
    "pinned_gpu": "RuntimeError: Only dense CPU tensors can be pinned",
    "pinned_strides_of_a_gpu": "RuntimeError: Only dense CPU tensors can be pinned",
    "storage_of_the_cpu": "RuntimeError: set_: a CUDA tensor and a storage on cpu",
    "device_that_is_not_there": "RuntimeError: CUDA error: invalid device ordinal 7",
    "wait_in_debug_mode": "RuntimeError: called a synchronizing CUDA operation",
    "read_too_early": r"AssertionError: \[nan, nan, nan\]",
    "change_what_is_sent": r"AssertionError: \[2.0, 2.0, 2.0\]",
    "no_wait_before": "CUDA race: aten::mul_ on stream .* writes what aten::.* on stream 0 of",
    "no_wait_after": "CUDA race: aten::sum on stream 0 of cuda:0 reads what aten::mul_ on stream",
    "event_before_the_kernel": "CUDA race: aten::sum .* reads what aten::mul_",
    "copy_to_a_peer": "CUDA race: aten::sum on stream 0 of cuda:1 reads what aten::copy_ on",
    "freed_too_early": "CUDA race: memory was freed while aten::sum on stream",
    "out_of_memory": "OutOfMemoryError: CUDA out of memory",
}
FAULTS_OF_TWO = {
    "cpu_tensor_for_nccl": "No backend type associated with device type cpu",
    "cpu_tensor_for_its_backend": "Tensors must be CUDA and dense",
    "not_contiguous": "Tensors must be contiguous",
    "type_of_nccl": "Input tensor data type is not supported for NCCL",
    "bits_of_nccl": "Cannot use ReduceOp",
    "gpu_of_another_rank": "a tensor on cuda:., but the communicator of rank . is on cuda:",
    "gloo_sends_a_gpu": "RuntimeError: (writev|readv): Bad address",
    "no_wait_for_work": "CUDA race: aten::.* reads what nccl:all_reduce on stream",
    "freed_on_another_stream": "CUDA race: memory was freed while nccl:all_reduce on stream",
    "freed_after_the_call": "CUDA race: memory was freed while nccl:all_reduce on stream",
    "future_of_another": "CUDA race: aten::sum on stream 0 of .* reads what nccl:all_reduce on",
    "future_of_a_group": "CUDA race: aten::sum on stream 0 of .* reads what nccl:recv on",
    "read_before_written": "CUDA race: aten::mul on .* reads what aten::fill_ on stream 0",
    "read_before_computed": "CUDA race: aten::add on stream 0 .* reads what aten::mul on",
    "read_before_received": "CUDA race: aten::add on stream 0 .* reads what nccl:all_reduce on",
}
SHOWN = {  # with EMULATED_GPU_RACES=show
    "read_before_written": r"AssertionError: \[0.0, 0.0, 0.0\]",
    "read_before_computed": r"AssertionError: \[nan, nan, nan\]",
    "read_before_received": r"AssertionError: \[1.0, 1.0, 1.0\]",
}
PROGRAMS = (ROOT / WORKER).read_text().split("# ---- two ranks")
FIXED, FIXED_OF_TWO = (re.findall(r"^def (\w+_fixed)", text, re.M) for text in PROGRAMS)


def outcomes(*names: str, **told) -> dict[str, list]:
    """Name -> what happened on each rank; "RULES" -> the rules that each rank has broken."""
    said = run(WORKER, *names, gpus=2, **told).check().output
    ranks = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.fixture(scope="module")
def happened():
    pair = outcomes(*FAULTS_OF_TWO, *FIXED_OF_TWO)
    alone = outcomes(*FAULTS, *FIXED, ranks=1)
    return pair | alone | {"RULES": pair["RULES"][0] | alone["RULES"][0]}


@pytest.mark.parametrize("name", FAULTS | FAULTS_OF_TWO)
def test_fault_is_an_error_on_each_rank(name, happened):
    assert len(happened[name]) == (2 if name in FAULTS_OF_TWO else 1)
    for said in happened[name]:
        assert re.search((FAULTS | FAULTS_OF_TWO)[name], said)


@pytest.mark.parametrize("name", [*FIXED, *FIXED_OF_TWO])
def test_what_is_allowed_is_no_error(name, happened):
    assert set(happened[name]) == {"fine"}


def test_each_rule_is_needed(happened):
    """Each rule of the device is broken by a program above, which fails in no such way without."""
    rules = {
        f"{path.name}:{number}"
        for path in (ROOT / "tests/emulated_gpu").glob("*.[hc]*")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.match(r" +RULE\(", line)
    }
    assert {rule for rule, _ in happened["RULES"].values()} == rules
    for name, (_, without) in happened["RULES"].items():
        assert not re.search((FAULTS | FAULTS_OF_TWO)[name], without), name


@pytest.fixture(scope="module")
def shown():
    return outcomes(*SHOWN, *FIXED_OF_TWO, EMULATED_GPU_RACES="show")


@pytest.mark.parametrize("name", SHOWN)
def test_forgotten_wait_can_be_seen_in_the_numbers(name, shown):
    for said in shown[name]:
        assert re.search(SHOWN[name], said)


def test_program_that_waits_computes_the_same_where_races_are_shown(shown):
    assert {said for name in FIXED_OF_TWO for said in shown[name]} == {"fine"}


def test_two_ranks_on_one_gpu_are_refused():
    said = run(WORKER, "two_ranks_on_one_gpu", gpus=1)
    assert said.returncode == 1
    assert "Duplicate GPU detected : rank" in said.output
