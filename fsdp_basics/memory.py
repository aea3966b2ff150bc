"""What a rank holds under each strategy: counted from the live tensors, next to the formula.

    torchrun --standalone --nproc_per_node=2 fsdp_basics/memory.py
    torchrun --standalone --nproc_per_node=4 fsdp_basics/memory.py --plot memory.png
    torchrun --standalone --nproc_per_node=3 fsdp_basics/memory.py --dim 132 --depth 3

Each storage counts once. Parameters and optimizer state are there all the time; activations, and
parameters gathered from other ranks, from forward to backward; gradients until zero_grad().

Look at

1. the bytes: parameters, gradients and optimizer state shrink with the number of ranks, activations
   with their share of the batch. The ratio to the formula (strategies.py) is 1, padding included.
2. the sums at three moments: ZeRO-2 and ZeRO-3 hold the same between two steps, not within one.
   DDP's gradients never go: they live in its buckets.
3. the peak of the process during a step (RSS; on a GPU, the allocator's): what is gathered or
   computed for a moment comes on top. On a CPU, offload changes nothing: it is one memory.

RSS tells the truth only if freed memory goes back to the system. By default malloc keeps much of it
for later, so RSS stays high and hides what sharding saves. This script asks malloc not to (mallopt,
the same as to start it with MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072); compare
--malloc default. The strategies run one after another in the same processes: first all with a tiny
model, so that imports and caches do not count; then in earnest. `peak` is above the RSS from before
the model was built, and `left` is what remains of it when the model is gone.
"""

import ctypes
import gc
import os
import re
import sys
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser
from data import load_dataset
from model import VisionTransformer
from runtime import Worker, distributed_worker
from strategies import build, expected_memory, make_meshes, units_of
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

KINDS = ("parameters", "optimizer", "gathered", "activations", "gradients")
MOMENTS = ("between steps", "end of forward", "end of backward")
HEADS = 4


@record
def main() -> None:
    args = parse_args()
    if args.malloc == "return":
        return_freed_memory()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    gc.freeze()  # the modules are no garbage: spare gc.collect() the way through them
    meshes = make_meshes(worker.device.type, worker.world_size)
    data = (t[: args.batch_size].clone() for t in load_dataset("digits")[0][:])
    images, labels = (t.to(worker.device) for t in data)
    for dim, depth in ((16, 1), (args.dim, args.depth)):  # the first time only to warm up
        rows = {
            name: measure(name, dim, depth, images, labels, mesh, worker.device)
            for name, mesh in meshes.items()
        }
    everywhere = [None] * worker.world_size
    dist.all_gather_object(everywhere, rows)
    if worker.is_main:
        report(everywhere)
        if args.plot:
            plot(everywhere, args.plot)


def measure(name: str, dim: int, depth: int, images, labels, mesh, device) -> dict:
    """Train a few steps; return what this rank held, and what the formulas say, in bytes."""
    base = memory_in_use(device)
    torch.manual_seed(0)
    model = VisionTransformer(dim=dim, depth=depth, heads=HEADS).to(device)
    units = units_of(model)
    model, optimizer = build(name, model, mesh)
    if name != "one process":  # that one works on the whole global batch, on every rank
        images, labels = (t[dist.get_rank() :: mesh.size()].clone() for t in (images, labels))
    for _ in range(2):  # makes the optimizer state, and lets DDP arrange its buckets
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    old = [(StorageWeakRef(s), s) for s in map(storage, gradients_of(model, optimizer))]
    old = [(weak, s.data_ptr(), s.nbytes()) for weak, s in old]
    optimizer.zero_grad()
    moments = [inventory(model, optimizer, old)]
    saved = []  # what autograd keeps for backward

    def keep(tensor):
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(images), labels)
    moments.append(inventory(model, optimizer, old, saved))
    saved.clear()
    loss.backward()
    moments.append(inventory(model, optimizer, old))
    optimizer.step()
    del loss, old

    reset_peak(device)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    peak = peak_memory(device) - base
    del model, optimizer
    gc.collect()  # they are full of reference cycles
    formula = expected_memory(name, units, dist.get_rank(), mesh.size())
    formula["activations"] = expected_activations(dim, depth, len(images))
    return {
        "moments": dict(zip(MOMENTS, moments, strict=True)),
        "measured": {kind: max(m[kind] for m in moments) for kind in KINDS},
        "formula": formula,
        "peak": peak,
        "left": memory_in_use(device) - base,
    }


# ---- counting tensors


def inventory(model, optimizer, old_gradients=(), saved=()) -> dict[str, int]:
    """Bytes of the live tensors by what they are for; a storage counts where it comes first."""
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    state = [t for s in local.state.values() for t in s.values() if torch.is_tensor(t)]
    # FSDP puts the gathered parameters in the place of the shards while they exist.
    lists = (mine, state, model.parameters(), saved, gradients_of(model, optimizer))
    # DDP keeps its buckets when .grad is set to None: gradients of the last step that still exist.
    kept = {place: size for weak, place, size in old_gradients if not weak.expired()}
    seen, sizes = set(), {}
    for kind, tensors in zip(KINDS, lists, strict=True):
        found = {s.data_ptr(): s.nbytes() for s in map(storage, tensors)}
        found |= kept if kind == "gradients" else {}
        sizes[kind] = sum(size for place, size in found.items() if place not in seen)
        seen |= {place for place, size in found.items() if size}
    return sizes


