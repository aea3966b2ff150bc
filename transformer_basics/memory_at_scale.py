r"""Bytes per rank on a mesh of 1,024 ranks, computed in one process without memory: a dry run.

    python transformer_basics/memory_at_scale.py                          # rank 0
    python transformer_basics/memory_at_scale.py --rank 1023              # of the last stage
    python transformer_basics/memory_at_scale.py --ranks 64 --pp 1 --tp 8 --dp-shard 8 \
        --layers 32 --heads 32 --dim 4096

The model is spread as train.py spreads it, by the same functions. Fake tensors have shapes, dtypes
and devices, but no memory. The fake process group has 1,023 other ranks that send nothing: its
collectives return at once. So the program takes a real training step in every respect but numbers.

Look at the two columns. The bytes are those of the tensors that exist after the step; the formula
counts the rows and columns of a GPT by hand. Try --pp 1 or --dp-shard 1 before you rent a cluster.
(Not counted: activations, gathered parameters and other temporary memory. With --pp a stage keeps
its gradients unsharded until its last micro-batch: --dp-shard x --cp times the line "gradients".)
"""

import argparse
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from arguments import ArgumentParser, UserError, at_least
from closed_pipe import quiet_if_closed
from config import AXES, Settings
from model import GPT, GPTConfig, cross_entropy
from optimizer import make_optimizer
from parallelize import materialize, shard_model
from presets import PRESETS, VOCABULARIES
from stages import stage_layers
from step import clip_gradients
from torch._subclasses.fake_tensor import FakeTensorMode  # there is no public name for it
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

# Importing it makes the backend "fake" known: there is no public way.
from torch.testing._internal.distributed import fake_pg  # noqa: F401

GIB = 2**30


@record
@quiet_if_closed()
def main() -> None:
    args, settings = parse_args()
    config = settings.model(args.vocab_size)
    dist.init_process_group("fake", store=dist.HashStore(), rank=args.rank, world_size=args.ranks)
    mesh = init_device_mesh("cpu", settings.mesh_shape(), mesh_dim_names=AXES)
    stage = mesh["pp"].get_local_rank()
    model = shard_model(config, settings, mesh, stage)
    # The mesh was made before: it keeps its table of ranks in a tensor, which must have numbers.
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialize(model, torch.device("cpu"))
        optimizer = make_optimizer(model, settings)
        take_step(model, optimizer, mesh, settings)
    place = ", ".join(f"{axis} {i}" for axis, i in zip(AXES, mesh.get_coordinate(), strict=True))
    layers = stage_layers(config, settings.pp)[stage]
    print(f"rank {args.rank} of {args.ranks}: {place}; layers {layers.start} to {layers.stop - 1}")
    report(measure(model, optimizer), formula(config, settings, mesh))
    dist.destroy_process_group()


