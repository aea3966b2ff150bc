r"""Measure speed (MFU), traffic and memory of train.py's step on a list of meshes, in one run.

    torchrun --standalone --nproc_per_node=2 transformer_basics/benchmark.py
    torchrun --standalone --nproc_per_node=4 transformer_basics/benchmark.py --size medium \
        --mesh dp_shard=4 --mesh "dp_shard=2 tp=2" --mesh "pp=2 tp=2"
    torchrun --standalone --nproc_per_node=8 transformer_basics/benchmark.py --size 124M \
        --precision bf16 --compile --batch-size 16                         # on 8 GPUs

Look at MFU (model FLOP/s utilization), the fraction of the device's peak that goes into training.
Small layers, communication and waiting take the other time: the other columns say which of them.
MFU = tokens/s x FLOP per token / (ranks x measured matmul peak of one rank), where
FLOP per token = 6 x weights that are multiplied with + 12 x layers x tokens x width (attention).
"""

import math
import os
import statistics
import time

import torch
import torch.distributed as dist
from activation_checkpointing import CHECKPOINTING
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least, between
from config import AXES, PRECISIONS, SHAPE, Settings
from counting_by_axis import CountByAxis
from data import batch_part
from flops import matmul_peak, wait
from model import GPTConfig, initialize
from optimizer import make_optimizer
from parallelize import spread_model
from presets import PRESETS, SMOLLM2, VOCABULARIES
from runtime import Worker, distributed_worker
from step import train_step
from torch.distributed.elastic.multiprocessing.errors import record

