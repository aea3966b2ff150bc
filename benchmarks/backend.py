"""Our shared-memory backend against Gloo, against torch's floor, and against the memory's limit.

    python benchmarks/backend.py                # all of it, 20 minutes; writes results/backend.md
    python benchmarks/backend.py --repeats 3 --parts latency bandwidth --no-write   # a quick look

latency    small messages; the floor is a backend that does nothing. 2, 4 and 8 ranks
busy       the same for two ranks while other processes keep all cores busy
bandwidth  1 to 64 MB; the limit is `t.mul_(1.)`, which reads and writes every number once
training   DDP, FSDP2 and tensor parallelism by hand, on a GPT and on a wide MLP
mpi        Open MPI's all_reduce and messages, where mpicc and mpirun are installed

All sides of a table take turns in one run, but MPI, whose processes are started in between.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / d) for d in ("custom_backend", "transformer_basics", "benchmarks")]
sys.path.append(str(ROOT / "parallel_basics"))  # last: it has a model.py and a runtime.py, too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank

import report
import shm
import torch
import torch.distributed as dist
from benchmark import SIZES, config_of
from model import GPT, cross_entropy, initialize
from tensor_parallel_from_scratch import cut_model, vocab_parallel_cross_entropy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import cpp_extension

SMALL = {"8 B": 8, "4 KB": 4096, "64 KB": 65536}
LARGE = {"1 MB": 2**20, "16 MB": 2**24, "64 MB": 2**26}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--parts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # what a child measures
    args = parser.parse_args()
    if args.part:
        run_part(args)
        return
    sections = [section for name in args.parts for section in TEXTS[name](args.repeats)]
    if args.no_write:
        print("\n\n".join(sections))
    else:
        report.write("backend", "A shared-memory backend", sections)


def run_part(args) -> None:
    if int(os.environ["WORLD_SIZE"]) <= os.cpu_count():
        pin_to_a_core()
    dist.init_process_group("gloo")
    null = cpp_extension.load("null_backend", [str(ROOT / "benchmarks/null_backend.cpp")])
    dist.Backend.register_backend(
        "null", lambda store, rank, size, timeout: null.create(rank, size), devices=["cpu"]
    )
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "shm", "null")}
    samples = PARTS[args.part](groups, args.repeats)
    if dist.get_rank() == 0:
        report.say(samples)
    dist.barrier()
    dist.destroy_process_group()


def pin_to_a_core() -> None:
    """Keep this rank, and every thread that it will start, on one core; each rank on another."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})


