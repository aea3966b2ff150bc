"""The planner's formulas against numbers of the papers that they come from, worked out by hand."""

import dataclasses
import math

import memory
import network
import numpy as np
import pipeline
import pytest
import report
import search
import shapes
import stacks
import step_time

LLAMA = shapes.Model(32, 4096, 32, 8, 128, 14336, 1, 128256, 0)  # Llama 3 8B
GPT3 = shapes.Model(96, 12288, 96, 96, 128, 49152, 0, 51200, 1)
A100 = shapes.Cluster(80, 312, 2039, 300, 25, 8)
ONE = shapes.Mesh(1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 2048, 0, 0, 0)  # one GPU, no flash kernel
IDEAL = stacks.Stack(gemm_efficiency=1, launch_s=0, fixed_s=0, hop_s=0, memory_passes=0, base_gib=0)


def mesh(**changes) -> shapes.Mesh:
    return dataclasses.replace(ONE, **changes)


def test_weights_of_published_models():
    assert LLAMA.layer_parameters == 218_103_808
    assert LLAMA.parameters == 8_029_995_008  # "8B"; norms, 0.003 % of them, are left out
    assert GPT3.parameters == pytest.approx(174.6e9, rel=0.001)  # Narayanan et al. 2021, table 1


def test_flop_of_an_iteration():
    """Narayanan et al. 2021, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16lh), with recomputation.

    It counts no recomputation of the output layer: 6 B s h V are 96 B s l h^2 V / 16 l h.
    """
    full = mesh(full_checkpointing=1, micro_batch=4)
    s, h, layers, vocab = 2048, 12288, 96, 51200
    formula = 96 * 4 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    given = (GPT3, full, A100, IDEAL)
    seconds = layers * (step_time.products_s(*given) + step_time.attention_s(*given))
    no_traffic = dataclasses.replace(IDEAL, logit_traffic_bytes=0)
    seconds += step_time.head_s(GPT3, full, A100, no_traffic)
    assert seconds * 312e12 == pytest.approx(formula, rel=1e-9)


def test_a_causal_flash_kernel_halves_attention():
    without = step_time.attention_s(GPT3, ONE, A100, IDEAL)
    assert step_time.attention_s(GPT3, mesh(flash=1), A100, IDEAL) == pytest.approx(without / 2)


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_layer(tp):
    """Korthikanti et al. 2022, equations 1, 2 and 4, in bytes per token: s b h (34 + 5 a s / h)."""
    h, a, s = 12288, 96, 2048
    with_tp = h * (10 + 24 / tp + 5 * a * s / (h * tp))
    assert step_time.kept_bytes(GPT3, mesh(tp=tp)) == pytest.approx(with_tp)
    with_sp = h / tp * (34 + 5 * a * s / h)
    assert step_time.kept_bytes(GPT3, mesh(tp=tp, sequence_parallel=1)) == pytest.approx(with_sp)


def test_zero_stages():
    """Rajbhandari et al. 2020, figure 1: 7.5e9 weights on 64 GPUs take 120, 31.4, 16.6, 1.9 GB.

    There weights and gradients have 2 bytes each, and the optimizer 12.
    """
    paper = dataclasses.replace(IDEAL, resident_bytes=4)
    for stage, gb in ((0, 120), (1, 31.4), (2, 16.6), (3, 1.9)):
        held = memory.zero_bytes(7.5e9, 64, stage, (2, 2, 12))
        assert sum(held.values()) / 1e9 == pytest.approx(gb, abs=0.05)
        dp = {"dp_shard": 64} if stage == 3 else {"dp_replicate": 64}
        parts = memory.state_bytes(mesh(zero_stage=stage, **dp), paper, 7.5e9)
        assert sum(parts.values()) / 1e9 == pytest.approx(gb, abs=0.05)


def test_micro_batches_in_flight():
    """1F1B holds pp; with v stages per rank (1 + (p - 1) / (p v)) times as much. [Korthikanti]"""
    assert memory.in_flight(mesh(pp=8, accumulation=64)) == 8
    assert memory.in_flight(mesh(pp=8, accumulation=3)) == 3
    interleaved = memory.in_flight(mesh(pp=8, virtual_stages=3, accumulation=64))
    assert interleaved == pytest.approx(8 * (1 + 7 / (8 * 3)))


