"""Print one table with one row per rank: rank 0 gathers the rows and prints them."""

import torch
import torch.distributed as dist
from runtime import Worker


def print_by_rank(worker: Worker, title: str, **columns) -> None:
    """Print a table with one line per rank and one column per keyword.

    columns: this rank's values: tensors (any shape), numbers, strings. Every rank must call this,
    with the same keywords: it is a collective. Values are turned into text before they are sent.
    """
    row = [str(worker.rank), *(as_text(value) for value in columns.values())]
    rows = [None] * worker.world_size if worker.is_main else None
    dist.gather_object(row, rows, dst=0)
    if worker.is_main:
        print(f"\n{title}")
        print_table(["rank", *(name.replace("_", " ") for name in columns)], rows)


def print_table(header: list[str], rows: list[list]) -> None:
    """Print `rows` under `header`, in aligned columns: numbers to the right, text to the left."""
    lines = [header, *([as_text(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [all(is_number(line[i]) for line in lines[1:]) for i in range(len(header))]
    for line in lines:
        cells = zip(line, widths, numeric, strict=True)
        print("  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in cells).rstrip())


def as_text(value) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.detach().cpu().tolist())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