def seconds_per_call(call: Callable[[], None], count: int) -> float:
    """Of `count` calls on all ranks, from a common start; the mean of this rank's."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


# ---- small messages


def latency(groups: dict, repeats: int) -> dict:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = {size: torch.zeros(bytes // 4) for size, bytes in SMALL.items()}
    tiny = [torch.zeros(2) for _ in range(world_size)]

    def there_and_back(group) -> None:
        first, then = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        if rank < 2:
            first(x["8 B"], 1 - rank, group=group)
            then(x["8 B"], 1 - rank, group=group)

    calls = {f"all_reduce {size}": partial(dist.all_reduce, t) for size, t in x.items()}
    calls |= {
        "broadcast 8 B": partial(dist.broadcast, x["8 B"], 0),
        "all_gather 8 B": partial(dist.all_gather, tiny, x["8 B"]),
        "barrier": dist.barrier,
        "there and back 8 B": there_and_back,
    }
    sides = {}
    for name, call in calls.items():
        for backend, group in groups.items():
            count = (100 if backend == "gloo" else 2000) * 2 // world_size
            here = partial(call, group=group) if call is not there_and_back else None
            here = here or partial(there_and_back, group)
            sides[f"{name}, {backend}"] = partial(seconds_per_call, here, count)
    return report.alternate(repeats, sides)


def latency_text(repeats: int) -> list[str]:
    sections = []
    for ranks in (2, 4, 8):
        found = run("latency", ranks, repeats)
        sections += [f"## {ranks} ranks: small messages", latency_table(found)]
    return sections


def latency_table(found: dict) -> str:
    """Microseconds, and ratios pair by pair."""
    rows = [("us a call: median (min ... max)", "nothing (floor)", "shm", "gloo")]
    rows[0] += ("shm / floor", "gloo / shm")
    for name in dict.fromkeys(side.rpartition(", ")[0] for side in found):
        null, ours, gloo = (found[f"{name}, {b}"] for b in ("null", "shm", "gloo"))
        cells = (report.summary([1e6 * s for s in side]) for side in (null, ours, gloo))
        ratios = (
            statistics.median(report.ratio_of_pairs(*p)) for p in ((ours, null), (gloo, ours))
        )
        rows.append((name, *cells, *(f"{ratio:.3g}" for ratio in ratios)))
    return report.table(rows)


def busy_text(repeats: int) -> list[str]:
    code = "while True: pass"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count())]
    try:
        found = run("latency", 2, repeats)
    finally:
        for other in others:
            other.kill()
            other.wait()
    return ["## 2 ranks, with another process busy on every core", latency_table(found)]


# ---- large messages


def bandwidth(groups: dict, repeats: int) -> dict:
    world_size = dist.get_world_size()
    sides = {}
    for size, bytes in LARGE.items():
        count = bytes // 4
        private, shared = torch.zeros(count), shm.empty(count).zero_()
        part = torch.zeros(count // world_size)
        calls = {
            "limit": lambda x=private: x.mul_(1.0),
            "all_reduce, gloo": partial(dist.all_reduce, private, group=groups["gloo"]),
            "all_reduce, staged": partial(dist.all_reduce, private, group=groups["shm"]),
            "all_reduce, zero copy": partial(dist.all_reduce, shared, group=groups["shm"]),
        }
        for name in ("gloo", "shm"):
            group = groups[name]
            calls[f"all_gather, {name}"] = partial(all_gather, private, part, group=group)
            calls[f"reduce_scatter, {name}"] = partial(reduce_scatter, part, private, group=group)
            calls[f"broadcast, {name}"] = partial(dist.broadcast, private, 0, group=group)
        for name, call in calls.items():
            fast = 2 if "gloo" in name else 8
            sides[f"{size}: {name}"] = partial(
                seconds_per_call, call, max(1, fast * 2**24 // bytes)
            )
    return report.alternate(repeats, sides)


# The second names are those of torch before 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bandwidth_text(repeats: int) -> list[str]:
    sections = []
    for ranks in (2, 4):
        found = run("bandwidth", ranks, repeats)
        sections += [f"## {ranks} ranks: large messages, fp32", bandwidth_table(found, ranks)]
        sections += [others_table(found)]
    sections.append(
        "Bus bandwidth of an all_reduce: 2 (n - 1) / n times the bytes, per second. The limit: "
        "bytes of the tensor per second while all ranks do `t.mul_(1.)` at once."
    )
    return sections


def bandwidth_table(found: dict, ranks: int) -> str:
    rows = [("all_reduce, GB/s: median (min ... max)", *LARGE)]
    rates = {}
    for name in ("limit", "all_reduce, gloo", "all_reduce, staged", "all_reduce, zero copy"):
        factor = 1 if name == "limit" else 2 * (ranks - 1) / ranks
        rates[name] = {
            size: [factor * bytes / seconds / 1e9 for seconds in found[f"{size}: {name}"]]
            for size, bytes in LARGE.items()
        }
        rows.append((name, *(report.summary(rates[name][size]) for size in LARGE)))
    for name in ("staged", "zero copy"):
        for other in ("limit", "all_reduce, gloo"):
            ratios = (
                report.ratio_of_pairs(rates[f"all_reduce, {name}"][size], rates[other][size])
                for size in LARGE
            )
            rows.append((f"{name} / {other}", *map(report.summary, ratios)))
    return report.table(rows)


def others_table(found: dict) -> str:
    rows = [("shm against gloo: ratio of times", *LARGE)]
    for name in ("all_gather", "reduce_scatter", "broadcast"):
        ratios = (
            report.ratio_of_pairs(found[f"{size}: {name}, gloo"], found[f"{size}: {name}, shm"])
            for size in LARGE
        )
        rows.append((name, *map(report.summary, ratios)))
    return report.table(rows)


# ---- training: samples per second of both ranks


def training(groups: dict, repeats: int) -> dict:
    mlp = {
        f"MLP, DDP, {name}": steps(wide_mlp, partial(ddp, group=group, hook=hook), mlp_loss)
        for name, group, hook in ddp_sides(groups)
    }
    gpt = partial(steps, partial(gpt_of, "medium"), loss=gpt_loss, size="medium")
    sides = mlp | {"MLP, DDP, nothing sent": steps(wide_mlp, lambda model: model, mlp_loss)}
    sides["GPT, nothing sent"] = gpt(lambda model: model)
    for name, group, hook in ddp_sides(groups):
        sides[f"GPT, DDP, {name}"] = gpt(partial(ddp, group=group, hook=hook))
    for name in ("gloo", "shm"):
        mesh = DeviceMesh.from_group(groups[name], "cpu")
        for free in (True, False):
            what = "freed" if free else "kept"
            wrap = partial(sharded, mesh=mesh, free=free, allocate=name == "shm")
            sides[f"GPT, FSDP2 {what}, {name}"] = gpt(wrap)
    return report.alternate(repeats, sides)


def tensor_parallel(groups: dict, repeats: int) -> dict:
    sides = {}
    for size in ("small", "medium"):
        build = partial(gpt_of, size)
        one = steps(build, lambda model: model, gpt_loss, size, copies=1)
        sides[f"{size}, one process, two threads"] = partial(alone_with_two_threads, one)
        for name in ("gloo", "shm"):
            loss = partial(cut_loss, group=groups[name])
            wrap = partial(cut_model, group=groups[name])
            sides[f"{size}, by hand, {name}"] = steps(build, wrap, loss, size, copies=1)
    return report.alternate(repeats, sides)


def ddp_sides(groups: dict) -> list[tuple]:
    return [
        ("gloo", groups["gloo"], None),
        ("shm", groups["shm"], None),
        ("shm, zero copy", groups["shm"], shm.ddp_hook),
    ]


def ddp(model: nn.Module, group, hook) -> nn.Module:
    model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    if hook:
        model.register_comm_hook(group, hook)
    return model


def sharded(model: nn.Module, mesh: DeviceMesh, free: bool, allocate: bool) -> nn.Module:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, reshard_after_forward=free)
    if allocate:  # gather into memory that all ranks see
        model.set_allocate_memory_from_process_group_for_comm(True)
    return model


def gpt_of(size: str) -> nn.Module:
    return initialize(GPT(config_of(size)), 0)


def wide_mlp() -> nn.Module:
    torch.manual_seed(0)
    width = 1600
    layers = [m for _ in range(4) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def mlp_loss(model: nn.Module, x, _) -> torch.Tensor:
    return model(x).square().mean()


def gpt_loss(model: nn.Module, x, y) -> torch.Tensor:
    return cross_entropy(model(x), y)


def cut_loss(model: nn.Module, x, y, group) -> torch.Tensor:
    return vocab_parallel_cross_entropy(model(x), y, group)


def steps(build, wrap, loss, size: str = "", copies: int = 2) -> Callable[[], float]:
    """A function that trains four steps and returns samples per second of all ranks."""
    model = wrap(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if size:
        config, batch = config_of(size), SIZES[size][1]
        tokens = torch.randint(256, (batch, config.block_size + 1))
        x, y = tokens[:, :-1], tokens[:, 1:]
    else:
        batch = 32
        x, y = torch.randn(batch, 1600), None

    def samples_per_second() -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(4):
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
        rate = torch.tensor(4 * batch * copies / (time.perf_counter() - started))
        dist.all_reduce(rate, op=dist.ReduceOp.MIN)  # as fast as the slower one
        return rate.item()

    return samples_per_second


def alone_with_two_threads(side: Callable[[], float]) -> float:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count()))
    torch.set_num_threads(2)
    # Both ranks must take part in the common start and end: rank 1's own copy would compete.
    rate = side() if dist.get_rank() == 0 else wait_for_the_other()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores)
    return rate


def wait_for_the_other() -> float:
    dist.barrier()
    dist.all_reduce(torch.tensor(float("inf")), op=dist.ReduceOp.MIN)
    return 0.0


def training_text(repeats: int) -> list[str]:
    found = run("training", 2, repeats)
    sending_nothing = {"GPT": "GPT, nothing sent", "MLP": "MLP, DDP, nothing sent"}
    rows = [("samples/s of two ranks: median (min ... max)", "", "/ nothing sent", "/ gloo")]
    for name, rates in found.items():
        alone = found[sending_nothing[name[:3]]]
        gloo = found.get(name.replace("shm, zero copy", "gloo").replace("shm", "gloo"), rates)
        ratios = (statistics.median(report.ratio_of_pairs(rates, other)) for other in (alone, gloo))
        rows.append((name, report.summary(rates), *(f"{ratio:.3f}" for ratio in ratios)))
    kept = report.ratio_of_pairs(found["GPT, FSDP2 kept, shm"], found["GPT, DDP, shm"])
    tensor = run("tensor_parallel", 2, repeats)
    tp_rows = [("samples/s: median (min ... max)", "", "/ one process")]
    for name, rates in tensor.items():
        one = tensor[f"{name.split(',')[0]}, one process, two threads"]
        ratio = statistics.median(report.ratio_of_pairs(rates, one))
        tp_rows.append((name, report.summary(rates), f"{ratio:.3f}"))
    return [
        "## Training on two ranks: GPT of 10.9 M parameters, 4 sequences a rank; MLP of 10 M",
        report.table(rows),
        f"FSDP2 kept / DDP, both on shm: {report.summary(kept)}",
        "## Two tensor-parallel ranks against one process with two threads",
        report.table(tp_rows),
    ]


# ---- MPI


def mpi_text(repeats: int) -> list[str]:
    heading = "## Open MPI"
    if not (shutil.which("mpicc") and shutil.which("mpirun")):
        return [heading, "Not measured: no mpicc and mpirun here."]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "osu")
        subprocess.run(
            ["mpicc", "-O3", "-march=native", str(ROOT / "benchmarks/osu.c"), "-o", str(program)],
            check=True,
        )
        options = ("--allow-run-as-root", "--bind-to", "core", "-n", 2)
        mpi, ours, floor = {}, {}, []
        for _ in range(repeats):  # taking turns
            for name, seconds in report.measure("mpirun", *options, program, 1).items():
                mpi.setdefault(name, []).extend(seconds)
            for name, seconds in run("as_mpi", 2, 1).items():
                ours.setdefault(name, []).extend(seconds)
    floor = statistics.median(ours.pop("floor"))
    rows = [
        ("us a call: median (min ... max)", "Open MPI, from C", "shm, from Python", "MPI / shm")
    ]
    for name, seconds in mpi.items():
        ratio = statistics.median(report.ratio_of_pairs(seconds, ours[name]))
        cells = (report.summary([1e6 * s for s in side]) for side in (seconds, ours[name]))
        rows.append((f"{name} B", *cells, f"{ratio:.3g}"))
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    return [
        f"{heading}: {version.splitlines()[0]}",
        report.table(rows),
        f"The floor of a call from Python, all_reduce on a backend that does nothing: "
        f"{1e6 * floor:.2f} us.",
    ]


def as_mpi(groups: dict, repeats: int) -> dict:
    rank, group = dist.get_rank(), groups["shm"]
    sides = {
        "floor": partial(
            seconds_per_call, partial(dist.all_reduce, torch.zeros(2), group=groups["null"]), 2000
        )
    }
    for bytes in (8, 4096, 65536, 2**20, 2**24, 2**26):
        x, count = torch.zeros(bytes // 4), 2000 if bytes <= 65536 else 2**27 // bytes

        def there_and_back(x=x) -> None:
            first, then = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
            first(x, 1 - rank, group=group)
            then(x, 1 - rank, group=group)

        reduce = partial(dist.all_reduce, x, group=group)
        sides[f"all_reduce {bytes}"] = partial(seconds_per_call, reduce, count)
        sides[f"there and back {bytes}"] = partial(seconds_per_call, there_and_back, count)
    return report.alternate(repeats, sides)


def run(part: str, ranks: int, repeats: int) -> dict:
    return report.measure(*report.torchrun(ranks), __file__, "--repeats", repeats, "--part", part)


PARTS = {f.__name__: f for f in (latency, bandwidth, training, tensor_parallel, as_mpi)}
TEXTS = {
    "latency": latency_text,
    "busy": busy_text,
    "bandwidth": bandwidth_text,
    "training": training_text,
    "mpi": mpi_text,
}


if __name__ == "__main__":
    main()
