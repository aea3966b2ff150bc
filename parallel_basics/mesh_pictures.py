"""Draw device meshes as text, from what the ranks report. Used by device_mesh.py."""

from collections.abc import Sequence


def draw(ranks: list[dict], names: Sequence[str]) -> str:
    """The mesh as text: the last axis across, the one before it down, all other axes as blocks."""
    rank_at = {rank["coordinate"]: i for i, rank in enumerate(ranks)}
    sizes = [i + 1 for i in max(rank_at)]  # of the last coordinate on each axis
    titles = [f"{name} {size}" for name, size in zip(names, sizes, strict=True)]
    lines = ["mesh of " + ", ".join(titles)]
    width = max(len(titles[-1]), len(f"rank {len(ranks) - 1}")) + 3
    label = len(", ".join(titles[:-2]))  # how wide the first column is
    if len(titles) > 1:
        label = max(label, len("  " + titles[-2]))
    columns = "".join(f"{names[-1]} {i}".rjust(width) for i in range(sizes[-1]))
    previous = None
    for row in sorted({coordinate[:-1] for coordinate in rank_at}):
        if row[:-1] != previous:
            previous = row[:-1]
            block = ", ".join(f"{n} {i}" for n, i in zip(names, row[:-1], strict=False))
            lines.append(block.ljust(label) + columns)
        name = f"  {names[-2]} {row[-1]}" if row else ""
        cells = "".join(f"rank {rank_at[*row, i]}".rjust(width) for i in range(sizes[-1]))
        lines.append(name.ljust(label) + cells)
    return "\n".join(lines)


def groups_table(ranks: list[dict], names: Sequence[str], per_node: int) -> str:
    """The groups along each axis, the stride of their ranks, and whether they cross nodes."""
    width = max(map(len, ("axis", *names))) + 2
    rows = []
    for axis, name in enumerate(names):
        groups = sorted({tuple(rank["groups"][axis]) for rank in ranks})
        apart = groups[0][1] - groups[0][0] if len(groups[0]) > 1 else 0
        inside = all(len({rank // per_node for rank in group}) == 1 for group in groups)
        text = " | ".join(" ".join(map(str, group)) for group in groups)
        rows.append([name, text, str(apart or "-"), "inside" if inside else "across"])
    rows.insert(0, ["axis", "groups", "stride", f"nodes of {per_node}"])
    wide = max(len(groups) for _, groups, _, _ in rows) + 2
    return "\n".join(f"{a:{width}}{b:{wide}}{c:>6}  {d}" for a, b, c, d in rows)


def views_table(of_ranks: list[dict]) -> str:
    """One row per rank: the members of each slice, and the sum over it."""
    titles = list(of_ranks[0])
    rows = [["rank", *titles]]
    for rank, views in enumerate(of_ranks):
        cells = []
        for title in titles:
            members, total = views[title]
            cells.append(f"{text(members)}  sum {total}")
        rows.append([str(rank), *cells])
    widths = [max(len(row[i]) for row in rows) + 3 for i in range(len(rows[0]))]
    lines = ["".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def text(nested: list) -> str:
    """[[0, 1], [2, 3]] -> 0 1 / 2 3"""
    if isinstance(nested[0], list):
        return " / ".join(map(text, nested))
    return " ".join(map(str, nested))
