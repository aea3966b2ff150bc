"""What plan.py prints: the tables, what limits a mesh, what no row backs."""

from dataclasses import replace

from network import Ring
from search import Job, Plan
from shapes import Mesh
from step_time import (
    cp_ring,
    dp_rings,
    fsdp_rings,
    model_flop,
    p2p_bytes,
    stages_share_a_node,
    tp_ring,
)

MFU = (
    "6 FLOP per weight and token + 12 L s a d for attention (a causal kernel computes half of\n"
    "them), recomputation not counted (PaLM), by the bf16 peak"
)


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
    if mesh.selective_checkpointing:
        parts.append("sel")
    return " ".join(parts)


def tokens_per_second(job: Job, plan: Plan) -> float:
    """Tokens per second and GPU."""
    return job.batch * job.sequence / plan.step_s / job.gpus


def mfu(job: Job, plan: Plan) -> float:
    """Model FLOP/s over the peak of the GPUs, see MFU; fp8 runs are measured by bf16's peak."""
    peak = job.gpus * job.cluster.peak_tflops * 1e12
    return float(model_flop(job.model, plan.mesh)) / plan.step_s / peak


def causal_mfu(job: Job, plan: Plan) -> float:
    """MFU that counts the causal half of attention only: what a flash kernel computes."""
    model, mesh = job.model, plan.mesh
    attention = 12 * model.layers * model.heads * model.head_dim * mesh.sequence * mesh.step_tokens
    return mfu(job, plan) * (1 - attention / 2 / float(model_flop(model, mesh)))


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
        found["FSDP tables"] = (layer["tables"], m)
        found["replicas"] = (layer["replicas"], layers)  # once per step
        found["rep. tables"] = (layer["replicas' tables"], 1)
    else:
        gradients, weights = dp_rings(job.model, mesh, job.stack)
        found["DP gradients"], found["DP weights"] = (gradients, 1), (weights, 1)
    return {
        key: replace(r, count=r.count * times) for key, (r, times) in found.items() if r.size > 1
    }


def wire_parts(job: Job, mesh: Mesh) -> dict[str, tuple[float, float]]:
    """GB of a step on the links of a GPU in its node, and on its network port, by what sends."""
    found = {}
    for key, ring in rings(job, mesh).items():
        found[key] = tuple(float(x) / 1e9 for x in ring.bytes_on_wires(job.cluster))
    if mesh.pp > 1:
        p2p = float(mesh.accumulation * p2p_bytes(job.model, mesh)) / 1e9
        inside = stages_share_a_node(mesh, job.cluster)
        found["PP"] = (p2p, 0.0) if inside else (0.0, p2p)
    return found


def wire_gb(job: Job, mesh: Mesh) -> tuple[float, float]:
    """GB of a step on the links of a GPU in its node, and on its network port."""
    parts = wire_parts(job, mesh).values()
    return sum(nvlink for nvlink, _ in parts), sum(port for _, port in parts)


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
    inside = stages_share_a_node(plan.mesh, job.cluster)
    names = {
        "compute": "matrix products",
        "traffic": "HBM",
        "launch": "host",
        "p2p": f"PP: {'links in the node' if inside else 'network port'}",
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
    if job.fp8 and "fp8_speed" not in known.get("fitted", ()):
        found.append("fp8 (no row with this software)")
    if mesh.cp > 1 and job.sequence > 65536:
        found.append("context parallelism beyond 64k tokens")
    if job.model.head_dim % 8:
        found.append(f"head_dim {job.model.head_dim} (no multiple of 8: attention is far slower)")
    return found


def doubts_by_line(
    job: Job, plans: list[Plan], stack_name: str, known: dict, gpu: str
) -> list[str]:
    """What no published row backs, with the lines of the table if it is not true of all."""
    lines = {}
    for i, plan in enumerate(plans, 1):
        for doubt in doubts(job, plan, stack_name, known, gpu):
            lines.setdefault(doubt, []).append(i)
    return [
        doubt + (f" (lines {', '.join(map(str, of))})" if len(of) < len(plans) else "")
        for doubt, of in lines.items()
    ]


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