def test_bubble():
    """Narayanan et al. 2021, section 2.2: (p - 1) / m of the ideal time, divided by v."""
    for v, share in ((1, 7 / 32), (4, 7 / 32 / 4)):
        model = dataclasses.replace(GPT3, vocab=1)
        given = mesh(pp=8, accumulation=32, virtual_stages=v)
        parts = step_time.step_parts(model, given, A100, IDEAL)
        assert parts["bubble"] / parts["compute"] == pytest.approx(share, rel=1e-4)


def test_bubble_fraction():
    """Of the whole step, not of its busy part: 7 of 39 micro-batches; interleaved 3.5 of 35.5."""
    assert step_time.bubble_fraction(8, 32) == pytest.approx(7 / 39)
    assert step_time.bubble_fraction(8, 32, 2) == pytest.approx(3.5 / 35.5)
    assert step_time.bubble_fraction(1, 4) == 0


def test_a_ring_enters_a_node_once():
    """32 GPUs of four nodes gather 1 GB: each port carries an eighth of what a rank sends."""
    ring = network.Ring(1e9, 32, 1)
    assert ring.sent_bytes() == pytest.approx(31 / 32 * 1e9)
    nvlink, port = ring.bytes_on_wires(A100)
    assert port == pytest.approx(31 / 32 * 1e9 / 8)
    assert nvlink == pytest.approx(31 / 32 * 1e9 * 7 / 8)
    # The ports of a node carry 8 x 25 GB/s together; NVLink, 300 GB/s, is not the limit.
    assert ring.seconds(A100, 0) == pytest.approx(31 / 32 * 1e9 / (0.8 * 200e9) + 31 * 5e-6)


def test_a_group_of_one_rank_per_node_uses_its_own_port():
    ring = network.Ring(1e9, 4, 8)  # DP next to tensor parallelism over 8
    assert ring.bytes_on_wires(A100) == (0, pytest.approx(3 / 4 * 1e9))
    assert ring.seconds(A100, 0) == pytest.approx(3 / 4 * 1e9 / 20e9 + 3 * 5e-6)


def test_a_ring_on_one_node():
    ring = network.Ring(1e9, 8, 1)
    assert ring.bytes_on_wires(A100) == (pytest.approx(7 / 8 * 1e9), 0)
    assert ring.seconds(A100, 1e-5) == pytest.approx(7 / 8 * 1e9 / 240e9 + 7e-5)
    assert network.Ring(1e9, 1, 1).seconds(A100, 1e-5) == 0


def test_rings_of_tensor_parallelism():
    """Two all_reduce forward and two backward; SP gathers two inputs again; and recomputation."""
    for changes, rings in (
        ({}, 8),
        ({"sequence_parallel": 1}, 10),
        ({"full_checkpointing": 1}, 12),
    ):
        ring = step_time.tp_ring(GPT3, mesh(tp=8, **changes))
        assert ring.count == rings
        assert ring.volume_bytes == 2048 * 12288 * 2


def test_zero_1_sends_less_than_ddp():
    """fp32 gradients: all_reduce 2 x 4 bytes a weight; ZeRO-1 scatters 4 and gathers bf16."""
    sent = {}
    for zero in (0, 1):
        rings = step_time.dp_rings(GPT3, mesh(dp_replicate=64, zero_stage=zero), IDEAL)
        sent[zero] = sum(float(ring.sent_bytes()) for ring in rings) / GPT3.parameters * 64 / 63
    assert sent == pytest.approx({0: 8, 1: 6})


def test_fsdp_gathers_weights_and_scatters_gradients():
    rings = step_time.fsdp_rings(LLAMA, mesh(dp_shard=16, zero_stage=3), IDEAL)
    assert rings["gather"].volume_bytes == 2 * LLAMA.layer_parameters
    assert rings["scatter"].volume_bytes == 4 * LLAMA.layer_parameters
    hybrid = step_time.fsdp_rings(LLAMA, mesh(dp_shard=8, dp_replicate=2, zero_stage=3), IDEAL)
    assert hybrid["replicas"].volume_bytes == 4 * LLAMA.layer_parameters / 8
    assert hybrid["replicas"].stride == 8


def test_hsdp_reduces_all_gradients_between_replicas_once_per_step():
    """8 x 8 ranks, fp32 gradients: an all_reduce of 4 N / 8 bytes sends 2 x 7/8 of them."""
    cluster = dataclasses.replace(A100, gpus_per_node=8)
    for accumulation in (1, 8):
        hybrid = mesh(dp_shard=8, dp_replicate=8, zero_stage=3, accumulation=accumulation)
        job = search.Job(LLAMA, cluster, IDEAL, 64, 2048, 64 * accumulation)
        port = report.wire_gb(job, hybrid)[1]
        assert port == pytest.approx(2 * 7 / 8 * 4 * LLAMA.parameters / 8 / 1e9, rel=1e-6)


