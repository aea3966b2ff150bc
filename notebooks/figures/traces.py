"""Pictures of chapter 18: one step on all ranks, where its time went, a bit that flipped."""

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

import figures

WORK = ("load", "forward", "backward", "optimizer")  # what a rank's main thread does, in order
COLOURS = {
    "load": "#9a86e0",
    "forward": figures.ACTIONS["forward"],
    "backward": figures.ACTIONS["backward"],
    "optimizer": figures.ACTIONS["weights"],
    "waits": "#c4c4c4",  # stands without an edge in stacked bars
    "network": figures.ACTIONS["send"],
}
PARTS = {
    "loading": COLOURS["load"],
    "computing": COLOURS["forward"],
    "waiting for the other rank": COLOURS["waits"],
    "waiting for the network": COLOURS["network"],
}


def step(ranks: Sequence[Mapping], title: str = "", ax=None) -> None:
    """One step of a job, that of middle length: a row for each rank's work and its messages.

    ranks: of each rank, spans (begin, end) in seconds on one clock by name: "load", "forward",
    "backward", "optimizer", one of each in each step; "aten", the operators that it computed;
    "wire", its messages.
    Raises AssertionError where the parts of a step are not in their order, or a message ends on
    one rank before it has begun on another: then something has a wrong name.
    """
    for number, messages in enumerate(zip(*(own["wire"] for own in ranks), strict=True)):
        begins, ends = zip(*messages, strict=True)
        assert min(ends) > max(begins), f"message {number} has arrived before all have sent it"
    rows, k = {}, middle(ranks)
    for rank, own in enumerate(ranks):
        parts = [own[name][k] for name in WORK]
        assert parts == sorted(parts), f"rank {rank}: {WORK} are not in this order"
        spans = [figures.Span(*part, name) for name, part in zip(WORK, parts, strict=True)]
        spans[2:3] = backward(*own["backward"][k], own["aten"])
        rows[f"rank {rank} works"] = spans
        first, last = parts[0][0], parts[-1][1]
        rows[f"rank {rank} sends"] = [
            figures.Span(a, b, "network") for a, b in own["wire"] if first <= a and b <= last
        ]
    alone = ax is None
    if alone:
        figure, ax = plt.subplots(figsize=(figures.WIDTH, 2.7))
    figures.timeline(rows, COLOURS, ax=ax)
    ax.get_legend().remove()
    ax.set_title(title, loc="left", pad=8)
    if alone:
        legend(ax)
        figures.show(figure)


def legend(ax) -> None:
    """All kinds of spans in a row below the axis."""
    handles = [Rectangle((0, 0), 1, 1, facecolor=c, edgecolor="0.35") for c in COLOURS.values()]
    below = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.3)}
    ax.legend(handles, COLOURS, ncols=len(COLOURS), columnspacing=1.2, **below)


def backward(begin: float, end: float, operators: Sequence) -> list[figures.Span]:
    """A backward cut where, for 3 ms or more, no operator runs: there it waits."""
    spans, now = [], begin
    for a, b in [*sorted(span for span in operators if begin <= span[0] < end), (end, end)]:
        if a - now > 0.003:
            spans.append(figures.Span(now, a, "waits"))
        elif spans and spans[-1].kind == "backward":
            a = spans.pop().start
        else:
            a = min(a, now)
        now = max(now, b)
        spans.append(figures.Span(a, min(now, end), "backward"))
    return spans


def lengths(ranks: Sequence[Mapping]) -> list[float]:
    """Seconds of each recorded step, from the first rank's beginning to the last one's end."""
    begins = zip(*([a for a, _ in own["load"]] for own in ranks), strict=True)
    ends = zip(*([b for _, b in own["optimizer"]] for own in ranks), strict=True)
    return [max(end) - min(begin) for begin, end in zip(begins, ends, strict=True)]


def middle(ranks: Sequence[Mapping]) -> int:
    """The number of the step of middle length."""
    seconds = lengths(ranks)
    return seconds.index(sorted(seconds)[len(seconds) // 2])


def before_after(
    before: Sequence[Mapping], after: Sequence[Mapping], titles: Sequence[str], fault: Callable
) -> None:
    """A step of each of two runs, one below the other, on one scale.

    fault: run -> a number that the fault makes larger. Raises AssertionError where it is not
    larger before the cure than after it: then the two are exchanged.
    """
    sick, well = fault(before), fault(after)
    assert sick > well, f"{sick:.4g} before, {well:.4g} after: are they exchanged?"
    figure, axes = plt.subplots(2, 1, figsize=(figures.WIDTH, 5.2))
    longest = max(lengths(run)[middle(run)] for run in (before, after))
    for run, title, ax in zip((before, after), titles, axes, strict=True):
        step(run, title, ax)
        ax.set_xlim(0, 1030 * longest)
    axes[0].set_xlabel("")
    legend(axes[1])
    figures.show(figure)


def fingerprints(
    runs: Mapping[str, Sequence[Mapping[str, float]]], stands_out: Mapping[str, str]
) -> None:
    """Where the time of a step went: for each run a stacked bar per rank, in milliseconds.

    runs: name -> for each rank {a key of PARTS: seconds of a step}; the first one is healthy.
    stands_out: name -> the part that is long there. Raises AssertionError where on no rank it is
    a larger share of the step than in the healthy run: then a name is wrong.
    """
    healthy = next(iter(runs.values()))
    for name, part in stands_out.items():  # shares: the machine may be slower at one of the times
        largest, usual = (
            max(rank[part] / sum(rank.values()) for rank in run) for run in (runs[name], healthy)
        )
        assert largest > usual, f"{name}: {part} does not stand out"
    columns, names = {}, []
    for name, ranks in runs.items():
        for number, rank in enumerate(ranks):
            names.append(f"rank {number}" + f"\n{name}" * (number == 0))
            columns[str(len(columns))] = {part: 1e3 * rank[part] for part in PARTS}
    figure, axes = figures.panels(1, 3.6, squeeze=False)
    ax = axes[0][0]
    figures.bars(columns, PARTS, ax, ylabel="milliseconds of a step")
    ax.set_xticks(range(len(names)), names)
    ax.set_ylim(0, 1.3 * ax.get_ylim()[1])  # room for the legend
    ax.legend(ncols=2, loc="upper left")
    figures.show(figure)


def corruption(curves: Mapping[str, Sequence[float]], step: int, every: int) -> None:
    """The loss of each run over the steps, where the bit flipped, and where it was looked for.

    curves: what was flipped -> loss of each step; the first one is without a fault.
    Raises AssertionError if a run differs from the first one before that step.
    """
    usual = next(iter(curves.values()))
    figure, axes = figures.panels(1, 3.2, squeeze=False)
    ax = axes[0][0]
    styles = ("-", "--", "-.", ":")
    for (what, losses), style in zip(curves.items(), styles, strict=False):
        assert list(losses[:step]) == list(usual[:step]), f"{what} differs before the flip"
        ax.plot([loss if loss < 100 else 100 for loss in losses], style, label=what)  # or NaN
    ax.axvline(step, color="0.5", linewidth=1)
    ax.text(step - 1.5, 10, "a bit flips", ha="right", va="center")
    for look in range(every - 1, len(usual), every):
        ax.plot([look], [0.03], "^", color="0.3", clip_on=False)
    ax.text(step + 0.5, 0.038, "checksums are compared", va="bottom")
    ax.set(yscale="log", xlabel="step", ylabel="loss (at most 100 drawn)", ylim=(0.03, 110))
    ax.legend(loc="upper left")
    figures.show(figure)
