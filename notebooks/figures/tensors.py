"""Tensors on ranks, cell by cell, in the colour of the rank they come from; boxes and arrows."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from figures.page import COLOURS, NOBODY, WIDTH, show

Origin = Callable[[float], int | Iterable[int]]


def tens(value: float) -> int:
    """The origin of a number that its rank has marked: 31 is element 1 of rank 3."""
    return int(value) // 10


def digits(value: float) -> list[int]:
    """The origins of a sum in which rank r's part is 10**r: 1101 has something of 0, 2 and 3."""
    return [rank for rank, digit in enumerate(reversed(str(int(value)))) if digit != "0"]


def ranks(
    stages: Mapping[str, Sequence], origin: Origin | None = None, one_size: bool = False
) -> None:
    """Draw the tensors that ranks hold: a row per stage, a column per rank.

    stages: title -> one tensor (0, 1 or 2 dims) per rank, as gather() returns it; None: no tensor.
    origin: the rank, or the ranks, that a number comes from, told from the number itself (see
    `tens` and `digits`), so that no label can be at the wrong place. None: the rank that holds it.
    one_size: all cells are equally wide, so that a quarter of a tensor looks like a quarter.
    """
    grids = {title: [_grid(tensor) for tensor in row] for title, row in stages.items()}
    columns = max(map(len, grids.values()))
    widest = max(len(line) for row in grids.values() for grid in row for line in grid)
    heights = [max(max(map(len, row)), 1) for row in grids.values()]
    figure, axes = plt.subplots(
        len(grids),
        columns,
        figsize=(WIDTH, 0.4 * sum(heights) + 0.3 * len(grids) + 0.3),
        height_ratios=heights,
        squeeze=False,
    )
    for row, (title, tensors) in zip(axes, grids.items(), strict=True):
        row[0].set_ylabel(title, rotation=0, ha="right", va="center", labelpad=8)
        for rank, (ax, grid) in enumerate(zip(row, tensors, strict=False)):
            from_rank = origin or (lambda value, rank=rank: rank)
            tensor(ax, grid, from_rank, widest if one_size else None)
    for rank, ax in enumerate(axes[0]):
        ax.set_title(f"rank {rank}")
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    show(figure)


def tensor(
    ax: Axes, grid: Sequence[Sequence[float]], origin: Origin, width: int | None = None
) -> None:
    """Draw a tensor of 2 dims into `ax`, one cell per number, coloured by where it comes from.

    width: of `ax`, in cells; None: as wide as the tensor.
    """
    for i, line in enumerate(grid):
        for j, value in enumerate(line):
            owners = origin(value)
            cell(ax, j, -i, f"{value:.4g}", [owners] if isinstance(owners, int) else owners)
    height, width = len(grid), width or max(map(len, grid), default=1)
    ax.set(xlim=(-0.05, width + 0.05), ylim=(0.05 - height + 0.9, 1.05))


def cell(ax: Axes, x: float, y: float, text: str, owners: Iterable[int], w=1.0, h=1.0) -> None:
    """A box whose lower left corner is (x, y), striped in the colours of the ranks `owners`."""
    stripes = [COLOURS[owner % len(COLOURS)] for owner in owners] or [NOBODY]
    for i, colour in enumerate(stripes):
        stripe = Rectangle((x + w * i / len(stripes), y), w / len(stripes), h, facecolor=colour)
        ax.add_patch(stripe)
    ax.add_patch(Rectangle((x, y), w, h, facecolor="none", edgecolor="white", linewidth=1.5))
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center")


def _grid(tensor) -> list[list[float]]:
    import torch

    if tensor is None:
        return []
    return torch.atleast_2d(torch.as_tensor(tensor).detach()).tolist()


# ---- boxes and arrows


def box(ax: Axes, x: float, y: float, text: str, colour="#eeeeee", width=2.2, height=0.8) -> None:
    """A box around its centre (x, y). colour: a rank's number, or a colour."""
    facecolor = COLOURS[colour] if isinstance(colour, int) else colour
    corner = (x - width / 2, y - height / 2)
    ax.add_patch(Rectangle(corner, width, height, facecolor=facecolor, edgecolor="0.4"))
    ax.text(x, y, text, ha="center", va="center")


def arrow(ax: Axes, start: tuple, end: tuple, text: str = "", **style) -> None:
    """An arrow, with a word in its middle. style: matplotlib's arrowprops."""
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "0.3", **style})
    if text:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        upright = start[0] == end[0]
        ax.text(
            x + 0.1 * upright,
            y + 0.06 * (not upright),
            text,
            ha="left" if upright else "center",
            va="center" if upright else "bottom",
        )
