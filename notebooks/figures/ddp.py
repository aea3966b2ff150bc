"""Pictures of chapters 6 and 7: data parallelism, buckets that travel under backward, a script."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator

import figures


def data_parallel(indices: Sequence[Sequence[int]]) -> None:
    """Draw a step of data parallelism. indices: the samples of the global batch, rank by rank.

    Raises AssertionError unless each sample is in exactly one local batch.
    """
    everything = sorted(i for own in indices for i in own)
    assert everything == list(range(len(everything))), "a sample is missing, or there twice"
    columns = [2.3 + 5.4 * rank for rank in range(len(indices))]
    middle = sum(columns) / len(columns)
    figure, ax = figures.canvas(4.6, (-0.2, 10.2), (-0.8, 6.7))
    figures.box(ax, middle, 6.1, f"one global batch of {len(everything)} images", width=5)
    for rank, (x, own) in enumerate(zip(columns, indices, strict=True)):
        few = ", ".join(map(str, own[:3]))
        figures.box(ax, x, 4.85, f"rank {rank}\nimages {few}, ...", rank, 3)
        figures.box(ax, x, 3.6, "forward, backward\nsame weights", rank, 3)
        figures.box(ax, x, 2.4, f"its gradient $g_{rank}$", rank, 3)
        figures.box(ax, x, 0, "optimizer step: same gradient\nin, same weights out", rank, 3.6)
        figures.arrow(ax, (middle + (x - middle) * 0.6, 5.7), (x, 5.25))
        for start, end in ((4.45, 4.0), (3.2, 2.8), (2.0, 1.6), (0.8, 0.4)):
            figures.arrow(ax, (x, start), (x, end))
    total = " + ".join(f"g_{rank}" for rank in range(len(indices)))
    figures.cell(ax, columns[0] - 1.8, 0.8, "", range(len(indices)), w=9, h=0.8)
    text = rf"all_reduce, then divide: every rank has  $({total})\, / \,{len(indices)}$"
    ax.text(middle, 1.2, text, ha="center", va="center")
    figures.show(figure)


def buckets(trial: Sequence[Mapping], frames: int = 12) -> None:
    """A movie of one backward pass: computing above, the buckets that travel below it.

    trial: per rank {"backward": seconds, "all": seconds, "buckets": [(number, "start" or "end",
    seconds since backward began)]}, as the ranks noted it.
    Raises AssertionError if a bucket left after backward had ended, or buckets in another order
    than that of their numbers: then something is drawn under a wrong name.
    """
    times = []  # per rank: bucket -> [start, end]
    for rank in trial:
        own = {number: [t] for number, kind, t in rank["buckets"] if kind == "start"}
        for number, kind, t in rank["buckets"]:
            if kind == "end":
                own[number].append(t)
        starts = [start for start, _ in own.values()]
        assert starts == sorted(starts), "buckets out of order"
        assert list(own) == sorted(own), "buckets under wrong numbers"
        assert max(starts) <= rank["backward"], "a bucket left after backward"
        times.append(own)
    last = max(rank["all"] for rank in trial)
    height = 2 + max(map(len, times))  # rows of a rank

    def draw(ax, k):
        now = last * (k + 1) / frames
        for r, (rank, own) in enumerate(zip(trial, times, strict=True)):
            top = -r * height
            bars = [("backward", 0, rank["backward"], figures.COLOURS[r])]
            sent = figures.ACTIONS["reduce"]  # what several ranks add belongs to none
            bars += [(f"bucket {n}", start, end, sent) for n, (start, end) in own.items()]
            for row, (name, start, end, colour) in enumerate(bars):
                ax.text(-0.01 * last, top - row, name, ha="right", va="center", fontsize=8)
                if start < now:
                    width = min(end, now) - start
                    ax.barh(top - row, width, 0.8, start, color=colour, edgecolor="0.35")
            ax.text(0, top + 0.65, f"rank {r}", fontweight="bold", va="center", fontsize=9)
            if now >= rank["all"]:
                ax.plot([rank["all"]] * 2, [top + 0.5, top - len(own) - 0.5], "--", color="black")
        bottom = -len(trial) * height + 0.9
        ax.plot([now, now], [bottom, 1.2], color=figures.LINES[1], linewidth=1)
        ax.plot([0, last], [bottom, bottom], color="black", linewidth=0.8)
        for ms in MaxNLocator(6).tick_values(0, 1e3 * last):
            if ms <= 1e3 * last:
                ax.plot([ms / 1e3] * 2, [bottom, bottom - 0.15], color="black", linewidth=0.8)
                ax.text(ms / 1e3, bottom - 0.7, f"{ms:.0f}", ha="center", fontsize=8)
        ax.text(-0.01 * last, bottom - 0.7, "ms", ha="right", fontsize=8)

    limits = (-0.14 * last, 1.04 * last), (-len(trial) * height, 1.2)
    figures.movie(draw, frames, 4.2, *limits, stills=(frames // 2, frames - 1), seconds=0.5)


def script(rows: Sequence[tuple[str, str]]) -> None:
    """Draw what any training script does (left), and what many ranks add (right)."""
    colours = (figures.ACTIONS["wait"], figures.ACTIONS["send"])
    figure, ax = figures.canvas(4.8, (-0.1, 11.3), (-len(rows) + 0.4, 1.2))
    for i, texts in enumerate(rows):
        for x, width, text, colour in zip((0, 5), (4.8, 6.2), texts, colours, strict=True):
            if text:
                figures.box(ax, x + width / 2, -i, text, colour, width, 0.78)
    ax.text(0, 0.75, "any training script", fontweight="bold")
    ax.text(5, 0.75, "what many ranks add", fontweight="bold")
    figures.show(figure)


def schedule(layers: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]) -> None:
    """Draw the puzzle's backward, layer by layer, and its messages: (start, end) in ms each.

    layers: (milliseconds of backward, MB of gradients), in the order of backward.
    """
    row, now = [], 0.0
    for i, (ms, _) in enumerate(layers):
        row.append(figures.Span(now / 1e3, (now + ms) / 1e3, "backward", str(i)))
        now += ms
    assert all(end > start for start, end in spans), "a message ends after it begins"
    assert max(end for _, end in spans) > now, "the last bucket travels after backward"
    wire = [figures.Span(a / 1e3, b / 1e3, "reduce", str(i)) for i, (a, b) in enumerate(spans)]
    figures.timeline({"layers": row, "buckets": wire}, end=now / 1e3)
