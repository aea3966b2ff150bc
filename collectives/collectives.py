"""Every collective of torch.distributed: what each rank holds before and after.

    torchrun --standalone --nproc_per_node=3 collectives/collectives.py
    torchrun --standalone --nproc_per_node=4 collectives/collectives.py --only all_to_all_single
    python collectives/collectives.py                       # a world of one: nothing moves

Each number shows where it comes from: rank r begins with 10 r, 10 r + 1, and so on, one number per
rank. Look at the duals: scatter undoes gather, reduce_scatter is to all_gather what reduce is to
broadcast, and an all_reduce is a reduce_scatter followed by an all_gather.

Every function here takes this rank's tensors, leaves them unchanged, and returns this rank's
result. `src` and `dst` are ranks within the group (`group_src=`), which is what you want in a
subgroup; the `src=` of torch.distributed is a global rank. Backends send a tensor's memory in its
own order, so the tensors of all ranks must be contiguous: a transposed one is copied first.
"""

import time
from collections.abc import Callable

import new_names
import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser
from runtime import Worker, distributed_worker
from tables import print_by_rank, print_table
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        for name in [args.only] if args.only else EXAMPLES:
            EXAMPLES[name](worker)


def contiguous_copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


# One to all, all to one. `x`: this rank's tensor, with one shape and dtype on all ranks.


def broadcast(x: torch.Tensor, src: int = 0, group=None) -> torch.Tensor:
    """Every rank gets the tensor of rank `src`."""
    y = contiguous_copy(x)  # dist.broadcast writes into what it is given
    dist.broadcast(y, group_src=src, group=group)
    return y


def scatter(parts: list[torch.Tensor] | None, like: torch.Tensor, src: int = 0, group=None):
    """Rank i gets part i of rank `src`. `like`: a tensor of the shape and dtype of a part."""
    y = like.new_empty(like.shape)
    parts = [part.contiguous() for part in parts] if dist.get_rank(group) == src else None
    dist.scatter(y, parts, group_src=src, group=group)
    return y


def gather(x: torch.Tensor, dst: int = 0, group=None) -> list[torch.Tensor] | None:
    """Rank `dst` gets a list of all tensors, every other rank None."""
    mine = dist.get_rank(group) == dst
    parts = [x.new_empty(x.shape) for _ in range(dist.get_world_size(group))] if mine else None
    dist.gather(x.contiguous(), parts, group_dst=dst, group=group)
    return parts


def reduce(x: torch.Tensor, dst: int = 0, op=dist.ReduceOp.SUM, group=None) -> torch.Tensor | None:
    """Rank `dst` gets the sum (or what `op` says), every other rank None.

    On every other rank, dist.reduce leaves unspecified numbers in the tensor (Gloo: partial sums).
    """
    y = contiguous_copy(x)
    dist.reduce(y, group_dst=dst, op=op, group=group)
    return y if dist.get_rank(group) == dst else None


# All to all.


def all_reduce(x: torch.Tensor, op=dist.ReduceOp.SUM, group=None) -> torch.Tensor:
    """Every rank gets the sum (or what `op` says)."""
    y = contiguous_copy(x)
    dist.all_reduce(y, op=op, group=group)
    return y


def all_gather(x: torch.Tensor, group=None) -> list[torch.Tensor]:
    """Every rank gets a list of all tensors."""
    parts = [x.new_empty(x.shape) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def all_gather_single(x: torch.Tensor, group=None) -> torch.Tensor:
    """Every rank gets all tensors, concatenated along dim 0."""
    y = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    new_names.all_gather_single(y, x.contiguous(), group=group)
    return y


def all_gather_uneven(x: torch.Tensor, group=None) -> list[torch.Tensor]:
    """all_gather of tensors that differ along dim 0: pad to the longest, gather, trim.

    NCCL takes a list of different shapes (as a series of broadcasts). Gloo refuses it.
    """
    lengths = all_gather(torch.tensor(len(x), device=x.device), group)
    padded = x.new_zeros(int(max(lengths)), *x.shape[1:])
    padded[: len(x)] = x
    parts = all_gather(padded, group)
    return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]


def reduce_scatter(parts: list[torch.Tensor], op=dist.ReduceOp.SUM, group=None) -> torch.Tensor:
    """Rank i gets the sum of all ranks' part i."""
    parts = [part.contiguous() for part in parts]
    y = torch.empty_like(parts[dist.get_rank(group)])
    dist.reduce_scatter(y, parts, op=op, group=group)
    return y


def reduce_scatter_single(x: torch.Tensor, op=dist.ReduceOp.SUM, group=None) -> torch.Tensor:
    """reduce_scatter of parts that are concatenated along dim 0 of `x`."""
    y = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    new_names.reduce_scatter_single(y, x.contiguous(), op=op, group=group)
    return y


def all_to_all(parts: list[torch.Tensor], group=None) -> list[torch.Tensor]:
    """Rank i gets part i of every rank: this transposes the table of ranks and parts.

    NCCL takes parts of different shapes, Gloo does not. Use all_to_all_uneven for them.
    """
    parts = [part.contiguous() for part in parts]
    received = [torch.empty_like(part) for part in parts]
    try:
        dist.all_to_all(received, parts, group=group)
    except RuntimeError as error:
        if "does not support alltoall" not in str(error):
            raise
        received = list(all_to_all_single(torch.stack(parts), group))  # Gloo up to torch 2.11
    return received


