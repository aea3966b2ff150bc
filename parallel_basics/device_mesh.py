"""DeviceMesh: coordinates for the ranks of a job, and a group of ranks along each axis.

    python parallel_basics/device_mesh.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/device_mesh.py
    torchrun --standalone --nproc_per_node=8 parallel_basics/device_mesh.py
    torchrun --standalone --nproc_per_node=6 parallel_basics/device_mesh.py --shape 3 2

To combine strategies, give each one an axis. A rank then belongs to one group per axis: it computes
a layer with the ranks of its row, say, and averages gradients with the ranks of its column.

The pictures are measured, not read from the DeviceMesh: each rank reports its coordinate, and finds
the other members of its groups by an all_gather in each group. Look at

1. the order: rank numbers on the last axis differ by 1, those on the first axis differ most.
   torchrun numbers the ranks node by node, so the axis that communicates most comes last.
2. a slice, mesh["tp"]: one line of code gives each rank the group that it is in.
3. flattening: two axes as one, for collectives over all of their ranks, such as the average of the
   loss when both axes shard the batch.
"""

import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from mesh_pictures import draw, groups_table, views_table
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

# By number of axes. Data parallelism comes first: it communicates once per step. Tensor parallelism
# communicates several times per layer and needs the fastest links.
NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("replicate", "shard", "tp")}


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        show(args, worker)


def make_mesh(device: str, shape: Sequence[int], names: Sequence[str], ranks: int) -> DeviceMesh:
    """A mesh of all ranks, row by row. Every rank must call this.

    It makes the process groups, one per line of each axis; a rank keeps those that it is in.
    """
    if math.prod(shape) != ranks:
        product = " x ".join(map(str, shape))
        raise UserError(f"--shape {product} is for {math.prod(shape)} ranks, this job has {ranks}")
    return init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))


def flatten(mesh: DeviceMesh, first: str, second: str, name: str) -> DeviceMesh:
    """Two neighbouring axes of `mesh`, a mesh of all ranks, as one axis called `name`.

    Ranks are in row-major order, so a mesh with the product of the two sizes has the ranks of both
    axes in a line. (DeviceMesh's own method for this is not public.) Every rank must call this.
    """
    names, shape = list(mesh.mesh_dim_names), list(mesh.shape)
    i = names.index(first)
    if names[i : i + 2] != [first, second]:
        raise ValueError(f"{first} and {second} are not neighbours among {names}")
    names[i : i + 2] = [name]
    shape[i : i + 2] = [shape[i] * shape[i + 1]]
    return init_device_mesh(mesh.device_type, tuple(shape), mesh_dim_names=tuple(names))[name]


# ---- what a rank reports about a mesh


def members(mesh: DeviceMesh) -> Tensor:
    """The ranks of `mesh`, in its shape, gathered from the ranks axis by axis."""
    ranks = torch.tensor(dist.get_rank(), device=mesh.device_type)
    for axis in reversed(range(mesh.ndim)):
        of_group = [torch.empty_like(ranks) for _ in range(mesh.size(axis))]
        dist.all_gather(of_group, ranks, group=mesh.get_group(axis))
        ranks = torch.stack(of_group)
    return ranks.cpu()


def collect(mesh: DeviceMesh) -> list[dict]:
    """Each rank's coordinate, and the members of its group along each axis."""
    groups = [members(mesh[name]).tolist() for name in mesh.mesh_dim_names]
    of_ranks = [None] * dist.get_world_size()
    own = {"coordinate": tuple(mesh.get_coordinate()), "groups": groups}
    dist.all_gather_object(of_ranks, own)
    return of_ranks


def views(mesh: DeviceMesh) -> dict[str, tuple[list, int]]:
    """Title -> (members, sum of their rank numbers by all_reduce), for slices of `mesh`."""
    names = mesh.mesh_dim_names
    slices = {f'mesh["{name}"]': mesh[name] for name in names}
    if len(names) > 2:
        slices[f'mesh["{names[0]}", "{names[1]}"]'] = mesh[names[:2]]
    if len(names) > 1:
        slices[f"{names[0]} and {names[1]} flattened"] = flatten(mesh, *names[:2], "flat")
    of_slices = {}
    for title, part in slices.items():
        total = torch.tensor(dist.get_rank(), device=mesh.device_type)
        for axis in range(part.ndim):  # summed along each axis in turn: over all ranks of the slice
            dist.all_reduce(total, group=part.get_group(axis))
        of_slices[title] = members(part).tolist(), total.item()
    return of_slices


# ---- the script


def show(args, worker: Worker) -> None:
    shapes = [balanced_shape(worker.world_size, axes) for axes in (1, 2, 3)]
    if args.shape:
        shapes = [tuple(args.shape)]
    for shape in shapes:
        names = tuple(args.names or NAMES[len(shape)])
        mesh = make_mesh(worker.device.type, shape, names, worker.world_size)
        ranks = collect(mesh)
        if worker.is_main:
            print("\n" + draw(ranks, names))
            print(groups_table(ranks, names, ranks_per_node(args, worker.world_size)))
    of_ranks = [None] * worker.world_size
    dist.all_gather_object(of_ranks, views(mesh))
    if worker.is_main:
        print("\nthe last mesh on each rank: the ranks of each slice, and their sum by all_reduce")
        print(views_table(of_ranks))


def balanced_shape(ranks: int, axes: int) -> tuple[int, ...]:
    """Sizes of axes whose product is `ranks`, as equal as its factors allow, smallest first."""
    factors = []
    while ranks > 1:
        smallest = next(f for f in range(2, ranks + 1) if ranks % f == 0)
        factors.append(smallest)
        ranks //= smallest
    shape = [1] * axes
    for factor in reversed(factors):
        shape[0] *= factor
        shape.sort()  # the next factor goes to the smallest axis
    return tuple(shape)


def ranks_per_node(args, ranks: int) -> int:
    """Ranks per node of this job; one machine with 4 ranks or more is drawn as two nodes."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    pretend = ranks // 2 if here == ranks and ranks > 2 and ranks % 2 == 0 else here
    return args.ranks_per_node or pretend


def parse_args():
    parser = ArgumentParser(description="Meshes of ranks: coordinates, groups, slices, flattening.")
    add = parser.add_argument
    add(
        "--shape",
        type=at_least(1),
        nargs="+",
        help="sizes of the axes of one mesh (default: meshes of 1, 2 and 3 axes)",
    )
    add("--names", nargs="+", help="names of the axes of --shape (default: dp, tp, ...)")
    per_node = "ranks per node in the picture (default: as torchrun started them, or half)"
    add("--ranks-per-node", type=at_least(1), help=per_node)
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.names and not args.shape:
        parser.error("--names needs --shape")
    if args.shape and len(args.shape) not in NAMES and not args.names:
        parser.error(f"--shape with {len(args.shape)} axes needs --names")
    if args.names and len(args.names) != len(args.shape):
        parser.error(f"--names gives {len(args.names)} for the {len(args.shape)} axes of --shape")
    if args.names and len(set(args.names)) < len(args.names):
        parser.error(f"--names must differ: {' '.join(args.names)}")
    return args


if __name__ == "__main__":
    main()
