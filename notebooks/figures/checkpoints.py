"""Pictures of chapter 10: which rows lie in whose file, and how long training waits."""

from collections.abc import Mapping, Sequence
from statistics import median

from figures import COLOURS, Span, arrow, canvas, cell, show, timeline


def rows(saved: Sequence[range], wanted: Sequence[range], reads: Sequence[tuple]) -> None:
    """Left the files of the saving ranks, right what the loading ranks want; arrows: who reads.

    saved, wanted: the rows of each rank. reads: (rank, file, rows) for each interval that is read.
    A row has the colour of the rank that wrote it.
    """
    count = sum(map(len, saved))
    writer = {row: file for file, mine in enumerate(saved) for row in mine}
    figure, ax = canvas(4, (-1.6, 7.6), (-count - 1.6, 0.8))
    for x, ranks, name in ((0, saved, "file of rank"), (5, wanted, "rank")):
        for rank, mine in enumerate(ranks):
            for row in mine:
                cell(ax, x, -row - rank * 0.7 - 1, f"row {row}", [writer[row]], w=1.4)
            y = -sum(mine[:: len(mine) - 1]) / 2 - rank * 0.7 - 0.5
            side = (-0.15, "right") if x == 0 else (x + 1.55, "left")
            ax.text(side[0], y, f"{name} {rank}", ha=side[1], va="center")
    found = {rank: [] for rank in range(len(wanted))}
    for rank, file, some in reads:
        middle = (some[0] + some[-1] + 1) / 2
        start, end = (1.5, -middle - file * 0.7), (4.9, -middle - rank * 0.7)
        arrow(ax, start, end, color=COLOURS[file], linewidth=2)
        assert set(some) <= set(saved[file]), "an arrow starts at a file that has not these rows"
        found[rank] += some
    assert [sorted(rows) for rows in found.values()] == [list(mine) for mine in wanted]
    ax.text(0.7, 0.4, f"saved by {len(saved)} ranks", ha="center")
    ax.text(5.7, 0.4, f"wanted by {len(wanted)} ranks", ha="center")
    show(figure)


def waits(saves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """way to save -> (seconds that training waited, seconds until it was on disk) of each save."""
    colours = {"training waits": COLOURS[1], "a thread writes": "#eeeeee"}
    lines = {}
    for way, times in saves.items():
        waited, written = (median(t[k] for t in times) for k in (0, 1))
        spans = lines[f"{way}: training\nwaits {1e3 * waited:.0f} ms"] = []
        spans.append(Span(0, waited, "training waits"))
        if written > waited:
            spans.append(Span(waited, written, "a thread writes"))
    # What the names claim: only one of the two comes back before all is written.
    assert all(waited == written for waited, written in saves["save"])
    assert all(waited < written for waited, written in saves["async_save"])
    timeline(lines, colours)
