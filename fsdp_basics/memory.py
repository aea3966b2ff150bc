"""Memory of a rank under each strategy: counted from the live tensors, next to the formula.

    torchrun --standalone --nproc_per_node=2 fsdp_basics/memory.py
    torchrun --standalone --nproc_per_node=4 fsdp_basics/memory.py --plot memory.png
    torchrun --standalone --nproc_per_node=3 fsdp_basics/memory.py --dim 132 --batch-size 15

Parameters and optimizer state exist all the time. Activations, and parameters gathered from other
ranks, exist from forward to backward. Gradients exist until zero_grad().

Look at

1. the bytes: parameters, gradients and optimizer state shrink with the number of ranks, activations
   with the local batch. The ratio to the formula (strategies.py) is 1, padding included.
2. the sums at three moments: ZeRO-2 and ZeRO-3 hold equal bytes between two steps, but not within
   one. DDP never frees its gradients: they are in its buckets.
3. the peak of the process during a step (RSS; on a GPU, the allocator's), which includes temporary
   tensors. On a CPU, offloading changes nothing: there is only one memory.

tensor_memory.py counts tensors. process_memory.py asks the system (and makes malloc return freed
memory; compare --malloc default). measure_memory.py trains and measures. The strategies run one
after another in the same processes: first all with a tiny model, so that imports and caches do not
count; then with the model that is measured.
"""

import gc
import os
from pathlib import Path

import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from data import load_dataset
from measure_memory import HEADS, MOMENTS, measure
from memory_plot import plot
from process_memory import return_freed_memory
from runtime import Worker, distributed_worker
from strategies import make_meshes
from tensor_memory import KINDS
from torch.distributed.elastic.multiprocessing.errors import record

MB = 1e6


@record
def main() -> None:
    args = parse_args()
    if args.malloc == "return":
        return_freed_memory()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    gc.freeze()  # gc.collect() then skips the imported modules, which are no garbage
    meshes = make_meshes(worker.device.type, worker.world_size)
    images, labels = load_dataset("digits")[0][:]
    images = images[: args.batch_size].clone().to(worker.device)
    labels = labels[: args.batch_size].clone().to(worker.device)

    def measure_all(dim: int, depth: int) -> dict[str, dict]:
        return {
            name: measure(name, dim, depth, images, labels, mesh, worker.device)
            for name, mesh in meshes.items()
        }

    measure_all(dim=16, depth=1)  # to warm up
    rows = measure_all(args.dim, args.depth)
    rows_of_ranks = [None] * worker.world_size
    dist.all_gather_object(rows_of_ranks, rows)
    if worker.is_main:
        print_bytes(rows_of_ranks)
        print_moments(rows_of_ranks)
        if args.plot:
            plot(rows_of_ranks, args.plot)


def print_bytes(rows_of_ranks: list[dict]) -> None:
    """rows_of_ranks: one dictionary per rank: strategy -> the result of `measure`."""
    print(f"\nbytes on the fullest of {len(rows_of_ranks)} rank(s), below it the formula")
    print(f"{'':15}" + "".join(f"{kind:>12}" for kind in KINDS) + "    ratio")
    for name in rows_of_ranks[0]:
        rows = [rows[name] for rows in rows_of_ranks]
        fullest = max(rows, key=lambda row: sum(row["measured"].values()))
        ratios = [ratio(row["measured"][k], row["formula"][k]) for row in rows for k in KINDS]
        furthest = max(ratios, key=lambda ratio: abs(ratio - 1))  # of all kinds, on all ranks
        print(f"{name:15}" + "".join(f"{fullest['measured'][k]:12,}" for k in KINDS))
        formula = "".join(f"{fullest['formula'][k]:12,}" for k in KINDS)
        print(f"{'':15}{formula}{furthest:9.4f}")


def print_moments(rows_of_ranks: list[dict]) -> None:
    print("\nMB on the fullest rank   " + "  ".join(MOMENTS) + "    peak    left")
    for name in rows_of_ranks[0]:
        rows = [rows[name] for rows in rows_of_ranks]
        columns = ""
        for moment in MOMENTS:
            fullest = max(sum(row["moments"][moment].values()) for row in rows)
            columns += f"{fullest / MB:{len(moment) + 2}.2f}"
        for value in ("peak", "left"):
            columns += f"{max(row[value] for row in rows) / MB:8.1f}"
        print(f"{name:23}{columns}")


def ratio(measured: int, formula: int) -> float:
    if formula:
        return measured / formula
    return 1.0 if measured == 0 else float("inf")


def parse_args():
    parser = ArgumentParser(description="Bytes per rank and strategy, counted and by formula.")
    add = parser.add_argument
    add("--dim", type=at_least(HEADS), default=256, help="width, a multiple of 4")
    add("--depth", type=at_least(1), default=4, help="transformer blocks")
    add("--batch-size", type=at_least(1), default=16, help="images per step, at most 1400")
    freed = "return freed memory to the system, or keep it as malloc does by default"
    add("--malloc", choices=("return", "default"), default="return", help=freed)
    add("--plot", type=Path, metavar="FILE.png", help="also draw stacked bars into this file")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.dim % HEADS:
        parser.error(f"--dim must be a multiple of {HEADS}, not {args.dim}")
    if args.batch_size > 1400 or args.batch_size % ranks:
        parser.error(
            f"--batch-size must be a multiple of {ranks} rank(s) up to 1400, not {args.batch_size}"
        )
    if args.plot and args.plot.suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--plot {args.plot} must end in .png, .pdf or .svg")
    if args.plot and not args.plot.absolute().parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no folder {args.plot.parent}")
    return args


if __name__ == "__main__":
    main()
