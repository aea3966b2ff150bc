"""Pictures of chapter 23: calls over time, how stale gradients are, and what that does."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import figures


def calls(ran: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """A row per way of calling: when the function ran on each worker, in seconds.

    ran: way -> (begin, end) of worker1, worker2, ... Raises AssertionError if calls of rpc_sync ran
    at the same time, or none of rpc_async: then the labels are exchanged.
    """
    together = {}
    for way, times in ran.items():
        ordered = sorted(times)
        together[way] = any(a[1] > b[0] for a, b in pairwise(ordered))
    assert not together["rpc_sync"], "two calls of rpc_sync ran at the same time"
    assert together["rpc_async"], "calls of rpc_async ran one after the other"
    rows, colours = {}, {}
    for way in ("rpc_sync", "rpc_async"):
        times = ran[way]
        zero = min(begin for begin, _ in times)
        for k, (begin, end) in enumerate(times, 1):
            colours[f"worker{k}"] = figures.COLOURS[k]
            span = figures.Span(begin - zero, end - zero, f"worker{k}")
            rows[f"{way}, worker{k}"] = [span]
    figures.timeline(rows, colours)


def staleness(pushes: Sequence[tuple[int, int]]) -> None:
    """How many pushes of each trainer were how stale.

    pushes: (trainer, staleness), in the order in which they came. Raises AssertionError where a
    staleness is not the number of other trainers' pushes since this trainer's last one.
    """
    last = {}
    for k, (trainer, stale) in enumerate(pushes):
        if trainer in last:
            others = k - last[trainer] - 1
            assert stale == others, f"push {k} is {others} pushes old, and not {stale}"
        last[trainer] = k
    # A rare push may be very old: bars for 0, 1, 2 to 3, 4 to 7, 8 to 15, ...
    most = max(stale for _, stale in pushes)
    starts = [0] + [2**k for k in range(most.bit_length())]
    labels = [str(start) if start < 2 else f"{start}-{2 * start - 1}" for start in starts]
    trainers = sorted(last)
    figure, axes = figures.panels(len(trainers), 2.4, sharex=True, sharey=True)
    for ax, trainer in zip(axes, trainers, strict=True):
        stales = [stale for who, stale in pushes if who == trainer]
        counts = [0] * len(starts)
        for stale in stales:
            counts[stale.bit_length()] += 1
        ax.bar(range(len(starts)), counts, width=0.9, color=figures.COLOURS[trainer])
        ax.set_xticks(range(len(starts)), labels)
        mean = sum(stales) / len(stales)
        ax.set(title=f"trainer {trainer}: {len(stales)} pushes, mean {mean:.1f}")
        ax.set(xlabel="staleness")
    axes[0].set_ylabel("pushes")
    figures.show(figure)


def accuracy(
    stale: Sequence[int],
    accuracies: Mapping[float, Sequence[float]],
    limit: Callable,
    momentum: Mapping[tuple[float, float], Sequence[float]],
) -> None:
    """Accuracy over staleness, a line per learning rate; and over the rate in units of its limit.

    accuracies: rate -> a value per staleness. limit: staleness -> largest rate. momentum: (rate,
    momentum) -> a value per staleness; such a rate counts 1 / (1 - momentum) times. Raises
    AssertionError if a larger rate bears more staleness: then rates are exchanged.
    """
    rows = [(rate, f"rate {rate:g}", row) for rate, row in accuracies.items()]
    for (rate, mu), row in momentum.items():
        rows.append((rate / (1 - mu), f"rate {rate:g},\nmomentum {mu:g}", row))
    bears = []
    for _, _, row in sorted(rows):
        good = [s for s, value in zip(stale, row, strict=True) if value > 0.75]
        bears.append(max(good, default=-1))
    assert bears == sorted(bears, reverse=True), f"larger rates bear more staleness: {bears}"
    figure, (left, right) = figures.panels(2, 3.2, sharey=True)
    for rate, label, row in rows:
        left.plot([s + 1 for s in stale], row, "o-", label=label)
        right.plot([rate / limit(s) for s in stale], row, "o-", label=label)
    left.set(xscale="log", xlabel="staleness", ylabel="accuracy after 200 updates", ylim=(0, 1))
    left.set_xticks([s + 1 for s in stale], [str(s) for s in stale], minor=False)
    left.minorticks_off()
    right.axvline(1, color="0.5", linestyle="--")
    right.set(xscale="log", xlabel="rate / (1 - momentum), in units of its limit")
    right.legend(loc="upper right")
    figures.show(figure)
