"""The pictures of chapter 2: who waits for whom, and a sum that goes round a ring."""

import math
from collections.abc import Mapping, Sequence

from figures import LINES, arrow, box, cell, digits, movie, panels, show


def waiting(waits_for: Mapping[str, Sequence[int | None]]) -> None:
    """Ranks on a circle, and an arrow from each to the one that it waits for: a panel per title."""
    figure, axes = panels(len(waits_for), 3.4)
    for ax, (title, targets) in zip(axes, waits_for.items(), strict=True):
        angles = [math.pi / 2 - 2 * math.pi * rank / len(targets) for rank in range(len(targets))]
        places = [(1.6 * math.cos(a), math.sin(a)) for a in angles]
        for rank, target in enumerate(targets):
            if target is not None:
                style = {"shrinkA": 26, "shrinkB": 26, "linewidth": 2, "color": LINES[1]}
                arrow(ax, places[rank], places[target], connectionstyle="arc3,rad=-0.15", **style)
            box(ax, *places[rank], f"rank {rank}", rank, width=0.9, height=0.36)
        ax.set(xlim=(-2.2, 2.2), ylim=(-1.3, 1.3))
        ax.set_title(title)
        ax.axis("off")
    show(figure)


def ring(held: Sequence[Sequence]) -> None:
    """A movie of the ring all_reduce.

    held: for each rank its tensor, one number per chunk, at the start and after each step. The
    arrows are found in the numbers: a chunk that has changed has come from the left.
    """
    world, steps = len(held), len(held[0]) - 1
    held = [[[int(v) for v in tensor] for tensor in rank] for rank in held]
    received = []  # for each step: (receiver, chunk)
    for k in range(steps):
        changed = [
            (rank, chunk)
            for rank in range(world)
            for chunk in range(world)
            if held[rank][k][chunk] != held[rank][k + 1][chunk]
        ]
        assert [rank for rank, _ in changed] == list(range(world)), "one chunk each, in every step"
        for rank, chunk in changed:
            sent = held[rank - 1][k][chunk]
            own = held[rank][k][chunk] if k < world - 1 else 0
            assert held[rank][k + 1][chunk] == own + sent, "it has come from the left"
        received.append(changed)
    assert all(tensor[-1] == held[0][-1] for tensor in held), "all have the sum"

    def draw(ax, k: int) -> None:
        what = "adding" if k < world else "passing on"
        title = f"step {k} of {2 * (world - 1)}: {what}" if k else "at the start"
        ax.text(-0.7, 0.35, title, fontsize=10)
        for rank in range(world):
            ax.text(2 * rank + 0.5, -0.2, f"rank {rank}", ha="center", va="center")
            for chunk, value in enumerate(held[rank][k]):
                cell(ax, 2 * rank, -1.4 - chunk, str(value), digits(value))
        for chunk in range(world):
            ax.text(-1.0, -0.9 - chunk, f"chunk {chunk}", ha="right", va="center")
        for rank, chunk in received[k - 1] if k else ():
            arrow(ax, (2 * rank - 0.9, -0.9 - chunk), (2 * rank, -0.9 - chunk), linewidth=2)
            if rank == 0:  # it leaves on the right side and comes in again on the left
                x = 2 * world - 1
                arrow(ax, (x, -0.9 - chunk), (x + 0.7, -0.9 - chunk), linewidth=2)
                ax.text(x + 0.8, -0.9 - chunk, "to rank 0", va="center")

    limits = (-2.2, 2 * world + 1.2), (-world - 0.5, 0.8)
    movie(draw, steps + 1, 2.6, *limits, stills=(1, world - 1, steps))
