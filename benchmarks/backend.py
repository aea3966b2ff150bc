"""Our shared-memory backend against Gloo, against torch's overhead, and against memory bandwidth.

    python benchmarks/backend.py                # everything, 20 minutes; writes results/backend.md
    python benchmarks/backend.py --repeats 3 --parts latency bandwidth --no-write   # a quick look

latency    small messages; the floor is a backend that does nothing. 2, 4 and 8 ranks
busy       two ranks while other processes keep all cores busy
bandwidth  1 to 64 MB, in half precision, too; the limit is `t.mul_(1.)`, which reads and writes
           every number once (in bfloat16 torch's own kernel is slow, and no limit)
training   DDP, FSDP2 and tensor parallelism by hand, on a GPT and on a wide MLP
mpi        Open MPI's all_reduce and messages, if mpicc and mpirun are installed

All sides of a table take turns in one run, except MPI, whose processes start in between. Where
there are as many cores as ranks, each rank stays on a core with all its threads. So Gloo's thread
shares it with the one that waits: without this Gloo is faster (results/collectives.md).
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / d) for d in ("custom_backend", "transformer_basics", "benchmarks")]
sys.path.append(str(ROOT / "parallel_basics"))  # last: it has a model.py and a runtime.py, too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank

import bench
import shm
import torch
import torch.distributed as dist
from backend_training import tensor_parallel, training, training_text
from torch.utils import cpp_extension

SMALL = {"8 B": 8, "4 KB": 4096, "64 KB": 65536}
HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LARGE = {"1 MB": 2**20, "16 MB": 2**24, "64 MB": 2**26}


def main() -> None:
    bench.main(
        "backend",
        "A shared-memory backend next to Gloo: speed of collectives and of training",
        __doc__,
        TEXTS,
        part,
    )


def part(name: str, repeats: int) -> None:
    if int(os.environ["WORLD_SIZE"]) <= bench.cores():
        bench.pin_to_a_core()
    dist.init_process_group("gloo")
    null = cpp_extension.load("null_backend", [str(ROOT / "benchmarks/null_backend.cpp")])
    dist.Backend.register_backend(
        "null", lambda store, rank, size, timeout: null.create(rank, size), devices=["cpu"]
    )
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "shm", "null")}
    samples = PARTS[name](groups, repeats)
    if dist.get_rank() == 0:
        bench.say(samples)
    dist.barrier()
    dist.destroy_process_group()


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
            sides[f"{name}, {backend}"] = partial(bench.seconds_per_call, here, count)
    return bench.alternate(repeats, sides)


def latency_text(repeats: int) -> list[str]:
    sections = []
    for ranks in (2, 4, 8):
        found = bench.measure_part(__file__, "latency", ranks, repeats)
        sections += [f"## {ranks} ranks: small messages", latency_table(found)]
    return sections


def latency_table(found: dict) -> str:
    """Microseconds, and ratios pair by pair."""
    rows = [("us per call: median (min ... max)", "nothing (floor)", "shm", "gloo")]
    rows[0] += ("shm / floor", "gloo / shm")
    for name in dict.fromkeys(side.rpartition(", ")[0] for side in found):
        null, ours, gloo = (found[f"{name}, {b}"] for b in ("null", "shm", "gloo"))
        cells = (bench.summary([1e6 * s for s in side]) for side in (null, ours, gloo))
        ratios = (statistics.median(bench.ratio_of_pairs(*p)) for p in ((ours, null), (gloo, ours)))
        rows.append((name, *cells, *(f"{ratio:.3g}" for ratio in ratios)))
    return bench.table(rows)


def busy_text(repeats: int) -> list[str]:
    code = "while True: pass"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(bench.cores())]
    try:
        small = bench.measure_part(__file__, "latency", 2, repeats)
        large = bench.measure_part(__file__, "bandwidth", 2, repeats)
    finally:
        for other in others:
            other.kill()
            other.wait()
    heading = "## 2 ranks, with another process busy on every core"
    return [heading, latency_table(small), bandwidth_table(large, 2), others_table(large)]


# ---- large messages


def bandwidth(groups: dict, repeats: int, dtype: torch.dtype = torch.float32) -> dict:
    world_size = dist.get_world_size()
    sides = {}
    for size, bytes in LARGE.items():
        count = bytes // dtype.itemsize
        private, shared = torch.zeros(count, dtype=dtype), shm.empty(count, dtype=dtype).zero_()
        part = torch.zeros(count // world_size, dtype=dtype)
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
                bench.seconds_per_call, call, max(1, fast * 2**24 // bytes)
            )
    return bench.alternate(repeats, sides)


# The second names are for torch before 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bandwidth_text(repeats: int) -> list[str]:
    sections = []
    for ranks in (2, 4):
        found = bench.measure_part(__file__, "bandwidth", ranks, repeats)
        sections += [f"## {ranks} ranks: large messages, fp32", bandwidth_table(found, ranks)]
        sections += [others_table(found)]
    for name in HALF:
        found = bench.measure_part(__file__, f"bandwidth {name}", 2, repeats)
        sections += [f"## 2 ranks: large messages, {name}", bandwidth_table(found, 2)]
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
        rows.append((name, *(bench.summary(rates[name][size]) for size in LARGE)))
    for name in ("staged", "zero copy"):
        for other in ("limit", "all_reduce, gloo"):
            ratios = (
                bench.ratio_of_pairs(rates[f"all_reduce, {name}"][size], rates[other][size])
                for size in LARGE
            )
            rows.append((f"{name} / {other}", *map(bench.summary, ratios)))
    return bench.table(rows)


def others_table(found: dict) -> str:
    rows = [("shm against gloo: ratio of times", *LARGE)]
    for name in ("all_gather", "reduce_scatter", "broadcast"):
        ratios = (
            bench.ratio_of_pairs(found[f"{size}: {name}, gloo"], found[f"{size}: {name}, shm"])
            for size in LARGE
        )
        rows.append((name, *map(bench.summary, ratios)))
    return bench.table(rows)


# ---- MPI


def mpi_text(repeats: int) -> list[str]:
    heading = "## Open MPI"
    if not (shutil.which("mpicc") and shutil.which("mpirun")):
        return [heading, "Not measured: no mpicc and mpirun here."]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "osu")
        compiler = ("mpicc", "-O3", "-march=native", ROOT / "benchmarks/osu.c", "-o", program)
        compiled = subprocess.run(compiler, capture_output=True, text=True)
        if compiled.returncode:  # Debian's mpicc comes without mpi.h
            why = compiled.stderr.partition("error: ")[2].partition("\n")[0]
            return [heading, f"Not measured: mpicc cannot compile osu.c ({why})."]
        options = ("--allow-run-as-root", "--bind-to", "core", "-n", 2)
        mpi, ours, floor = {}, {}, []
        for _ in range(repeats):  # taking turns
            for name, seconds in bench.measure("mpirun", *options, program, 1).items():
                mpi.setdefault(name, []).extend(seconds)
            for name, seconds in bench.measure_part(__file__, "as_mpi", 2, 1).items():
                ours.setdefault(name, []).extend(seconds)
    floor = statistics.median(ours.pop("floor"))
    rows = [
        ("us per call: median (min ... max)", "Open MPI, from C", "shm, from Python", "MPI / shm")
    ]
    for name, seconds in mpi.items():
        ratio = statistics.median(bench.ratio_of_pairs(seconds, ours[name]))
        cells = (bench.summary([1e6 * s for s in side]) for side in (seconds, ours[name]))
        rows.append((f"{name} B", *cells, f"{ratio:.3g}"))
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    return [
        f"{heading}: {version.splitlines()[0]}",
        bench.table(rows),
        f"The floor of a call from Python, all_reduce on a backend that does nothing: "
        f"{1e6 * floor:.2f} us.",
    ]


def as_mpi(groups: dict, repeats: int) -> dict:
    rank, group = dist.get_rank(), groups["shm"]
    reduce = partial(dist.all_reduce, torch.zeros(2), group=groups["null"])
    sides = {"floor": partial(bench.seconds_per_call, reduce, 2000)}
    for bytes in (8, 4096, 65536, 2**20, 2**24, 2**26):
        x, count = torch.zeros(bytes // 4), 2000 if bytes <= 65536 else 2**27 // bytes

        def there_and_back(x=x) -> None:
            first, then = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
            first(x, 1 - rank, group=group)
            then(x, 1 - rank, group=group)

        reduce = partial(dist.all_reduce, x, group=group)
        sides[f"all_reduce {bytes}"] = partial(bench.seconds_per_call, reduce, count)
        sides[f"there and back {bytes}"] = partial(bench.seconds_per_call, there_and_back, count)
    return bench.alternate(repeats, sides)


PARTS = {f.__name__: f for f in (latency, bandwidth, training, tensor_parallel, as_mpi)}
PARTS |= {f"bandwidth {name}": partial(bandwidth, dtype=dtype) for name, dtype in HALF.items()}
TEXTS = {
    "latency": latency_text,
    "busy": busy_text,
    "bandwidth": bandwidth_text,
    "training": training_text,
    "mpi": mpi_text,
}


if __name__ == "__main__":
    main()
