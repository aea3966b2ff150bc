"""Run the tables of device_mesh.py and dtensor.py on 2, 3 and 4 ranks and save what came out.

Started by test_parallel_basics_mesh.py as one job of 4 ranks; fewer are a mesh of the first.
"""

import logging
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parallel_basics"))

import device_mesh
import dtensor
import torch
import torch.distributed as dist
from dtensor import place
from dtensor_costs import PLACEMENTS, Traffic
from dtensor_strategies import STRATEGIES, train
from runtime import distributed_worker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SHAPES = [(4,), (2, 2), (4, 1), (1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1)]
# Rows, inner, columns: all divide; x is small; y is small; neither rows nor columns divide.
EVEN, SMALL_X, SMALL_Y, ODD = (24, 48, 36), (12, 120, 240), (240, 120, 12), (10, 12, 7)
EACH = [(2, EVEN), (3, EVEN), (3, ODD), (4, EVEN), (4, SMALL_X), (4, SMALL_Y)]
TRAINED = [(2, "sgd"), (2, "adamw"), (3, "sgd"), (4, "adamw")]  # on 3 ranks nothing divides


def main() -> None:
    with distributed_worker("cpu") as worker:
        results = collect(worker)
        if worker.is_main:
            torch.save(results, sys.argv[1])


def collect(worker) -> dict:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    results = {}
    for shape in SHAPES:
        names = device_mesh.NAMES[len(shape)]
        mesh = device_mesh.make_mesh("cpu", shape, names, worker.world_size)
        everyone = [None] * worker.world_size
        dist.all_gather_object(everyone, device_mesh.views(mesh))
        ranks = device_mesh.collect(mesh)
        results["mesh", shape] = {"ranks": ranks, "views": everyone}
        if len(shape) > 1:
            ours = device_mesh.flatten(mesh, *names[:2], "flat")
            theirs = mesh[names[:2]]._flatten()
            ranks_of = [dist.get_process_group_ranks(m.get_group()) for m in (ours, theirs)]
            everyone = [None] * worker.world_size
            dist.all_gather_object(everyone, [*ranks_of, ours.get_local_rank()])
            results["flatten", shape] = everyone
    results["refusals"] = refusals()
    for ranks in (2, 3, 4):
        mesh = DeviceMesh("cpu", list(range(ranks)))
        if worker.rank < ranks:
            results |= tables(mesh)
        dist.barrier()
    return results


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    calls = [
        lambda: device_mesh.make_mesh("cpu", (3, 2), ("a", "b"), 4),
        lambda: device_mesh.flatten(mesh, "a", "c", "flat"),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("accepted")
        except ValueError as error:
            found.append(str(error))
    return found


def tables(mesh: DeviceMesh) -> dict:
    n, found = mesh.size(), {}
    for sizes in [sizes for ranks, sizes in EACH if ranks == n]:
        found["redistribute", n, sizes] = plain(dtensor.redistributions(mesh, sizes[:2]))
        found["matmul", n, sizes] = plain(dtensor.products(mesh, sizes))
        found["operators", n, sizes] = plain(dtensor.operators(mesh, sizes[:2]))
        found["gradients", n, sizes] = gradients(mesh, sizes)
    optimizers = [optimizer for ranks, optimizer in TRAINED if ranks == n]
    for name, optimizer in product(STRATEGIES, optimizers):
        history, traffic = train(mesh, STRATEGIES[name], optimizer)
        calls = {phase: t.calls for phase, t in traffic.items()}
        sent = sum(t.bytes for t in traffic.values())
        found["train", n, name, optimizer] = {"history": history, "calls": calls, "bytes": sent}
    return found


def plain(table: list[dict]) -> list[dict]:
    """Traffic as text."""
    return [{k: str(v) if isinstance(v, Traffic) else v for k, v in row.items()} for row in table]


def gradients(mesh: DeviceMesh, sizes) -> dict[tuple, tuple]:
    """Placements -> the full gradients of x and y, of sum((x @ y) * z)."""
    x_whole, y_whole, z_whole = inputs(sizes)
    found = {}
    for x_name, y_name in product(PLACEMENTS, PLACEMENTS):
        x, y = place(x_whole, x_name, mesh), place(y_whole, y_name, mesh)
        x.requires_grad_()
        y.requires_grad_()
        product_ = (x @ y).redistribute(mesh, [PLACEMENTS["R"]])
        (product_ * place(z_whole, "R", mesh)).sum().backward()
        found[x_name, y_name] = x.grad.full_tensor().clone(), y.grad.full_tensor().clone()
    return found


def inputs(sizes):
    rows, inner, columns = sizes
    generator = torch.Generator().manual_seed(2)
    shapes = (rows, inner), (inner, columns), (rows, columns)
    return [torch.randn(shape, generator=generator) for shape in shapes]


if __name__ == "__main__":
    main()
