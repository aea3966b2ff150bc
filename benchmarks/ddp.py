"""Measure what DDP costs; the two sides of every comparison alternate in one run.

    python benchmarks/ddp.py                 # everything, about ten minutes; writes results/ddp.md
    python benchmarks/ddp.py --repeats 3     # a quick look

(a) train.py against the barest loop, one process   (b) two ranks against one, same global batch
(c) DDP against ddp_from_scratch.py, two ranks       (d) time from launch to the first step
(e) time of the replicas' checksum against that of a step, two ranks
"""

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "ddp_basics"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank, also for one process

import bench
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
from config import Settings, parse_args
from data import random_images
from ddp_from_scratch import BucketedDDP, NaiveDDP
from model import SmallCNN
from optimizer import make_optimizer
from replicas import check_replicas
from runtime import Worker, distributed_worker
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

TORCHRUN = bench.torchrun(ranks=2)
SETTINGS = Settings(optimizer="adamw", lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="repeats of each measurement")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # what a child measures
    args = parser.parse_args()
    if args.part:
        with distributed_worker("cpu") as worker:
            samples = PARTS[args.part](worker, args.repeats)
            if worker.is_main:
                bench.say(samples)
        return
    options = (__file__, "--repeats", args.repeats, "--part")
    a = bench.measure(sys.executable, *options, "template")
    b = bench.measure(*TORCHRUN, *options, "scaling")
    c = bench.measure(*TORCHRUN, *options, "from_scratch")
    e = bench.measure(*TORCHRUN, *options, "checksum")
    d = start_up(args.repeats)
    texts = [*template_text(a), *text(b, c), *start_up_text(d), *checksum_text(e)]
    bench.write("ddp", "What DDP costs", texts)


# ---- (a) the template's loop against the barest one: images per second of one process


def template(worker: Worker, repeats: int) -> dict[str, list[float]]:
    images = random_images(2048, seed=0)
    train.load_data = lambda *_: (images, random_images(1, seed=1))  # training time only

    def with_template() -> float:
        sys.argv = ["train.py", "--epochs", "1", "--dataset", "synthetic"]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            train.train(parse_args(), worker)
        return float(output.getvalue().rpartition("samples/s")[2].split()[0].replace(",", ""))

    def barest() -> float:
        torch.manual_seed(0)
        model = SmallCNN(image_size=28)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        loader = DataLoader(images, batch_size=64, shuffle=True, drop_last=True)
        started = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return len(loader) * 64 / (time.perf_counter() - started)

    return bench.alternate(repeats, {"template": with_template, "barest": barest})


# ---- (b) and (c): images per second of two ranks


def scaling(worker: Worker, repeats: int) -> dict[str, list[float]]:
    """One process with the global batch (the other rank waits) against two ranks with half each."""
    batch = 256

    def one() -> float:
        rate = steps(SmallCNN(image_size=28), batch, batch, 6) if worker.is_main else 0.0
        dist.barrier()
        return rate

    def two() -> float:
        model = DistributedDataParallel(SmallCNN(image_size=28), gradient_as_bucket_view=True)
        return steps(model, batch, batch // 2, 6)

    return bench.alternate(repeats, {"one": one, "two": two})


def from_scratch(worker: Worker, repeats: int) -> dict[str, list[float]]:
    """A model of 14 M parameters, so that there are several buckets, and much to communicate."""

    def build() -> nn.Module:
        wide = [m for _ in range(3) for m in (nn.Linear(2048, 2048), nn.ReLU())]
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), *wide, nn.Linear(2048, 10)
        )

    wrappers = {
        "torch": lambda: DistributedDataParallel(build(), gradient_as_bucket_view=True),
        "bucketed": lambda: BucketedDDP(build()),
        "naive": lambda: NaiveDDP(build()),
    }
    return bench.alternate(
        repeats,
        {name: lambda wrap=wrap: steps(wrap(), 64, 32, 5) for name, wrap in wrappers.items()},
    )


def steps(model: nn.Module, global_batch: int, local_batch: int, count: int) -> float:
    """Images per second over all ranks, of `count` optimizer steps after one warm-up step."""
    torch.manual_seed(0)
    images, labels = torch.rand(local_batch, 1, 28, 28), torch.randint(10, (local_batch,))
    optimizer = make_optimizer(model, SETTINGS)
    for i in range(count + 1):
        if i == 1:
            started = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return count * global_batch / (time.perf_counter() - started)


# ---- (e) seconds of a step, and of the checksum that the template takes every --log-every steps


