"""What plan.py prints: tables, the derivation of a mesh, what limits it, what no row backs."""

from dataclasses import replace

from memory import GIB, USABLE, in_flight
from network import Ring
from search import Job, Plan
from shapes import Mesh
from step_time import (
    attention_s,
    cp_ring,
    dp_rings,
    forward_units,
    fsdp_rings,
    kept_bytes,
    launch_s,
    model_flop,
    p2p_bytes,
    products_s,
    stage_layers,
    stage_parameters,
    tp_ring,
    traffic_s,
)

MFU = "6 FLOP per weight and token + 12 L s a d for attention, recomputation not counted (PaLM)"


def name(mesh: Mesh) -> str:
    """A mesh as --explain reads it, without the sizes that are 1."""
    dp = f"{mesh.dp_replicate:g}x{mesh.dp_shard:g}"
    sizes = [f"dp={dp}"] + [f"{k}={getattr(mesh, k):g}" for k in ("tp", "pp", "cp")]
    sizes = [size for size in sizes if not size.endswith("=1") and size != "dp=1x1"]
    return ",".join(sizes) or "one GPU"


def batch(mesh: Mesh) -> str:
    """Micro-batch, accumulation, ZeRO stage, interleaving and recomputation in a few letters."""
    parts = [f"{mesh.micro_batch:g}x{mesh.accumulation:g}", f"z{mesh.zero_stage:g}"]
    if mesh.virtual_stages > 1:
        parts.append(f"v{mesh.virtual_stages:g}")
    if mesh.full_checkpointing:
        parts.append("ckpt")
    return " ".join(parts)


def tokens_per_second(job: Job, plan: Plan) -> float:
    """Tokens per second and GPU."""
    return job.batch * job.sequence / plan.step_s / job.gpus


def mfu(job: Job, plan: Plan) -> float:
    """Model FLOP/s over the peak of the GPUs, see MFU; fp8 runs are measured by bf16's peak."""
    peak = job.gpus * job.cluster.peak_tflops * 1e12
    return float(model_flop(job.model, plan.mesh)) / plan.step_s / peak


def rings(job: Job, mesh: Mesh) -> dict[str, Ring]:
    """Every ring of a step, with how often a GPU of a mean stage takes part in it."""
    layers = job.model.layers / mesh.pp
    m = mesh.accumulation
    found = {
        "TP": (tp_ring(job.model, mesh), m * layers),
        "CP": (cp_ring(job.model, mesh), m * layers),
    }
    if mesh.zero_stage == 3:
        layer = fsdp_rings(job.model, mesh, job.stack)
        found["FSDP gather"] = (layer["gather"], 2 * m * layers)
        found["FSDP scatter"] = (layer["scatter"], m * layers)
        found["replicas"] = (layer["replicas"], m * layers)
        found["FSDP tables"] = (layer["tables"], m)
    else:
        gradients, weights = dp_rings(job.model, mesh, job.stack)
        found["DP gradients"], found["DP weights"] = (gradients, 1), (weights, 1)
    return {
        key: replace(r, count=r.count * times) for key, (r, times) in found.items() if r.size > 1
    }


def wire_gb(job: Job, mesh: Mesh) -> tuple[float, float]:
    """GB of a step on the links of a GPU in its node, and on its network port."""
    nvlink, port = 0.0, 0.0
    for ring in rings(job, mesh).values():
        parts = ring.bytes_on_wires(job.cluster)
        nvlink, port = nvlink + float(parts[0]), port + float(parts[1])
    p2p = float(mesh.accumulation * p2p_bytes(job.model, mesh))
    if 2 * mesh.gpus / mesh.pp <= job.cluster.gpus_per_node:
        nvlink += p2p
    else:
        port += p2p
    return nvlink / 1e9, port / 1e9


