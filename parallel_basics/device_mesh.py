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
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from mesh_pictures import draw, groups_table, views_table
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


def make_mesh(device: str, shape: Sequence[int], names: Sequence[str], ranks: int) -> DeviceMesh:
    """A mesh of all ranks, which are laid out in it row by row. Every rank must call this.

    It makes the process groups: one per line of each axis, of which a rank keeps those it is in.
    """
    if math.prod(shape) != ranks:
        product = " x ".join(map(str, shape))
        raise UserError(f"--shape {product} is for {math.prod(shape)} ranks, this job has {ranks}")
    return init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))


def flatten(mesh: DeviceMesh, first: str, second: str, name: str) -> DeviceMesh:
    """The two neighbouring axes of `mesh`, a mesh of all ranks, as one axis called `name`.

    Ranks are laid out row by row, so that the mesh with the two sizes multiplied has those ranks
    in a line. (DeviceMesh has a method for this that is not public.) Every rank must call this.
    """
    names, shape = list(mesh.mesh_dim_names), list(mesh.shape)
    i = names.index(first)
    if names[i : i + 2] != [first, second]:
        raise ValueError(f"{first} and {second} are not neighbours among {names}")
    names[i : i + 2] = [name]
    shape[i : i + 2] = [shape[i] * shape[i + 1]]
    return init_device_mesh(mesh.device_type, tuple(shape), mesh_dim_names=tuple(names))[name]


# ---- what a rank finds out about a mesh


def members(mesh: DeviceMesh) -> Tensor:
    """The ranks of `mesh`, in its shape, as the ranks themselves say: gathered axis by axis."""
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
        print(
            "\nthe last mesh, as each rank sees it: who is in the slice, and the sum of these ranks"
        )
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
        shape.sort()  # the next factor goes to the axis that is the smallest now
    return tuple(shape)


def ranks_per_node(args, ranks: int) -> int:
    """As the job is; on one machine we pretend that it is two, if they get two ranks or more."""
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
        help="one mesh only, of these sizes",
    )
    add("--names", nargs="+", help="of the axes")
    add("--ranks-per-node", type=at_least(1), help="default: as it is")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.names and not args.shape:
        parser.error("--names are those of the axes of a --shape")
    if args.shape and len(args.shape) not in NAMES and not args.names:
        parser.error(f"--shape with {len(args.shape)} axes needs --names")
    if args.names and len(args.names) != len(args.shape):
        parser.error(f"--names gives {len(args.names)} for the {len(args.shape)} axes of --shape")
    if args.names and len(set(args.names)) < len(args.names):
        parser.error(f"--names must differ: {' '.join(args.names)}")
    return args


if __name__ == "__main__":
    main()
