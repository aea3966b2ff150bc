"""Process groups (new_group): collectives among some of the ranks, such as rows of a grid.

    torchrun --standalone --nproc_per_node=4 collectives/process_groups.py
    torchrun --standalone --nproc_per_node=6 collectives/process_groups.py --columns 3
    python collectives/process_groups.py                       # a grid of one by one

Tensor-parallel ranks communicate along a row, data-parallel ranks along a column. Each row and each
column is a group. Look at

1. the grid: every rank is in two groups and has a rank in each. The sums stay within the group.
2. the calls that make such groups, and which of them this backend lacks.
3. global ranks and group ranks: `src=` takes a global rank, `group_src=` a rank in the group.
4. a backend and a timeout per group.
5. the rule that EVERY rank must make EVERY group, in the same order: here one rank skips a group.
"""

import os
import time
from datetime import timedelta

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # section 5 provokes a warning

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, above, at_least
from runtime import Worker, distributed_worker
from tables import print_by_rank, print_table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        try:
            grid = make_grid(worker.world_size, args.columns)
        except ValueError as error:
            raise UserError(f"--columns: {error}") from None
        show_grid(grid, worker)
        show_ready_made(grid, worker)
        show_ranks(worker)
        show_backends(worker)
        show_missing_rank(args.timeout, worker)  # last: it leaves the ranks out of step


def make_grid(world_size: int, columns: int | None = None) -> torch.Tensor:
    """The ranks 0 ... world_size - 1 row by row; by default as close to a square as possible.

    Returns int64 [rows, columns]. Raises ValueError if `columns` does not divide the world size.
    """
    if columns is None:
        divisors = [c for c in range(1, world_size + 1) if world_size % c == 0]
        columns = next(c for c in divisors if c * c >= world_size)  # rows no longer than needed
    if columns < 1 or world_size % columns:
        raise ValueError(f"{world_size} rank(s) do not fill rows of {columns}")
    return torch.arange(world_size).view(-1, columns)


def groups_of(lists: list[list[int]], **options):
    """Make one group for each list of ranks; return the one that this rank is in, or None.

    Do not pass None on to a collective: `group=None` means all ranks.

    Every rank must call this with the same lists: new_group must be called by every rank of the
    job, also by ranks outside the group. The ranks agree on a group's name by counting their calls.
    """
    mine = None
    for ranks in lists:
        group = dist.new_group(ranks, **options)
        if dist.get_rank() in ranks:  # other ranks get GroupMember.NON_GROUP_MEMBER
            mine = group
    return mine


def sum_in(group, value: float, device) -> float:
    x = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(x, group=group)  # adds up over the group, not over all ranks
    return x.item()


def show_grid(grid: torch.Tensor, worker: Worker) -> None:
    row, column = groups_of(grid.tolist()), groups_of(grid.T.tolist())
    (i,), (j,) = (axis.tolist() for axis in torch.where(grid == worker.rank))
    title = f"1. A grid of {len(grid)} x {len(grid[0])}: {grid.tolist()}. Sums of the global ranks"
    print_by_rank(
        worker,
        title,
        place=(i, j),
        row_group=dist.get_process_group_ranks(row),
        rank_in_row=dist.get_rank(row),
        row_sum=sum_in(row, worker.rank, worker.device),
        column_group=dist.get_process_group_ranks(column),
        rank_in_column=dist.get_rank(column),
        column_sum=sum_in(column, worker.rank, worker.device),
    )


