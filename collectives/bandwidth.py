r"""Measure collectives over message sizes: time, algbw, busbw; also our own all_reduces.

    torchrun --standalone --nproc_per_node=2 collectives/bandwidth.py
    torchrun --standalone --nproc_per_node=2 collectives/bandwidth.py --verify --output-dir runs/bw
    torchrun --standalone --nproc_per_node=4 collectives/bandwidth.py \
        --operations all_reduce ring tree --min-bytes 1K --max-bytes 64M --factor 4 --repeats 9

Look at

1. alpha: the time of a call before its first byte. Up to `half at` bytes a call is mostly alpha,
   and a small call takes as long as a larger one.
2. algbw = bytes / time. It falls when ranks are added even if the network is fully used, because an
   all-reduce moves 2 (N-1) / N bytes per byte. busbw corrects for that: it is what one rank of a
   ring sends and receives per second (naive, tree and recursive_doubling send more), and the only
   number to compare with the limits in the last lines: those of memory and of TCP between CPUs.
   (NCCL on GPUs of one node uses neither the CPU's memory nor TCP, and is faster.)
3. the spread (min, max). Two medians differ only if their difference is larger than the spread.

--verify compares every value at every size with a plain sum. --output-dir saves every sample and a
log-log plot. Bytes and busbw are defined as in nccl-tests, so you can compare the columns:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import argparse
import re
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least, between
from bandwidth_cases import OPERATIONS, expected_result, first_error, pattern, prepare
from bandwidth_report import (
    Fit,
    Measurement,
    print_fits,
    print_limits,
    print_measurements,
    save,
)
from costs import bus_factor, fit_alpha_beta, measure_limits, time_calls
from runtime import Worker, distributed_worker
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        sizes = sizes_between(args.min_bytes, args.max_bytes, args.factor, 4 * worker.world_size)
        measurements, errors = [], []
        for operation in args.operations:
            if not works_here(operation, worker):
                continue
            for nbytes in sizes:
                values = "not checked"
                if args.verify:
                    new_errors = errors_of(operation, nbytes, worker)
                    errors += new_errors
                    values = "wrong" if new_errors else "ok"
                measurements.append(measure(operation, nbytes, args.repeats, values, worker))
        if not measurements:
            raise UserError("nothing to measure: send_recv needs two ranks or more")
        fits = fit_each(measurements)
        if worker.is_main:
            print_measurements(measurements)
            print_fits(fits)
        limits = measure_limits(sizes[-1], args.repeats, worker)
        if worker.is_main:
            print_limits(limits, sizes[-1])
            for error in errors:
                print(error)
            if args.output_dir:
                save(measurements, fits, limits, args.output_dir)
    if errors:
        sys.exit(1)


def sizes_between(least: int, most: int, factor: float, unit: int) -> list[int]:
    """least, least * factor, ... up to most: bytes, rounded down to whole units, at least one.

    unit: one float32 for each rank.
    """
    sizes, size = [], least
    while size <= most:
        sizes.append(max(size // unit, 1) * unit)
        size = max(size + 1, round(size * factor))
    return sorted(set(sizes))


def works_here(operation: str, worker: Worker) -> bool:
    """Whether this backend has the operation; prints if not. Makes a small call on every rank."""
    if operation == "send_recv" and worker.world_size == 1:
        return False  # there is no second rank
    x = torch.zeros(worker.world_size, device=worker.device)
    try:
        prepare(operation, x, torch.zeros_like(x)).run()
    except (RuntimeError, NotImplementedError) as error:
        if "not support" not in str(error):
            raise
        if worker.is_main:  # every rank gets this error
            print(f"{operation} is missing here: {str(error).splitlines()[0]}")
        return False
    return True


def errors_of(operation: str, nbytes: int, worker: Worker) -> list[str]:
    """Call once with known values: the errors of all ranks, as one list on every rank."""
    x = pattern(worker.rank, nbytes // 4, worker.device)
    case = prepare(operation, x, torch.zeros_like(x))
    case.run()
    error = first_error(case.result, expected_result(operation, nbytes // 4, worker.device))
    errors = [None] * worker.world_size
    dist.all_gather_object(errors, error)
    return [
        f"WRONG: {operation}, {nbytes} bytes, rank {rank}: {error}"
        for rank, error in enumerate(errors)
        if error
    ]


def measure(operation: str, nbytes: int, repeats: int, values: str, worker: Worker) -> Measurement:
    # Zeros, because other numbers would grow with each all_reduce. fill_ writes every page: all
    # pages that were never written share one page of memory, and would be read too fast.
    x = torch.empty(nbytes // 4, device=worker.device).fill_(0)
    y = torch.empty_like(x).fill_(0)
    if worker.device.type == "cpu":  # several small calls: ranks leave a barrier at different times
        calls = max(1, min(10, 2**18 // nbytes))
    else:  # as in nccl-tests: one launch would be a large part of a sample
        calls = 20
    seconds = time_calls(prepare(operation, x, y).run, repeats, calls, worker.device)
    algbw = nbytes / statistics.median(seconds)
    return Measurement(
        operation=operation,
        bytes=nbytes,
        ranks=worker.world_size,
        backend=dist.get_backend(),
        seconds=seconds,
        algbw=algbw,
        busbw=algbw * bus_factor(operation, worker.world_size),
        values=values,
    )


def fit_each(measurements: list[Measurement]) -> list[Fit]:
    """A line through the medians of each operation that has two sizes or more."""
    fits = []
    for operation in dict.fromkeys(m.operation for m in measurements):
        points = [m for m in measurements if m.operation == operation]
        if len(points) < 2:
            continue
        sizes = [m.bytes for m in points]
        medians = [statistics.median(m.seconds) for m in points]
        alpha, beta = fit_alpha_beta(sizes, medians)
        errors = [abs((alpha + beta * s) / t - 1) for s, t in zip(sizes, medians, strict=True)]
        fits.append(Fit(operation, alpha, beta, max(errors), max(m.busbw for m in points)))
    return fits


def parse_args():
    parser = ArgumentParser(description="Time and bandwidth of collectives over message sizes.")
    add = parser.add_argument
    names = ", ".join(OPERATIONS)
    add(
        "--operations",
        nargs="+",
        choices=OPERATIONS,
        default=OPERATIONS,
        metavar="NAME",
        help=f"operations to measure: {names} (default: all)",
    )
    size_help = "smallest message; K, M, G are powers of 1024"
    add("--min-bytes", type=number_of_bytes, default="4K", help=size_help)
    add("--max-bytes", type=number_of_bytes, default="16M", help="largest message")
    add("--factor", type=between(1.1, 1024), default=8.0, help="multiply the size by X each time")
    add("--repeats", type=at_least(1), default=5, help="samples per size")
    add("--verify", action="store_true", help="check the values at each size")
    add("--output-dir", type=Path, help="write metrics.jsonl and bandwidth.png to PATH")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.min_bytes > args.max_bytes:
        parser.error(f"--min-bytes {args.min_bytes} is above --max-bytes {args.max_bytes}")
    parser.make_folder("--output-dir", args.output_dir)
    return args


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def number_of_bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text)
    size = int(match[1]) * UNITS[match[2]] if match else 0
    if not 4 <= size <= 16 * UNITS["G"]:
        raise argparse.ArgumentTypeError(f"must be from 4 to 16G bytes, such as 64K, not {text}")
    return size


if __name__ == "__main__":
    main()