def test_hsdp_waits_for_its_replicas_once_per_step():
    """Without overlap: two rings of the 4-byte gradients of a shard, over one port of 25 GB/s."""
    stack = dataclasses.replace(IDEAL, dp_overlap=0)
    ring = 2 * 7 / 8 * 4 * LLAMA.parameters / 8 / (0.8 * 25e9) + 2 * 7 * 33 * 5e-6
    for accumulation in (1, 8):
        one = mesh(dp_shard=8, zero_stage=3, accumulation=accumulation)
        parts = [
            step_time.step_parts(LLAMA, dataclasses.replace(one, dp_replicate=n), A100, stack)
            for n in (1, 8)
        ]
        # The last layer's scatter, which nothing can hide, comes on top of the 32.
        last = 2 * 7 / 8 * 4 * LLAMA.layer_parameters / 8 / (0.8 * 25e9) + 2 * 7 * 5e-6
        assert parts[1]["DP"] - parts[0]["DP"] == pytest.approx(ring + last)


def nanotron_stages(costs: list[float], stages: int) -> list[int]:
    """Layers per stage, block by block, as nanotron deals them; the last block is the head."""
    total, placed, stage, spent = sum(costs), [0] * stages, 0, 0.0
    for i, cost in enumerate(costs):
        spent += cost
        if i < len(costs) - 1:
            placed[stage] += 1
        if spent > total * (stage + 1) / stages:
            stage += 1
    return placed


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("layers", [16, 28, 32, 80])
def test_stages_of_equal_work(layers, pp):
    model = dataclasses.replace(LLAMA, layers=layers, kv_heads=32)
    head = model.embedding_parameters / model.layer_parameters
    placed = nanotron_stages([1.0] * layers + [head], pp)
    balanced = stacks.Stack(balanced=1)
    first, between, last = pipeline.stage_layers(model, mesh(pp=pp), balanced)
    assert (first, last) == (placed[0], placed[-1])
    if pp > 2:
        assert between == max(placed[1:-1])


def test_a_stage_whose_share_is_whole():
    """The playbook's 1B: 16 layers, and an output layer worth 4. Half are 10, and 11 go first."""
    small = shapes.Model(16, 2048, 32, 32, 64, 8192, 1, 131072, 1)
    first, _, last = pipeline.stage_layers(small, mesh(pp=2), stacks.Stack(balanced=1))
    assert (first, last) == (11, 5)
    assert nanotron_stages([1.0] * 16 + [4.0], 2) == [11, 5]


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_the_slowest_stage_sets_the_pace(pp):
    model = dataclasses.replace(LLAMA, kv_heads=32)
    balanced = dataclasses.replace(IDEAL, balanced=1, logit_traffic_bytes=0)
    given = (model, mesh(pp=pp, accumulation=8, flash=1), A100, balanced)
    layer = step_time.products_s(*given) + step_time.attention_s(*given)
    head = step_time.head_s(*given)
    weights = [1.0] * 32 + [model.embedding_parameters / model.layer_parameters]
    stages = [float(n * layer) for n in nanotron_stages(weights, pp)]
    stages[-1] += float(head)
    assert step_time.step_parts(*given)["compute"] == pytest.approx(8 * max(stages))


def test_stages_with_a_layer_less_at_the_ends():
    """Llama 3.1 405B has 126 layers on 16 stages; BLOOM 70 on 12."""
    model = dataclasses.replace(LLAMA, layers=126)
    assert pipeline.stage_layers(model, mesh(pp=16), IDEAL) == (7, 8, 7)
    model = dataclasses.replace(LLAMA, layers=70)
    assert pipeline.stage_layers(model, mesh(pp=12), IDEAL) == (5, 6, 5)
    assert pipeline.stage_layers(model, mesh(pp=7), IDEAL) == (10, 10, 10)


@pytest.mark.parametrize("layers", [7, 28, 32, 70, 80])
def test_stages_hold_the_layers_of_the_model(layers):
    """The first, the last, the fullest between, and others between that have at most one less."""
    model = dataclasses.replace(LLAMA, layers=layers)
    for pp in range(3, layers + 1):
        first, between, last = pipeline.stage_layers(model, mesh(pp=pp), IDEAL)
        most = first + last + (pp - 2) * between
        assert most - (pp - 3) <= layers <= most, pp
        assert last >= 1