def take_step(
    model: GPT, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, settings: Settings
) -> None:
    """One micro-batch of one sequence through this stage alone, and the optimizer's step.

    The hidden states of the previous stage, and the gradients of the next one, are made up.
    """
    tokens = torch.zeros(1, settings.block_size // settings.cp, dtype=torch.int64)
    tokens_here = tokens.shape[1] // (settings.tp if settings.sequence_parallel else 1)
    hidden = torch.zeros(1, tokens_here, settings.dim, requires_grad=True)
    with loss_parallel() if settings.loss_parallel else nullcontext():
        out = model(tokens if model.is_first else hidden)
        (cross_entropy(out, tokens) if model.is_last else out.sum()).backward()
    clip_gradients(model, settings.clip, mesh)
    optimizer.step()


def measure(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of the tensors that this rank holds between two steps."""

    def nbytes(tensor: torch.Tensor) -> int:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.numel() * local.element_size()

    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return {
        "parameters": sum(nbytes(p) for p in model.parameters()),
        "gradients": sum(nbytes(p.grad) for p in model.parameters()),
        "optimizer state": sum(nbytes(tensor) for tensor in states),
    }


def formula(config: GPTConfig, settings: Settings, mesh: DeviceMesh) -> dict[str, int]:
    """The same bytes from the shapes of a GPT: float32, AdamW, the mesh of `settings`.

    pp chooses layers. tp divides the rows of a column-parallel weight (out, in), and the columns of
    a row-parallel one. dp_shard x cp divides the rows that are left: rounded up, so that the last
    ranks may have fewer. dp_replicate divides nothing.
    """
    tp, shards, width = settings.tp, settings.dp_shard * settings.cp, config.dim
    queries, keys = config.heads * config.head_dim // tp, config.kv_heads * config.head_dim
    keys //= tp if config.kv_heads % tp == 0 else 1  # fewer heads than ranks: each has all
    mlp, is_llama = config.mlp_dim // tp, config.is_llama
    layers = stage_layers(config, settings.pp)[mesh["pp"].get_local_rank()]
    # (rows, columns) on each tp rank
    block = [(queries, width), (keys, width), (keys, width), (mlp, width)]  # value, then expand
    block += [(width, queries), (width, mlp)]  # out, contract
    if is_llama:
        block += [(mlp, width)] + [(width, 1)] * 2  # gate; two norms
        block += [(queries, 1), (keys, 1), (keys, 1)] if config.qkv_bias else []
    else:
        block += [(queries, 1), (keys, 1), (mlp, 1)]  # biases: query, value; expand
        block += [(width, 1)] * 6  # two norms, with a weight and a bias; biases: out, contract
    block += [(config.head_dim, 1)] * 2 if config.qk_norm else []
    tensors = block * len(layers)
    if layers.start == 0:  # embeddings
        positions = config.block_size // (tp if settings.sequence_parallel else 1)
        tensors += [(config.vocab_size // tp, width)] + [(positions, width)] * (not is_llama)
    if layers.stop == config.layers:  # norm, head
        tensors += [(width, 1)] * (1 if is_llama else 2)
        has_own = not config.tied or layers.start > 0  # a tied stage of its own has a copy
        tensors += [(config.vocab_size // tp, width)] * has_own
    shard = mesh["dp_shard"].get_local_rank() * settings.cp + mesh["cp"].get_local_rank()
    numbers = 0
    for rows, columns in tensors:
        most = math.ceil(rows / shards)
        numbers += max(0, min(most, rows - shard * most)) * columns
    return {
        "parameters": 4 * numbers,
        "gradients": 4 * numbers,
        "optimizer state": 8 * numbers + 4 * len(tensors),  # two means, and a count of steps
    }


def report(measured: dict[str, int], expected: dict[str, int]) -> None:
    print(f"\n{'':16}{'bytes':>16}{'formula':>16}{'GiB':>8}")
    rows = {name: (measured[name], expected[name]) for name in measured}
    rows["sum"] = tuple(map(sum, zip(*rows.values(), strict=True)))
    for name, (found, wanted) in rows.items():
        print(f"{name:16}{found:16,}{wanted:16,}{found / GIB:8.2f}")


def parse_args():
    parser = ArgumentParser(description="Bytes per rank on a large mesh, in one process.")
    add = parser.add_argument
    add("--ranks", type=at_least(1), default=1024, help="ranks of the job (default: 1024)")
    add("--rank", type=at_least(0), default=0, help="the rank to compute (default: 0)")
    add("--pp", type=at_least(1), default=8, help="pipeline stages (default: 8)")
    replicas = "replicas (default: ranks / (pp x dp-shard x cp x tp))"
    add("--dp-replicate", type=at_least(1), help=replicas)
    add("--dp-shard", type=at_least(1), default=8, help="FSDP shards per replica (default: 8)")
    add("--cp", type=at_least(1), default=1, help="context-parallel shards (default: 1)")
    add("--tp", type=at_least(1), default=8, help="tensor-parallel shards (default: 8)")
    add("--preset", choices=PRESETS, help="the shape of this model; other flags override it")
    tied = "use the token embedding's weight in the head"
    add("--tied", action=argparse.BooleanOptionalAction, default=False, help=tied)
    add("--layers", type=at_least(1), default=96, help="blocks (default: 96, as GPT-3)")
    add("--heads", type=at_least(1), default=96, help="attention heads (default: 96, as GPT-3)")
    add("--dim", type=at_least(1), default=12288, help="width of the model (default: 12288)")
    add("--block-size", type=at_least(1), default=2048, help="tokens per sequence (default: 2048)")
    add("--vocab-size", type=at_least(1), default=50304, help="embedding rows (default: 50304)")
    args = parser.parse_args()
    if args.preset:
        vocabulary = VOCABULARIES[args.preset]
        parser.set_defaults(**PRESETS[args.preset], vocab_size=vocabulary)
        args = parser.parse_args()
    if args.rank >= args.ranks:
        parser.error(f"--rank {args.rank}: the ranks are 0 to {args.ranks - 1}")
    chosen = {name: value for name, value in vars(args).items() if name in Settings.__annotations__}
    is_tp = args.tp > 1
    try:
        settings = Settings(
            **chosen, batch_size=args.ranks, sequence_parallel=is_tp, loss_parallel=is_tp
        ).on(args.ranks)
    except UserError as error:
        parser.error(str(error))
    if args.vocab_size % args.tp:
        parser.error(f"--vocab-size {args.vocab_size} does not divide by --tp {args.tp}")
    return args, settings


if __name__ == "__main__":
    main()
