"""Charts: lines and points over an axis, stacked bars, and who does what, when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.page import ACTIONS, KINDS, LINES, WIDTH, show


def curves(
    lines: Mapping[str, tuple[Sequence, Sequence] | tuple[Sequence, Sequence, str]],
    ax: Axes | None = None,
    **axes,
) -> None:
    """Draw lines: label -> (x, y) or (x, y, format), such as "o" for what was measured.

    axes: what Axes.set() takes (xlabel, ylabel, title, xscale="log", ...). With `ax` it is drawn
    there and not shown, as one of several: see panels().
    """
    figure = None
    if ax is None:
        figure, ax = plt.subplots(figsize=(WIDTH, 3.2))
    for label, (x, y, *style) in lines.items():
        ax.plot(list(x), list(y), *style, label=label, markersize=5)
    ax.set(**axes)
    if len(lines) > 1:
        ax.legend()
    if figure:
        show(figure)


def bars(
    columns: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str] = KINDS,
    ax: Axes | None = None,
    **axes,
) -> None:
    """Draw stacked bars: column -> what it is made of -> how much. axes, ax: as in curves()."""
    figure = None
    if ax is None:
        figure, ax = plt.subplots(figsize=(WIDTH, 3.2))
    bottom = [0.0] * len(columns)
    for kind, colour in colours.items():
        if any(kind in column for column in columns.values()):
            heights = [column.get(kind, 0) for column in columns.values()]
            ax.bar(list(columns), heights, 0.8, bottom, color=colour, edgecolor="white", label=kind)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    ax.set(**axes)
    ax.legend()
    if figure:
        show(figure)


def panels(count: int, height: float = 3.2, **options) -> tuple[Figure, Sequence[Axes]]:
    """Several charts side by side: (figure, axes). End with show(figure)."""
    return plt.subplots(1, count, figsize=(WIDTH, height), **options)


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, in seconds."""

    start: float
    end: float
    kind: str  # a key of the colours
    text: str = ""
    pale: bool = False  # of a rank's second stage, for instance


def timeline(
    rows: Mapping[str, Sequence[Span]],
    colours: Mapping[str, str] = ACTIONS,
    title: str = "",
    ax: Axes | None = None,
    end: float | None = None,
) -> None:
    """Draw who does what, when: a row per key, from top to bottom; time in ms since the first span.

    A text is left out where its span is too short for it. end: where a line is drawn, in seconds.
    """
    figure = None
    if ax is None:
        figure, ax = plt.subplots(figsize=(WIDTH, 0.42 * len(rows) + 1.1))
    spans = [span for row in rows.values() for span in row]
    zero, last = min(s.start for s in spans), max(s.end for s in spans)
    for y, row in enumerate(rows.values()):
        for s in row:
            left, width = 1e3 * (s.start - zero), 1e3 * (s.end - s.start)
            ax.barh(
                y,
                width,
                0.8,
                left,
                color=colours[s.kind],
                edgecolor="0.35",
                linewidth=0.5,
                alpha=0.5 if s.pale else 1,
            )
            if width > 8 * len(s.text) * (last - zero):  # of 1,000: about a letter's width
                ax.text(left + width / 2, y, s.text, ha="center", va="center", fontsize=8)
    if end is not None:
        ax.axvline(1e3 * (end - zero), color=LINES[1], linestyle="--")
    used = dict.fromkeys(span.kind for span in spans)
    handles = [Rectangle((0, 0), 1, 1, facecolor=colours[kind], edgecolor="0.35") for kind in used]
    ax.legend(handles, used, ncols=len(used), loc="lower right", bbox_to_anchor=(1, 1))
    ax.set(yticks=range(len(rows)), yticklabels=list(rows), ylim=(len(rows) - 0.5, -0.5))
    ax.set(xlabel="milliseconds", xlim=(0, None))
    ax.set_title(title, loc="left", pad=20)  # above the legend
    if figure:
        show(figure)