def test_a_stage_without_a_block():
    """Of the playbook's runs: 1B on 16 stages and 3B on 32 crashed; 1B on 8 ran."""
    balanced = stacks.Stack(balanced=1)
    small = shapes.Model(16, 2048, 32, 32, 64, 8192, 1, 131072, 1)
    larger = shapes.Model(28, 3072, 32, 32, 96, 8192, 1, 131072, 1)
    assert memory.has_empty_stage(small, mesh(pp=16), balanced)
    assert memory.has_empty_stage(larger, mesh(pp=32), balanced)
    assert not memory.has_empty_stage(small, mesh(pp=8), balanced)
    assert not memory.has_empty_stage(small, mesh(pp=16), IDEAL)


def test_model_flop_utilization():
    """PaLM, appendix B: 6 N + 12 L H Q T FLOP per token, recomputation not counted."""
    n = 96 * GPT3.layer_parameters + 51200 * 12288
    per_token = 6 * n + 12 * 96 * 96 * 128 * 2048
    assert step_time.model_flop(GPT3, mesh(full_checkpointing=1)) == pytest.approx(2048 * per_token)


def test_the_head_is_on_the_last_stage_only():
    """A vocabulary of 128k on 8 layers per stage: the last stage is the slowest."""
    given = (mesh(pp=4, accumulation=8, flash=1), A100, IDEAL)
    without = dataclasses.replace(LLAMA, vocab=1)
    parts, bare = step_time.step_parts(LLAMA, *given), step_time.step_parts(without, *given)
    head = step_time.head_s(LLAMA, *given)
    assert parts["compute"] - bare["compute"] == pytest.approx(8 * head, rel=1e-3)
    assert parts["bubble"] - bare["bubble"] == pytest.approx(3 * head / 4, rel=1e-3)


def test_memory_of_the_fuller_stage():
    """Logits count on the last stage, which holds one micro-batch where the first holds pp."""
    many = mesh(pp=4, accumulation=8, flash=1, sequence=8192)
    parts = memory.memory_parts(LLAMA, many, IDEAL)
    kept = 8 * 8192 * float(step_time.kept_bytes(LLAMA, many))
    assert parts["activations"] * 2**30 == pytest.approx(4 * kept)
    assert parts["logits"] == 0
    parts = memory.memory_parts(LLAMA, dataclasses.replace(many, full_checkpointing=1), IDEAL)
    assert parts["logits"] * 2**30 == 10 * 8192 * 128256


def test_full_checkpointing_keeps_the_inputs_and_one_layer():
    full = mesh(full_checkpointing=1)
    parts = memory.memory_parts(GPT3, full, IDEAL)
    one_layer = 2048 * float(step_time.kept_bytes(GPT3, full))
    assert parts["activations"] * 2**30 == pytest.approx(96 * 2 * 12288 * 2048 + one_layer)
    given = (A100, IDEAL)
    more = step_time.products_s(GPT3, full, *given) / step_time.products_s(GPT3, ONE, *given)
    assert more == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("model", "share"),
    [(GPT3, 0.70), (shapes.Model(105, 20480, 128, 128, 160, 81920, 0, 51200, 1), 0.65)],
)
def test_selective_checkpointing_keeps_no_scores(model, share):
    """Korthikanti et al. 2022, section 5: 34 s b h / t bytes per layer are left, if SP is on.

    This saves 70 % of the activations of GPT-3, and 65 % of those of MT-NLG. Attention is computed
    again, one layer at a time.
    """
    selective = mesh(tp=8, sequence_parallel=1, selective_checkpointing=1)
    every = dataclasses.replace(selective, selective_checkpointing=0)
    left = float(memory.layer_bytes(model, selective, IDEAL))
    assert left == pytest.approx(2048 * 34 * model.width / 8)
    assert 1 - left / memory.layer_bytes(model, every, IDEAL) == pytest.approx(share, abs=0.006)
    parts = memory.memory_parts(model, selective, IDEAL)
    scores = 2048 * 5 * model.heads * 2048 / 8
    assert parts["activations"] * 2**30 == pytest.approx(model.layers * left + scores)
    given = (A100, IDEAL)
    assert step_time.products_s(model, selective, *given) == step_time.products_s(
        model, every, *given
    )
    more = step_time.attention_s(model, selective, *given) / step_time.attention_s(
        model, every, *given
    )
    assert more == pytest.approx(4 / 3)


