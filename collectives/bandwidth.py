"""What each byte costs: time and bandwidth of every collective, and of our own all-reduces.

    torchrun --standalone --nproc_per_node=2 collectives/bandwidth.py
    torchrun --standalone --nproc_per_node=2 collectives/bandwidth.py --verify --output-dir runs/bw
    torchrun --standalone --nproc_per_node=4 collectives/bandwidth.py \\
        --operations all_reduce ring tree --min-bytes 1K --max-bytes 64M --factor 4 --repeats 9

Look at

1. alpha: what a call costs before the first byte. Up to `half at` bytes a call is mostly alpha, and
   many small calls cost as much as many large ones.
2. algbw = bytes / time. It falls when ranks are added even if the network is fully used, since an
   all-reduce moves 2 (N-1) / N bytes per byte. busbw corrects for that: it is what one rank sends
   and receives per second, and the only number to compare with the limits in the last lines.
3. the spread (min, max). Compare two medians only where it does not cover their difference.

--verify compares every value at every size with a plain sum. --output-dir keeps every sample, and a
log-log plot. Bytes and busbw are those of nccl-tests, so that the columns can be compared:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import json
import re
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from all_reduce_algorithms import ALGORITHMS
from arguments import ArgumentParser, UserError
from bandwidth_cases import COLLECTIVES, OPERATIONS, first_error, pattern, prepare
from costs import bus_factor, fit_alpha_beta, measure_limits, time_calls
from runtime import Worker, distributed_worker
from tables import print_table
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        # Whole elements, as many for each rank.
        unit = 4 * worker.world_size
        sizes = sorted({max(size // unit, 1) * unit for size in args.sizes})
        rows, wrong = [], []
        for operation in args.operations:
            if operation == "send_recv" and worker.world_size == 1:
                continue  # there is nobody to send to
            for nbytes in sizes:
                try:
                    row, errors = measure(operation, nbytes, args, worker)
                except (RuntimeError, NotImplementedError) as failure:
                    if "not support" not in str(failure):
                        raise
                    if worker.is_main:  # the backend refuses on every rank alike
                        print(f"{operation} is missing here: {str(failure).splitlines()[0]}")
                    break
                rows.append(row)
                wrong += errors
        if not rows:
            raise UserError("nothing to measure: send_recv needs two ranks or more")
        fits = [fit for operation in args.operations if (fit := fit_rows(operation, rows))]
        limits = measure_limits(sizes[-1], args.repeats, worker)
        if worker.is_main:
            report(rows, fits, limits)
            print(*wrong, sep="\n", end="\n" * bool(wrong))
            if args.output_dir:
                save(rows, fits, limits, args.output_dir)
    if wrong:
        sys.exit(1)


# ---- one row of the table


def measure(operation: str, nbytes: int, args, worker: Worker) -> tuple[dict, list[str]]:
    """Returns the row, the same on all ranks, and what is wrong with the values, if asked."""
    x = pattern(worker.rank, nbytes // 4, worker.device)
    y = torch.zeros_like(x)
    case = prepare(operation, x, y)
    errors = []
    if args.verify:
        case.run()
        errors = [None] * worker.world_size
        dist.all_gather_object(errors, first_error(case))
        errors = [f"WRONG: {operation}, {nbytes} bytes, rank {r}: {e}"
                  for r, e in enumerate(errors) if e]  # fmt: skip
    # All-reduced again and again, numbers would grow. And untouched zeros share one page of memory.
    x.fill_(0), y.fill_(0)
    calls = max(1, min(10, 2**18 // nbytes))  # several small ones: the barrier's end is not sharp
    seconds = time_calls(case.run, args.repeats, calls, worker.device)
    algbw = nbytes / statistics.median(seconds)
    row = {
        **{"operation": operation, "bytes": nbytes, "ranks": worker.world_size},
        **{"backend": dist.get_backend(), "seconds": seconds, "algbw": algbw},
        **{"busbw": algbw * bus_factor(operation, worker.world_size)},
        "values": ("wrong" if errors else "ok") if args.verify else "not checked",
    }
    return row, errors


def fit_rows(operation: str, rows: list[dict]) -> dict | None:
    mine = [row for row in rows if row["operation"] == operation]
    if len(mine) < 2:  # one size gives no line
        return None
    sizes, seconds = [r["bytes"] for r in mine], [statistics.median(r["seconds"]) for r in mine]
    alpha, beta = fit_alpha_beta(sizes, seconds)
    off = max(abs((alpha + beta * s) / t - 1) for s, t in zip(sizes, seconds, strict=True))
    best = max(row["busbw"] for row in mine)
    return {"fit": operation, "alpha": alpha, "beta": beta, "worst_error": off, "best_busbw": best}


# ---- what is printed and saved


def report(rows: list[dict], fits: list[dict], limits: dict[str, list[float]]) -> None:
    print("\ntime per call, of the slowest rank; bandwidths in GB/s (10^9 bytes per second)")
    header = ["operation", "bytes", "us: median", "min", "max", "algbw", "busbw", "values"]
    lines = []
    for row in rows:
        us = [1e6 * f(row["seconds"]) for f in (statistics.median, min, max)]
        rates = [f"{row[key] / 1e9:.3f}" for key in ("algbw", "busbw")]
        values = [row["operation"], row["bytes"], *(f"{t:.0f}" for t in us), *rates, row["values"]]
        lines.append(values)
    print_table(header, lines)

    print("\ntime = alpha + bytes * beta")
    header = ["operation", "alpha us", "1/beta GB/s", "half at bytes", "worst error", "best busbw"]
    lines = []
    for fit in fits:
        alpha, beta = fit["alpha"], fit["beta"]
        rate, half = (f"{1e-9 / beta:.3f}", f"{alpha / beta:.0f}") if beta else ("-", "-")
        error, best = f"{fit['worst_error']:.0%}", f"{fit['best_busbw'] / 1e9:.3f}"
        lines.append([fit["fit"], f"{1e6 * alpha:.0f}", rate, half, error, best])
    print_table(header, lines)

    print(f"\nlimits, measured with {rows[-1]['bytes']} bytes")
    header = ["per rank", "GB/s: median", "min", "max"]
    print_table(
        header,
        [
            [name, *(f"{f(rates) / 1e9:.3f}" for f in (statistics.median, min, max))]
            for name, rates in limits.items()
        ],
    )


def save(rows: list[dict], fits: list[dict], limits: dict, folder: Path) -> None:
    """metrics.jsonl: a line per row, fit and limit; seconds and bytes. bandwidth.png: the rows."""
    lines = [*rows, *fits, *({"limit": k, "bytes_per_second": v} for k, v in limits.items())]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    import matplotlib

    matplotlib.use("Agg")  # no window, no display needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    for operation in dict.fromkeys(row["operation"] for row in rows):
        mine = [row for row in rows if row["operation"] == operation]
        x, y = [r["bytes"] for r in mine], [r["busbw"] / 1e9 for r in mine]
        spread = [
            [r["busbw"] * statistics.median(r["seconds"]) / f(r["seconds"]) / 1e9 for r in mine]
            for f in (max, min)
        ]
        for ax, names in zip(axes, (COLLECTIVES, ("all_reduce", *ALGORITHMS)), strict=True):
            if operation in names:
                ax.plot(x, y, marker="o", label=operation)
                ax.fill_between(x, *spread, alpha=0.1)
    for ax, title in zip(axes, ("collectives", "all-reduce: torch's and ours"), strict=True):
        for i, (name, rates) in enumerate(limits.items()):
            rate = statistics.median(rates) / 1e9
            ax.axhline(rate, color="0.5", linestyle=("-", "--", ":")[i], label=name)
        ax.set(xscale="log", yscale="log", xlabel="bytes", ylabel="busbw, GB/s", title=title)
        ax.legend(fontsize=8)
    figure.suptitle(f"{rows[0]['ranks']} ranks, {rows[0]['backend']}")
    figure.tight_layout()
    figure.savefig(folder / "bandwidth.png", dpi=120)
    print(f"saved {folder}/metrics.jsonl and bandwidth.png")


def parse_args():
    parser = ArgumentParser(description="Time and bandwidth of collectives over message sizes.")
    add = parser.add_argument
    add("--operations", nargs="+", default=OPERATIONS, metavar="NAME", help=", ".join(OPERATIONS))
    add("--min-bytes", default="4K", help="smallest size; K, M and G are powers of 1024")
    add("--max-bytes", default="16M")
    add("--factor", type=float, default=8.0, help="from one size to the next")
    add("--repeats", type=int, default=5, help="samples per size")
    add("--verify", action="store_true", help="compare the values at each size")
    add("--output-dir", type=Path, help="write metrics.jsonl and bandwidth.png there")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    unknown = [name for name in args.operations if name not in OPERATIONS]
    if unknown:
        parser.error(f"--operations: no {unknown[0]}; there are {', '.join(OPERATIONS)}")
    low, high = (number_of_bytes(s, parser) for s in (args.min_bytes, args.max_bytes))
    if low > high:
        parser.error(f"--min-bytes {args.min_bytes} is above --max-bytes {args.max_bytes}")
    if not 1.1 <= args.factor < float("inf"):
        parser.error(f"--factor must be at least 1.1, not {args.factor}")
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, not {args.repeats}")
    args.sizes = [low]
    while (size := round(args.sizes[-1] * args.factor)) <= high:
        args.sizes.append(size)
    if args.output_dir:
        try:
            args.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output-dir {args.output_dir} cannot be made: {error.strerror}")
    return args


def number_of_bytes(text: str, parser: ArgumentParser) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text, flags=re.ASCII)
    size = int(match[1]) * 1024 ** " KMG".index(match[2] or " ") if match else 0
    if not 4 <= size <= 2**34:
        parser.error(f"a size is from 4 bytes to 16G, such as 64K, not {text}")
    return size


if __name__ == "__main__":
    main()
