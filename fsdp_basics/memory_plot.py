"""Draw the measurements of memory.py as stacked bars."""

from pathlib import Path

from measure_memory import MOMENTS
from tensor_memory import KINDS

MB = 1e6


def plot(rows_of_ranks: list[dict], path: Path) -> None:
    """Draw for each strategy two stacked bars (end of forward, end of backward), and the peak.

    rows_of_ranks: one dictionary per rank: strategy -> the result of `measure`.
    """
    from matplotlib.figure import Figure

    names = list(rows_of_ranks[0])
    axes = Figure(figsize=(9, 0.6 * len(names) + 1.6), layout="constrained").subplots()
    for i, name in enumerate(names):
        rows = [rows[name] for rows in rows_of_ranks]
        draw_bar(axes, i - 0.19, [row["moments"][MOMENTS[1]] for row in rows])
        draw_bar(axes, i + 0.19, [row["moments"][MOMENTS[2]] for row in rows])
        peak = max(row["peak"] for row in rows) / MB
        axes.plot([peak, peak], [i - 0.38, i + 0.38], color="black", label="peak of a step")
    handles, labels = axes.get_legend_handles_labels()
    handle_of = dict(zip(labels, handles, strict=True))  # each label once
    axes.legend(handle_of.values(), handle_of.keys(), fontsize="small", loc="lower right")
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="MB on the fullest rank")
    axes.set_title(f"{len(rows_of_ranks)} ranks: end of forward (upper), end of backward (lower)")
    axes.invert_yaxis()
    axes.figure.savefig(path, dpi=150)


def draw_bar(axes, y: float, of_ranks: list[dict[str, int]]) -> None:
    """Draw one stacked bar: bytes by kind on the fullest rank."""
    fullest = max(of_ranks, key=lambda by_kind: sum(by_kind.values()))
    left = 0.0
    for i, kind in enumerate(KINDS):
        width = fullest[kind] / MB
        axes.barh(y, width, 0.34, left, color=f"C{i}", label=kind)
        left += width