def test_a_flash_kernel_leaves_no_scores_to_save():
    flash = mesh(flash=1)
    selective = dataclasses.replace(flash, selective_checkpointing=1)
    held = [memory.layer_bytes(LLAMA, m, stacks.Stack()) for m in (flash, selective)]
    assert held[0] == held[1]
    titan = stacks.Stack(selective_bytes=0.45)  # which saves other operations
    assert memory.layer_bytes(LLAMA, selective, titan) == pytest.approx(0.45 * held[0])


def test_a_host_sets_the_pace_of_small_layers():
    slow = dataclasses.replace(IDEAL, launch_s=1.0)
    parts = step_time.step_parts(LLAMA, ONE, A100, slow)
    assert parts["launch"] + parts["compute"] == pytest.approx(32, rel=0.1)
    fast = step_time.step_parts(LLAMA, ONE, A100, dataclasses.replace(IDEAL, launch_s=1e-6))
    assert fast["launch"] == 0


def test_a_pipeline_over_the_network_slows_the_host_with_tp():
    stack = dataclasses.replace(IDEAL, launch_s=1e-3, pipelined_launch_s=2e-3)
    for changes, seconds in (
        ({"tp": 4, "pp": 4}, 8e-3),
        ({"tp": 16, "pp": 2}, 32e-3 * 1.2),
        ({"tp": 2, "pp": 4}, 0),  # one node
        ({"tp": 4, "dp_replicate": 4}, 0),
        ({"pp": 16}, 0),
    ):
        assert step_time.pipelined_launch_s(mesh(**changes), A100, stack) == pytest.approx(seconds)


# Properties that hold for every mesh.

MESHES = [
    mesh(dp_replicate=d, zero_stage=z, tp=t, sequence_parallel=int(t > 1), pp=p, accumulation=8)
    for d in (1, 4)
    for z in (0, 1)
    for t in (1, 8)
    for p in (1, 4, 12)
]
MESHES += [mesh(dp_shard=d, zero_stage=3, tp=t, flash=1) for d in (2, 8, 64) for t in (1, 4)]
STACKS = [stacks.Stack(), stacks.Stack(balanced=1, gathered_bytes=4), IDEAL]


def test_arrays_give_what_numbers_give():
    """One call for many meshes is how plan.py and fit.py compute."""
    many = shapes.columns(MESHES)
    for stack in STACKS:
        together = step_time.step_s(GPT3, many, A100, stack)
        held = memory.memory_gib(GPT3, many, stack)
        for i, one in enumerate(MESHES):
            assert together[i] == pytest.approx(float(step_time.step_s(GPT3, one, A100, stack)))
            assert held[i] == pytest.approx(float(memory.memory_gib(GPT3, one, stack)))
    assert np.isfinite(together).all()


@pytest.mark.parametrize("stack", STACKS)
def test_no_part_is_negative(stack):
    for one in MESHES:
        parts = step_time.step_parts(GPT3, one, A100, stack) | memory.memory_parts(GPT3, one, stack)
        assert all(value >= 0 for value in parts.values()), (one, parts)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_gpus_take_no_more_memory(stage):
    held = [
        float(memory.memory_gib(GPT3, mesh(zero_stage=stage, dp_shard=n), stacks.Stack()))
        for n in (2, 4, 8, 64, 512)
    ]
    assert held == sorted(held, reverse=True)


def test_slower_wires_take_more_time():
    for key in ("nvlink_gb_s", "nic_gb_s", "hbm_gb_s", "peak_tflops"):
        slower = dataclasses.replace(A100, **{key: getattr(A100, key) / 2})
        for one in MESHES:
            fast, slow = (step_time.step_s(GPT3, one, c, STACKS[0]) for c in (A100, slower))
            assert slow >= fast, (key, one)


def test_ranks_of_a_mesh():
    one = mesh(dp_replicate=2, dp_shard=4, tp=8, pp=3, cp=2, micro_batch=2, accumulation=5)
    assert one.gpus == 2 * 4 * 8 * 3 * 2
    assert one.tokens == 2 * 2048 / 2
    assert one.step_tokens == 2 * 5 * 8 * 2048
    assert one.shards == 16
    assert math.prod((2, 4, 2)) == one.shards
