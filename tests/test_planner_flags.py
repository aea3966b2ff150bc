"""--flags of plan.py: train.py parses them into the model and the mesh that were planned."""

import json
import re
import subprocess
import sys

import command
import inputs
import pytest
from helpers import ROOT, python
from search import Job, evaluate, meshes

PLAN = ROOT / "planner/plan.py"
PARSE = """
import json, os, sys
from flags import parse_args
for ranks, flags in json.loads(sys.argv[1]):
    sys.argv[1:], os.environ["WORLD_SIZE"] = flags, str(ranks)
    settings = parse_args()
    print(json.dumps({**vars(settings), "llama": settings.model(1).is_llama}, default=str))
"""


def parsed(lines: list[str]) -> list[dict]:
    """What train.py makes of command lines, on as many ranks as torchrun would start."""
    given = []
    for line in lines:
        nodes = int((re.search(r"--nnodes=(\d+)", line) or [0, 1])[1])
        ranks = nodes * int(re.search(r"--nproc_per_node=(\d+)", line)[1])
        given.append((ranks, line.partition("train.py ")[2].split()))
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps(given)],
        cwd=ROOT / "transformer_basics",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = map(json.loads, done.stdout.splitlines())
    return [one | {"ranks": ranks} for one, (ranks, _) in zip(found, given, strict=True)]


def test_a_pipeline_with_too_few_micro_batches():
    """train.py refuses them: torch's 1F1B wants one per stage."""
    cluster, stack, _ = inputs.cluster("H100")
    job = Job(inputs.model("llama-3-70b"), cluster, inputs.stack(stack)[0], 32, 4096, 2, 0)
    plan = next(p for p in evaluate(job, meshes(job)) if p.fits and p.mesh.accumulation < p.mesh.pp)
    with pytest.raises(inputs.UserError, match=r"micro-batches do not fill \d+ pipeline stages"):
        command.flags(job, plan)


PLANS = {  # model, GPUs, sequence, sequences per step, fp8, sizes of the mesh
    "ZeRO-1": ("llama-3-8b", 64, 8192, 512, 0, {"zero_stage": 1, "tp": 2, "pp": 1}),
    "FSDP": ("llama-3-70b", 64, 8192, 512, 1, {"zero_stage": 3, "tp": 2, "pp": 1}),
    "interleaved": (
        "llama-3-8b",
        64,
        8192,
        512,
        0,
        {"zero_stage": 1, "pp": 2, "virtual_stages": 2},
    ),
    "GPT-2": ("gpt2-124m", 8, 1024, 64, 0, {"zero_stage": 0}),
    "CP": ("llama-3-8b", 16, 65536, 16, 0, {"cp": 2, "tp": 8}),
}


@pytest.fixture(scope="module")
def planned() -> dict[str, tuple]:
    """name -> the job, the mesh, and what train.py makes of the command."""
    given = {}
    for name, (preset, gpus, sequence, batch, fp8, sizes) in PLANS.items():
        cluster, stack, _ = inputs.cluster("H100")
        model = inputs.model(preset)
        job = Job(model, cluster, inputs.stack(stack)[0], gpus, sequence, batch, fp8)
        every = [m for m in meshes(job) if all(getattr(m, k) == v for k, v in sizes.items())]
        given[name] = job, next(plan for plan in evaluate(job, every) if plan.fits)
    lines = parsed([command.flags(*pair) for pair in given.values()])
    return {
        name: (job, plan.mesh, line)
        for (name, (job, plan)), line in zip(given.items(), lines, strict=True)
    }


@pytest.mark.parametrize("name", PLANS)
def test_train_py_parses_what_was_planned(planned, name):
    job, mesh, found = planned[name]
    model = job.model
    assert found["ranks"] == job.gpus
    heads, ffn = found["kv_heads"] or found["heads"], found["mlp_dim"] or 4 * found["dim"]
    shape = (found["layers"], found["dim"], found["heads"], heads, ffn)
    assert shape == (model.layers, model.width, model.heads, model.kv_heads, model.ffn)
    assert (found["head_dim"] or found["dim"] // found["heads"]) == model.head_dim
    assert (found["llama"], found["tied"]) == (bool(model.gated), bool(model.tied))
    assert (found["pp"], found["tp"], found["cp"]) == (mesh.pp, mesh.tp, mesh.cp)
    replicas = mesh.dp_replicate * mesh.dp_shard
    assert found["dp_replicate"] * found["dp_shard"] == replicas
    shards = {0: 1, 1: replicas, 3: mesh.dp_shard}[mesh.zero_stage]  # that divide the optimizer
    assert mesh.zero_stage > 0 or mesh.cp == 1  # context-parallel ranks share it, too
    assert found["cp_kernel"] == ("torch" if mesh.cp > 1 else "ring")
    assert found["dp_shard"] == shards
    once = mesh.zero_stage == 1  # per step weights are gathered and gradients are reduced
    assert (found["keep_gathered"], found["reduce_once"]) == (once, once)
    assert found["batch_size"] // replicas // found["accumulate"] == mesh.micro_batch
    assert (found["stages_per_rank"] or 1) == mesh.virtual_stages
    assert (found["schedule"] == "interleaved") == (mesh.virtual_stages > 1)
    assert found["fp8"] == bool(job.fp8)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--model llama-3-70b --gpus 8 --batch-tokens 1M", "does not fit"),
        ("--model gpt2-124m --gpus 12 --batch-tokens 96K", "12 GPUs do not fill nodes of 8"),
    ],
)
def test_no_command_for_what_train_py_cannot_do(args, says):
    result = python(PLAN, *args.split(), "--flags")
    assert result.returncode == 2
    assert says in result.output.splitlines()[-1]
    assert "torchrun --" not in result.output
