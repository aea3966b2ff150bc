"""Report the measurements of bandwidth.py: tables, JSON lines, a plot."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from all_reduce_algorithms import ALGORITHMS
from bandwidth_cases import COLLECTIVES
from tables import print_table


@dataclass(frozen=True)
class Measurement:
    """One operation at one size."""

    operation: str
    bytes: int
    ranks: int
    backend: str
    seconds: list[float]  # samples, each that of the slowest rank
    algbw: float  # bytes per second
    busbw: float  # bytes per second
    values: str  # "ok", "wrong", "not checked"


@dataclass(frozen=True)
class Fit:
    """seconds = alpha + beta * bytes, over all sizes of one operation."""

    fit: str  # the operation
    alpha: float  # seconds
    beta: float  # seconds per byte
    worst_error: float  # the largest relative difference between the line and a median
    best_busbw: float  # bytes per second


def print_measurements(measurements: list[Measurement]) -> None:
    print("\ntime per call, of the slowest rank; bandwidths in GB/s (10^9 bytes per second)")
    rows = []
    for m in measurements:
        times = [f"{1e6 * seconds:.0f}" for seconds in median_min_max(m.seconds)]
        rates = [f"{m.algbw / 1e9:.3f}", f"{m.busbw / 1e9:.3f}"]
        rows.append([m.operation, m.bytes, *times, *rates, m.values])
    header = ["operation", "bytes", "us: median", "min", "max", "algbw", "busbw", "values"]
    print_table(header, rows)


def print_fits(fits: list[Fit]) -> None:
    print("\ntime = alpha + bytes * beta")
    rows = []
    for fit in fits:
        rate = f"{1e-9 / fit.beta:.3f}" if fit.beta else "-"
        half_at = f"{fit.alpha / fit.beta:.0f}" if fit.beta else "-"
        error, best = f"{fit.worst_error:.0%}", f"{fit.best_busbw / 1e9:.3f}"
        rows.append([fit.fit, f"{1e6 * fit.alpha:.0f}", rate, half_at, error, best])
    header = ["operation", "alpha us", "1/beta GB/s", "half at bytes", "worst error", "best busbw"]
    print_table(header, rows)


def print_limits(limits: dict[str, list[float]], nbytes: int) -> None:
    print(f"\nlimits, measured with {nbytes} bytes")
    rows = [
        [name, *(f"{rate / 1e9:.3f}" for rate in median_min_max(rates))]
        for name, rates in limits.items()
    ]
    print_table(["per rank", "GB/s: median", "min", "max"], rows)


def median_min_max(samples: list[float]) -> tuple[float, float, float]:
    return statistics.median(samples), min(samples), max(samples)


def save(measurements: list[Measurement], fits: list[Fit], limits: dict, folder: Path) -> None:
    """metrics.jsonl: one line per measurement, fit and limit, in seconds and bytes."""
    lines = [asdict(record) for record in (*measurements, *fits)]
    lines += [{"limit": name, "bytes_per_second": rates} for name, rates in limits.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plot(measurements, limits, folder / "bandwidth.png")
    print(f"saved {folder}/metrics.jsonl and bandwidth.png")


def plot(measurements: list[Measurement], limits: dict, path: Path) -> None:
    """Plot busbw over bytes with the spread of the samples; collectives left, all_reduces right."""
    import matplotlib

    matplotlib.use("Agg")  # no window, no display needed
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    draw(left, "collectives", [m for m in measurements if m.operation in COLLECTIVES], limits)
    all_reduces = [m for m in measurements if m.operation in ("all_reduce", *ALGORITHMS)]
    draw(right, "all-reduce: torch's and ours", all_reduces, limits)
    figure.suptitle(f"{measurements[0].ranks} ranks, {measurements[0].backend}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw(ax, title: str, measurements: list[Measurement], limits: dict) -> None:
    for operation in dict.fromkeys(m.operation for m in measurements):
        points = [m for m in measurements if m.operation == operation]
        sizes = [m.bytes for m in points]
        ax.plot(sizes, [m.busbw / 1e9 for m in points], marker="o", label=operation)
        times = [median_min_max(m.seconds) for m in points]
        slowest = [m.busbw / 1e9 * t[0] / t[2] for m, t in zip(points, times, strict=True)]
        fastest = [m.busbw / 1e9 * t[0] / t[1] for m, t in zip(points, times, strict=True)]
        ax.fill_between(sizes, slowest, fastest, alpha=0.1)
    for (name, rates), style in zip(limits.items(), ("-", "--", ":"), strict=False):
        ax.axhline(statistics.median(rates) / 1e9, color="0.5", linestyle=style, label=name)
    ax.set(xscale="log", yscale="log", xlabel="bytes", ylabel="busbw, GB/s", title=title)
    ax.legend(fontsize=8)
