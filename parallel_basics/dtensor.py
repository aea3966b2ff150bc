"""DTensor: one tensor on many ranks. What redistribute and each operator send, counted.

    python parallel_basics/dtensor.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/dtensor.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/dtensor.py --sizes 64 1024 768

A DTensor has the shape of the full tensor, a mesh, and a placement for each axis of the mesh:

    R         Replicate()           every rank has the full tensor
    S0, S1    Shard(0), Shard(1)    every rank has some of the rows, or some of the columns
    P         Partial()             every rank has a summand: their sum is the tensor

An operator computes on the local tensors if it can. If it cannot, DTensor first redistributes the
inputs, by collectives that your code does not show. Look at

1. redistribute: a change of placement is at most one collective (Replicate to Shard sends nothing),
   and backward reverses it.
2. matmul: six rules need no communication (dtensor_costs.py); for other pairs DTensor redistributes
   to the rule that it estimates to be cheapest. Try other --sizes. S1 times S0 sends nothing, and
   its result is Partial.
3. other operators: a linear operator takes a P as it is. Any other operator needs an all_reduce
   first, even where a reduce_scatter would do: DTensor looks at one operator at a time.

What DTensor chooses depends on the version of torch: "counted" is what it did in this run. How
placements make a model data parallel, FSDP or tensor parallel: dtensor_strategies.py.
"""

import logging
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from dtensor_costs import (
    PLACEMENTS,
    bytes_sent,
    collective_for,
    matmul_plan,
    measure,
    name_of,
    print_table,
)
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Partial, distribute_tensor


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        show(args, worker)


def place(tensor: Tensor, name: str, mesh: DeviceMesh) -> DTensor:
    """`tensor`, which is equal on every rank, as a DTensor. Nothing is sent."""
    tensor = tensor.to(mesh.device_type)
    if name != "P":
        # Each rank keeps its shard. (By default, src_data_rank=0, rank 0 would send its tensor.)
        return distribute_tensor(tensor, mesh, [PLACEMENTS[name]], src_data_rank=None)
    # A DTensor from local tensors: random summands, and a last one that makes the sum right.
    generator = torch.Generator().manual_seed(tensor.numel())
    summands = torch.randn((mesh.size() - 1, *tensor.shape), generator=generator).to(tensor.device)
    summands = torch.cat([summands, (tensor - summands.sum(0))[None]])
    return DTensor.from_local(summands[mesh.get_local_rank()], mesh, [Partial()])


def show(args, worker: Worker) -> None:
    # Each rank would warn that Gloo has no all_to_all for DTensor; the table shows that.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    rows, inner, _ = args.sizes
    tables = {
        "1. redistribute x": redistributions(mesh, (rows, inner)),
        "2. x @ y": products(mesh, args.sizes),
        "3. other operators; y has the shape of x": operators(mesh, (rows, inner)),
    }
    if worker.is_main:
        x, y = (f"{a} x {b}: {4 * a * b:,} bytes" for a, b in pairwise(args.sizes))
        print(f"x is {x}; y is {y}. Counted and formula: bytes sent per rank, in a ring.")
        for title, table in tables.items():
            print(f"\n{title}")
            print_table(table)


# ---- 1. redistribute


def redistributions(mesh: DeviceMesh, shape: tuple[int, int]) -> list[dict]:
    """One row per change of placement (redistribute() refuses a change to Partial)."""
    x_full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(shape)
    table = []
    for source, target in product(PLACEMENTS, ("R", "S0", "S1")):
        if source == target:
            continue
        x = place(x_full, source, mesh).requires_grad_()
        y, forward = measure(mesh, x.redistribute, mesh, [PLACEMENTS[target]])
        _, backward = measure(mesh, y.backward, place(ones, target, mesh))
        collective = collective_for(source, target, mesh.device_type)
        right = close(y, x_full) and close(x.grad, ones)
        table.append(
            {
                "from": source,
                "to": target,
                "collective": forward,
                "counted": forward.bytes,
                "formula": bytes_sent(collective, shape, mesh.size(), source, target),
                "in backward": backward,
                "values": verdict(right),
            }
        )
    return table


