"""Measure how fast the GPT trains; the sides of every comparison take turns in one run.

    python benchmarks/gpt.py               # everything, about ten minutes; writes results/gpt.md
    python benchmarks/gpt.py --repeats 1 --sizes tiny --no-write     # a quick look

(a) one process, one thread: train.py's step, a bare loop, transformers' GPT-2; and MFU
(b) bf16 against fp32   (c) two data-parallel ranks against one; FSDP2 against DDP
(d) tensor parallelism on two ranks against one process with two threads (or one GPU)
"""

import argparse
import os
import statistics
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "transformer_basics"), str(ROOT / "benchmarks")]
sys.path.append(str(ROOT / "parallel_basics"))  # last: both directories have model.py, runtime.py
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank

import bench
import torch
from benchmark import SIZES, config_of
from flops import matmul_peak
from gpt_sides import alone, bare, hugging_face, template, together
from model import GPT
from parallelize import apply_compile, apply_tensor_parallel
from runtime import Worker, distributed_worker
from tensor_parallel_from_scratch import cut_model, vocab_parallel_cross_entropy
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="repeats of each measurement")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium"])
    parser.add_argument("--no-write", action="store_true", help="only print the results")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # what a child measures
    args = parser.parse_args()
    if args.part:
        if args.part == "data_parallel" and args.device == "cpu" and sys.platform == "linux":
            bench.pin_to_a_core()
        with distributed_worker(args.device) as worker:
            torch.set_float32_matmul_precision("high")  # as train.py, for all sides
            samples = {size: PARTS[args.part](worker, args.repeats, size) for size in args.sizes}
            if worker.is_main:
                bench.say(samples)
        return
    options = (__file__, "--repeats", args.repeats, "--device", args.device)
    options += ("--sizes", *args.sizes, "--part")
    one = bench.measure(sys.executable, *options, "one_process")
    on_gpu = args.device != "cpu"
    sections = one_process_text(one, on_gpu)
    if not on_gpu or torch.cuda.device_count() > 1:
        torchrun = bench.torchrun(ranks=2)
        samples = bench.measure(*torchrun, *options, "data_parallel")
        sections += data_parallel_text(samples, on_gpu)
        samples = bench.measure(*torchrun, *options, "tensor_parallel")
        sections += tensor_parallel_text(samples)
    if args.no_write:
        print("\n\n".join(sections))
    else:
        bench.write("gpt", "How fast the GPT trains", sections)


# ---- the parts


def one_process(worker: Worker, repeats: int, size: str) -> dict:
    batch, mesh = SIZES[size][1], "dp_shard=1"
    sides = {
        "train.py's step": template(mesh, size, worker, batch),
        "bare loop": bare(size, worker, batch),
        "transformers": hugging_face(size, worker, batch),
        "fp32 peak": lambda: matmul_peak(worker.device, torch.float32),
        "bf16 peak": lambda: matmul_peak(worker.device, torch.bfloat16),
    }
    if sides["bf16 peak"]() > sides["fp32 peak"]():  # otherwise bf16 is emulated, and useless
        sides["bf16"] = template(mesh, size, worker, batch, precision="bf16")
    return bench.alternate(repeats, sides)


def data_parallel(worker: Worker, repeats: int, size: str) -> dict:
    """One rank with its batch against two ranks with twice the batch; then two kinds of FSDP."""
    batch = SIZES[size][1]
    both = (size, worker, 2 * batch)
    one = bare(size, worker, batch)
    ddp = partial(DistributedDataParallel, gradient_as_bucket_view=True)
    sides = {
        "one rank": alone(one, worker),
        "two that send nothing": together(one, worker, copies=2),
        "DDP": together(bare(size, worker, batch, ddp), worker, copies=2),
        "copies": template("dp_replicate=2", *both),
        "ZeRO-2": template("dp_shard=2", *both),
        "ZeRO-3": template("dp_shard=2", *both, keep_gathered=False),
    }
    return bench.alternate(repeats, sides)