def gradients_of(model, optimizer) -> list[torch.Tensor]:
    groups = (group["params"] for group in optimizer.param_groups)
    return [p.grad for p in chain(*groups, model.parameters()) if p.grad is not None]


def storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory behind a tensor; of a DTensor, behind this rank's shard."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def expected_activations(dim: int, depth: int, images: int) -> int:
    """Bytes that autograd keeps from forward to backward, as PyTorch computes VisionTransformer.

    A block keeps 16 numbers for each number of its input: the input, what norm1, attention and
    norm2 return, and the sum between them (5 x 1), query, key and value (3), and both sides of GELU
    (2 x 4); two per patch and norm; one per patch and head. (A GPU's attention may keep others.)
    """
    vectors = images * 16  # 8 x 8 pixels in patches of 2 x 2
    block = 16 * vectors * dim + 4 * vectors + HEADS * vectors
    root = vectors * dim + 2 * vectors + images * (dim + 10 + 64) + 1  # mean, logits, the images
    return 4 * (depth * block + root) + 8 * images  # labels are int64


# ---- memory of the process


def return_freed_memory() -> None:
    """Have malloc return what is freed to the system: of 128 KB and above, at once."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of <malloc.h>
            libc.mallopt(parameter, 128 << 10)


def memory_in_use(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else status("VmRSS")


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # makes VmHWM the VmRSS of now


def peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status("VmHWM")


def status(name: str) -> int:
    """A value of /proc/self/status (Linux), in bytes."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


# ---- the report


def report(everywhere: list[dict]) -> None:
    """everywhere: what each rank measured, by strategy."""
    print(f"\nbytes on the fullest of {len(everywhere)} rank(s), below it the formula")
    print(f"{'':15}" + "".join(f"{kind:>12}" for kind in KINDS) + "    ratio")
    for name in everywhere[0]:
        ranks = [rows[name] for rows in everywhere]
        row = max(ranks, key=lambda r: sum(r["measured"].values()))
        ratios = [ratio(r["measured"][k], r["formula"][k]) for r in ranks for k in KINDS]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))  # of all kinds, on all ranks
        print(f"{name:15}" + "".join(f"{row['measured'][k]:12,}" for k in KINDS))
        print(f"{'':15}" + "".join(f"{row['formula'][k]:12,}" for k in KINDS) + f"{worst:9.4f}")
    print("\nMB on the fullest rank   " + "  ".join(MOMENTS) + "    peak    left")
    for name in everywhere[0]:
        ranks = [rows[name] for rows in everywhere]
        sums = [max(sum(r["moments"][m].values()) for r in ranks) / 1e6 for m in MOMENTS]
        peak, left = (max(r[key] for r in ranks) / 1e6 for key in ("peak", "left"))
        columns = "".join(f"{s:{len(m) + 2}.2f}" for s, m in zip(sums, MOMENTS, strict=True))
        print(f"{name:23}{columns}{peak:8.1f}{left:8.1f}")


def ratio(measured: int, formula: int) -> float:
    return measured / formula if formula else 1.0 if measured == 0 else float("inf")


def plot(everywhere: list[dict], path: Path) -> None:
    """For each strategy two stacked bars, the ends of forward and backward, and the peak."""
    from matplotlib.figure import Figure

    names = list(everywhere[0])
    axes = Figure(figsize=(9, 0.6 * len(names) + 1.6), layout="constrained").subplots()
    for i, name in enumerate(names):
        ranks = [rows[name] for rows in everywhere]
        for moment, y in ((MOMENTS[1], i - 0.19), (MOMENTS[2], i + 0.19)):
            row, left = max((r["moments"][moment] for r in ranks), key=lambda r: sum(r.values())), 0
            for k, kind in enumerate(KINDS):
                axes.barh(y, row[kind] / 1e6, 0.34, left, color=f"C{k}", label=kind)
                left += row[kind] / 1e6
        peak = max(r["peak"] for r in ranks) / 1e6
        axes.plot([peak, peak], [i - 0.38, i + 0.38], color="black", label="peak of a step")
    labels = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))  # each once
    axes.legend(labels.values(), labels, fontsize="small", loc="lower right")
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="MB on the fullest rank")
    axes.set_title(f"{len(everywhere)} ranks: end of forward (upper), end of backward (lower)")
    axes.invert_yaxis()
    axes.figure.savefig(path, dpi=120)


def parse_args():
    parser = ArgumentParser(description="Bytes per rank and strategy, counted and by formula.")
    add = parser.add_argument
    add("--dim", type=int, default=256, help="width of the transformer, a multiple of 4")
    add("--depth", type=int, default=4, help="its blocks")
    add("--batch-size", type=int, default=16, help="images, over all ranks")
    add("--malloc", choices=("return", "default"), default="return", help="what is freed")
    add("--plot", type=Path, metavar="FILE.png", help="also draw stacked bars")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.dim < HEADS or args.dim % HEADS:
        parser.error(f"--dim must be a multiple of {HEADS}, not {args.dim}")
    if args.depth < 1:
        parser.error(f"--depth must be at least 1, not {args.depth}")
    if not 0 < args.batch_size <= 1400 or args.batch_size % ranks:
        wanted = f"a multiple of {ranks} rank(s) from 1 to 1400"
        parser.error(f"--batch-size must be {wanted}, not {args.batch_size}")
    if args.plot and args.plot.suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--plot {args.plot} must end in .png, .pdf or .svg")
    if args.plot and not args.plot.absolute().parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no folder {args.plot.parent}")
    return args


if __name__ == "__main__":
    main()