def all_to_all_single(x: torch.Tensor, group=None) -> torch.Tensor:
    """all_to_all of equally long parts that are concatenated along dim 0 of `x`."""
    y = x.new_empty(x.shape)
    dist.all_to_all_single(y, x.contiguous(), group=group)
    return y


def all_to_all_uneven(x: torch.Tensor, send: list[int], group=None):
    """Send the first send[0] rows of `x` to rank 0, the next send[1] to rank 1, and so on.

    Returns the rows received, in rank order, and how many came from each rank. A rank does not know
    in advance how many rows it will get, so the counts are sent first. (MoE layers do this with
    tokens.) Raises ValueError, before anything is sent, if `send` is not about all rows of `x`.
    """
    if sum(send) != len(x):
        raise ValueError(f"send says {sum(send)} rows, x has {len(x)}")
    counts = all_to_all_single(torch.tensor(send, device=x.device), group)
    receive = counts.tolist()
    y = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), receive, send, group=group)
    return y, receive


def barrier(group=None) -> float:
    """Wait until every rank has called this. Returns the seconds that this rank waited."""
    started = time.perf_counter()
    # NCCL's barrier is an all_reduce queued on the GPU; dist.barrier also waits for that.
    dist.barrier(group)
    return time.perf_counter() - started


# What the script prints.


def numbered(worker: Worker, count: int | None = None) -> torch.Tensor:
    """10 r, 10 r + 1, ...: `count` numbers, by default one per rank."""
    count = worker.world_size if count is None else count
    return 10 * worker.rank + torch.arange(count, device=worker.device)


def plain(result):
    """Lists instead of tensors, "-" instead of None."""
    if isinstance(result, list):
        return [plain(part) for part in result]
    return "-" if result is None else result.tolist()


def example(what: str, function: Callable, split: bool = False) -> Callable:
    """An entry of EXAMPLES: a table of the function's input and result. split: input is a list."""

    def show(worker: Worker) -> None:
        x = numbered(worker)
        given = list(x.split(1)) if split else x
        print_by_rank(worker, what, before=plain(given), after=plain(function(given)))

    return show


def show_all_gather_uneven(worker: Worker) -> None:
    x = numbered(worker, worker.rank + 1)
    lengths = range(1, worker.world_size + 1)
    try:
        parts = [x.new_zeros(n) for n in lengths]
        dist.all_gather(parts, x)
        answer = str(plain(parts))
    except RuntimeError as error:
        answer = str(error).splitlines()[0].rpartition("::")[2]
    if worker.is_main:
        print(f"\ndist.all_gather of 1, 2, ... numbers, {dist.get_backend()}: {answer}")
    what = "all_gather_uneven: padded to the longest, gathered, trimmed"
    print_by_rank(worker, what, before=plain(x), after=plain(all_gather_uneven(x)))


def show_all_to_all_uneven(worker: Worker) -> None:
    send = [(worker.rank + 2 * to) % 3 for to in range(worker.world_size)]
    x = numbered(worker, sum(send))
    y, receive = all_to_all_uneven(x, send)
    print_by_rank(
        worker,
        "all_to_all_single, uneven: rank r sends (r + 2 i) % 3 numbers to rank i",
        before=x,
        send=str(send),
        receive=str(receive),
        after=y,
    )


def show_barrier(worker: Worker) -> None:
    dist.barrier()  # start together
    time.sleep(0.1 * worker.rank)
    waited = f"{barrier():.2f}"
    title = "barrier: every rank waits for the last one"
    print_by_rank(worker, title, arrives_after_s=f"{0.1 * worker.rank:.2f}", waits_s=waited)


def show_identity(worker: Worker) -> None:
    x = numbered(worker)
    one, two = all_reduce(x), all_gather_single(reduce_scatter_single(x))
    if worker.is_main:
        print()
        rows = [["all_reduce", one], ["reduce_scatter_single, then all_gather_single", two]]
        print_table(["on rank 0", "after"], rows)


EXAMPLES = {
    "broadcast": example("broadcast: rank 0's tensor, to every rank", broadcast),
    "scatter": example(
        "scatter: part i of rank 0, to rank i", lambda p: scatter(p, p[0]), split=True
    ),
    "gather": example("gather: all tensors, to rank 0", gather),
    "all_gather": example("all_gather: all tensors, to every rank, as a list", all_gather),
    "all_gather_single": example(
        "all_gather_single: all tensors, to every rank, as one tensor", all_gather_single
    ),
    "all_gather_uneven": show_all_gather_uneven,
    "reduce": example("reduce: the sum of all tensors, to rank 0", reduce),
    "all_reduce": example("all_reduce: the sum of all tensors, to every rank", all_reduce),
    "reduce_scatter": example(
        "reduce_scatter: part i of the sum, to rank i; input: a list", reduce_scatter, True
    ),
    "reduce_scatter_single": example(
        "reduce_scatter_single: part i of the sum, to rank i; input: one tensor",
        reduce_scatter_single,
    ),
    "identity": show_identity,
    "all_to_all": example(
        "all_to_all: every rank's part i, to rank i; input: a list", all_to_all, split=True
    ),
    "all_to_all_single": example(
        "all_to_all_single: every rank's part i, to rank i; input: one tensor", all_to_all_single
    ),
    "all_to_all_uneven": show_all_to_all_uneven,
    "barrier": show_barrier,
}


def parse_args():
    parser = ArgumentParser(description="Every collective, before and after.")
    parser.add_argument("--only", choices=list(EXAMPLES), help="print only this one (default: all)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
