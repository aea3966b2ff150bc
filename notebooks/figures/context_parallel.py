"""The pictures of chapter 16: keys and values on their way, and who computes which scores."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

import figures

RANKS = 4


def plan(ranks: int = RANKS) -> None:
    """Draw where keys and values are in each step, and who computes which block of the scores.

    Colour: the rank that the keys and values come from.
    """
    figure, axes = figures.panels(2, 2.5)
    computed = set()
    for rank in range(ranks):
        for step in range(ranks):
            source = (rank - step) % ranks
            computed.add((rank, source))
            figures.cell(axes[0], step, -rank, f"K{source} V{source}", [source])
            figures.cell(axes[1], source, -rank, f"step {step}", [source])
    assert len(computed) == ranks**2, "every block of the scores is computed, and only once"
    for ax, column, title in (
        (axes[0], "step ", "the keys and values that a rank has"),
        (axes[1], "K", "when it computes which block of scores"),
    ):
        for i in range(ranks):
            ax.text(i + 0.5, 1.1, f"{column}{i}", ha="center", va="bottom")
            ax.text(-0.1, 0.5 - i, f"rank {i}", ha="right", va="center")
        ax.set(xlim=(-0.9, ranks + 0.05), ylim=(1 - ranks - 0.05, 1.5))
        ax.set_title(title)
        ax.axis("off")
    figures.show(figure)


def ring(seen: Sequence[Sequence[int]]) -> None:
    """Show keys and values going round, as recorded: seen[rank][step] is whose keys a rank had."""
    ranks = len(seen)
    for rank, sources in enumerate(seen):
        assert sorted(sources) == list(range(ranks)), f"rank {rank} has not seen all keys"
        for step in range(1, ranks):
            assert sources[step] == seen[rank - 1][step - 1], "not what the rank before has sent"
    moves = 3  # pictures from one rank to the next
    frames = ranks * (1 + moves) - moves

    def draw(ax, k):
        step, moved = divmod(k, 1 + moves)
        travelled = moved / (1 + moves)
        for rank in range(ranks):
            ax.text(-0.1, 0.4 - rank, f"rank {rank}", ha="right", va="center")
            figures.cell(ax, 0, -rank, f"Q{rank}", [rank], h=0.8)
            source, x, y = seen[rank][step], 1.5, -rank - travelled
            if rank == ranks - 1 and moved:  # back to rank 0, on a way of its own
                x, y = 2.9, -rank + travelled * (ranks - 1)
            figures.cell(ax, x, y, f"K{source} V{source}", [source], w=1.2, h=0.8)
            for j in range(ranks):
                when = seen[rank].index(j)
                done = when <= step
                text = f"step {when}" if done else ""
                figures.cell(ax, 5.2 + j, -rank, text, [j] if done else [], h=0.8)
                new = when == step and not moved
                style = {"color": "black", "zorder": 4} if new else {"color": "0.8", "zorder": 3}
                ax.plot(*_outline(5.2 + j, -rank, 1, 0.8), lw=1.5, **style)
        for j in range(ranks):
            ax.text(5.7 + j, 0.9, f"K{j}", ha="center", va="bottom")
        title = f"step {step}: compute" if not moved else "pass on to the next rank"
        ax.text(0, 0.9, title, va="bottom")
        ax.text(4.9, -ranks / 2 + 0.9, "scores", rotation=90, va="center", ha="center")

    limits = (-0.9, 9.3), (0.9 - ranks, 1.5)
    figures.movie(draw, frames, 2.3, *limits, stills=(0, 2, 1 + moves), seconds=0.5)


def _outline(x, y, w, h):
    return [x, x + w, x + w, x, x], [y, y, y + h, y + h, y]


def scores(panels: Mapping[str, tuple]) -> list[list[int]]:
    """Draw which (query, key) pairs are computed, in the colour of the query's rank.

    panels: title -> (mask, tokens): mask (T, T), True where a query may look; tokens of each rank.
    Returns for each panel the number of pairs of each rank, which is also written below it.
    """
    figure, axes = figures.panels(len(panels), 3.5, squeeze=False)
    found = []
    for ax, (title, (mask, tokens)) in zip(axes[0], panels.items(), strict=True):
        picture = [[0] * len(mask) for _ in range(len(mask))]
        for rank, own in enumerate(tokens):
            for query in own.tolist():
                picture[query] = [(rank + 1) * int(m) for m in mask[query].tolist()]
        flat = [value for row in picture for value in row]
        found.append([flat.count(rank + 1) for rank in range(len(tokens))])
        assert sum(found[-1]) == int(mask.sum()), "a query of nobody, or of two ranks"
        colours = ListedColormap([figures.NOBODY, *figures.COLOURS[: len(tokens)]])
        limits = {"vmin": -0.5, "vmax": len(tokens) + 0.5}
        ax.imshow(picture, cmap=colours, interpolation="nearest", **limits)
        ax.set(xticks=[], yticks=[], ylabel="queries")
        ax.set_title(title)
        ax.set_xlabel("keys\npairs of ranks 0, 1, ...: " + ", ".join(map(str, found[-1])))
    figures.show(figure)
    return found


def steps(work: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Draw counted work as time: a step ends for all when the slowest rank has done it.

    work: title -> for each rank the scores that it computes in each step.
    """
    figure, axes = plt.subplots(len(work), 1, figsize=(figures.WIDTH, 3.6), sharex=True)
    for ax, (title, of_ranks) in zip(axes, work.items(), strict=True):
        start = 0
        for amounts in zip(*of_ranks, strict=True):
            ax.barh(
                range(len(amounts)),
                amounts,
                left=start,
                color=figures.COLOURS[: len(amounts)],
                edgecolor="0.4",
            )
            ax.axvline(start, color="0.4", linewidth=1, linestyle=":")
            start += max(amounts)
        ax.axvline(start, color="0.4", linewidth=1, linestyle=":")
        idle = 1 - sum(map(sum, of_ranks)) / (len(of_ranks) * start)
        names = [f"rank {i}" for i in range(len(of_ranks))]
        ax.set(yticks=range(len(names)), yticklabels=names)
        ax.set_title(f"{title}: {start} units of time, idle {idle:.0%}", loc="left")
        ax.invert_yaxis()
    axes[-1].set_xlabel("units of time (scores)")
    figures.show(figure)
