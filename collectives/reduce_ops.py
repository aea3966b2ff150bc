"""ReduceOp, from SUM to PREMUL_SUM: what each gives on this backend, and why float sums differ.

    torchrun --standalone --nproc_per_node=3 collectives/reduce_ops.py
    torchrun --standalone --nproc_per_node=2 collectives/reduce_ops.py --device cpu
    python collectives/reduce_ops.py                   # a world of one: only the simulated ranks

1. Every operation is tried on every dtype, so the table shows what this backend does, not what its
   manual says. Gloo and NCCL lack different operations; the script also tries the alternatives.
2. Sums of floats. A sum of three or more numbers depends on their order, and each all-reduce
   algorithm adds in its own order. Look at how many of 100,000 sums differ, and by how little; then
   at the sum that loses everything. All ranks of one job get the same bits, as training needs.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser
from runtime import Worker, distributed_worker
from tables import print_table
from torch.distributed.elastic.multiprocessing.errors import record

OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        print_ops(worker)
        if worker.is_main:
            print_how_many_differ()
            print_one_that_differs()
        print_sums_of_this_backend(worker)


# 1. The operations.


def reduce_op(name: str, factor: float = 0.5):
    """The ReduceOp of this name. PREMUL_SUM multiplies each rank's numbers by `factor` first."""
    if name == "PREMUL_SUM":
        op = dist.ReduceOp.PREMUL_SUM  # older versions of torch have only a private function
        return op(factor) if callable(op) else dist._make_nccl_premul_sum(factor)
    return getattr(dist.ReduceOp, name)


def try_op(name: str, x: torch.Tensor, group=None) -> torch.Tensor | str:
    """all_reduce of a copy of `x`: the result, or the backend's refusal.

    Every rank gets the refusal, before or after the numbers are sent. The group still works.
    """
    y = x.clone(memory_format=torch.contiguous_format)
    try:
        dist.all_reduce(y, op=reduce_op(name), group=group)
    except (RuntimeError, TypeError, ValueError) as error:
        return "refused: " + str(error).splitlines()[0].rpartition(": ")[2]
    return y


def sample(rank: int, dtype: torch.dtype, device="cpu") -> torch.Tensor:
    """Rank 0: 1 6 1 0, rank 1: 2 6 2 1, rank 2: 3 6 4 0, ..."""
    return torch.tensor([rank + 1, 6, 2 ** min(rank, 7), rank % 2], device=device).to(dtype)


# Alternatives where a backend lacks an operation. x: any dtype unless the name says otherwise.


def average_integers(x: torch.Tensor, group=None) -> torch.Tensor:
    """AVG, rounded down: sum, then divide. In int64: sums of uint8 wrap around at 256."""
    total = x.to(torch.int64, copy=True)
    dist.all_reduce(total, group=group)
    return (total // dist.get_world_size(group)).to(x.dtype)


def premul_sum(x: torch.Tensor, factor: float, group=None) -> torch.Tensor:
    """PREMUL_SUM: multiply, then sum. (NCCL does both in one kernel, one pass over memory.)"""
    y = x * factor
    dist.all_reduce(y, group=group)
    return y


def bitwise(x: torch.Tensor, combine: Callable, group=None) -> torch.Tensor:
    """BAND, BOR, BXOR by all_gather: `combine` is torch.bitwise_and, _or or _xor."""
    x = x.contiguous()  # Gloo sends the memory as it lies, gaps included
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    for part in parts[1:]:
        parts[0] = combine(parts[0], part)
    return parts[0]


def print_ops(worker: Worker) -> None:
    notes, rows = [], []
    for name in OPS:
        row = [name]
        for dtype in DTYPES:
            result = try_op(name, sample(worker.rank, dtype, worker.device))
            if isinstance(result, str):
                if result not in notes:
                    notes.append(result)
                row.append(f"({notes.index(result) + 1})")
            else:
                numbers = result.int().tolist() if dtype == torch.bool else result.tolist()
                row.append(" ".join(f"{number:.4g}" for number in numbers))
        rows.append(row)
    device = worker.device
    other = {
        "AVG of int64, by SUM": average_integers(sample(worker.rank, torch.int64, device)),
        "PREMUL_SUM by 0.5, float32": premul_sum(sample(worker.rank, torch.float32, device), 0.5),
        "BXOR of int64, by all_gather": bitwise(
            sample(worker.rank, torch.int64, device), torch.bitwise_xor
        ),
    }
    if worker.is_main:
        print(f"\n1. all_reduce of four numbers per rank, {dist.get_backend()}")
        ranks = range(worker.world_size)
        print("before: " + ", ".join(str(sample(r, torch.int64).tolist()) for r in ranks))
        print_table(["op", *(str(dtype).removeprefix("torch.") for dtype in DTYPES)], rows)
        for i, note in enumerate(notes):
            print(f"({i + 1}) {note}")
        print("bool: SUM is OR, PRODUCT is AND. Alternatives where an operation is missing:")
        print_table(["how", "after"], [[k, v] for k, v in other.items()])


# 2. Sums of floats. `values`: one row per rank.


def in_rank_order(values: torch.Tensor) -> torch.Tensor:
    """((x0 + x1) + x2) + ...: one rank adds all rows in rank order."""
    total = values[0].clone()
    for row in values[1:]:
        total += row
    return total


def as_tree(values: torch.Tensor) -> torch.Tensor:
    """(x0 + x1) + (x2 + x3): neighbours first, then pairs of pairs."""
    rows = list(values)
    while len(rows) > 1:
        pairs = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)]
        rows = pairs + rows[len(pairs) * 2 :]
    return rows[0]


