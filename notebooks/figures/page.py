"""The page of a chapter: how wide it is, how small letters may be, its colours; still and moving.

show(figure) and movie(draw, frames) are the only ways out: both refuse what is too small to read.
"""

import io
from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
from IPython.display import Image, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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


def canvas(height: float, xlim: tuple, ylim: tuple) -> tuple[Figure, Axes]:
    """An empty picture of this height in inches, for box(), arrow() and cell()."""
    figure, ax = plt.subplots(figsize=(WIDTH, height))
    ax.set(xlim=xlim, ylim=ylim)
    ax.axis("off")
    return figure, ax


def show(figure: Figure) -> None:
    """Show a picture in the page, and close it.

    Raises ValueError if a text is smaller than 8 points, or the picture not as wide as the page.
    """
    picture = _render(figure)
    file = io.BytesIO()
    picture.quantize(128, dither=0).save(file, format="PNG", optimize=True)
    display(Image(file.getvalue(), format="png"))


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
