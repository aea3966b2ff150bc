"""Which meshes the planner tries, and what it says of them."""

import dataclasses

import inputs
import pytest
import report
from helpers import ROOT, python
from network import wires
from search import Job, best, evaluate, meshes

PLAN = ROOT / "planner/plan.py"


def job(model: str, gpus: int, sequence: int, batch: int, gpu: str = "H100") -> Job:
    cluster, stack, _ = inputs.cluster(gpu)
    return Job(inputs.model(model), cluster, inputs.stack(stack)[0], gpus, sequence, batch)


@pytest.mark.parametrize("gpus", [16, 24, 56])
def test_groups_inside_a_replica_fill_their_nodes(gpus):
    """bloom-176b has 112 heads: 7 divides them, but a TP group of 7 straddles nodes of 8."""
    given = job("bloom-176b", gpus, 65536, gpus)
    found = meshes(given)
    for m in {dataclasses.replace(m, micro_batch=1, accumulation=1) for m in found}:
        wires({"cp": m.cp, "tp": m.tp}, 8)  # raises if they do not
        assert gpus // m.pp > 8 or 8 % (gpus // m.pp) == 0
    assert {m.tp for m in found} == {1, 2, 4, 8}
    assert {m.tp for m in meshes(job("gpt2-124m", 6, 1024, 12))} == {1, 2, 3, 6}  # inside one node


def test_ranks_of_context_parallelism_share_the_states():
    """One sequence on 8 GPUs: FSDP and ZeRO-1 over cp, as train.py shards over dp_shard x cp."""
    given = job("llama-3-8b", 8, 131072, 1)
    ring = [m for m in meshes(given) if m.cp == 8]
    assert {(m.dp_replicate, m.dp_shard, m.zero_stage) for m in ring} == {(1, 1, 1), (1, 1, 3)}
    plans = {p.mesh.zero_stage: p for p in evaluate(given, ring) if p.mesh.full_checkpointing}
    states = {zero: sum(list(p.memory_gib.values())[:3]) * 2**30 for zero, p in plans.items()}
    weights = given.model.parameters
    assert states[1] == pytest.approx((6 + 12 / 8) * weights)
    assert states[3] == pytest.approx(18 / 8 * weights)
    assert plans[3].fits


def test_stages_of_a_pipeline_shard_no_weights():
    """train.py keeps them gathered for a step, and gradients whole: this is ZeRO-1."""
    stages = [m for m in meshes(job("llama-3-70b", 64, 8192, 512)) if m.pp > 1]
    assert {m.zero_stage for m in stages if m.dp_replicate > 1} == {0, 1}


def test_tp_divides_the_mlp():
    """As train.py demands: 6826 is 2 x 3413."""
    given = job("llama-3-8b", 8, 8192, 64)
    model = dataclasses.replace(given.model, ffn=6826)
    assert {m.tp for m in meshes(dataclasses.replace(given, model=model))} == {1, 2}


def test_a_mesh_without_replicas_is_sharded_by_nothing():
    assert {m.zero_stage for m in meshes(job("llama-3-8b", 8, 8192, 8)) if m.tp == 8} == {0}


def test_each_line_has_its_doubts():
    given = job("llama-3-8b", 64, 8192, 512)
    plans = best(given)
    _, known = inputs.stack("nemo-h100")
    found = report.doubts_by_line(given, plans, "nemo-h100", known, "H100")
    three = ", ".join(str(i) for i, p in enumerate(plans, 1) if p.mesh.zero_stage == 3)
    assert f"ZeRO stage 3 with this software (lines {three})" in found
    every = report.doubts_by_line(given, plans, "nemo-h100", known, "H200")
    assert any(doubt.startswith("H200 (") and "line" not in doubt for doubt in every)


def test_mfu_with_the_causal_half_of_attention():
    """By hand, at 256K tokens: 6 N + 6 L s a d FLOP per token, over the peak."""
    given = job("llama-3-8b", 64, 262144, 8)
    plan = best(given)[0]
    speed = 8 * 262144 / plan.step_s / 64
    weights = 32 * 218_103_808 + 128256 * 4096
    flop = 6 * weights + 6 * 32 * 262144 * 4096
    assert report.mfu(given, plan) > 1
    assert report.causal_mfu(given, plan) == pytest.approx(speed * flop / 989e12)


def test_no_fit_ends_with_status_1():
    few = ("--model", "llama-3-70b", "--gpus", 8, "--batch-tokens", "1M")
    result = python(PLAN, *few)
    assert result.returncode == 1
    assert "No mesh fits" in result.output
