"""Measure what sharding costs and saves; the strategies alternate in one run.

    python benchmarks/fsdp.py              # everything, half an hour; writes results/fsdp.md
    python benchmarks/fsdp.py --repeats 2 --sizes tiny --no-write    # a quick look

(a) images per second   (b) peak memory and bytes held per rank   (c) seconds a save stops training
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "fsdp_basics"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank

import async_checkpoint
import bench
import measure_memory
import process_memory
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import VisionTransformer
from runtime import Worker, distributed_worker
from strategies import build, make_meshes

COMPARED = ("DDP", "ZeRO-2", "ZeRO-3", "HSDP")
SIZES = {  # dim, blocks, global batch, timed steps per sample; about 12 blocks dim^2 parameters
    "tiny": (32, 2, 16, 2),
    "small": (128, 4, 256, 4),
    "medium": (256, 8, 128, 4),
    "large": (512, 8, 64, 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="repeats of each measurement")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium", "large"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--no-write", action="store_true", help="only print the results")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # what a child measures
    args = parser.parse_args()
    if args.part:
        if args.part == "held":
            process_memory.return_freed_memory()  # otherwise RSS would not fall; it slows training
        with distributed_worker("cpu") as worker:
            samples = PARTS[args.part](worker, args.repeats, args.sizes)
            if worker.is_main:
                bench.say(samples)
        return
    results = {(part, n): measure(part, n, args) for n in args.ranks for part in ("speed", "held")}
    sections = [*text(results, args), *save_text(measure("save", args.ranks[0], args))]
    if args.no_write:
        print("\n\n".join(sections))
    else:
        bench.write("fsdp", "What sharding costs and saves", sections)


def measure(part: str, ranks: int, args) -> dict:
    options = ("--part", part, "--repeats", args.repeats, "--sizes", *args.sizes)
    return bench.measure(*bench.torchrun(ranks), __file__, *options)


# ---- (a) images per second, over all ranks


def speed(worker: Worker, repeats: int, sizes: list[str]) -> dict:
    meshes = make_meshes("cpu", worker.world_size)
    return {
        size: bench.alternate(
            repeats,
            {
                name: lambda name=name, size=size: images_per_second(name, size, meshes[name])
                for name in COMPARED
                if name in meshes
            },
        )
        for size in sizes
    }


def images_per_second(name: str, size: str, mesh) -> float:
    dim, depth, batch, steps = SIZES[size]
    torch.manual_seed(0)
    model, optimizer = build(name, VisionTransformer(dim=dim, depth=depth), mesh)
    local = batch // mesh.size()
    images, labels = torch.rand(local, 1, 8, 8), torch.randint(10, (local,))
    for i in range(steps + 2):
        if i == 2:  # step 0 creates the optimizer state, then DDP rebuilds its buckets
            dist.barrier()
            started = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    dist.barrier()  # a step ends when the last rank ends it
    return steps * batch / (time.perf_counter() - started)


# ---- (b) memory of the fullest rank, as fsdp_basics/memory.py measures it


def held(worker: Worker, repeats: int, sizes: list[str]) -> dict:
    """size -> strategy -> samples of (peak RSS, bytes held, formula, 16 P / N)."""
    meshes = make_meshes("cpu", worker.world_size)

    def sample(name: str, size: str) -> tuple:
        dim, depth, batch, _ = SIZES[size]
        images, labels = torch.rand(batch, 1, 8, 8), torch.randint(10, (batch,))
        row = measure_memory.measure(
            name, dim, depth, images, labels, meshes[name], torch.device("cpu")
        )
        with torch.device("meta"):
            bare = VisionTransformer(dim=dim, depth=depth)
        parts = {"DDP": 1, "HSDP": worker.world_size // 2}.get(name, worker.world_size)
        simple = 16 * sum(p.numel() for p in bare.parameters()) / parts
        kinds = ("parameters", "gradients", "optimizer")
        measured, formula = (sum(row[key][k] for k in kinds) for key in ("measured", "formula"))
        rows = [None] * worker.world_size
        dist.all_gather_object(rows, (row["peak"], measured, formula, simple))
        return max(row[0] for row in rows), *max(row[1:] for row in rows)

    names = [name for name in COMPARED if name in meshes]
    repeats = min(repeats, 3)  # they hardly differ
    return {
        size: bench.alternate(repeats, {n: lambda n=n, size=size: sample(n, size) for n in names})
        for size in sizes
    }


# ---- (c) seconds that a save keeps training waiting, as async_checkpoint.py measures it


def save(worker: Worker, repeats: int, sizes: list[str]) -> dict:
    """way -> seconds, of the slowest rank; for the largest of the sizes."""
    dim, depth, _, _ = SIZES[sizes[-1]]
    with async_checkpoint.shared_folder(None, worker) as folder:
        seen = async_checkpoint.compare(dim, depth, repeats, folder, worker)
    everywhere = [None] * worker.world_size
    dist.all_gather_object(everywhere, (seen["waits"], seen["bytes"], seen["as saved"]))
    if not all(as_saved for _, _, as_saved in everywhere):
        raise RuntimeError("an asynchronous save does not hold the state of its moment")
    waits = {
        way: [max(times) for times in zip(*(waits[way] for waits, _, _ in everywhere), strict=True)]
        for way in ("save", "async_save")
    }
    return waits | {"bytes": max(size for _, size, _ in everywhere), "size": sizes[-1]}


PARTS = {"speed": speed, "held": held, "save": save}


# ---- the report


def text(results: dict, args) -> list[str]:
    sections = ["## (a) Images per second, over all ranks: median (min ... max)"]
    for ranks in args.ranks:
        rows = [(f"{ranks} ranks", *map(describe, args.sizes))]
        samples = results["speed", ranks]
        for name in samples[args.sizes[0]]:
            rows.append((name, *(bench.summary(samples[size][name]) for size in args.sizes)))
            if name != "DDP":
                pairs = [
                    bench.ratio_of_pairs(samples[size][name], samples[size]["DDP"])
                    for size in args.sizes
                ]
                rows.append((f"{name} / DDP, pair by pair", *map(bench.summary, pairs)))
        sections.append(bench.table(rows))
    sections.append(
        "## (b) Memory of the fullest rank\n\n"
        "peak: memory of the process in a step, minus its memory before the model was built, MB: "
        "median (min ... max)\n\nheld: parameters, gradients and optimizer state, counted, MB; in "
        "brackets the ratios to the exact formula, and to 16 bytes per parameter divided by the "
        "number of ranks in a shard group"
    )
    for ranks in args.ranks:
        rows = [(f"{ranks} ranks", *map(describe, args.sizes))]
        samples = results["held", ranks]
        for name in samples[args.sizes[0]]:
            cells = [samples[size][name] for size in args.sizes]
            rows.append((f"{name}: peak", *(bench.summary([s[0] / 1e6 for s in c]) for c in cells)))
            rows.append((f"{name}: held", *(ratios(c[0]) for c in cells)))
        sections.append(bench.table(rows))
    sections.append("HSDP needs two rows of two ranks: it begins at 4 ranks.")
    return sections


def describe(size: str) -> str:
    dim, depth, batch, _ = SIZES[size]
    with torch.device("meta"):
        model = VisionTransformer(dim=dim, depth=depth)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return f"{size}: {millions:.1f} M parameters, batch {batch}"


def ratios(sample: list[float]) -> str:
    _, measured, formula, simple = sample
    return f"{measured / 1e6:.2f} ({measured / formula:.4f}, {measured / simple:.4f})"


def save_text(waits: dict) -> list[str]:
    fraction = bench.ratio_of_pairs(waits["async_save"], waits["save"])
    rows = [
        (
            f"{waits['bytes'] / 1e6:.0f} MB per rank",
            "training waits, seconds: median (min ... max)",
        ),
        ("dcp.save", bench.summary(waits["save"])),
        ("dcp.async_save", bench.summary(waits["async_save"])),
        ("ratio, pair by pair", bench.summary(fraction)),
    ]
    return [f"## (c) Saving the {waits['size']} model", bench.table(rows)]


if __name__ == "__main__":
    main()