def show_ranks(worker: Worker) -> None:
    ranks = list(range(worker.world_size // 2, worker.world_size))
    group = groups_of([ranks])
    if group is None:  # new_group gave NON_GROUP_MEMBER: a collective on it warns, does nothing
        said = ["outside", "-", "-", "-"]
    else:
        first = dist.get_global_rank(group, 0)  # get_group_rank goes the other way
        calls = ({"src": 0}, {"src": first}, {"group_src": 0})
        said = [dist.get_group_rank(group, worker.rank)]
        said += [broadcast_rank(group, worker.device, **call) for call in calls]
    print_by_rank(
        worker,
        f"3. The upper half, {ranks}: its first member broadcasts its global rank. Received with",
        group_rank=said[0],
        **{"src=0": said[1], f"src={ranks[0]}": said[2], "group_src=0": said[3]},
    )


def broadcast_rank(group, device, **source) -> str:
    x = torch.tensor(dist.get_rank(), device=device)
    try:
        dist.broadcast(x, group=group, **source)
    except ValueError as error:  # raised on every rank of the group, before anything is sent
        return str(error).split(" <")[0]
    return str(x.item())


def show_backends(worker: Worker) -> None:
    rows = [["the world", dist.get_backend(), dist.get_backend_config()]]
    # Gloo: for control messages on the CPU next to NCCL; a short timeout, as they are quick.
    for options in ({"backend": "gloo", "timeout": timedelta(seconds=20)}, {"backend": "nccl"}):
        said = ", ".join(f"{name}={value}" for name, value in options.items())
        try:
            group = dist.new_group(**options)
            rows.append([said, dist.get_backend(group), dist.get_backend_config(group)])
        except Exception as error:
            rows.append([said, "-", str(error)])
    if worker.is_main:
        print("\n4. A backend per group")
        print_table(["new_group", "get_backend", "per device"], rows)


def show_ready_made(grid: torch.Tensor, worker: Worker) -> None:
    rows, columns = grid.tolist(), grid.T.tolist()
    own_row = next(row for row in rows if worker.rank in row)
    ways = {
        "new_subgroups(group_size)": lambda: dist.new_subgroups(len(rows[0]))[0],
        "new_subgroups_by_enumeration": lambda: dist.new_subgroups_by_enumeration(columns)[0],
        "init_device_mesh, row": lambda: mesh_group(grid, "row", worker),
        "init_device_mesh, column": lambda: mesh_group(grid, "column", worker),
        "split_group": lambda: dist.split_group(split_ranks=rows),
        "new_group by members alone": lambda: members_alone(own_row),
    }
    lines, missing = [], []
    for name, make in ways.items():
        try:
            group = make()
            lines.append(dist.get_process_group_ranks(group) if group else "not a member")
        except RuntimeError as error:
            lines.append("missing")
            missing.append(f"{name} is missing on {dist.get_backend()}: {error}")
    everyone = [None] * worker.world_size
    dist.gather_object(lines, everyone if worker.is_main else None)
    if worker.is_main:
        print("\n2. Calls that make groups: the group of the first and of the last rank")
        rows = list(zip(ways, everyone[0], everyone[-1], strict=True))
        print_table(["made by", "rank 0", f"rank {worker.world_size - 1}"], rows)
        for reason in missing:
            print(reason)


def mesh_group(grid: torch.Tensor, axis: str, worker: Worker):
    """The group of this rank along one axis of a mesh, which makes the groups of all its axes."""
    mesh = init_device_mesh(
        worker.device.type, tuple(grid.shape), mesh_dim_names=("row_index", "column_index")
    )
    # Ranks of one row share the row's index: the axis along which they differ is the other one.
    return mesh.get_group("column_index" if axis == "row" else "row_index")


def members_alone(ranks: list[int]):
    """A group that only its members make: ranks outside of it need not call, with Gloo.

    (With NCCL, before torch 2.15 only after init_process_group(device_id=...), a group is split
    from the world's communicator, for which all ranks must call.)

    But let every rank make equally many groups, as here one per row. The group's name consists of
    its members and of how many groups this rank has made (torch 2.15) or is in (2.13). If that
    number differs, the ranks wait for each other until the timeout. In 2.15 such a call also
    counts for the next new_group of all ranks: a rank that was not a member stays one call behind.
    """
    if dist.get_rank() not in ranks:
        return None
    return dist.new_group(ranks, use_local_synchronization=True)


def show_missing_rank(timeout: float, worker: Worker) -> None:
    last = worker.world_size - 1
    dist.barrier()  # start together: the timeout is short
    started = time.perf_counter()
    said = "makes no group" if worker.rank == last else try_new_group(timeout)
    seconds = time.perf_counter() - started
    dist.barrier()  # the default group still works
    print_by_rank(
        worker,
        f"5. Rank {last} skips a new_group, timeout {timeout:g} s",
        after_s=f"{seconds:.1f}",
        said=said,
    )
    if worker.is_main and last > 0:
        print(f"The last number of the key is the group rank that never connected: {last}.")
        # A new_group by all ranks would now fail as well.
        print(f"Ranks find groups by counting their calls: rank {last} stays one call behind.")


def try_new_group(timeout: float, **options) -> str:
    """Make a group of all ranks and use it. Returns "made", or the error."""
    # Gloo, which connects in new_group. NCCL before torch 2.15 would hang in the first collective.
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout), **options)
        dist.barrier(group=group)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "made"


def parse_args():
    parser = ArgumentParser(description="Groups of ranks: rows and columns of a grid.")
    add = parser.add_argument
    add("--columns", type=at_least(1), help="columns of the grid (default: as square as possible)")
    add("--timeout", type=above(0), default=0.5, help="wait X seconds for the missing rank")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
