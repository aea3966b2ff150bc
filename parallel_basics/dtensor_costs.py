"""Count what DTensor sends, compute it by formula, and print tables.

A placement is named R (Replicate), S0 or S1 (Shard of that dim) or P (Partial: a sum over ranks).
All meshes here have one axis. Bytes are those that one rank sends if a collective runs as a ring.
"""

import math
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode  # sees the tensors that are sent

PLACEMENTS = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}
COLLECTIVES = {  # names of PyTorch's operators -> names in the tables
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "shard_dim_alltoall": "all_to_all",
}


def name_of(tensor: DTensor) -> str:
    """The name of a tensor's placement on the one axis of its mesh: R, S0, P, P(avg), ..."""
    (placement,) = tensor.placements
    if isinstance(placement, Partial):
        kind = placement.reduce_op
        return "P" if kind == "sum" else f"P({kind})"
    return f"S{placement.dim}" if isinstance(placement, Shard) else "R"


# ---- counted


@dataclass(frozen=True)
class Traffic:
    calls: dict[str, int]  # collective -> number of calls
    bytes: int  # bytes that this rank sends

    def __str__(self) -> str:
        several = {c: f"{n} {c}" if n > 1 else c for c, n in self.calls.items()}
        return ", ".join(several.values()) or "-"


def measure(mesh: DeviceMesh, function, *args) -> tuple:
    """Call `function(*args)`; return its result, and the traffic on the axis of `mesh`."""
    with CountBytes(mesh.size()) as count, CommDebugMode() as comm:
        result = function(*args)
    counts = {operator.__name__: n for operator, n in comm.get_comm_counts().items() if n}
    calls = {COLLECTIVES.get(name, name): n for name, n in counts.items()}
    return result, Traffic(calls, count.bytes)


class CountBytes(TorchDispatchMode):
    """Sees each operator that a rank runs on its local tensors, collectives included."""

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks, self.bytes = ranks, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor turns it into local operators, which come here
        result = function(*args, **(kwargs or {}))
        collective = COLLECTIVES.get(function.overloadpacket.__name__)
        if collective:
            passes = 2 if collective == "all_reduce" else 1  # a reduce_scatter and an all_gather
            nbytes = max(args[0].nbytes, result.nbytes)  # of the full tensor
            self.bytes += round(passes * (self.ranks - 1) / self.ranks * nbytes)
        return result


# ---- by formula


def collective_for(source: str, target: str, device: str = "cuda") -> str | None:
    """The collective that changes one placement into another; None: no rank sends anything."""
    if source == target or source == "R":
        return None  # every rank takes its shard of the full tensor
    if source == "P":
        return "all_reduce" if target == "R" else "reduce_scatter"
    if target == "R" or device == "cpu":
        return "all_gather"  # on CPU instead of an all_to_all; then each rank takes its shard
    return "all_to_all"


def bytes_sent(collective: str | None, shape, ranks: int, *placements: str) -> int:
    """Bytes that one of `ranks` ranks sends, for a float32 tensor of `shape`.

    placements: before and after. Each dim that one of them shards is padded to a multiple of ranks.
    """
    if collective is None:
        return 0
    sizes = list(shape)
    for name in placements:
        if name.startswith("S"):
            dim = int(name[1])
            sizes[dim] = math.ceil(sizes[dim] / ranks) * ranks
    nbytes = 4 * math.prod(sizes)
    if collective == "all_reduce":
        return round(2 * (ranks - 1) / ranks * nbytes)
    if collective == "all_to_all":  # each rank has 1 / ranks of the tensor, and keeps its own part
        return round((ranks - 1) / ranks**2 * nbytes)
    return round((ranks - 1) / ranks * nbytes)  # all_gather, reduce_scatter


# Placements of x and y that need no communication, and the placement of x @ y.
MATMUL_RULES = [
    ("R", "R", "R"),
    ("S0", "R", "S0"),  # some rows of x give these rows of the product
    ("R", "S1", "S1"),  # some columns of y give these columns of the product
    ("S1", "S0", "P"),  # some columns of x with the matching rows of y give a summand
    ("P", "R", "P"),  # a summand of x gives a summand of the product
    ("R", "P", "P"),
]


def matmul_plan(x: str, y: str, sizes: tuple[int, int, int], mesh: DeviceMesh) -> list[tuple]:
    """The cheapest way to one of the rules: [(source, target, shape)] of what is redistributed.

    sizes: (rows of x, columns of x, columns of y).
    """
    rows, inner, columns = sizes
    plans = []
    for to_x, to_y, _ in MATMUL_RULES:
        steps = [(x, to_x, (rows, inner)), (y, to_y, (inner, columns))]
        steps = [step for step in steps if collective_for(*step[:2])]
        if not any(target == "P" for _, target, _ in steps):  # nothing becomes a summand
            plans.append((sum(microseconds(*step, mesh) for step in steps), steps))
    return min(plans, key=lambda plan: plan[0])[1]


def microseconds(source: str, target: str, shape, mesh: DeviceMesh) -> float:
    """DTensor's estimate. It knows NVLink and Ethernet, and treats each CPU as one machine."""
    local = mesh.device_type == "cuda" and mesh.size() <= torch.cuda.device_count()
    nvlink = 87.7 * 2**30 / 1e6  # bytes per microsecond
    per_hop, bytes_per_microsecond = (0.6, nvlink) if local else (2.7, 0.22 * nvlink)
    collective = collective_for(source, target)
    hops = (mesh.size() - 1) * (2 if collective == "all_reduce" else 1)
    latency = 6.6 + per_hop * hops + (collective == "all_to_all")
    return latency + bytes_sent(collective, shape, mesh.size()) / bytes_per_microsecond


# ---- output


def print_table(table: list[dict]) -> None:
    """One line per row; the names of the columns are those of the first row."""
    rows = [list(table[0])]
    for row in table:
        rows.append([f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()])
    is_number = [isinstance(value, int) for value in table[0].values()]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for cell, width, right in zip(row, widths, is_number, strict=True):
            cells.append(cell.rjust(width) if right else cell.ljust(width))
        print("  ".join(cells).rstrip())
