"""What draws in the chapters: one look, and one meaning of colour.

ranks({"before": gather("x")}, origin)   tensors on ranks: numbers in cells, colour says whose
curves({"measured": (x, y)}, ...)        lines and points over an axis
bars({"rank 0": {"parameters": 4e6}})    stacked bars
timeline({"rank 0": [Span(...)]})        who does what, when
movie(draw, frames)                      what moves: an animated picture, without scripts

Colour is ORIGIN wherever tensors are drawn: the rank whose data a number is made of. A cell that
several ranks have contributed to is striped in all their colours. COLOURS can be told apart by
readers who do not see red and green, and black text can be read on each of them.

Pictures that belong to one chapter alone lie beside this file, in a module of the chapter's name.
Each ends with show(), which refuses letters that nobody could read.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from IPython.display import Image, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

WIDTH = 8  # inches: at 150 dots an inch a little more than a page on GitHub is wide
DPI = 150
SMALLEST_LETTERS = 8  # points

# Of ranks 0, 1, 2, ...: after Okabe and Ito, https://jfly.uni-koeln.de/color/, made lighter.
COLOURS = ("#7cc3ee", "#f2b64a", "#57c4a4", "#e0a3c4", "#f3e86b", "#9a86e0", "#ec9070", "#dddddd")
NOBODY = "white"
# Of what a rank does: in timelines, where rows are ranks already.
ACTIONS = {
    "forward": "#7cc3ee",
    "backward": "#f2b64a",
    "weights": "#57c4a4",
    "gather": "#e0a3c4",
    "reduce": "#c4c4c4",
    "send": "#e0a3c4",
    "compute": "#7cc3ee",
    "wait": "#f0f0f0",
}
# Of what memory holds: in stacked bars.
KINDS = {
    "parameters": "#7cc3ee",
    "gradients": "#e0a3c4",
    "optimizer": "#f2b64a",
    "activations": "#57c4a4",
}
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#999999")  # thin: darker

Origin = Callable[[float], int | Iterable[int]]

plt.rcParams.update(
    {
        "figure.dpi": DPI,
        "savefig.dpi": DPI,
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "axes.prop_cycle": plt.cycler(color=LINES),
    }
)


# ---- tensors on ranks


def tens(value: float) -> int:
    """The origin of a number that its rank has marked: 31 is element 1 of rank 3."""
    return int(value) // 10


def digits(value: float) -> list[int]:
    """The origins of a sum in which rank r's part is 10**r: 1101 has something of 0, 2 and 3."""
    return [rank for rank, digit in enumerate(reversed(str(int(value)))) if digit != "0"]


def ranks(stages: Mapping[str, Sequence], origin: Origin | None = None) -> None:
    """Draw the tensors that ranks hold: a row per stage, a column per rank.

    stages: title -> one tensor (0, 1 or 2 dims) per rank, as gather() returns it; None: no tensor.
    origin: the rank, or the ranks, that a number comes from, told from the number itself (see
    `tens` and `digits`), so that no label can be at the wrong place. None: the rank that holds it.
    """
    grids = {title: [_grid(tensor) for tensor in row] for title, row in stages.items()}
    columns = max(map(len, grids.values()))
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
            tensor(ax, grid, origin or (lambda value, rank=rank: rank))
    for rank, ax in enumerate(axes[0]):
        ax.set_title(f"rank {rank}")
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    show(figure)


def tensor(ax: Axes, grid: Sequence[Sequence[float]], origin: Origin) -> None:
    """Draw a tensor of 2 dims into `ax`, one cell per number, coloured by where it comes from."""
    for i, line in enumerate(grid):
        for j, value in enumerate(line):
            owners = origin(value)
            cell(ax, j, -i, f"{value:.4g}", [owners] if isinstance(owners, int) else owners)
    height, width = len(grid), max(map(len, grid), default=1)
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


def canvas(height: float, xlim: tuple, ylim: tuple) -> tuple[Figure, Axes]:
    """An empty picture of this height in inches, for box(), arrow() and cell()."""
    figure, ax = plt.subplots(figsize=(WIDTH, height))
    ax.set(xlim=xlim, ylim=ylim)
    ax.axis("off")
    return figure, ax


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


# ---- charts


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


# ---- time


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


# ---- what moves


def movie(
    draw: Callable[[Axes, int], None],
    frames: int,
    height: float,
    xlim: tuple,
    ylim: tuple,
    stills: Sequence[int] = (),
    seconds: float = 0.8,
    most_bytes: int = 150_000,
) -> None:
    """Show `frames` pictures one after the other, over and over; the last stays longer.

    draw(ax, k): draws picture k, of what was recorded, into empty axes. seconds: for each picture.
    stills: pictures that are also shown one below the other, for paper.
    An animated PNG: wherever a picture can be seen it moves, and no script runs.
    Raises ValueError if it is larger than `most_bytes`.
    """
    from PIL import Image as Pictures

    pictures = []
    for k in range(frames):
        figure, ax = canvas(height, xlim, ylim)
        draw(ax, k)
        pictures.append(_render(figure))
    palette = _palette(pictures)
    pictures = [p.quantize(palette=palette, dither=Pictures.Dither.NONE) for p in pictures]
    file = io.BytesIO()
    pictures[0].save(
        file,
        format="PNG",
        save_all=True,
        append_images=pictures[1:],
        duration=[int(1000 * seconds)] * (frames - 1) + [int(3000 * seconds)],
        loop=0,
        optimize=True,
    )
    if len(file.getvalue()) > most_bytes:
        raise ValueError(f"{len(file.getvalue()):,} bytes, more than {most_bytes:,}: fewer frames?")
    display(Image(file.getvalue(), format="png"))
    if stills:
        figure, axes = plt.subplots(
            len(stills), 1, figsize=(WIDTH, height * len(stills)), squeeze=False
        )
        for ax, k in zip(axes.flat, stills, strict=True):
            ax.set(xlim=xlim, ylim=ylim)
            ax.axis("off")
            draw(ax, k)
        show(figure)


# ---- the page


def show(figure: Figure) -> None:
    """Show a picture in the page, and close it.

    Raises ValueError if a text is smaller than 8 points, or the picture not as wide as the page.
    """
    picture = _render(figure)
    file = io.BytesIO()
    picture.quantize(128, dither=0).save(file, format="PNG", optimize=True)
    display(Image(file.getvalue(), format="png"))


def _render(figure: Figure):
    """The picture in memory, with letters that can be read; the figure is closed."""
    from PIL import Image as Pictures

    figure.tight_layout()
    if figure.get_figwidth() != WIDTH:
        raise ValueError(f"{figure.get_figwidth()} inches wide: pictures are {WIDTH}")
    for text in figure.findobj(Text):
        size = text.get_fontsize()
        if size < SMALLEST_LETTERS and text.get_visible() and text.get_text().strip():
            raise ValueError(f"{text.get_text()!r} is {size} points high: who can read that?")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    plt.close(figure)
    return Pictures.open(file).convert("RGB")


def _palette(pictures: Sequence):
    """One palette of 64 colours for all pictures: those of the first, the middle, the last."""
    from PIL import Image as Pictures

    chosen = [pictures[0], pictures[len(pictures) // 2], pictures[-1]]
    together = Pictures.new("RGB", (chosen[0].width, sum(p.height for p in chosen)))
    for i, picture in enumerate(chosen):
        together.paste(picture, (0, i * picture.height))
    return together.quantize(64, kmeans=1, dither=0)