SIZES = {  # a model, and its sequences per rank
    "tiny": (GPTConfig(256, 64, 2, 4, 64), 2),
    "small": (GPTConfig(256, 256, 4, 4, 128), 8),
    "medium": (GPTConfig(256, 256, 6, 6, 384), 4),
    "large": (GPTConfig(256, 256, 16, 8, 512), 2),
    "llama": (GPTConfig(256, 256, 6, 6, 384, kv_heads=2, mlp_dim=1024, **SMOLLM2), 4),
    "124M": (GPTConfig(50304, 1024, 12, 12, 768), 8),
    "350M": (GPTConfig(50304, 1024, 24, 16, 1024), 8),
    "1B": (GPTConfig(50304, 1024, 16, 16, 2048), 8),
}
SIZES |= {  # rows of the embedding: a multiple of 64, as train.py pads them
    name: (GPTConfig(-(-VOCABULARIES[name] // 64) * 64, **PRESETS[name]), 2) for name in PRESETS
}


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    torch.set_float32_matmul_precision("high")  # as train.py
    runs = {
        mesh: MeshRun(mesh, args, worker) for mesh in args.mesh or usual(worker.world_size, args)
    }
    samples = {mesh: [] for mesh in runs}
    for i in range(args.repeats + 1):
        for mesh in list(runs) if i % 2 else list(runs)[::-1]:
            rate = runs[mesh].tokens_per_second(args.steps)
            if i:  # the first round warms up
                samples[mesh].append(rate)
    counts = {mesh: run.counted() for mesh, run in runs.items()}
    peak = matmul_peak(worker.device, PRECISIONS[args.precision])
    if not worker.is_main:
        return
    config, batch = config_of(args.size), batch_size(args, worker.world_size)
    flops = config.flops_per_token(config.block_size)
    print(f"{args.size}: {config}, batch {batch}, {args.precision}")
    print(f"{flops:,} FLOP per token; matmul peak of a rank {peak / 1e9:.1f} GFLOP/s")
    print(f"{'mesh':28}{'tokens/s: median (min ... max)':34}{'MFU':>5}", end="")
    print(f"{'calls':>7}{'MB sent':>9}{'MB held':>9}")
    for mesh, rates in samples.items():
        rate, (calls, sent, held) = statistics.median(rates), counts[mesh]
        spread = f"{rate:,.0f} ({min(rates):,.0f} ... {max(rates):,.0f})"
        mfu = rate * flops / peak / worker.world_size
        print(f"{mesh:28}{spread:34}{mfu:5.0%}{calls:7}{sent / 1e6:9.2f}{held / 1e6:9.2f}")
    print("calls, MB sent: rank 0, a step, in rings. MB held: parameters, gradients, optimizer.")


class MeshRun:
    """A model and its optimizer on one mesh, sharded as in train.py, and a batch of random tokens.

    args: size, batch_size, precision, fp8, clip, activation_checkpointing, compile, keep_gathered,
        sequence_parallel.
    """

    def __init__(self, mesh: str, args, worker: Worker):
        config, batch = config_of(args.size), batch_size(args, worker.world_size)
        self.settings = settings_of(mesh, args, worker.world_size)
        self.worker = worker
        self.mesh, self.model, self.pipeline = spread_model(config, self.settings, worker.device)
        initialize(self.model, seed=0)
        self.optimizer = make_optimizer(self.model, self.settings)
        part, parts = batch_part(self.mesh)
        generator = torch.Generator().manual_seed(0)
        shape = (batch, config.block_size + 1)
        tokens = torch.randint(config.vocab_size, shape, generator=generator)
        tokens = tokens[part::parts].to(worker.device)
        self.batch, self.tokens = (tokens[:, :-1], tokens[:, 1:]), batch * config.block_size

    def step(self) -> None:
        train_step(self.model, self.pipeline, *self.batch, self.optimizer, self.mesh, self.settings)

    def tokens_per_second(self, steps: int) -> float:
        """Tokens per second of all ranks, from a common start to the end of the last rank."""
        dist.barrier()
        started = wait(self.worker.device)
        for _ in range(steps):
            self.step()
        wait(self.worker.device)
        dist.barrier()
        return steps * self.tokens / (time.perf_counter() - started)

    def counted(self) -> tuple[int, int, int]:
        """Calls and bytes sent in one step by this rank; bytes that it holds between steps."""
        with CountByAxis(self.mesh) as sent:
            self.step()
        over = [sent.over(axis) for axis in sent.sizes]
        held = [p.to_local() for p in self.model.parameters()]
        held += [p.grad.to_local() for p in self.model.parameters() if p.grad is not None]
        for state in self.optimizer.state.values():
            held += [t.to_local() for t in state.values() if hasattr(t, "to_local")]
        return sum(c for c, _ in over), sum(b for _, b in over), sum(t.nbytes for t in held)


def settings_of(mesh: str, args, ranks: int) -> Settings:
    """train.py's settings for this mesh. Raises `UserError` if it does not fit the model."""
    config, axes = config_of(args.size), dict.fromkeys(AXES, 1) | parse_mesh(mesh)
    return Settings(
        **{name: getattr(config, name) for name in SHAPE},
        batch_size=batch_size(args, ranks),
        accumulate=2 * axes["pp"] if axes["pp"] > 1 else 1,
        lr=1e-4,
        clip=args.clip,
        precision=args.precision,
        fp8=args.fp8,
        activation_checkpointing=args.activation_checkpointing,
        compile=args.compile,
        keep_gathered=args.keep_gathered,
        sequence_parallel=args.sequence_parallel and axes["tp"] > 1,
        loss_parallel=axes["tp"] > 1,
        **axes,
    ).on(ranks)


def usual(ranks: int, args) -> list[str]:
    """Each axis alone with all ranks, if the model divides by them, and dp_shard with tp=2."""
    meshes = [f"dp_replicate={ranks}", f"dp_shard={ranks}"]
    config = config_of(args.size)
    if ranks > 1 and config.heads % ranks == 0:
        meshes.append(f"tp={ranks}")
    if 1 < ranks <= config.layers:
        meshes.append(f"pp={ranks}")
    if ranks > 2 and ranks % 2 == 0 and config.heads % 2 == 0:
        meshes.append(f"dp_shard={ranks // 2} tp=2")
    return meshes


def config_of(size: str) -> GPTConfig:
    return SIZES[size][0]


def batch_size(args, ranks: int) -> int:
    return args.batch_size or SIZES[args.size][1] * ranks


def parse_mesh(text: str) -> dict[str, int]:
    """ "dp_shard=2 tp=2" -> {"dp_shard": 2, "tp": 2}. Raises `UserError` for anything else."""
    try:
        axes = {name: int(size) for name, size in (part.split("=") for part in text.split())}
    except ValueError:
        axes = {}
    if not axes or set(axes) - set(AXES) or min(axes.values()) < 1:
        raise UserError(f"--mesh {text!r} is not like 'dp_shard=2 tp=2' (axes: {', '.join(AXES)})")
    return axes


def parse_args():
    parser = ArgumentParser(description="Speed, traffic and memory of a GPT on a list of meshes.")
    add = parser.add_argument
    add("--size", choices=SIZES, default="small", help="a GPT or Llama of that size, or a preset")
    add("--mesh", action="append", help="a mesh such as 'dp_shard=2 tp=2'; may be repeated")
    add("--batch-size", type=at_least(1), help="sequences per step, over all ranks")
    add("--clip", type=between(0, math.inf), default=1.0, help="clip the gradient norm (0: never)")
    add("--precision", choices=PRECISIONS, default="fp32", help="dtype of matmuls")
    add("--fp8", action="store_true", help="multiply in fp8 in the linear layers of the blocks")
    add("--activation-checkpointing", **CHECKPOINTING)
    add("--compile", action="store_true", help="torch.compile each block")
    add("--sequence-parallel", action="store_true", help="shard tokens between layers, if tp > 1")
    add("--keep-gathered", action="store_true", help="do not gather again in backward (ZeRO-2)")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    add("--steps", type=at_least(1), default=2, help="steps per sample")
    add("--repeats", type=at_least(1), default=3, help="samples per mesh")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    for mesh in args.mesh or ():
        try:
            axes = parse_mesh(mesh)
        except UserError as error:
            parser.error(str(error))
        if math.prod(axes.values()) != ranks:
            parser.error(f"--mesh {mesh!r} does not multiply to the {ranks} rank(s) of this job")
    return args


if __name__ == "__main__":
    main()
