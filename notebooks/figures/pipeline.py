"""The pictures of chapter 15: who worked when, recorded or played."""

import itertools
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

import figures
from figures import Span

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}
COLOURS = {
    "forward": figures.ACTIONS["forward"],
    "backward": figures.ACTIONS["backward"],
    "input gradient": "#ec9070",
    "weight gradients": figures.ACTIONS["weights"],
}


def rows(timelines: Sequence[Sequence[tuple]]) -> dict[str, list[Span]]:
    """For figures.timeline(): the actions of each rank, (kind, micro-batch, start, end).

    With (kind, stage, micro-batch, start, end) a rank's second stage is paler. Fails if a rank did
    two things at once, or a micro-batch arrived at a rank before the rank before had sent it.
    """
    found = {}
    for rank, line in enumerate(timelines):
        assert all(a[-1] <= b[-2] for a, b in itertools.pairwise(line)), f"rank {rank}"
        found[f"rank {rank}"] = [
            Span(start, end, KINDS[kind], str(i), bool(stage) and stage[0] >= len(timelines))
            for kind, *stage, i, start, end in line
        ]
    ends = {}
    for rank, line in enumerate(timelines):
        ends |= {(kind, *(stage or [rank]), i): end for kind, *stage, i, _, end in line}
    for rank, line in enumerate(timelines):
        for kind, *stage, i, start, _ in line:
            before = (kind, (stage[0] if stage else rank) - 1, i)
            assert kind != "F" or ends.get(before, start) <= start, f"{before} comes too late"
    return found


def timelines(titles: Mapping[str, Sequence[Sequence[tuple]]], unit: str = "") -> None:
    """Draw the timelines of all ranks, one picture below the other, with one axis of time.

    unit: of times that are not seconds, such as those of a schedule that was only played.
    """
    if unit:  # figures.timeline() multiplies by 1000
        titles = {
            title: [[(*a[:-2], a[-2] / 1000, a[-1] / 1000) for a in line] for line in recorded]
            for title, recorded in titles.items()
        }
    lines = max(map(len, titles.values()))
    figure, axes = plt.subplots(
        len(titles),
        figsize=(figures.WIDTH, len(titles) * (0.3 * lines + 0.65)),
        sharex=True,
        squeeze=False,
    )
    for ax, (title, recorded) in zip(axes[:, 0], titles.items(), strict=True):
        figures.timeline(rows(recorded), COLOURS, title, ax)
        ax.set_xlabel((unit or "milliseconds") if ax is axes[-1, 0] else "")
        ax.get_legend().remove()
    lengths = [max(line[-1][-1] for line in r) - r[0][0][-2] for r in titles.values()]
    ax.set_xlim(0, 1010 * max(lengths))
    kinds = {KINDS[kind] for recorded in titles.values() for line in recorded for kind, *_ in line}
    shown = {kind: colour for kind, colour in COLOURS.items() if kind in kinds}
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=c, edgecolor="0.35") for c in shown.values()]
    top = axes[0, 0]
    top.legend(handles, shown, ncols=len(shown), loc="lower right", bbox_to_anchor=(1, 1))
    figures.show(figure)


def movie(recorded: Sequence[Sequence[tuple]], frames: int = 32) -> None:
    """Show recorded timelines as they came about; on the right, what each rank keeps meanwhile."""
    found = rows(recorded)
    zero = min(line[0][-2] for line in recorded)
    last = max(line[-1][-1] for line in recorded)

    def kept(line, now):
        return sum((kind == "F") - (kind == "B") for kind, *_, end in line if end <= now)

    for rank, line in enumerate(recorded):
        most = max(kept(line, end) for *_, end in line)
        assert most == len(recorded) - rank, f"1F1B keeps p - stage, and rank {rank} kept {most}"

    def draw(ax, k):
        now = zero + (last - zero) * (k + 1) / frames
        for y, (name, spans) in enumerate(found.items()):
            ax.text(-0.01, -y, name, ha="right", va="center")
            for span in spans:
                if span.start < now:
                    left = (span.start - zero) / (last - zero)
                    width = (min(span.end, now) - span.start) / (last - zero)
                    colour, busy = COLOURS[span.kind], span.end > now
                    edge = "black" if busy else "0.5"
                    ax.barh(-y, width, 0.8, left, color=colour, edgecolor=edge, lw=1 + busy)
                    if width > 0.018:
                        ax.text(left + width / 2, -y, span.text, ha="center", va="center")
            number = 0 if k == frames - 1 else kept(recorded[y], now)
            for i in range(number):
                figures.cell(ax, 1.03 + 0.035 * i, -y - 0.3, "", [], w=0.03, h=0.6)
                ax.barh(-y, 0.03, 0.6, 1.03 + 0.035 * i, color="0.75", edgecolor="0.3")
        ax.text(0, 0.55, "blue: forward   orange: backward", va="bottom")
        ax.text(1.03, 0.55, "kept", va="bottom")

    high = len(recorded) - 1
    figures.movie(
        draw,
        frames,
        2.2,
        (-0.09, 1.18),
        (-high - 0.5, 0.9),
        stills=(frames // 4, frames // 2),
        seconds=0.25,
    )


def idle(measured: Mapping[tuple[str, int], float], ranks: int) -> None:
    """Draw the measured bubble fraction, {(schedule, m): share}, on the curve of the formula."""
    every = [1 + x / 10 for x in range(160)]
    lines = {"(p - 1) / (m + p - 1)": (every, [(ranks - 1) / (m + ranks - 1) for m in every], "k-")}
    for name, style in (("GPipe", "o"), ("1F1B", "x")):
        points = {m: share for (n, m), share in measured.items() if n == name}
        assert points[1] > points[4] > points[16], "more micro-batches, less idle"
        lines[f"{name}, measured"] = points, points.values(), style
    labels = {"xlabel": "micro-batches m", "ylabel": "idle", "ylim": (0, 0.9)}
    figures.curves(lines, title=f"{ranks} ranks", **labels)


def kept(of_ranks: Sequence[Mapping], m: int) -> None:
    """Draw the bytes that a rank keeps after each action: {(schedule, m): [bytes, ...]}.

    A panel per rank, because the lines of different ranks would cover one another.
    """
    figure, axes = figures.panels(len(of_ranks), 2.6, sharey=True)
    for rank, (ax, history) in enumerate(zip(axes, of_ranks, strict=True)):
        for name in ("GPipe", "1F1B"):
            values, one = history[name, m], max(history["GPipe", 1])
            most = m if name == "GPipe" else min(len(of_ranks) - rank, m)
            assert max(values) == one * most, f"{name}, rank {rank}: not {most} micro-batches"
            x = range(1, len(values) + 1)
            ax.step(x, [b / 1000 for b in values], where="post", label=name)
        ax.set(title=f"rank {rank}, m = {m}", xlabel="actions done")
    axes[0].set_ylabel("KB kept for backward")
    axes[0].legend(loc="upper left")
    figures.show(figure)
