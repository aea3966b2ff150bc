"""Pictures of chapter 9: who holds what during a step of FSDP, and when messages travel."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from figures import ACTIONS, COLOURS, LINES, NOBODY, Span, curves, movie, panels, show, timeline

WORDS = {
    "start": "between steps: every rank has its shards, and nothing else",
    "gather": "all_gather: every rank gets the other shards of '{}'",
    "forward": "forward: '{}' is whole, and computes",
    "free": "'{}' has computed: the other ranks' shards are given back",
    "backward": "backward: '{}' is whole, and computes its gradients",
    "reduce": "'{}' is given back; reduce_scatter: each rank gets the mean for its shard",
    "end": "end of backward: each rank has its shards, and their gradients",
}

# (what, unit, for each unit: "shard", "arriving" or "whole", which units have a gradient)
Event = tuple[str, str, Mapping[str, str], Sequence[str]]


def step(by_rank: Sequence[Sequence[Event]], sizes: Mapping[str, int], stills=()) -> None:
    """A moving picture of one training step: a row per rank, a column per unit.

    by_rank: the events that each rank recorded. sizes: bytes of each unit while it is whole.
    stills: as in movie(). A cell is a shard, in the colour of the rank that looks after it. Below:
    bytes of parameters on rank 0, which is what the cells above add up to.
    """
    # What is gathered ahead, in backward, is seen arriving in the next picture: one less to show.
    kinds = [what for what, *_ in by_rank[0]]
    turn = kinds.index("backward")
    shown = [k for k, what in enumerate(kinds) if k <= turn or what != "gather"]
    by_rank = [[events[k] for k in shown] for events in by_rank]
    ranks, names = len(by_rank), list(sizes)
    bytes_after = [held(event, sizes, ranks) for event in by_rank[0]]
    for events in by_rank:
        assert [e[:2] for e in events] == [e[:2] for e in by_rank[0]], "ranks go one way together"
    most = sum(sizes.values())

    def draw(ax, k):
        what, unit, _, _ = by_rank[0][k]
        ax.text(0, -0.48, WORDS[what].format(unit), weight="bold")
        coloured = 0
        for rank, events in enumerate(by_rank):
            y = ranks - 1 - rank
            ax.text(-0.15, y + 0.35, f"rank {rank}", ha="right", va="center")
            _, _, state, gradients = events[k]
            for i, name in enumerate(names):
                for shard in range(ranks):
                    here = state[name] == "whole" or shard == rank
                    coloured += here * (rank == 0) * sizes[name] / ranks
                    travels = state[name] == "arriving" and not here
                    face = COLOURS[shard] if here or travels else NOBODY
                    box = Rectangle((1.3 * i + 0.28 * shard, y), 0.28, 0.7, facecolor=face)
                    box.set(edgecolor="0.5", linewidth=0.5, alpha=0.35 if travels else 1)
                    ax.add_patch(box)
                    if name in gradients and shard == rank:
                        ax.text(
                            1.3 * i + 0.28 * shard + 0.14, y + 0.33, "g", ha="center", va="center"
                        )
                if rank == 0:
                    ax.text(1.3 * i + 0.56, ranks - 0.1, name, ha="center")
        arriving = sum(sizes[n] for n, s in by_rank[0][k][2].items() if s == "arriving")
        assert coloured + arriving * (ranks - 1) / ranks == bytes_after[k], "cells and curve differ"
        # The curve has its own box at the bottom, from (0, -2.1) to (5.2, -0.9).
        width = 5.2 / (len(bytes_after) - 1)
        for j in range(k + 1):
            height = 1.2 * bytes_after[j] / most
            colour = LINES[1] if j == k else "0.7"
            ax.add_patch(Rectangle((width * (j - 0.4), -2.1), 0.8 * width, height, color=colour))
        ax.plot([-0.1, 5.3], [-0.9, -0.9], color="0.5", linestyle=":")
        ax.text(-0.15, -0.9, "whole model", ha="right", va="center")
        ax.text(-0.15, -1.95, "on rank 0", ha="right", va="center")
        ax.text(5.3, -1.35, f"{bytes_after[k] / 1000:.0f} KB", ha="right", color=LINES[1])

    movie(draw, len(bytes_after), 3.0, (-1, 5.4), (-2.2, ranks + 0.3), stills, seconds=0.9)


def held(event: Event, sizes: Mapping[str, int], ranks: int) -> int:
    """Bytes of parameters on a rank after an event: its shards, and what is whole or arriving."""
    others = sum(sizes[name] for name, state in event[2].items() if state != "shard")
    return sum(sizes.values()) // ranks + others * (ranks - 1) // ranks


def whole_over_time(runs: Mapping[str, Sequence[Event]], sizes: Mapping[str, int]) -> None:
    """For each run: bytes of parameters on a rank, event by event."""
    figure, axes = panels(len(runs), 2.8, sharey=True)
    ranks = 4
    for ax, (title, events) in zip(axes, runs.items(), strict=True):
        y = [held(event, sizes, ranks) / 1000 for event in events]
        ax.fill_between(range(len(y)), y, step="mid", color=COLOURS[0])
        turn = next(i for i, event in enumerate(events) if event[0] == "backward")
        ax.axvline(turn - 0.5, color="0.3", linestyle="--")
        model = sum(sizes.values()) / 1000
        ax.axhline(model, color="0.5", linestyle=":")
        ax.text(0, model, "whole model", va="bottom", fontsize=8)
        ax.set(title=title, xlabel="event (dashed: backward begins)", ylim=(0, 1.15 * model))
    axes[0].set_ylabel("KB of parameters here")
    show(figure)


def lanes(runs: Mapping[str, tuple[float, Sequence[tuple]]]) -> None:
    """What computes and what travels: title -> (seconds of the step, [(kind, layer, from, to)])."""
    figure, axes = panels(1, 4.2)
    figure.clear()
    axes = figure.subplots(len(runs), 1, sharex=True)
    for ax, (title, (end, times)) in zip(axes, runs.items(), strict=True):
        rows = {"computing": [], "network": []}
        for kind, layer, a, b in times:
            row = "network" if kind in ("gather", "reduce") else "computing"
            rows[row].append(Span(a, b, kind, str(layer)))
        begin = min(span.start for row in rows.values() for span in row)
        busy = 1e3 * sum(span.end - span.start for span in rows["computing"])
        heading = f"{title}: {1e3 * (end - begin):.0f} ms ({busy:.0f} computing)"
        timeline(rows, ACTIONS, heading, ax, end)
    axes[0].set_xlabel("")
    axes[1].get_legend().remove()
    axes[0].get_legend().set_bbox_to_anchor((1, 1.12))
    # What the titles claim: messages and computation overlap below, and not above.
    first, second = (_overlap(times) for _, times in runs.values())
    assert second > first, "prefetching should make them overlap"
    show(figure)


def _overlap(times: Sequence[tuple]) -> float:
    """Seconds in which something computes while something else travels."""
    sent = [t for t in times if t[0] in ("gather", "reduce")]
    return sum(
        max(0, min(b, d) - max(a, c))
        for kind, _, a, b in times
        if kind in ("forward", "backward")
        for _, _, c, d in sent
    )


def plan(moments: Sequence[tuple[str, float]], limit: float) -> None:
    """Memory at each moment of a planned step, against what there is: [(moment, MB)].

    moments: named "forward 0", ..., "backward 0", ...
    """
    names, sizes = zip(*moments, strict=True)
    figure, ax = panels(1)
    curves(
        {
            "your plan": (range(len(sizes)), sizes, "o-"),
            "what there is": ((0, len(sizes) - 1), (limit, limit), "--"),
        },
        ax,
        xlabel="forward (F) and backward (B) of each block",
        ylabel="MB",
        ylim=(0, None),
    )
    ax.set_xticks(range(len(names)), [f"{name[0].upper()}{name.split()[1]}" for name in names])
    show(figure)
