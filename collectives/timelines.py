"""Draw spans of time: when each of several things was computed, and when it was sent or copied."""

from pathlib import Path


def draw(order: str, spans: dict[str, list[tuple]], width: int = 72) -> list[str]:
    """A line per bucket: # while it is computed, - while it is sent, = while both go on.

    spans: for each order, and in it for each bucket, begin and end of computing, then of sending,
        in seconds. All orders have one scale: the width is the longest of them.
    """
    end = max(max(bucket) for order in spans.values() for bucket in order)
    lines = [f"{order}, {1e3 * max(max(bucket) for bucket in spans[order]):.1f} ms"]
    for i, bucket in enumerate(spans[order]):
        a, b, c, d = (round(width * moment / end) for moment in bucket)
        marks = (" -#="[2 * (a <= x < b) + (c <= x < d)] for x in range(width))
        lines.append(f"{i:3} |{''.join(marks)}".rstrip())
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