def close(tensor: DTensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    """A sum of summands is rounded: about 1e-6 for numbers of size 1."""
    return (tensor.full_tensor().cpu() - expected).abs().max().item() <= tolerance


def verdict(right: bool) -> str:
    return "right" if right else "WRONG"


# ---- 2. matmul


def products(mesh: DeviceMesh, sizes: tuple[int, int, int]) -> list[dict]:
    """One row per pair of placements of x and y: what x @ y sends."""
    rows, inner, columns = sizes
    generator = torch.Generator().manual_seed(0)
    x_full = torch.randn(rows, inner, generator=generator)
    y_full = torch.randn(inner, columns, generator=generator)
    expected = x_full @ y_full
    table = []
    for x_name, y_name in product(PLACEMENTS, PLACEMENTS):
        x, y = place(x_full, x_name, mesh), place(y_full, y_name, mesh)
        z, traffic = measure(mesh, torch.matmul, x, y)
        formula = 0
        for source, target, shape in matmul_plan(x_name, y_name, sizes, mesh):
            collective = collective_for(source, target, mesh.device_type)
            formula += bytes_sent(collective, shape, mesh.size(), source, target)
        table.append(
            {
                "x": x_name,
                "y": y_name,
                "x @ y": name_of(z),
                "collective": traffic,
                "counted": traffic.bytes,
                "formula": formula,
                # Each element is a sum of `inner` products of about 1; summands of a P are larger.
                "values": verdict(close(z, expected, tolerance=1e-4 * inner**0.5)),
            }
        )
    return table


# ---- 3. other operators

# Operator, placements of its inputs, the collective that it should call for the last input.
OPERATORS = [
    ("2 * x", "P", None),
    ("x + y", "P P", None),
    ("x + y", "S0 P", "reduce_scatter"),
    ("x + y", "S1 S0", "all_to_all"),
    ("x * y", "R P", None),
    ("x * y", "P P", "all_reduce"),
    ("gelu(x)", "S1", None),
    ("gelu(x)", "P", "all_reduce"),
    ("x.sum()", "S0", None),
    ("x.mean()", "S0", None),
    ("x.amax(1)", "S0", None),
    ("x.amax(1)", "S1", None),
    ("softmax(x, 1)", "S0", None),
    ("softmax(x, 1)", "S1", "all_to_all"),  # to S0: rows are whole
    ("layer_norm(x)", "S0", None),
    ("layer_norm(x)", "S1", "all_gather"),
    ("x[0]", "S0", "all_to_all"),  # to S1
]
FUNCTIONS = {
    "2 * x": lambda x: 2 * x,
    "x + y": torch.add,
    "x * y": torch.mul,
    "gelu(x)": F.gelu,
    "x.sum()": torch.sum,
    "x.mean()": torch.mean,
    "x.amax(1)": lambda x: x.amax(1),
    "softmax(x, 1)": lambda x: x.softmax(1),
    "layer_norm(x)": lambda x: F.layer_norm(x, x.shape[1:]),
    "x[0]": lambda x: x[0],
}


def operators(mesh: DeviceMesh, shape: tuple[int, int]) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    x_and_y = [torch.randn(shape, generator=generator) for _ in range(2)]
    table = []
    for operator, placements, collective in OPERATORS:
        function, names = FUNCTIONS[operator], placements.split()
        full_inputs = x_and_y[: len(names)]
        inputs = [place(full, name, mesh) for full, name in zip(full_inputs, names, strict=True)]
        result, traffic = measure(mesh, function, *inputs)
        expected = function(*full_inputs)
        if collective == "all_to_all" and mesh.device_type == "cpu":
            collective = "all_gather"
        if operator == "x.mean()" and shape[0] % mesh.size():
            collective = "all_gather"  # the mean of means is the mean only of equal shards
        table.append(
            {
                "operator": operator,
                "inputs": placements,
                "result": name_of(result),
                "collective": traffic,
                "counted": traffic.bytes,
                "formula": bytes_sent(collective, shape, mesh.size(), *names),
                # A sum of all elements is large, and its rounding error grows with it.
                "values": verdict(close(result, expected, 1e-4 * max(1, expected.abs().max()))),
            }
        )
    return table


def parse_args():
    parser = ArgumentParser(description="Placements, redistribution and its cost, operators.")
    parser.add_argument(
        "--sizes",
        type=at_least(1),
        nargs=3,
        metavar=("ROWS", "INNER", "COLUMNS"),
        default=(256, 512, 384),
        help="x is ROWS x INNER, y is INNER x COLUMNS",
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
