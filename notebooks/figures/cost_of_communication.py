"""The pictures of chapter 4: what a message costs, who sends what to whom, and when."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from figures import (
    ACTIONS,
    COLOURS,
    LINES,
    WIDTH,
    Span,
    arrow,
    box,
    canvas,
    cell,
    curves,
    movie,
    panels,
    show,
    tens,
    timeline,
)

# ---- one message


def message(alpha: float, beta: float) -> None:
    """Time and bandwidth of a message of alpha + n beta seconds, over its bytes n."""
    sizes = torch.logspace(2, 8, 100, dtype=torch.float64)
    rate = sizes / (alpha + beta * sizes) / 1e9
    half = alpha / (alpha + beta * (alpha / beta))  # of the bandwidth, at alpha / beta bytes
    assert abs(half - 0.5) < 1e-9
    figure, (left, right) = panels(2)
    lines = {
        "alpha + n beta": (sizes, 1e6 * (alpha + beta * sizes)),
        "alpha": (sizes, torch.full_like(sizes, 1e6 * alpha), "--"),
        "n beta": (sizes, 1e6 * beta * sizes, ":"),
    }
    curves(lines, left, xlabel="bytes", ylabel="microseconds", title="time of a message")
    left.set(xscale="log", yscale="log", ylim=(10, 1e5))
    curves({"rate": (sizes, rate)}, right, xlabel="bytes", ylabel="GB/s", xscale="log")
    right.axvline(alpha / beta, color="0.6", linestyle="--")
    right.set_title("bytes per second: half of it at alpha / beta")
    show(figure)


# ---- all_reduce: who sends what to whom


def broadcasts(plans: Mapping[str, Sequence], held: Sequence[Mapping[str, Sequence]]) -> None:
    """A movie of rank 0's number on its way to all: one row per plan, all plans at once.

    plans: name -> for each step the pairs (source, target). held: for each rank, name -> what it
    held at the start and after each step.
    """
    world = len(held)
    last = max(map(len, plans.values()))
    height = {name: 2.1 * i for i, name in enumerate(reversed(plans))}
    for name, plan in plans.items():
        assert all(tens(rank[name][-1]) == 0 for rank in held), "not everybody has it"
        for k, pairs in enumerate(plan):  # who got something is who has something new
            new = {r for r in range(world) if held[r][name][k] != held[r][name][k + 1]}
            assert new == {target for _, target in pairs}

    def draw(ax, k: int) -> None:
        for name, plan in plans.items():
            y, done = height[name], min(k, len(plan))
            count = sum(tens(rank[name][done]) == 0 for rank in held)
            ax.text(-0.25, y + 0.5, name, ha="right", va="center")
            said = f"step {k}: {count} of {world} have it" if k <= len(plan) else "done"
            ax.text(1.6 * world - 0.3, y + 0.5, said, va="center")
            for r, rank in enumerate(held):
                value = rank[name][done]
                cell(ax, 1.6 * r, y, str(value), [tens(value)])
                ax.text(1.6 * r + 0.5, -0.5, f"rank {r}", ha="center")
            for source, target in plan[k - 1] if 0 < k <= len(plan) else ():
                start, end = (1.6 * source + 0.5, y + 1), (1.6 * target + 0.5, y + 1)
                arrow(ax, start, end, connectionstyle="arc3,rad=-0.35", linewidth=1.5)

    limits = (-2.2, 1.6 * world + 2.6), (-0.7, 4.0)
    movie(draw, last + 1, 2.2, *limits, stills=range(1, last + 1))


def steps_of(logs: Sequence[Sequence[tuple]]) -> list[list[tuple[int, int, int]]]:
    """What each rank did one after another, put into common steps: (source, target, numbers).

    logs: for each rank its transfers, (to, from, numbers sent): `to` or `from` may be None.
    A message is sent and received in the same step, and a rank does one transfer per step.
    """
    sends, receives = {}, {}
    for rank, log in enumerate(logs):
        for i, (to, source, _) in enumerate(log):
            if to is not None:
                sends.setdefault((rank, to), []).append((rank, i))
            if source is not None:
                receives.setdefault((source, rank), []).append((rank, i))
    assert sends.keys() == receives.keys()
    pairs = [p for link in sends for p in zip(sends[link], receives[link], strict=True)]
    step = {(rank, i): i for rank, log in enumerate(logs) for i in range(len(log))}
    before = None
    while step != before:
        before = dict(step)
        for rank, i in step:
            step[rank, i] = max(step[rank, i], step.get((rank, i - 1), -1) + 1)
        for one, other in pairs:
            step[one] = step[other] = max(step[one], step[other])
    steps = [[] for _ in range(max(step.values()) + 1)]
    for link, calls in sends.items():
        for rank, i in calls:
            steps[step[rank, i]].append((*link, logs[rank][i][2]))
    return steps


def transfers(algorithms: Mapping[str, Sequence], numbers: int) -> None:
    """Who sends to whom in which step: a panel per algorithm, ranks from top to bottom.

    algorithms: name -> the steps, as steps_of() returns them, of a tensor of so many numbers.
    """
    figure, axes = panels(len(algorithms), 2.5, sharey=True)
    for ax, (name, steps) in zip(axes, algorithms.items(), strict=True):
        world = 1 + max(max(source, target) for step in steps for source, target, _ in step)
        for k, step in enumerate(steps):
            for source, target, _ in step:
                arrow(ax, (k, source), (k + 1, target), shrinkA=4, shrinkB=4)
        for rank in range(world):
            ax.plot(
                range(len(steps) + 1),
                [rank] * (len(steps) + 1),
                "o",
                color=COLOURS[rank],
                markeredgecolor="0.4",
                markersize=8,
            )
        labels = []
        for step in steps:
            (size,) = {count for *_, count in step}  # all messages of a step are equally long
            labels.append("S" if size == numbers else f"S/{numbers // size}")
        ax.set(xticks=[k + 0.5 for k in range(len(steps))], xticklabels=labels)
        ax.set(yticks=range(world), yticklabels=[f"rank {r}" for r in range(world)])
        ax.set(ylim=(world - 0.5, -0.5), title=name.replace("recursive_", "").replace("_", " "))
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    show(figure)


def load(counted: Sequence[Mapping], names: Sequence[str], nbytes: int) -> None:
    """The bytes that each of four ranks has sent, in tensors of `nbytes`, for each algorithm."""
    figure, axes = panels(len(names), 2.4, sharey=True)
    least = 2 * 3 / 4
    most_and_least = {"naive": (3, 1), "tree": (2, 1), "recursive_doubling": (2, 2)}
    for ax, name in zip(axes, names, strict=True):
        sent = [rank[name, 4][0] / nbytes for rank in counted]
        assert (max(sent), min(sent)) == most_and_least.get(name, (least, least)), name
        ax.bar(range(4), sent, color=COLOURS[:4], edgecolor="0.4")
        ax.axhline(least, color=LINES[1], linestyle="--")
        title = name.replace("recursive_", "").replace("_", "\n")
        ax.set(title=title, xlabel="rank", xticks=range(4))
    axes[0].set_ylabel("bytes sent / S")
    show(figure)


def fastest(predicted: Callable, names: Sequence[str], cluster: Mapping[str, float]) -> None:
    """Left: predicted times on 48 ranks. Right: the fastest algorithm for each size and world."""
    sizes = [2**k for k in range(8, 31)]
    figure, (left, right) = panels(2, 4.0)
    times = {name: [1e3 * predicted(name, n, 48, **cluster) for n in sizes] for name in names}
    curves({name: (sizes, ms) for name, ms in times.items()}, left, xscale="log", yscale="log")
    left.set(xlabel="bytes", ylabel="milliseconds", title="48 ranks: the fastest changes twice")
    left.legend(fontsize=8)
    order = [min(names, key=lambda name: times[name][i]) for i in range(len(sizes))]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes == 2, f"the title says twice, and it changes {changes} times"

    worlds = range(2, 65)
    best = [
        [min(range(len(names)), key=lambda i: predicted(names[i], n, w, **cluster)) for n in sizes]
        for w in worlds
    ]
    colours = ListedColormap(LINES[: len(names)])
    shade = {"cmap": colours, "vmin": -0.5, "vmax": len(names) - 0.5, "alpha": 0.6}
    right.pcolormesh(sizes, list(worlds), best, **shade)
    for i, name in enumerate(names):
        cells = [
            (n, w)
            for w, row in zip(worlds, best, strict=True)
            for n, b in zip(sizes, row, strict=True)
            if b == i
        ]
        if len(cells) > 100:  # of 1,449
            middle = (median(column) for column in zip(*cells, strict=True))
            words = name.replace("halving_", "halving_\n").replace("recursive_", "recursive_\n")
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
            right.text(*middle, words, ha="center", va="center", fontsize=8, bbox=box)
    right.set(xscale="log", xlabel="bytes", ylabel="number of ranks")
    right.set_title("the fastest for each size and world")
    show(figure)


# ---- time


def orders(spans: Mapping[str, Sequence[tuple]]) -> None:
    """When each bucket was computed and sent, one order of doing it below the other.

    spans: "sequential" and "overlapped" -> per bucket (begin, end of computing, begin, end of its
    transfer), in seconds.
    """
    (_, _, _, first_done), (second_begins, *_) = spans["sequential"][:2]
    assert second_begins >= first_done, "one after the other is not what this row shows"
    # Any two: on a busy machine one transfer may be done before this rank computes again.
    begins_before_end = [after[0] < before[3] for before, after in pairwise(spans["overlapped"])]
    assert any(begins_before_end), "nothing overlaps in this row"
    figure, axes = plt.subplots(2, figsize=(WIDTH, 5), sharex=True)
    for ax, (order, buckets) in zip(axes, spans.items(), strict=True):
        rows = {
            f"bucket {i}": [Span(b, e, "compute"), Span(s, d, "send")]
            for i, (b, e, s, d) in enumerate(buckets)
        }
        timeline(rows, title=f"{order}, rank 0", ax=ax)
    axes[0].set_xlabel("")
    show(figure)


# ---- the memory of a GPU


def memory_of_a_step(said: str) -> None:
    """The memory allocated at each moment of a training step, from the last table of streams.py.

    Raises ValueError if `said` has no such table.
    """
    rows = re.findall(r"^(\w+(?: \w+)*) +(\d+\.\d+)  #+$", said, re.M)
    if not rows:
        raise ValueError("streams.py has printed no table of memory")
    figure, ax = plt.subplots(figsize=(WIDTH, 3.4))
    for y, (moment, mib) in enumerate(rows):
        phase = moment.split()[0]
        colour = ACTIONS.get(phase, ACTIONS["reduce"])
        ax.barh(y, float(mib), 0.9, color=colour, edgecolor="0.35", linewidth=0.5)
    ax.set(yticks=range(len(rows)), yticklabels=[f"after {moment}" for moment, _ in rows])
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlabel="MiB allocated", title="first step of an MLP")
    show(figure)


# ---- the puzzle


def slow_ring(links: Mapping[frozenset, int]) -> None:
    """Four ranks in a ring, and what a chunk takes over each link."""
    figure, ax = canvas(2.0, (-1, 10), (-1.9, 0.8))
    for rank in range(4):
        box(ax, 3 * rank, 0, f"rank {rank}", rank, width=1.3)
    for pair, units in links.items():
        a, b = sorted(pair)
        text = f"{units} unit" + "s" * (units > 1)
        if b - a == 1:
            arrow(ax, (3 * a + 0.65, 0), (3 * b - 0.65, 0), text, arrowstyle="<|-|>")
        else:
            style = {"arrowstyle": "<|-|>", "connectionstyle": "arc3,rad=0.2", "color": LINES[1]}
            arrow(ax, (0, -0.4), (9, -0.4), **style)
            ax.text(4.5, -1.7, text, ha="center", color=LINES[1])
    show(figure)
