"""Draw what run_order() of async_work.py returns: per bucket, when it was computed and sent."""

from pathlib import Path


def draw(order: str, spans: dict[str, list[tuple]], width: int = 72) -> list[str]:
    """One line per bucket. All orders have one scale: `width` is the longest of them."""
    end = max(bucket[-1] for order in spans.values() for bucket in order)
    lines = [f"{order}, {1e3 * max(bucket[-1] for bucket in spans[order]):.1f} ms"]
    for i, bucket in enumerate(spans[order]):
        a, b, c, d = (round(width * moment / end) for moment in bucket)
        lines.append(f"{i:3} |" + " " * a + "#" * (b - a) + " " * (c - b) + "-" * (d - c))
    return lines


def plot(spans: dict[str, list[tuple]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no window, no display needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, figsize=(9, 5), sharex=True)
    for ax, order in zip(axes, ("sequential", "overlapped"), strict=True):
        for i, (a, b, c, d) in enumerate(spans[order]):
            bars = [(1e3 * a, 1e3 * (b - a))], [(1e3 * c, 1e3 * (d - c))]
            for bar, color, what in zip(bars, ("C0", "C1"), ("computes", "sends"), strict=True):
                ax.broken_barh(bar, (i - 0.4, 0.8), color=color, label=None if i else what)
        ax.set(title=f"{order}, rank 0", ylabel="bucket")
        ax.invert_yaxis()
    axes[0].legend()
    axes[1].set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"saved {path}")
