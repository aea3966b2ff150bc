"""The command line of transformer_basics/train.py that trains a plan."""

from inputs import UserError
from search import Job, Plan
from shapes import Mesh, Model


def flags(job: Job, plan: Plan) -> str:
    """torchrun and train.py with the flags of a plan.

    The vocabulary is that of --data and --tokenizer, which you add. train.py has a flash kernel;
    with --cp on GPUs it is torch's, which sends the keys and values of all heads.
    Its selective checkpointing keeps every matrix product: torchtitan keeps every second one.
    Raises UserError: train.py cannot train this plan.
    """
    mesh = plan.mesh
    node = min(job.gpus, int(job.cluster.gpus_per_node))
    if not plan.fits:
        raise UserError("--flags: the plan does not fit, so there is no command that trains it")
    if job.gpus % node:
        raise UserError(
            f"--flags: {job.gpus} GPUs do not fill nodes of {node}: torchrun needs that"
        )
    if mesh.accumulation < mesh.pp:
        raise UserError(
            f"--flags: {mesh.accumulation} micro-batches do not fill {mesh.pp} pipeline stages: "
            "train.py needs as many"
        )
    if mesh.cp > 1 and mesh.selective_checkpointing:
        raise UserError("--flags: train.py has no selective checkpointing with --cp")
    several = f"--nnodes={job.gpus // node} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
    parts = [
        f"torchrun {'--standalone' if node == job.gpus else several} --nproc_per_node={node}",
        "transformer_basics/train.py",
        *shape(job.model),
        f"--block-size {job.sequence} --batch-size {job.batch} --accumulate {mesh.accumulation}",
        *axes(mesh),
    ]
    if mesh.full_checkpointing or mesh.selective_checkpointing:
        mode = "full" if mesh.full_checkpointing else "selective"
        parts.append(f"--activation-checkpointing {mode}")
    parts += ["--tied"] * bool(job.model.tied)
    is_gpu = job.cluster.peak_tflops > 50
    parts += ["--cp-kernel torch"] * (is_gpu and mesh.cp > 1)
    parts += ["--precision bf16"] * is_gpu + ["--fp8"] * bool(job.fp8)
    return " ".join(parts)


def shape(model: Model) -> list[str]:
    """The flags of a model; without those that have train.py's default."""
    parts = ["--architecture llama"] if model.gated else []
    parts.append(f"--layers {model.layers} --dim {model.width} --heads {model.heads}")
    for flag, size, default in (
        ("--kv-heads", model.kv_heads, model.heads),
        ("--head-dim", model.head_dim, model.width // model.heads),
        ("--mlp-dim", model.ffn, 4 * model.width),
    ):
        parts += [f"{flag} {size}"] * (size != default)
    return parts


def axes(mesh: Mesh) -> list[str]:
    """The flags of a mesh. ZeRO-1 is FSDP that gathers and reduces once per step, as train.py's
    --keep-gathered and --reduce-once do: the optimizer alone is sharded during a step.
    """
    sizes = {"dp-replicate": mesh.dp_replicate, "dp-shard": mesh.dp_shard}
    zero_1 = mesh.zero_stage == 1
    if zero_1:
        sizes = {"dp-replicate": 1, "dp-shard": mesh.dp_replicate * mesh.dp_shard}
    sizes = {"pp": mesh.pp} | sizes | {"tp": mesh.tp}
    parts = [f"--{axis} {size}" for axis, size in sizes.items()]
    parts += ["--keep-gathered --reduce-once"] * zero_1
    parts += [f"--cp {mesh.cp}"] * (mesh.cp > 1)
    parts += ["--sequence-parallel"] * bool(mesh.sequence_parallel)
    parts += ["--loss-parallel"] * (mesh.tp > 1)  # memory.py counts the logits of one rank
    if mesh.virtual_stages > 1:
        parts.append(f"--schedule interleaved --stages-per-rank {mesh.virtual_stages}")
    return parts
