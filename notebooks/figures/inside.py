"""Pictures of chapter 22: messages between layers, caches, who reduces what, orders of steps."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import figures

DOWN, BACK, LATER = figures.LINES[0], figures.LINES[1], figures.LINES[2]


def all_reduce(messages: Sequence) -> None:
    """One dist.all_reduce from the script down: a column per layer, a row per message.

    messages: as custom_backend/spies.py records them (at, sender, receiver, what, took).
    Raises AssertionError if the layers do not call each other in a chain, or if the script's own
    thread completes the operation.
    """
    # At equal times an answer comes last: the profiler's clock is right to some 50 us only.
    messages = sorted(messages, key=lambda message: (message.at, message.what == "tensors, Work"))
    calls = ("all_reduce()", "allreduce()", "c10d.", ("gloo:", "nccl:"))
    way = [next(m for m in messages if m.what.startswith(call)) for call in calls]
    for upper, lower in pairwise(way):
        assert upper.receiver == lower.sender, f"{lower.sender} was not called by {upper.sender}"
    (done,) = [m for m in messages if m.receiver == "Future"]
    assert done.sender.startswith("thread "), f"{done.sender} has completed the operation"
    # Bytes are counted for the whole operation, without a time: they are sent before it is done.
    totals = [m for m in messages if "in total" in m.what]
    rest = [m for m in messages if m not in totals]
    place = rest.index(done)
    _sequence([*rest[:place], *totals, *rest[place:]], thread=done.sender)


def meeting(messages: Sequence) -> None:
    """What ranks and store say to each other, a column each, in the order of time.

    Raises AssertionError where a rank is told a key before anybody has set it: then a label is
    wrong.
    """
    sets = {m.what.split()[1].rstrip(","): m.at for m in messages if m.what.startswith("set ")}
    for m in messages:
        verb, key = f"{m.what} ".split(" ")[:2]
        if verb in ("get", "wait"):
            first, told = sets.get(key.rstrip(","), float("inf")), m.at + m.took
            assert told >= first, f"{m.sender} was told {key} before it was set"
    _sequence(sorted(messages, key=lambda message: message.at))


def _sequence(messages: Sequence, thread: str = "") -> None:
    columns = list(dict.fromkeys(name for m in messages for name in (m.sender, m.receiver)))
    if "store" in columns:  # ranks in their order, the store in the middle
        ranks = sorted(set(columns) - {"store"})
        columns = [*ranks[: (len(ranks) + 1) // 2], "store", *ranks[(len(ranks) + 1) // 2 :]]
    rows = len(messages)
    wide = len(columns) - 1
    figure, ax = figures.canvas(0.27 * rows + 0.9, (-0.16 * wide, 1.1 * wide), (rows, -1.7))
    for x, name in enumerate(columns):
        colour = figures.COLOURS[int(name[5:])] if name.startswith("rank ") else "#eeeeee"
        ax.plot([x, x], [-0.8, rows], color="0.8", linewidth=1, zorder=0)
        text = re.sub(r"^(thread |distributed|Process)|(Group|pt_gloo)(?=.)", r"\g<0>\n", name)
        box = {"boxstyle": "square,pad=0.25", "facecolor": colour, "edgecolor": "0.6"}
        ax.text(x, -1.3, text, ha="center", va="center", fontsize=8, bbox=box)
    for y, m in enumerate(messages):
        a, b = columns.index(m.sender), columns.index(m.receiver)
        colour = LATER if thread in (m.sender, m.receiver) else DOWN if b > a else BACK
        if a == b:
            ax.plot(a, y, "o", color=colour, markersize=4)
        else:
            figures.arrow(ax, (a, y), (b, y), color=colour, shrinkA=0, shrinkB=0)
        took = "" if m.took is None else f" ({1e6 * m.took:,.0f} us)"
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        place = {"ha": "center", "va": "bottom", "fontsize": 8}
        ax.text((a + b) / 2, y - 0.12, m.what + took, bbox=white, **place)
        at = "" if "in total" in m.what else f"{1e6 * (m.at - messages[0].at):,.0f} us"
        ax.text(-0.155 * wide, y, at, ha="left", va="center", fontsize=8, color="0.4")
    figures.show(figure)


def latencies(microseconds: Mapping[str, tuple[float, float]], title: str) -> None:
    """A bar per way to send a few bytes, on a logarithmic axis: (best, median), the fastest first.

    Raises AssertionError where the median is below the best: then they are exchanged.
    """
    ordered = sorted(microseconds.items(), key=lambda pair: pair[1])
    figure, ((ax,),) = figures.panels(1, 0.4 * len(ordered) + 1.0, squeeze=False)
    for y, (name, (best, median)) in enumerate(ordered):
        assert best <= median, f"{name}: the best is {best}, the median {median}"
        ax.barh(name, best, color=figures.COLOURS[0])
        ax.plot(median, y, "o", color="0.3", markersize=4)
        told = f"{three_digits(best)} us, median {three_digits(median)}"
        ax.text(1.15 * median, y, told, va="center")
    ax.invert_yaxis()
    most = max(median for _, median in microseconds.values())
    least = min(best for best, _ in microseconds.values())
    ax.set(xscale="log", xlabel="microseconds", xlim=(least / 3, 60 * most))
    ax.set_title(title, loc="left")
    figures.show(figure)


def three_digits(number: float) -> str:
    return f"{float(f'{number:.3g}'):,g}"


def chunks(rates: Mapping[int, float], caches: Mapping[str, int]) -> None:
    """GB/s over the bytes of a chunk; a line where two chunks fill a cache of `caches`."""
    figure, ((ax,),) = figures.panels(1, 3.2, squeeze=False)
    ax.plot(list(rates), [rate / 1e9 for rate in rates.values()], "o-", markersize=5)
    for name, nbytes in caches.items():
        ax.axvline(nbytes / 2, color="0.6", linestyle="--")
        ax.text(nbytes / 2 * 1.06, 0, f"half of {name}", rotation=90, va="bottom", color="0.35")
    ax.set(xscale="log", xlabel="bytes of a chunk", ylabel="GB/s", ylim=(0, None))
    figures.show(figure)


def traffic(counted: Mapping[str, Sequence[tuple]], formulas: Mapping[str, tuple]) -> None:
    """Bytes that each rank writes and reads, in tensors: a panel per way to reduce.

    counted: way -> for each rank (written, read). formulas: way -> (written, read) of the busiest.
    Raises AssertionError where a formula is not what was counted under its name.
    """
    figure, axes = figures.panels(len(counted), 2.8, sharey=True)
    for ax, (name, ranks) in zip(axes, counted.items(), strict=True):
        busiest = max(ranks, key=sum)
        close = all(abs(a - b) < 1e-9 for a, b in zip(busiest, formulas[name], strict=True))
        assert close, f"{name}: counted {busiest}, the formula says {formulas[name]}"
        for rank, (written, read) in enumerate(ranks):
            look = {"color": figures.COLOURS[rank], "edgecolor": "0.4"}
            ax.bar(rank, written, hatch="///", **look)
            ax.bar(rank, read, bottom=written, **look)
        total = sum(busiest)
        ax.axhline(total, color="0.5", linestyle=":")
        ax.text(len(ranks) - 0.5, total, f"{total:.3g} ", ha="right", va="bottom")
        ax.set(title=name, xlabel="rank", xticks=range(len(ranks)), ylim=(0, 4.6))
    axes[0].set_ylabel("tensors, hatched: written")
    figures.show(figure)


def interleaving(history: Sequence[tuple], names: Sequence[str]) -> None:
    """The steps of several processors in the order in which they happened, and what memory held.

    history: (processor, step, what memory holds afterwards). Raises AssertionError where memory
    has what no store has brought there.
    """
    rows = len(history)
    last = len(names)
    figure, ax = figures.canvas(0.3 * rows + 0.7, (-0.65, last + 0.6), (rows - 0.4, -1.3))
    for x, name in enumerate([*names, "memory"]):
        ax.text(x, -0.95, name, ha="center", va="center", weight="bold")
        ax.plot([x, x], [-0.6, rows - 0.5], color="0.85", linewidth=1, zorder=0)
    before = frozenset()
    for y, (processor, step, memory) in enumerate(history):
        new = set(memory) - set(before)
        assert new <= set(step.split()), f"{step!r} has not brought {new}"
        before = memory
        face = figures.COLOURS[processor]
        box = {"boxstyle": "square,pad=0.25", "facecolor": face, "edgecolor": "0.5"}
        ax.text(processor, y, step, ha="center", va="center", bbox=box)
        held = ", ".join(f"{name} = 1" for name in sorted(memory)) or "all 0"
        ax.text(last, y, held, ha="center", va="center")
        if new:
            figures.arrow(ax, (processor + 0.3, y), (last - 0.32, y), color=DOWN)
    ax.text(-0.6, (rows - 1) / 2, "time", rotation=270, ha="center", va="center", color="0.4")
    figures.show(figure)
