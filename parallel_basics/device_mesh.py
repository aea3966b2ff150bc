"""DeviceMesh: coordinates for the ranks of a job, and along each axis a group of ranks.

    python parallel_basics/device_mesh.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/device_mesh.py
    torchrun --standalone --nproc_per_node=8 parallel_basics/device_mesh.py
    torchrun --standalone --nproc_per_node=6 parallel_basics/device_mesh.py --shape 3 2

Strategies are combined by giving each an axis. A rank then belongs to one group per axis: with the
ranks of its row it computes one layer, say, and with those of its column it averages gradients.

Nothing here is drawn from the mesh's own table. Each rank tells its coordinate, and finds the other
members of a group by an all_gather in it. Look at

1. the order: the last axis has neighbours, whose numbers differ by 1, the first has those that are
   furthest apart. torchrun numbers the ranks node by node, so the axis that sends most comes last.
2. a slice, mesh["tp"]: the same line of code gives each rank the group that it is in.
3. flattening: two axes as one, for what all of their ranks do together. Averaging the loss does not
   care which of two axes cut the batch.
"""

import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from arguments import ArgumentParser, UserError
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

# By number of axes. Data parallelism comes first: it talks once a step. Tensor parallelism talks
# several times a layer, and wants the fastest links.
NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("replicate", "shard", "tp")}


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        show(args, worker)


def show(args, worker: Worker) -> None:
    if args.shape:
        shapes = [tuple(args.shape)]
    else:
        shapes = [balanced_shape(worker.world_size, axes) for axes in (1, 2, 3)]
    for shape in shapes:
        names = tuple(args.names or NAMES[len(shape)])
        mesh = make_mesh(worker.device.type, shape, names, worker.world_size)
        ranks = collect(mesh)
        if worker.is_main:
            print("\n" + draw(ranks, names))
            print(groups_table(ranks, names, ranks_per_node(args, worker.world_size)))
    everyone = [None] * worker.world_size
    dist.all_gather_object(everyone, views(mesh))
    if worker.is_main:
        print(
            "\nthe last mesh, seen by each rank: who is in the slice, and the sum over it of ranks"
        )
        print(views_table(everyone))


def balanced_shape(ranks: int, axes: int) -> tuple[int, ...]:
    """Sizes of axes whose product is `ranks`, as equal as its factors allow, smallest first."""
    shape, factors = [1] * axes, []
    while ranks > 1:
        factors.append(next(f for f in range(2, ranks + 1) if ranks % f == 0))
        ranks //= factors[-1]
    for factor in reversed(factors):  # each goes where the least is; if equal, to the last
        shape[min(reversed(range(axes)), key=shape.__getitem__)] *= factor
    return tuple(sorted(shape))


def make_mesh(device: str, shape: Sequence[int], names: Sequence[str], ranks: int) -> DeviceMesh:
    """A mesh of all ranks, which are laid out in it row by row. Every rank must call this.

    It makes the process groups: one per line of each axis, of which a rank keeps those it is in.
    """
    if math.prod(shape) != ranks:
        product = " x ".join(map(str, shape))
        raise UserError(f"--shape {product} is for {math.prod(shape)} ranks, this job has {ranks}")
    return init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))


# ---- what a rank finds out about a mesh


def members(mesh: DeviceMesh) -> Tensor:
    """The ranks of `mesh`, in its shape, as the ranks themselves say: gathered axis by axis."""
    found = torch.tensor(dist.get_rank(), device=mesh.device_type)
    for axis in reversed(range(mesh.ndim)):
        parts = [torch.empty_like(found) for _ in range(mesh.size(axis))]
        dist.all_gather(parts, found, group=mesh.get_group(axis))
        found = torch.stack(parts)
    return found.cpu()


def collect(mesh: DeviceMesh) -> list[dict]:
    """Each rank's coordinate, and the members of its group along each axis."""
    mine = {"coordinate": tuple(mesh.get_coordinate())}
    mine["groups"] = [members(mesh[name]).tolist() for name in mesh.mesh_dim_names]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def flatten(mesh: DeviceMesh, first: str, second: str, name: str) -> DeviceMesh:
    """The two neighbouring axes of `mesh`, a mesh of all ranks, as one axis called `name`.

    Ranks are laid out row by row, so that the mesh with the two sizes multiplied has those ranks
    in a line. (DeviceMesh has a method for this that is not public.) Every rank must call this.
    """
    names, shape = list(mesh.mesh_dim_names), list(mesh.shape)
    i = names.index(first)
    if names[i : i + 2] != [first, second]:
        raise ValueError(f"{first} and {second} are not neighbours among {names}")
    shape[i : i + 2], names[i : i + 2] = [shape[i] * shape[i + 1]], [name]
    return init_device_mesh(mesh.device_type, tuple(shape), mesh_dim_names=tuple(names))[name]


