"""The picture of chapter 1: how ranks find each other."""

from collections.abc import Sequence

from figures import LINES, arrow, box, canvas, show


def rendezvous(keys: Sequence[str]) -> None:
    """Ranks leave their addresses in a store, one key each, then connect to each other directly."""
    figure, ax = canvas(3.4, (-3.2, 10), (-0.9, 4.9))
    places = [(1, 3.6 - 1.1 * rank) for rank in range(len(keys))]
    box(ax, 7, 1.95, "", "white", width=5.4, height=4.6)
    for rank, (key, (x, y)) in enumerate(zip(keys, places, strict=True)):
        assert key.endswith(f"/{rank}"), f"{key} is not rank {rank}'s"
        box(ax, x, y, f"rank {rank}", rank, width=1.6, height=0.62)
        style = {"arrowstyle": "<|-|>", "linestyle": "--"}
        arrow(ax, (x + 0.8, y), (4.5, y), **style)
        box(ax, 7, y, key, rank, width=4.6, height=0.62)
        for other in range(rank):  # every pair has a connection of its own
            bend = f"arc3,rad={-0.3 * (rank - other)}"
            style = {"arrowstyle": "-", "connectionstyle": bend, "color": LINES[1]}
            arrow(ax, (x - 0.8, y), (places[other][0] - 0.8, places[other][1]), **style)
    ax.text(7, 4.5, "the store", ha="center")
    ax.text(3.1, 4.5, "1. addresses", ha="center")
    ax.text(-1.2, 4.5, "2. connections", ha="center", color=LINES[1])
    show(figure)