def checksum(worker: Worker, repeats: int) -> dict[str, list[float]]:
    models = {
        "SmallCNN, 28 x 28": lambda: SmallCNN(image_size=28),
        "14 M parameters": lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 2048),
            *(nn.Linear(2048, 2048) for _ in range(3)),
            nn.Linear(2048, 10),
        ),
    }
    measured = {}
    for name, build in models.items():
        model = build()
        ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        measured[f"step, {name}"] = lambda ddp_model=ddp_model: 32 / steps(ddp_model, 32, 16, 3)
        measured[f"checksum, {name}"] = lambda model=model: seconds_of(
            lambda: check_replicas(model, 1, worker)
        )
    return bench.alternate(repeats, measured)


def seconds_of(action) -> float:
    dist.barrier()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


PARTS = {
    "template": template,
    "scaling": scaling,
    "from_scratch": from_scratch,
    "checksum": checksum,
}


# ---- (d) seconds from the launch of torchrun to the end of the first step

BARE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write("joined")
dist.destroy_process_group()
"""


def start_up(repeats: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "bare.py")
        script.write_text(BARE)
        number = iter(range(10**6))

        def bare() -> float:
            mark = Path(folder, f"mark{next(number)}")
            return seconds_until(mark, [*TORCHRUN, script, mark])

        def full() -> float:
            run = Path(folder, f"run{next(number)}")
            options = ("--epochs", "1", "--log-every", "1", "--output-dir", run)
            return seconds_until(
                run / "metrics.jsonl", [*TORCHRUN, ROOT / "ddp_basics/train.py", *options]
            )

        return bench.alternate(repeats, {"train.py": full, "bare": bare})


def seconds_until(mark: Path, command: list) -> float:
    """Start the command; return the seconds until the file `mark` has content; let the job end."""
    started = time.perf_counter()
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as job:
        while not (mark.exists() and mark.stat().st_size):
            if job.poll() is not None:
                raise RuntimeError(f"{command} ended with status {job.returncode}")
            time.sleep(0.002)
        seconds = time.perf_counter() - started
        job.wait(60)
    return seconds


# ---- the report


def template_text(a: dict) -> list[str]:
    ratio = bench.ratio_of_pairs(a["template"], a["barest"])
    rows = [
        ("one process, batch 64, 28 x 28 images", "images/s: median (min ... max)"),
        ("train.py's loop", bench.summary(a["template"])),
        ("the barest loop", bench.summary(a["barest"])),
        ("ratio, pair by pair", bench.summary(ratio)),
    ]
    return ["## (a) The template against the barest loop", bench.table(rows)]


def text(b: dict, c: dict) -> list[str]:
    rows_b = [
        ("global batch 256, 28 x 28 images, one thread per rank", "images/s: median (min ... max)"),
        ("one process", bench.summary(b["one"])),
        ("two ranks, DDP", bench.summary(b["two"])),
        ("speed-up, pair by pair", bench.summary(bench.ratio_of_pairs(b["two"], b["one"]))),
    ]
    rows_c = [
        ("two ranks, global batch 64, 14 M parameters", "images/s: median (min ... max)"),
        *((name, bench.summary(samples)) for name, samples in c.items()),
        *(
            (
                f"{name} / torch, pair by pair",
                bench.summary(bench.ratio_of_pairs(c[name], c["torch"])),
            )
            for name in ("bucketed", "naive")
        ),
    ]
    return [
        "## (b) Two ranks against one process",
        bench.table(rows_b),
        "## (c) torch's DDP against ddp_from_scratch.py",
        bench.table(rows_c),
    ]


def checksum_text(e: dict) -> list[str]:
    rows = [("two ranks, global batch 32", "ms: median (min ... max)")]
    rows += [(name, bench.summary([1e3 * x for x in samples])) for name, samples in e.items()]
    for name in ("SmallCNN, 28 x 28", "14 M parameters"):
        share = statistics.median(e[f"checksum, {name}"]) / statistics.median(e[f"step, {name}"])
        rows.append((f"every 50 steps: {name}", f"{share / 50:.2%} of the time"))
    return ["## (e) The checksum of the replicas", bench.table(rows)]


def start_up_text(d: dict) -> list[str]:
    difference = statistics.median(x - y for x, y in zip(d["train.py"], d["bare"], strict=True))
    rows = [
        ("torchrun, two ranks", "seconds: median (min ... max)"),
        ("train.py: launch to the first step", bench.summary(d["train.py"])),
        ("import torch + init_process_group + one all_reduce", bench.summary(d["bare"])),
        ("difference, pair by pair (median)", f"{difference:.3g}"),
    ]
    return ["## (d) Start-up", bench.table(rows)]


if __name__ == "__main__":
    main()
