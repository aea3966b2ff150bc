"""The page of --explain: each number of a plan with its formula filled in."""

from memory import GIB, USABLE, fullest_stage, in_flight
from pipeline import stage_layers, stage_parameters
from report import batch, limit, mfu, name, rings, tokens_per_second, wire_gb
from search import Job, Plan
from step_time import (
    attention_s,
    bubble,
    forward_units,
    kept_bytes,
    launch_s,
    products_s,
    score_bytes,
    traffic_s,
)


def explain_memory(job: Job, plan: Plan) -> list[str]:
    """Memory, each formula filled in."""
    model, mesh, stack = job.model, plan.mesh, job.stack
    gib, tokens = plan.memory_gib, float(mesh.tokens)
    stage = int(fullest_stage(model, mesh, stack))
    layers = float(stage_layers(model, mesh, stack)[stage])
    weights = float(stage_parameters(model, mesh, stack)[stage])
    held = float(in_flight(mesh, (0, 1, mesh.pp - 1)[stage]))
    place = f", in stage {(1, 2, mesh.pp)[stage]} of {mesh.pp}" if mesh.pp > 1 else ""
    mine = "" if stage == 1 else " + its tables"
    kept = float(kept_bytes(model, mesh))
    sharded = float(mesh.shards)
    by = [sharded if mesh.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    matrices, tables = 2 + model.gated, 2 - model.tied
    h, d, f, vocab = model.width, model.head_dim, model.ffn, model.vocab
    both = 2 * model.heads + 2 * model.kv_heads
    ten = "10 h / tp" if mesh.sequence_parallel else "10 h"
    one = f"{stack.activation_factor:g} x {kept:,.0f} bytes"
    if mesh.selective_checkpointing:
        scores = float(score_bytes(model, mesh))
        share = f"{stack.selective_bytes:g} x " if stack.selective_bytes < 1 else ""
        left = f"({kept:,.0f} - {scores:,.0f} of scores)" if scores else f"{kept:,.0f}"
        one = f"{share}{stack.activation_factor:g} x {left} bytes (selective checkpointing)"
        one += ", and the scores of one layer" if scores else ""
    if mesh.full_checkpointing:
        one = "2 h bytes (checkpointing), and one layer in full"
    logits = stack.logit_bytes * tokens * vocab / mesh.tp / GIB
    return [
        "WEIGHTS",
        f"  layer        h d (2a + 2k) + {matrices} h f = {h} x {d} x {both}"
        f" + {matrices} x {h} x {f} = {model.layer_parameters:,}",
        f"  model        {model.layers} layers + {tables} x {vocab} x {h} = {model.parameters:,}",
        f"  a rank       ({layers:g} layers{mine}) / tp {mesh.tp} = {weights:,.0f}",
        "",
        f"MEMORY of the fullest GPU{place}",
        f"  parameters   2 bytes x {weights:,.0f} / {by[0]:g} = {gib['parameters']:.2f} GiB",
        f"  gradients    {stack.resident_bytes - 2:g} bytes x {weights:,.0f} / {by[1]:g}"
        f" = {gib['gradients']:.2f} GiB",
        f"  optimizer    {stack.optimizer_bytes:g} bytes x {weights:,.0f} / {by[2]:g}"
        f" = {gib['optimizer']:.2f} GiB",
        f"  tokens       of a micro-batch and rank: b s / cp"
        f" = {mesh.micro_batch:g} x {mesh.sequence:g} / {mesh.cp:g} = {tokens:,.0f}",
        f"  kept         per token and layer: {ten} + (4 d (a + k) + {4 + 4 * model.gated} f"
        f"{'' if mesh.flash else ' + 5 a s'}) / tp = {kept:,.0f} bytes",
        f"  activations  {layers:g} layers x {held:g} micro-batches in flight x"
        f" {tokens:,.0f} x {one} = {gib['activations']:.2f} GiB",
        f"  logits       {stack.logit_bytes:g} bytes x {tokens:,.0f} x {vocab} / tp {mesh.tp}"
        f" = {logits:.2f} GiB; on this GPU: {gib['logits']:.2f} GiB",
        f"  other        {stack.base_gib:g} GiB, and what FSDP gathers = {gib['buffers']:.2f} GiB",
        f"  total        {plan.total_gib:.2f} GiB, of {USABLE:g} x {job.cluster.gpu_memory_gb:g}"
        f" GiB: {'fits' if plan.fits else 'does not fit'}",
    ]


def explain_time(job: Job, plan: Plan) -> list[str]:
    """Time, each formula filled in."""
    model, mesh, cluster, stack = job.model, plan.mesh, job.cluster, job.stack
    s, tokens, units = plan.seconds, float(mesh.tokens), float(forward_units(mesh))
    kept = float(kept_bytes(model, mesh))
    peak = stack.gemm_efficiency * cluster.peak_tflops
    products = 1e3 * float(products_s(model, mesh, cluster, stack))
    attention = 1e3 * float(attention_s(model, mesh, cluster, stack))
    traffic = 1e3 * float(traffic_s(model, mesh, cluster, stack))
    host = 1e3 * float(launch_s(mesh, stack))
    lines = [
        "",
        f"TIME: {mesh.accumulation:g} micro-batches of the slowest stage, then the bubble",
        f"  products     {units:g} x 2 FLOP x {model.layer_parameters:,} x {tokens:,.0f} / tp"
        f" {mesh.tp}, at {stack.gemm_efficiency:g} x {cluster.peak_tflops:g} = {peak:.0f} TFLOP/s:"
        f" {products:.2f} ms per layer",
        f"  attention    {units + mesh.selective_checkpointing:g} x {4 - 2 * mesh.flash} s a d"
        f" x {tokens:,.0f} / tp {mesh.tp}, {stack.attention_cost:g} times as long per FLOP:"
        f" {attention:.2f} ms per layer",
        f"  HBM          {stack.memory_passes:g} passes x {tokens:,.0f} x {kept:,.0f} bytes"
        f" x {units:g}/3 / {cluster.hbm_gb_s:g} GB/s: {traffic:.2f} ms per layer",
        f"  host         issues a layer in {host:.2f} ms;"
        f" the GPU waits for it {s['launch']:.3f} s per step",
        f"  per step     compute {s['compute']:.3f} s (output layer and loss included),"
        f" HBM {s['traffic']:.3f} s",
    ]
    for key, ring in rings(job, mesh).items():
        here = ring.ranks_per_node(cluster)
        seconds = float(ring.seconds(cluster, stack.hop_s))
        ports = 1 if ring.messages else here
        network = "a network port" if ports == 1 else f"{ports:g} network ports"
        wire = "NVLink" if ring.size <= here else network
        lines.append(
            f"  {key:12} {ring.count:,.0f} x {ring.volume_bytes / 1e6:,.1f} MB round {ring.size:g}"
            f" ranks, {here:g} per node: {seconds:.3f} s over {wire}"
        )
    nvlink, port = wire_gb(job, mesh)
    waiting = bubble(mesh.pp, mesh.virtual_stages)
    return [
        *lines,
        f"  exposed      TP {s['TP']:.3f} s (overlap {stack.tp_overlap:g}), CP {s['CP']:.3f} s,"
        f" DP {s['DP']:.3f} s (overlap {stack.dp_overlap:g})",
        f"  bubble       (pp - 1) / v = {waiting:g} micro-batches of a mean stage:"
        f" {s['bubble']:.3f} s; sending to the next stage: {s['p2p']:.3f} s",
        f"  optimizer    30 bytes per weight / HBM + {stack.fixed_s:g} s = {s['optimizer']:.3f} s",
        f"  step         {plan.step_s:.3f} s: {tokens_per_second(job, plan):,.0f} tokens/s per GPU,"
        f" MFU {100 * mfu(job, plan):.1f} %",
        f"  wires        {nvlink:.1f} GB on a GPU's links in its node, {port:.1f} GB on its port",
        f"  limited by   {limit(job, plan)}",
    ]


def explanation(job: Job, plan: Plan) -> list[str]:
    """Each number of a plan with its formula filled in."""
    title = f"{name(plan.mesh)}: {batch(plan.mesh)} (micro-batch x accumulation, ZeRO stage)"
    return [title, "", *explain_memory(job, plan), *explain_time(job, plan)]