def limit(job: Job, plan: Plan) -> str:
    """The largest part of the step, by what would make it shorter."""
    largest = max(plan.seconds, key=plan.seconds.get)
    if largest in ("TP", "DP", "CP"):
        for key, ring in rings(job, plan.mesh).items():
            if key.startswith({"DP": ("DP", "FSDP", "rep")}.get(largest, largest)):
                bandwidth = float(ring.seconds(job.cluster, 0))
                inside = ring.size <= ring.ranks_per_node(job.cluster)
                if ring.seconds(job.cluster, job.stack.hop_s) > 2 * bandwidth:
                    return f"{largest}: latency"
                return f"{largest}: {'links in the node' if inside else 'network port'}"
    names = {
        "compute": "matrix products",
        "traffic": "HBM",
        "launch": "host",
        "p2p": "network port",
    }
    return names.get(largest, largest)


def doubts(job: Job, plan: Plan, stack_name: str, known: dict, gpu: str) -> list[str]:
    """What no published row backs."""
    mesh = plan.mesh
    found = []
    if known.get("calibrated"):
        found.append(f"{stack_name} (calibrated; no published run)")
    elif not known.get("rows"):
        found.append(f"{stack_name} (no rows: all constants are guesses)")
    elif gpu not in known["ran_on"]:
        found.append(f"{gpu} (the rows ran on {', '.join(known['ran_on'])})")
    if known.get("rows"):
        counts = known["gpu_counts"]
        if job.gpus > counts[-1]:
            found.append(f"{job.gpus} GPUs (the rows end at {counts[-1]})")
        if mesh.zero_stage not in known["zero_stages"]:
            found.append(f"ZeRO stage {mesh.zero_stage} with this software")
        for axis in ("tp", "pp", "cp"):
            size, most = getattr(mesh, axis), known[axis][-1]
            if size > most:
                found.append(f"{axis} = {size} (the rows end at {most})")
        if mesh.zero_stage == 3 and mesh.pp > 1:
            found.append("FSDP inside a pipeline")
    if mesh.cp > 1 and job.sequence > 65536:
        found.append("context parallelism beyond 64k tokens")
    if job.model.head_dim % 8:
        found.append(f"head_dim {job.model.head_dim} (no multiple of 8: attention is far slower)")
    return found


PARTS = {  # of a step, as the table orders and names them
    "compute": "compute",
    "traffic": "HBM",
    "launch": "host",
    "TP": "TP",
    "CP": "CP",
    "DP": "DP",
    "bubble": "bubble",
    "p2p": "p2p",
    "optimizer": "optim",
}


def table(job: Job, plans: list[Plan]) -> list[str]:
    """The plans: memory by part, time by part, bytes by wire."""
    width = max(len(name(plan.mesh)) for plan in plans)
    held = ("param", "grad", "optim", "act", "logits", "other")
    lines = [
        f" #  {'mesh':{width}}  {'micro-batches':17}"
        + "".join(f"{x:>7}" for x in held)
        + "  = GiB",
    ]
    for i, plan in enumerate(plans, 1):
        parts = "".join(f"{value:7.1f}" for value in plan.memory_gib.values())
        total = f"{plan.total_gib:6.1f}" + ("" if plan.fits else "  does not fit")
        lines.append(f"{i:2d}  {name(plan.mesh):{width}}  {batch(plan.mesh):17}{parts} ={total}")
    labels = "".join(f"{label:>8}" for label in PARTS.values())
    lines += ["", f" #  {labels}  = step s  tok/s/GPU  MFU  limited by"]
    for i, plan in enumerate(plans, 1):
        spent = "".join(f"{plan.seconds[part]:8.3f}" for part in PARTS)
        speed = f"{tokens_per_second(job, plan):10.0f}{100 * mfu(job, plan):4.0f}%"
        lines.append(f"{i:2d}  {spent}  ={plan.step_s:7.3f} {speed}  {limit(job, plan)}")
    lines += ["", " #  GB per step on the links of a GPU in its node, on its network port"]
    for i, plan in enumerate(plans, 1):
        nvlink, port = wire_gb(job, plan.mesh)
        lines.append(f"{i:2d}  {nvlink:44.1f}{port:21.1f}")
    return lines