def views(mesh: DeviceMesh) -> dict[str, tuple[list, int]]:
    """Title -> (members, sum of their rank numbers by all_reduce), for slices of `mesh`."""
    names = mesh.mesh_dim_names
    slices = {f'mesh["{name}"]': mesh[name] for name in names}
    if len(names) > 2:
        slices[f'mesh["{names[0]}", "{names[1]}"]'] = mesh[names[:2]]
    if len(names) > 1:
        slices[f"{names[0]} and {names[1]} flattened"] = flatten(mesh, *names[:2], "flat")
    found = {}
    for title, part in slices.items():
        total = torch.tensor(dist.get_rank(), device=mesh.device_type)
        for axis in range(part.ndim):  # summed along each axis in turn: over all ranks of the slice
            dist.all_reduce(total, group=part.get_group(axis))
        found[title] = members(part).tolist(), total.item()
    return found


# ---- output


def draw(ranks: list[dict], names: Sequence[str]) -> str:
    """The mesh as text: the last axis to the right, the one before it down, others in blocks."""
    at = {rank["coordinate"]: i for i, rank in enumerate(ranks)}
    *_, bottom = sorted(at)
    sizes = [i + 1 for i in bottom]
    titles = [f"{n} {s}" for n, s in zip(names, sizes, strict=True)]
    lines = ["mesh of " + ", ".join(titles)]
    width = max(len(titles[-1]), len(f"rank {len(ranks) - 1}")) + 3
    label = max(len(", ".join(titles[:-2])), len("  " + titles[-2]) if titles[1:] else 0)
    columns = "".join(f"{names[-1]} {i}".rjust(width) for i in range(sizes[-1]))
    previous = None
    for row in sorted({coordinate[:-1] for coordinate in at}):
        if row[:-1] != previous:
            previous = row[:-1]
            block = ", ".join(f"{n} {i}" for n, i in zip(names, row[:-1], strict=False))
            lines.append(block.ljust(label) + columns)
        name = f"  {names[-2]} {row[-1]}" if row else ""
        cells = "".join(f"rank {at[*row, i]}".rjust(width) for i in range(sizes[-1]))
        lines.append(name.ljust(label) + cells)
    return "\n".join(lines)


def groups_table(ranks: list[dict], names: Sequence[str], per_node: int) -> str:
    """The groups along each axis, how far apart neighbours are, whether they leave a node."""
    width = max(map(len, ("axis", *names))) + 2
    rows = []
    for axis, name in enumerate(names):
        groups = sorted({tuple(rank["groups"][axis]) for rank in ranks})
        apart = groups[0][1] - groups[0][0] if len(groups[0]) > 1 else 0
        inside = all(len({rank // per_node for rank in group}) == 1 for group in groups)
        text = " | ".join(" ".join(map(str, group)) for group in groups)
        rows.append([name, text, str(apart or "-"), "inside" if inside else "across"])
    wide = max(len("groups"), *(len(row[1]) for row in rows)) + 2
    head = ["axis", "groups", "apart", f"nodes of {per_node}"]
    lines = [f"{a:{width}}{b:{wide}}{c:>5}  {d}" for a, b, c, d in [head, *rows]]
    return "\n".join(lines)


def ranks_per_node(args, ranks: int) -> int:
    """As the job is; on one machine we pretend that it is two, if they get two ranks or more."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    pretend = ranks // 2 if here == ranks and ranks > 2 and ranks % 2 == 0 else here
    return args.ranks_per_node or pretend


def views_table(everyone: list[dict]) -> str:
    titles = list(everyone[0])
    rows = [["rank", *titles]]
    for rank, found in enumerate(everyone):
        cells = [f"{text(found[t][0])}  sum {found[t][1]}" for t in titles]
        rows.append([str(rank), *cells])
    widths = [max(len(row[i]) for row in rows) + 3 for i in range(len(rows[0]))]
    lines = ["".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def text(nested: list) -> str:
    """[[0, 1], [2, 3]] -> 0 1 / 2 3"""
    if isinstance(nested[0], list):
        return " / ".join(map(text, nested))
    return " ".join(map(str, nested))


def parse_args():
    parser = ArgumentParser(description="Meshes of ranks: coordinates, groups, slices, flattening.")
    add = parser.add_argument
    add("--shape", type=int, nargs="+", help="one mesh, of these sizes (default: 1, 2 and 3 axes)")
    add("--names", nargs="+", help="of the axes")
    add("--ranks-per-node", type=int, help="to say which groups leave a node (default: as it is)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    if args.shape and min(args.shape) < 1:
        parser.error(f"--shape must be of sizes from 1, not {min(args.shape)}")
    if args.names and not args.shape:
        parser.error("--names are those of the axes of a --shape")
    if args.shape and len(args.shape) not in NAMES and not args.names:
        parser.error(f"--shape with {len(args.shape)} axes needs --names")
    if args.names and len(args.names) != len(args.shape):
        parser.error(f"--names gives {len(args.names)} for the {len(args.shape)} axes of --shape")
    if args.names and len(set(args.names)) < len(args.names):
        parser.error(f"--names must differ: {' '.join(args.names)}")
    if args.ranks_per_node is not None and args.ranks_per_node < 1:
        parser.error(f"--ranks-per-node must be at least 1, not {args.ranks_per_node}")
    return args


if __name__ == "__main__":
    main()
