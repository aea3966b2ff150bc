"""DTensor: one tensor on many ranks. What a change of placement costs, what operators imply.

    python parallel_basics/dtensor.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/dtensor.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/dtensor.py --sizes 64 1024 768

A DTensor has the shape of the whole tensor, a mesh, and a placement for each axis of the mesh:

    R         Replicate()           every rank has the whole
    S0, S1    Shard(0), Shard(1)    every rank has some of the rows, or some of the columns
    P         Partial()             every rank has a summand: their sum is the tensor

Where operators can compute with what each rank has, they do. Where they cannot, DTensor first
redistributes inputs: collectives that nobody has written. Look at

1. redistribute: each change of placement is one collective, and backward is its mirror image.
2. matmul: six rules need no communication (dtensor_costs.py); for other pairs DTensor goes to the
   rule that it holds for cheapest. Try other --sizes. S1 times S0 is free, and leaves a sum undone.
3. other operators: what is linear takes a P as it is, and what is not waits for an all_reduce, even
   where a reduce_scatter would do: DTensor looks at one operator at a time.
4. two lines of a model (dtensor_model.py). How its tensors are placed is what makes it data
   parallel, FSDP or tensor parallel; each equals one process, also where it is placed badly.

What DTensor chooses depends on the version of torch: "counted" is what it did in this run.
"""

import logging
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from arguments import ArgumentParser
from dtensor_costs import (
    PLACEMENTS,
    bytes_sent,
    collective_for,
    matmul_plan,
    measure,
    name_of,
    place,
)
from dtensor_model import OPTIMIZERS, STRATEGIES, TOKENS, differences, strategy_bytes, train
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        show(args, worker)


def show(args, worker: Worker) -> None:
    # It would say on each rank that Gloo has no all_to_all for it: the table shows that.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    rows, inner, _ = args.sizes
    tables = [redistributions(mesh, (rows, inner))]
    tables.append(products(mesh, args.sizes))
    tables.append(operators(mesh, (rows, inner)))
    tables.append(strategies(mesh, args.optimizer))
    if worker.is_main:
        x, y = (f"{a} x {b}: {4 * a * b:,} bytes" for a, b in pairwise(args.sizes))
        print(f"x is {x}; y is {y}. Bytes are those that a rank sends in a ring.")
        for title, table in zip(TITLES, tables, strict=True):
            print("\n" + title)
            print_table(table)


# ---- 1. redistribute


def redistributions(mesh: DeviceMesh, shape: tuple[int, int]) -> list[dict]:
    """A row for each change of placement (to Partial there is none, and redistribute() refuses)."""
    whole, ones = torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.ones(shape)
    table = []
    for source, target in product(PLACEMENTS, ("R", "S0", "S1")):
        if source == target:
            continue
        x = place(whole, source, mesh).requires_grad_()
        y, forward = measure(mesh, x.redistribute, mesh, [PLACEMENTS[target]])
        _, backward = measure(mesh, y.backward, place(ones, target, mesh))
        collective = collective_for(source, target, mesh.device_type)
        right = close(y, whole) and close(x.grad, ones)
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
    """A row for each pair of placements of x and y: what x @ y sends."""
    rows, inner, columns = sizes
    generator = torch.Generator().manual_seed(0)
    x_whole = torch.randn(rows, inner, generator=generator)
    y_whole = torch.randn(inner, columns, generator=generator)
    expected, table = x_whole @ y_whole, []
    for x_name, y_name in product(PLACEMENTS, PLACEMENTS):
        x, y = place(x_whole, x_name, mesh), place(y_whole, y_name, mesh)
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
                # Entries are sums of `inner` products of size 1, and here of larger summands.
                "values": verdict(close(z, expected, tolerance=1e-4 * inner**0.5)),
            }
        )
    return table


# ---- 3. other operators

# Operator, placements of its inputs, what it is expected to send for the last input.
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
    ("softmax(x, 1)", "S1", "all_gather"),
    ("layer_norm(x)", "S0", None),
    ("layer_norm(x)", "S1", "all_gather"),
    ("x[0]", "S0", "all_gather"),
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
    wholes = [torch.randn(shape, generator=generator) for _ in range(2)]
    table = []
    for operator, placements, collective in OPERATORS:
        function, names = FUNCTIONS[operator], placements.split()
        inputs = [place(whole, name, mesh) for whole, name in zip(wholes, names, strict=False)]
        result, traffic = measure(mesh, function, *inputs)
        expected = function(*wholes[: len(names)])
        if collective == "all_to_all" and mesh.device_type == "cpu":
            collective = "all_gather"
        if operator == "x.mean()" and shape[0] % mesh.size():
            collective = "all_gather"  # the mean of means is the mean only if all parts are equal
        table.append(
            {
                "operator": operator,
                "inputs": placements,
                "result": name_of(result),
                "collective": traffic,
                "counted": traffic.bytes,
                "formula": bytes_sent(collective, shape, mesh.size(), *names),
                # The sum of all is large, and rounded in proportion.
                "values": verdict(close(result, expected, 1e-4 * max(1, expected.abs().max()))),
            }
        )
    return table


# ---- 4. a model


def strategies(mesh: DeviceMesh, optimizer: str) -> list[dict]:
    one, _ = train(None, STRATEGIES["data parallel"], optimizer)
    table = []
    for name, strategy in STRATEGIES.items():
        history, traffic = train(mesh, strategy, optimizer)
        row = {"strategy": name, "x": strategy.x, "W1": strategy.weights[0]}
        row |= {"W2": strategy.weights[1]} | traffic
        row["counted"] = sum(part.bytes for part in traffic.values())
        row["formula"] = strategy_bytes(name, mesh.size())
        worst = differences(history, one)
        table.append(row | {kind: f"{value:.0e}" for kind, value in worst.items()})
    return table


# ---- output

TITLES = (
    "1. redistribute x",
    "2. x @ y",
    "3. other operators; y has the shape of x",
    f"4. mean((relu(x @ W1) @ W2 - targets) ** 2), {TOKENS} tokens; one step of training\n"
    "   (the last three columns: largest differences to one process in 5 steps)",
)


def print_table(table: list[dict]) -> None:
    rows = [[f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()] for row in table]
    rows.insert(0, list(table[0]))
    numbers = [isinstance(value, int) for value in table[0].values()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(numbers))]
    for row in rows:
        cells = zip(row, widths, numbers, strict=True)
        print("  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in cells).rstrip())


def parse_args():
    parser = ArgumentParser(description="Placements, redistribution and its cost, operators.")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs=3,
        metavar=("ROWS", "INNER", "COLUMNS"),
        default=(256, 512, 384),
        help="x is ROWS x INNER, y is INNER x COLUMNS",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    if min(args.sizes) < 1:
        parser.error(f"--sizes must be at least 1, not {min(args.sizes)}")
    return args


if __name__ == "__main__":
    main()
