"""What a remote call costs, and what a parameter server costs next to DDP.

    python benchmarks/rpc.py                # all of it; writes results/rpc.md
    python benchmarks/rpc.py --repeats 3 --parts latency --no-write    # a quick look

latency    one tensor there and back between two processes: rpc_sync, send and recv of a Gloo group,
           an actor of Ray (where it is installed), a plain socket; and calls per second
batching   one update of the gradients of three trainers, or one of each
training   a parameter server, synchronous and asynchronous, and DDP: 2 and 4 ranks, all train

The sides of a table take turns in the same processes.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "rpc_basics"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else it reports home
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # 30 are few on a busy machine

import bench
import torch
import torch.distributed as dist
from batched_server import BatchedServer
from parameter_shard import Settings, Shard
from rpc_latency import latency, latency_text, nothing
from rpc_worker import RpcWorker, rpc_worker
from runtime import distributed_worker
from tasks import gradient_of
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def main() -> None:
    bench.main("rpc", "Remote calls", __doc__, TEXTS, part)


def part(name: str, repeats: int) -> None:
    with distributed_worker("cpu"), rpc_worker(120) as worker:
        samples = PARTS[name](worker, repeats)
        if worker.rank == 0:
            bench.say(samples)


# ---- one update of all gradients, or one of each


def batching(worker: RpcWorker, repeats: int) -> dict:
    sides = {}
    for size in (1_000, 100_000, 1_000_000):
        server = rpc.RRef(BatchedServer(torch.zeros(size), worker.world_size - 1))
        for name in ("one of all", "one of each"):
            push = partial(on_the_others, worker, push_only, server, size, name)
            side = partial(bench.seconds_per_call, push if worker.rank == 0 else nothing, 1)
            sides[f"{size:,}, {name}"] = side
    return bench.alternate(repeats, sides)


def on_the_others(worker: RpcWorker, function, *args) -> None:
    names = [(rank, worker.name_of(rank)) for rank in range(1, worker.world_size)]
    torch.futures.wait_all(
        [rpc.rpc_async(name, function, args=(*args, rank)) for rank, name in names]
    )


def push_only(server: rpc.RRef, size: int, name: str, rank: int) -> None:
    gradient = torch.ones(size)
    for _ in range(PUSHES):
        if name == "one of all":
            server.rpc_sync().push(rank, gradient)
        else:
            server.rpc_sync().push_alone(gradient)


PUSHES = 10  # of each trainer


def batching_text(repeats: int) -> list[str]:
    found = bench.measure_part(__file__, "batching", 4, repeats)
    rows = [("pushes/s of 3 trainers: median (min ... max)", "one of all", "one of each", "ratio")]
    for size in dict.fromkeys(name.rpartition(", ")[0] for name in found):
        both = [found[f"{size}, {name}"] for name in rows[0][1:3]]
        cells = (bench.summary([3 * PUSHES / s for s in seconds]) for seconds in both)
        ratio = statistics.median(bench.ratio_of_pairs(*reversed(both)))
        rows.append((f"{size} parameters", *cells, f"{ratio:.3g}"))
    return [
        "## One AdamW update of the gradients of all trainers, or of each",
        bench.table(rows),
    ]


# ---- a parameter server, and DDP

WIDTHS = {"small": 32, "wide": 12_000}  # of the hidden layer: 2,410 and 900,010 parameters
ROWS, STEPS = 60, 10  # of each rank and batch; of one measurement
MODELS = {}


def training(worker: RpcWorker, repeats: int) -> dict:
    """Samples per second of all ranks. The server lives in rank 0, which trains, too."""
    sides = {}
    for size in WIDTHS:
        MODELS[size] = build(size)
        ddp = DistributedDataParallel(build(size))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
        steps = {"DDP": partial(ddp_steps, ddp, optimizer)}
        for mode in ("sync", "async"):
            trainers = tuple(range(worker.world_size))
            first = parameters_to_vector(MODELS[size].parameters()).detach()
            server = rpc.RRef(Shard(0, first, settings(mode, trainers), None))
            call = partial(on_all, worker, server_steps, server, size)
            steps[mode] = call if worker.rank == 0 else nothing
        for name, step in steps.items():
            sides[f"{size}, {name}"] = partial(samples_per_second, step, worker.world_size)
    return bench.alternate(repeats, sides)


def samples_per_second(steps: Callable[[], None], ranks: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    steps()
    dist.barrier()  # all are done
    return STEPS * ROWS * ranks / (time.perf_counter() - started)


def ddp_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    images, labels = rows_of(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def server_steps(server: rpc.RRef, size: str, rank: int) -> None:
    model, (images, labels) = MODELS[size], rows_of(rank)
    for _ in range(STEPS):
        version, values = server.rpc_sync().pull()
        vector_to_parameters(values, model.parameters())
        gradient, _ = gradient_of(model, images, labels)
        server.rpc_sync().push(rank, version, [gradient], len(labels))


def on_all(worker: RpcWorker, function, *args) -> None:
    names = [(rank, worker.name_of(rank)) for rank in range(worker.world_size)]
    torch.futures.wait_all(
        [rpc.rpc_async(name, function, args=(*args, rank)) for rank, name in names]
    )


def settings(mode: str, trainers: tuple[int, ...]) -> Settings:
    return Settings(
        data="digits",
        mode=mode,
        steps=10**9,
        batch_size=ROWS * len(trainers),
        lr=1e-3,
        momentum=0.9,
        pull_every=1,
        max_staleness=None,
        compress="none",
        seed=0,
        trainers=trainers,
        slow=0,
        patience=60,
        save=None,
        save_every=1,
    )


def build(size: str) -> nn.Module:
    torch.manual_seed(0)
    width = WIDTHS[size]
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))


def rows_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(ROWS, 64, generator=generator), torch.arange(ROWS) % 10


def training_text(repeats: int) -> list[str]:
    texts = ["## A parameter server in rank 0, and DDP: samples/s of all ranks"]
    rows = [("median (min ... max)", "DDP", "server, sync", "server, async", "sync / DDP")]
    traffic = [("bytes and calls of a step", "DDP: a rank sends", "server: it sends", "calls")]
    for ranks in (2, 4):
        found = bench.measure_part(__file__, "training", ranks, repeats)
        for size, width in WIDTHS.items():
            rates = [found[f"{size}, {name}"] for name in ("DDP", "sync", "async")]
            ratio = statistics.median(bench.ratio_of_pairs(rates[1], rates[0]))
            parameters = width * 75 + 10
            name = f"{ranks} ranks, {parameters:,} parameters"
            rows.append((name, *map(bench.summary, rates), f"{ratio:.3g}"))
            ring = f"{2 * (ranks - 1) * 4 * parameters // ranks:,}"
            traffic.append((name, ring, f"{(ranks - 1) * 4 * parameters:,}", 2 * ranks))
    reason = (
        "By formula: in a ring each rank sends 2 (n - 1) / n of the bytes of the gradients, "
        "all at the same time. The server sends all parameters to each of the n - 1 other ranks, "
        "and receives as many gradients: one process does it, in Python, for 2 calls a rank."
    )
    return [*texts, bench.table(rows), bench.table(traffic), reason]


PARTS = {f.__name__: f for f in (latency, batching, training)}
TEXTS = {"latency": latency_text, "batching": batching_text, "training": training_text}


if __name__ == "__main__":
    main()
