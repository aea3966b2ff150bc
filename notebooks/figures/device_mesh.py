"""The pictures of chapter 12: who is in a group with whom, and how a tensor lies on a mesh."""

import re
from collections.abc import Mapping, Sequence

import figures


def groups(met: Sequence[Mapping]) -> None:
    """Draw the groups along each axis of a 2 x 2 mesh: a frame around the ranks of one group.

    met: for each rank {"coordinate": (dp, tp), "dp": ranks it met, "tp": ranks it met}.
    """
    names = ("dp", "tp")
    figure, axes = figures.panels(2, height=2.4)
    for ax, axis in zip(axes, names, strict=True):
        for rank, said in enumerate(met):
            row, column = said["coordinate"]
            figures.cell(ax, column, -row, f"rank {rank}", [rank], w=0.8, h=0.7)
        for group in {tuple(said[axis]) for said in met}:
            places = [met[rank]["coordinate"] for rank in group]
            for rank, place in zip(group, places, strict=True):
                assert met[rank][axis] == list(group), "a group whose members do not agree"
                others = [i for i, name in enumerate(names) if name != axis]
                assert all(place[i] == places[0][i] for i in others), f"not a line along {axis}"
            left, low = min(c for _, c in places) - 0.07, -max(r for r, _ in places) - 0.07
            right, top = max(c for _, c in places) + 0.87, -min(r for r, _ in places) + 0.77
            ax.plot(
                [left, right, right, left, left], [low, low, top, top, low], color="0.2", lw=1.5
            )
        for i in range(2):
            ax.text(i + 0.4, 0.86, f"tp {i}", ha="center", color="0.3")
            ax.text(-0.16, 0.35 - i, f"dp {i}", ha="right", va="center", color="0.3")
        ax.set(xlim=(-0.6, 2.1), ylim=(-1.15, 1.15))
        ax.set_title(f'groups along "{axis}"')
        ax.axis("off")
    figures.show(figure)


def layouts(per_rank: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Draw a 4 x 4 matrix for each layout on a 2 x 2 mesh; in each field, the ranks that hold it.

    per_rank: for each rank, layout (such as "[Shard(0), Replicate()]") -> the numbers it holds.
    """
    figure, axes = figures.panels(len(per_rank[0]), height=2.6)
    for ax, layout in zip(axes, per_rank[0], strict=True):
        for rank, held in enumerate(per_rank):
            assert sorted(held[layout]) == _held_by(layout, divmod(rank, 2)), (layout, rank)
        for i in range(16):
            owners = [rank for rank, held in enumerate(per_rank) if i in held[layout]]
            figures.cell(ax, i % 4, -(i // 4), " ".join(map(str, owners)), owners)
        ax.set(xlim=(0, 4), ylim=(-3, 1.1), aspect="equal")
        ax.set_title(layout.replace(", ", ",\n"), fontsize=9)
        ax.axis("off")
    figures.show(figure)


def _held_by(layout: str, coordinate: Sequence[int]) -> list[int]:
    """The numbers of a 4 x 4 matrix that a layout's name gives to the rank at `coordinate`."""
    places = [range(4), range(4)]  # rows, columns
    for index, dim in zip(coordinate, re.findall(r"Shard\((\d)\)|Replicate", layout), strict=True):
        if dim:
            held = places[int(dim)]
            half = len(held) // 2
            places[int(dim)] = held[index * half : (index + 1) * half]
    return sorted(4 * row + column for row in places[0] for column in places[1])


def products(pairs: Mapping[tuple[str, str], tuple[str, str, int]]) -> None:
    """Draw the table of x @ y: (placement of x, of y) -> (of the product, collectives, bytes)."""
    kinds = ("R", "S0", "S1", "P")
    assert set(pairs) == {(i, j) for i in kinds for j in kinds}
    most = max(sent for _, _, sent in pairs.values())
    figure, ax = figures.canvas(3.6, (-0.9, 4), (-3, 1.55))
    for (i, j), (result, calls, sent) in pairs.items():
        assert (calls == "-") == (sent == 0), "free is what sends nothing"
        place = kinds.index(j) + 0.5, 0.5 - kinds.index(i)
        cost = f"{calls}\n{sent / 1000:,.0f} kB" if sent else "free"
        level = 1 - 0.4 * sent / most
        colour = (level, level, 1.0) if sent else "white"
        figures.box(ax, *place, f"{result}\n{cost}", colour, width=0.98, height=0.98)
    for k, kind in enumerate(kinds):
        ax.text(k + 0.5, 1.08, f"y: {kind}", ha="center", weight="bold")
        ax.text(-0.08, 0.5 - k, f"x: {kind}", ha="right", va="center", weight="bold")
    figures.show(figure)