def explain_memory(job: Job, plan: Plan) -> list[str]:
    """Memory, each formula filled in."""
    model, mesh, stack = job.model, plan.mesh, job.stack
    gib, tokens = plan.memory_gib, float(mesh.tokens)
    layers = float(stage_layers(model, mesh, stack)[0])
    weights = float(stage_parameters(model, mesh, layers))
    kept = float(kept_bytes(model, mesh))
    sharded = float(mesh.shards)
    by = [sharded if mesh.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    matrices, tables = 2 + model.gated, 2 - model.tied
    h, d, f, vocab = model.width, model.head_dim, model.ffn, model.vocab
    both = 2 * model.heads + 2 * model.kv_heads
    ten = "10 h / tp" if mesh.sequence_parallel else "10 h"
    one = f"{stack.activation_factor:g} x {kept:,.0f} bytes"
    if mesh.full_checkpointing:
        one = "2 h bytes (checkpointing), and one layer in full"
    logits = stack.logit_bytes * tokens * vocab / mesh.tp / GIB
    return [
        "WEIGHTS",
        f"  layer        h d (2a + 2k) + {matrices} h f = {h} x {d} x {both}"
        f" + {matrices} x {h} x {f} = {model.layer_parameters:,}",
        f"  model        {model.layers} layers + {tables} x {vocab} x {h} = {model.parameters:,}",
        f"  a rank       ({layers:g} layers + its tables) / tp {mesh.tp} = {weights:,.0f}",
        "",
        "MEMORY of the fullest GPU",
        f"  parameters   2 bytes x {weights:,.0f} / {by[0]:g} = {gib['parameters']:.2f} GiB",
        f"  gradients    {stack.resident_bytes - 2:g} bytes x {weights:,.0f} / {by[1]:g}"
        f" = {gib['gradients']:.2f} GiB",
        f"  optimizer    {stack.optimizer_bytes:g} bytes x {weights:,.0f} / {by[2]:g}"
        f" = {gib['optimizer']:.2f} GiB",
        f"  tokens       of a micro-batch and rank: b s / cp"
        f" = {mesh.micro_batch:g} x {mesh.sequence:g} / {mesh.cp:g} = {tokens:,.0f}",
        f"  kept         per token and layer: {ten} + (4 d (a + k) + {4 + 4 * model.gated} f"
        f"{'' if mesh.flash else ' + 5 a s'}) / tp = {kept:,.0f} bytes",
        f"  activations  {layers:g} layers x {float(in_flight(mesh)):g} micro-batches in flight x"
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
        f"  attention    {units:g} x {4 - 2 * mesh.flash} s a d x {tokens:,.0f} / tp {mesh.tp},"
        f" {stack.attention_cost:g} times as long per FLOP: {attention:.2f} ms per layer",
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
    bubble = (mesh.pp - 1) / mesh.virtual_stages
    return [
        *lines,
        f"  exposed      TP {s['TP']:.3f} s (overlap {stack.tp_overlap:g}), CP {s['CP']:.3f} s,"
        f" DP {s['DP']:.3f} s (overlap {stack.dp_overlap:g})",
        f"  bubble       (pp - 1) / v = {bubble:g} micro-batches of a mean stage:"
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


def flags(job: Job, plan: Plan) -> str:
    """The command line of transformer_basics/train.py for a plan. It has no CP and no DDP: FSDP."""
    mesh, model = plan.mesh, job.model
    replicate, shard = mesh.dp_replicate, mesh.dp_shard
    here = min(job.gpus, int(job.cluster.gpus_per_node))
    several = f"--nnodes={job.gpus // here} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
    parts = [
        f"torchrun {'--standalone' if here == job.gpus else several} --nproc_per_node={here}",
        "transformer_basics/train.py",
        f"--layers {model.layers} --dim {model.width} --heads {model.heads}",
        f"--block-size {job.sequence} --batch-size {job.batch} --accumulate {mesh.accumulation}",
        f"--pp {mesh.pp} --dp-replicate {replicate} --dp-shard {shard} --tp {mesh.tp}",
    ]
    if mesh.sequence_parallel:
        parts.append("--sequence-parallel")
    if mesh.full_checkpointing:
        parts.append("--activation-checkpointing")
    if model.tied:
        parts.append("--tied")
    if job.cluster.peak_tflops > 50:
        parts.append("--precision bf16")
    return " ".join(parts)