def tensor_parallel(worker: Worker, repeats: int, size: str) -> dict:
    """No side clips gradients, because the sides would need different operations for it.

    train.py's step still sums the norm, one number, for the log.
    """
    common, mesh = (size, worker, SIZES[size][1]), init_device_mesh(worker.device.type, (2,))
    plain = partial(bare, *common, clip=False)
    cut = partial(apply_tensor_parallel, mesh=mesh)
    one = "one process, two threads" if worker.device.type == "cpu" else "one GPU"
    sides = {
        one: alone(plain(), worker, threads=2),
        "blocks compiled": alone(plain(apply_compile), worker, threads=2),
        "by hand": together(plain(cut_model, vocab_parallel_cross_entropy), worker),
        "DTensor": together(plain(cut), worker),
        "DTensor, blocks compiled": together(plain(lambda m: apply_compile(cut(m))), worker),
        "train.py --tp 2": template("tp=2", *common, clip=0.0),
        "train.py --tp 2 --sequence-parallel": template(
            "tp=2", *common, clip=0.0, sequence_parallel=True
        ),
    }
    return bench.alternate(repeats, sides)


PARTS = {f.__name__: f for f in (one_process, data_parallel, tensor_parallel)}


# ---- the report: tokens per second, and ratios pair by pair


def table(samples: dict, names: list[str], ratios: dict[str, tuple[str, str]]) -> str:
    sizes = list(samples)
    rows = [("tokens/s: median (min ... max)", *map(describe, sizes))]
    rows += [(name, *(bench.summary(samples[s][name]) for s in sizes)) for name in names]
    for title, (a, b) in ratios.items():
        pairs = [bench.ratio_of_pairs(samples[s][a], samples[s][b]) for s in sizes]
        rows.append((title, *map(bench.summary, pairs)))
    return bench.table(rows)


def describe(size: str) -> str:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(config_of(size)).parameters())
    return f"{size}: {parameters / 1e6:.1f} M parameters, {SIZES[size][1]} sequences per rank"


def one_process_text(samples: dict, on_gpu: bool) -> list[str]:
    names = ["train.py's step", "bare loop", "transformers"]
    ratios = {
        "train.py / transformers": (names[0], names[2]),
        "train.py / bare loop": (names[0], names[1]),
    }
    if all("bf16" in found for found in samples.values()):
        names.append("bf16")
        ratios["bf16 / fp32, both train.py"] = ("bf16", names[0])
    rows = [("share of the matmul peak (MFU)", *map(describe, samples))]
    for title, rate, peak in (("fp32", names[0], "fp32 peak"), ("bf16", "bf16", "bf16 peak")):
        cells = []
        for size, found in samples.items():
            if rate not in found:
                low, high = (statistics.median(found[f"{p} peak"]) / 1e9 for p in ("bf16", "fp32"))
                cells.append(f"not trained: peak {low:.0f} GFLOP/s, fp32 has {high:.0f}")
                continue
            flops = config_of(size).flops_per_token(config_of(size).block_size)
            best = statistics.median(found[peak])
            shares = [r * flops / best for r in found[rate]]
            cells.append(f"{bench.summary(shares)} of {best / 1e9:.0f} GFLOP/s")
        rows.append((title, *cells))
    heading = f"## (a), (b) One process, one {'GPU' if on_gpu else 'thread'}"
    return [heading, table(samples, names, ratios), bench.table(rows)]


def data_parallel_text(samples: dict, on_gpu: bool) -> list[str]:
    names = ["one rank", "two that send nothing", "DDP", "copies", "ZeRO-2", "ZeRO-3"]
    ratios = {
        "sending nothing / one rank": (names[1], "one rank"),
        "DDP / one rank": ("DDP", "one rank"),
        "DDP / sending nothing": ("DDP", names[1]),
        "copies / one rank": ("copies", "one rank"),
        "ZeRO-2 / DDP": ("ZeRO-2", "DDP"),
        "ZeRO-3 / DDP": ("ZeRO-3", "DDP"),
    }
    place = "its own GPU" if on_gpu else "one thread and stays on one core"
    shared = "the CPU's memory, power, cooling" if on_gpu else "memory, caches"
    text = (
        "copies: train.py with --dp-replicate 2. ZeRO-2: --dp-shard 2 --keep-gathered. ZeRO-3: "
        f"--dp-shard 2. Each rank has {place}. One rank has half of the sequences; the other rank "
        "waits. Two that send nothing are two such processes, each with its own model: what "
        f"they lose to 2, they lose to what they share ({shared}), not to communication."
    )
    heading = "## (c) Two data-parallel ranks"
    return [heading, table(samples, names, ratios), text]


def tensor_parallel_text(samples: dict) -> list[str]:
    names = list(next(iter(samples.values())))
    one = names[0]
    ratios = {f"{name} / one process": (name, one) for name in names[1:]}
    heading = f"## (d) Two tensor-parallel ranks against {one.replace(',', ' with')}"
    return [heading, table(samples, names, ratios)]


if __name__ == "__main__":
    main()
