"""All meshes of some GPUs, with their memory and their step time, the best first."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from inputs import UserError
from memory import fits, memory_parts
from shapes import Cluster, Mesh, Model
from stacks import Stack
from step_time import step_parts

SIZES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
LONG = 8192  # tokens that a rank holds of a sequence, at least, under context parallelism


@dataclass(frozen=True)
class Job:
    """What is to be planned."""

    model: Model
    cluster: Cluster
    stack: Stack
    gpus: int
    sequence: int
    batch: int  # sequences of a step, all ranks together
    fp8: int = 0
    flash: int = 1  # 0: attention without a fused kernel, as before 2023


@dataclass(frozen=True)
class Plan:
    """A mesh with what the formulas say of it."""

    mesh: Mesh
    memory_gib: dict[str, float]
    seconds: dict[str, float]
    fits: bool

    @property
    def total_gib(self) -> float:
        return sum(self.memory_gib.values())

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def splits(layers: int, stages: int) -> bool:
    """Whether the stages get equal numbers of layers, embedding and output layer counted or not."""
    return layers % stages == 0 or (layers + 2) % stages == 0


def data_parallel(ranks: int, per_node: int, cp: int, pp: int) -> list[tuple[int, int, int]]:
    """(dp_replicate, dp_shard, ZeRO stage): DDP, ZeRO-1, FSDP, and HSDP whose shards fill nodes.

    Context-parallel ranks hold the same weights: they share them, too, so there is no DDP. In a
    pipeline FSDP would be ZeRO-1: to gather for each micro-batch costs too much, so weights stay
    gathered for a step, and gradients whole. [as train.py, torchtitan]
    """
    if ranks * cp == 1:
        return [(1, 1, 0)]
    fill = [n for n in divisors(ranks) if n * cp > 1 and n * cp % per_node == 0]
    shards = sorted({*fill, ranks})
    fsdp = [(ranks // n, n, 3) for n in shards if pp == 1]
    return [(ranks, 1, 0)] * (cp == 1) + [(ranks, 1, 1), *fsdp]


def checkpointing(job: Job) -> list[tuple[int, int]]:
    """(full, selective) activation checkpointing: none, full, and selective if that saves memory.

    With a flash kernel there are no scores to save; torchtitan then saves other operations.
    """
    saves = not job.flash or job.stack.selective_bytes < 1
    return [(0, 0), (1, 0), (0, 1)] if saves else [(0, 0), (1, 0)]


def meshes(job: Job) -> list[Mesh]:
    """All meshes that the job can run on, with their batches and what they recompute.

    TP stays inside a node; groups of TP with CP fill nodes or share one evenly, as do stages of
    fewer GPUs than a node. Stages may differ by a layer.
    """
    model, node = job.model, min(job.gpus, int(job.cluster.gpus_per_node))

    def fills(size: int) -> bool:
        return size == job.gpus or size % node == 0 or node % size == 0

    found = []
    shapes = [
        (tp, pp, cp)
        for tp in divisors(job.gpus)
        if node % tp == 0
        and not any(size % tp for size in (model.heads, model.kv_heads, model.ffn))
        for pp in divisors(job.gpus // tp)
        if pp <= model.layers and (job.gpus // pp > node or fills(job.gpus // pp))
        for cp in divisors(job.gpus // (tp * pp))
        if cp == 1 or (job.sequence % (2 * cp) == 0 and cp <= job.sequence // LONG)
        if fills(tp * cp)
    ]
    for tp, pp, cp in shapes:
        ranks = job.gpus // (tp * pp * cp)
        if job.batch % ranks:
            continue
        per_rank = job.batch // ranks
        interleaved = [1] + [v for v in range(2, 8) if pp > 1 and splits(model.layers, pp * v)]
        for micro_batch in (b for b in divisors(per_rank) if b & (b - 1) == 0 and b <= 64):
            accumulation = per_rank // micro_batch
            for virtual in interleaved if accumulation % pp == 0 else (1,):
                for replicate, shard, zero in data_parallel(ranks, node // tp, cp, pp):
                    axes = (replicate, shard, zero, tp, int(tp > 1), pp, virtual, cp)
                    for saving in checkpointing(job):
                        batch = (micro_batch, accumulation, job.sequence, *saving)
                        found.append(Mesh(*axes, *batch, job.flash, job.fp8))
    return found


def nearest_gpus(job: Job) -> int | None:
    """The nearest number of GPUs that some mesh fills."""
    for away in range(1, job.gpus + 1):
        for gpus in (job.gpus - away, job.gpus + away):
            if gpus > 0 and meshes(dataclasses.replace(job, gpus=gpus)):
                return gpus
    return None


def evaluate(job: Job, candidates: list[Mesh]) -> list[Plan]:
    """Memory and time of each mesh."""
    names = [field.name for field in dataclasses.fields(Mesh)]
    table = np.array([[getattr(mesh, name) for name in names] for mesh in candidates], float)
    many = Mesh(**dict(zip(names, table.T, strict=True)))
    size = len(candidates)

    def rows(parts: dict) -> tuple[list[str], np.ndarray]:
        return list(parts), np.stack([np.broadcast_to(v, size) for v in parts.values()], axis=1)

    memory_names, memory = rows(memory_parts(job.model, many, job.stack))
    time_names, seconds = rows(step_parts(job.model, many, job.cluster, job.stack))
    good = fits(job.model, many, job.cluster, job.stack)
    return [
        Plan(
            mesh,
            dict(zip(memory_names, held.tolist(), strict=True)),
            dict(zip(time_names, spent.tolist(), strict=True)),
            bool(ok),
        )
        for mesh, held, spent, ok in zip(candidates, memory, seconds, good, strict=True)
    ]


def by_time(plan: Plan) -> tuple[float, float]:
    """Sorts plans: the faster first, and of equally fast ones the one that holds less."""
    return round(plan.step_s, 9), plan.total_gib


def best(job: Job, wanted: int = 10) -> list[Plan]:
    """The fastest meshes that fit, one plan for each mesh; where none fits, the smallest.

    Raises UserError: no mesh fills these GPUs with this batch.
    """
    candidates = meshes(job)
    if not candidates:
        other = nearest_gpus(job)
        raise UserError(
            f"no mesh of {job.gpus} GPUs splits {job.batch} sequences and {job.model.heads} heads"
            + (f": the nearest number of GPUs that works is {other}" if other else "")
        )
    plans = evaluate(job, candidates)
    fitting = [plan for plan in plans if plan.fits]
    ranked = sorted(fitting, key=by_time) or sorted(plans, key=lambda p: p.total_gib)
    chosen = {}
    for plan in ranked:
        chosen.setdefault(tuple(getattr(plan.mesh, size) for size in SIZES), plan)
    return list(chosen.values())[:wanted]