def as_ring(values: torch.Tensor) -> torch.Tensor:
    """The ring's order: piece i of the tensor starts at rank i and goes around the ring once.

    So equal numbers at two positions of one tensor may have different sums.
    """
    world_size = len(values)
    pieces = values.tensor_split(world_size, dim=1)
    return torch.cat([in_rank_order(p.roll(-i, dims=0)) for i, p in enumerate(pieces)])


def random_values(world_size: int, count: int = 100_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(world_size, count, generator=generator)


ORDERS = {"in rank order": in_rank_order, "tree": as_tree, "ring": as_ring}


def print_how_many_differ() -> None:
    print("\n2. 100,000 float32 sums, added in other orders (simulated ranks)")
    rows = []
    for world_size in (2, 3, 4, 8, 64):
        values = random_values(world_size)
        base = in_rank_order(values)
        ring, tree = (as_ring(values) - base).abs(), (as_tree(values) - base).abs()
        shares = [f"{(differences > 0).float().mean():.1%}" for differences in (ring, tree)]
        largest = (torch.maximum(ring, tree) / values.abs().sum(0)).max()
        rows.append([world_size, *shares, f"{largest:.1e}"])
    header = ["ranks", "ring differs in", "tree differs in", "largest difference / sum of |x|"]
    print_table(header, rows)
    print(f"(Two ranks: a + b is b + a. float32 rounds by up to {2**-24:.1e} per addition.)")


def print_one_that_differs() -> None:
    values = random_values(4)
    k = int((as_ring(values) != in_rank_order(values)).nonzero()[0])  # the first such sum
    print("\na sum that differs: " + " + ".join(f"({v:.9g})" for v in values[:, k].tolist()))
    cancelling = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])  # 1e8 + 1 is 1e8 in float32
    rows = [
        [name, f"{order(values)[k]:.9g}", order(cancelling).item()]
        for name, order in ORDERS.items()
    ]
    exact = math.fsum(values[:, k].double().tolist())
    rows.append(["exact", f"{exact:.12g}", 2.0])
    print_table(["4 ranks", "sum", "1e8 + 1 - 1e8 + 1"], rows)


def print_sums_of_this_backend(worker: Worker) -> None:
    values = random_values(worker.world_size)
    x = values[worker.rank].to(worker.device)
    total, again = reduced(x), reduced(x)
    in_two_calls = torch.cat([reduced(piece) for piece in x.split([33_333, 66_667])])

    of_rank_0 = total.clone()
    dist.broadcast(of_rank_0, src=0)
    same_on_all_ranks = everywhere(torch.equal(of_rank_0, total), worker.device)
    same_again = everywhere(torch.equal(total, again), worker.device)
    if worker.is_main:
        print(f"\n3. This backend's own sum of {worker.world_size} ranks, {dist.get_backend()}")
        for name, order in ORDERS.items():
            differing = (total.cpu() != order(values)).float().mean().item()
            print(f"differs from {name:14}{differing:7.1%}")
        differing = (total != in_two_calls).float().mean().item()
        print(f"in two all_reduces, {differing:.1%} of the sums differ from those in one")
        print(f"same bits on all ranks: {same_on_all_ranks}; in a second call: {same_again}")


def reduced(x: torch.Tensor) -> torch.Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y)
    return y


def everywhere(is_true: bool, device: torch.device) -> str:
    """ "yes" if this holds on every rank."""
    on_all = torch.tensor(int(is_true), device=device)
    dist.all_reduce(on_all, op=dist.ReduceOp.MIN)
    return "yes" if on_all else "no"


def parse_args():
    parser = ArgumentParser(description="What each reduction gives, and the order of float sums.")
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
