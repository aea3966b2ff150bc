"""The pictures of chapter 13: a pair of matrices on two ranks; what tensor parallelism costs."""

import itertools
from collections.abc import Mapping

import figures


def pair() -> None:
    """Draw an MLP on two ranks: the first matrix column-parallel, the second row-parallel."""
    figure, ax = figures.canvas(2.9, (-0.8, 11.1), (-1.3, 4.2))
    steps = [  # centre, width, text, whether it is another one on each rank
        (0.5, 0.9, "input\nwhole", False),
        (2.85, 2.0, "expand\ncolumn-parallel", True),
        (4.85, 1.3, "half the\nfeatures", True),
        (6.75, 1.8, "contract\nrow-parallel", True),
        (8.55, 1.2, "partial\nsum", True),
        (10.55, 1.0, "output\nwhole", False),
    ]
    for rank, y in enumerate((2.8, 0.8)):
        ax.text(-0.15, y, f"rank {rank}", ha="right", va="center")
        for x, width, text, own in steps:
            figures.box(ax, x, y, text, rank if own else "white", width, 1.2)
        for (x, width, *_), (next_x, next_width, *_) in itertools.pairwise(steps):
            figures.arrow(ax, (x + width / 2, y), (next_x - next_width / 2, y))
    for x, name, forward, backward in (
        (1.4, "f: copy", "nothing", "all_reduce"),
        (9.6, "g: sum", "all_reduce", "nothing"),
    ):
        ax.plot([x, x], [0, 3.6], color="0.2", linestyle="--")
        ax.text(x, 3.7, name, ha="center", weight="bold")
        ax.text(x, -0.15, f"forward: {forward}\nbackward: {backward}", ha="center", va="top")
    figures.show(figure)


def activations(measured: Mapping[str, float]) -> None:
    """Draw what a block keeps on n ranks, in activations: formulas, and what was weighed on 2.

    measured: "tensor" and "sequence" -> activations per block.
    """
    ranks = [1, 2, 4, 8, 16]
    formulas = {
        "tensor": ("tensor parallel", lambda n: 4 + 12 / n),
        "sequence": ("and sequence parallel", lambda n: 2 + 14 / n),
    }
    lines = {}
    for name, (label, formula) in formulas.items():
        assert abs(measured[name] - formula(2)) < 0.25, f"{name}: not the formula"
        lines[label] = ranks, [formula(n) for n in ranks], "-"
        lines[f"measured, {name}"] = [2], [measured[name]], "o" if name == "tensor" else "s"
    lines["gathered again in backward"] = ranks, [16 / n for n in ranks], "k:"
    figure, ax = figures.panels(1)
    labels = {"xlabel": "ranks", "ylabel": "activations per block", "ylim": (0, 17)}
    figures.curves(lines, ax=ax, xscale="log", **labels)
    ax.set_xticks(ranks, [str(n) for n in ranks])
    ax.set_xticks([], minor=True)
    figures.show(figure)


def crossing(counted: Mapping[int, int], width: int, blocks: int) -> None:
    """Draw the bytes that two ways to use two ranks send, over the tokens of a step.

    counted: tokens -> bytes that tensor parallelism has summed in `blocks` blocks of this width.
    """
    tokens = list(counted)
    formula = [4 * blocks * t * width * 4 for t in tokens]
    assert list(counted.values()) == formula
    gradients = 12 * blocks * width**2 * 4
    assert next(t for t, f in zip(tokens, formula, strict=True) if f > gradients) > 3 * width
    figure, ax = figures.panels(1)
    lines = {
        "tensor parallel, formula": (tokens, formula, "-"),
        "tensor parallel, counted": (tokens, counted.values(), "ko"),
        "data parallel, formula": (tokens, [gradients] * len(tokens), "--"),
        "tokens = 3 C": ([3 * width] * 2, [min(formula), max(formula)], "k:"),
    }
    labels = {"xlabel": "tokens per step, on one replica", "ylabel": "bytes summed per step"}
    figures.curves(lines, ax=ax, xscale="log", yscale="log", **labels)
    ax.set_xticks(tokens, [str(t) for t in tokens])
    ax.set_xticks([], minor=True)
    ax.set_yticks(formula, [f"{f:,}" for f in formula])
    ax.set_yticks([], minor=True)
    figures.show(figure)
