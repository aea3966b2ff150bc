"""(Part of clusters.py.) DDP, FSDP, HSDP and compression on two lab hosts, at several link rates.

    python benchmarks/clusters_links.py --part hsdp --repeats 3        # one table, printed

One job of four ranks, two on each host, measures all sides in turn: a process group of two ranks
on one host, a group of one rank per host, and all four ranks. Between two samples the ranks set
the rate of their host's interface, and read the bytes it has sent, headers included.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "clusters")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank

import bench
import lab
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

LAB = ROOT / "clusters/lab.py"
RATES = ("10gbit", "1gbit", "100mbit")
WIDTH, ROWS, STEPS = 640, 32, 3  # model width; local batch; optimizer steps per measurement
PARAMETERS = 64 * WIDTH + 2 * WIDTH**2 + 10 * WIDTH + 3 * WIDTH + 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        print("\n\n".join(TEXTS[args.part](args.repeats)))
        return
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    samples = PARTS[args.part](args.repeats)
    if dist.get_rank() == 0:
        bench.say(samples)
    dist.barrier()
    dist.destroy_process_group()


# ---- the job, on two hosts


@contextmanager
def hosts(count: int):
    """Run a lab; yields the first words of its commands."""
    command = [sys.executable, str(LAB), "--name", f"bench{os.getpid()}"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run the `finally` below
    subprocess.run([*command, "up", str(count)], check=True, capture_output=True, timeout=60)
    try:
        yield command
    finally:
        subprocess.run([*command, "down"], check=True, timeout=60)


def run(part: str, repeats: int) -> dict:
    """Run a part on two hosts with two ranks each; return rank 0's samples."""
    words = (sys.executable, __file__, "--part", part, "--repeats", repeats)
    job = {"WORLD_SIZE": "4", "MASTER_ADDR": lab.address(0), "MASTER_PORT": "29500"}
    job |= {"GLOO_SOCKET_IFNAME": "eth0"}
    with hosts(2) as command:
        ranks = [[*command, "exec", str(rank // 2), "--", *map(str, words)] for rank in range(4)]
        others = [
            subprocess.Popen(ranks[rank], env=os.environ | job | {"RANK": str(rank)})
            for rank in (1, 2, 3)
        ]
        told = [f"{name}={value}" for name, value in job.items()]
        samples = bench.measure("env", "RANK=0", *told, *ranks[0], timeout=500)
        for process in others:
            process.wait(60)
    return samples


def set_rate(rate: str | None) -> None:
    """Limit the rate at which this rank's host sends; None: no limit."""
    if dist.get_rank() % 2 == 0:  # the first rank of its host
        remove = ["tc", "qdisc", "del", "dev", "eth0", "root"]
        subprocess.run(remove, capture_output=True, timeout=20)  # fails where there is none
        if rate:
            lab.shell(lab.SLOW.format("eth0", rate))


def sample(step: Callable[[], None] | None, rate: str | None) -> tuple[float, float]:
    """Seconds and bytes sent by this host per optimizer step; step: None if not this rank's."""
    set_rate(rate)
    dist.barrier()
    started, sent = time.perf_counter(), bytes_sent()
    for _ in range(STEPS if step else 0):
        step()
    dist.barrier()
    return (time.perf_counter() - started) / STEPS, (bytes_sent() - sent) / STEPS


def bytes_sent() -> int:
    return psutil.net_io_counters(pernic=True)["eth0"].bytes_sent


# ---- what is trained


def build() -> nn.Sequential:
    """A model with most of its parameters in two square matrices."""
    torch.manual_seed(0)
    hidden = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def ddp_step(ranks: list[int], prepare: Callable = lambda model, group: None):
    """(A function for one optimizer step, the model) on these ranks; (None, None) on others."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None, None
    # One bucket: PowerSGD starts collectives in callbacks, whose order may differ between ranks.
    model = DistributedDataParallel(build(), process_group=group, bucket_cap_mb=100)
    prepare(model, group)
    return partial(train, model, torch.optim.SGD(model.parameters(), lr=0.05), 1), model


def fsdp_step(mesh: list, parts: int = 1):
    """One FSDP step; HSDP if mesh is a list of hosts' ranks. parts: micro-batches per step."""
    names = ("replicate", "shard") if isinstance(mesh[0], list) else ("shard",)
    device_mesh = DeviceMesh("cpu", mesh, mesh_dim_names=names)
    if device_mesh.get_coordinate() is None:
        return None
    model = build()
    for layer in model[::2]:
        fully_shard(layer, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    return partial(train, model, torch.optim.SGD(model.parameters(), lr=0.05), parts)


IMAGES, LABELS = (torch.tensor(x) for x in load_digits(return_X_y=True))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int) -> None:
    """One optimizer step; gradients are reduced after the last of the `parts` micro-batches."""
    for part in range(parts):
        if parts > 1:
            model.set_requires_gradient_sync(part == parts - 1)
        place = torch.randint(len(IMAGES), (ROWS,))
        loss = F.cross_entropy(model(IMAGES[place].float() / 16), LABELS[place]) / parts
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- DDP and FSDP, two ranks, on one host and on two


def links(repeats: int) -> dict:
    sides = {}
    for name, make in (("DDP", lambda ranks: ddp_step(ranks)[0]), ("FSDP", fsdp_step)):
        sides[f"{name}, one host"] = partial(sample, make([0, 1]), None)
        apart = make([0, 2])
        for rate in RATES:
            sides[f"{name}, {rate}"] = partial(sample, apart, rate)
    return bench.alternate(repeats, sides)


def links_text(repeats: int) -> list[str]:
    found = run("links", repeats)
    rows = [
        ("two ranks", "s per step", "samples/s", "MB sent by a host", "by formula", "x one host")
    ]
    for name, per_parameter in (("DDP", 4), ("FSDP", 8)):
        alone = [seconds for seconds, _ in found[f"{name}, one host"]]
        for where in ("one host", *RATES):
            seconds, sent = zip(*found[f"{name}, {where}"], strict=True)
            slower = bench.ratio_of_pairs(seconds, alone)
            formula = "0" if where == "one host" else f"{per_parameter * PARAMETERS / 1e6:.3g}"
            rate = bench.summary([2 * ROWS / s for s in seconds])
            cells = (bench.summary(seconds), rate, megabytes(sent), formula)
            rows.append((f"{name}, {where}", *cells, bench.summary(slower)))
    about = (
        f"{PARAMETERS:,} fp32 parameters, {ROWS} samples per rank, so that parameters dominate. By "
        "formula, for N = 2 ranks: an all_reduce sends 2 (N - 1) / N of its 4 bytes per parameter, "
        "an all_gather half of that. FSDP all-gathers twice, and Gloo's reduce_scatter is an "
        "all_reduce: 8 bytes per parameter. (NCCL's is half an all_reduce: 6.)"
    )
    return ["## DDP and FSDP: one host, and two", bench.table(rows), about]


def megabytes(sent) -> str:
    return bench.summary([nbytes / 1e6 for nbytes in sent])


# ---- HSDP: sharded within a host, replicated between hosts

SLOW = "100mbit"
# Bytes that a host sends to the other per parameter and optimizer step; ", 4": 4 micro-batches.
CROSSING = {"DDP": 6, "FSDP, 1": 12, "HSDP, 1": 4, "FSDP, 4": 30, "HSDP, 4": 4}


def hsdp(repeats: int) -> dict:
    flat, mesh = [0, 1, 2, 3], [[0, 1], [2, 3]]
    sides = {"DDP": ddp_step(flat)[0]}
    for parts in (1, 4):
        sides[f"FSDP, {parts}"] = fsdp_step(flat, parts)
        sides[f"HSDP, {parts}"] = fsdp_step(mesh, parts)
    return bench.alternate(repeats, {k: partial(sample, s, SLOW) for k, s in sides.items()})


def hsdp_text(repeats: int) -> list[str]:
    found = run("hsdp", repeats)
    rows = [("2 x 2 ranks", "s per step", "MB sent by a host", "by formula", "FSDP / this")]
    for name, per_parameter in CROSSING.items():
        kind, _, parts = name.partition(", ")
        seconds, sent = zip(*found[name], strict=True)
        fsdp = [s for s, _ in found[f"FSDP, {parts or 1}"]]
        ratio = bench.summary(bench.ratio_of_pairs(fsdp, seconds))
        formula = f"{per_parameter * PARAMETERS / 1e6:.3g}"
        title = f"{kind}, {parts} micro-batches" if parts == "4" else kind
        rows.append((title, bench.summary(seconds), megabytes(sent), formula, ratio))
    about = (
        f"{PARAMETERS:,} fp32 parameters, {SLOW}. In a ring of all four ranks, one rank of each "
        "host sends to the other host: 3/4 of the bytes in an all_gather, 6/4 in an all_reduce. "
        "With k micro-batches FSDP all-gathers 2 k times and sends 6 k + 6 bytes per parameter, "
        "because Gloo's reduce_scatter is an all_reduce; a true one needs 6 k + 3. HSDP gathers "
        "within the host, and only the two all_reduces of half the gradients each cross the link: "
        "2 x 2 = 4 bytes per parameter for any k. Without micro-batches the ratio is 12 / 4; "
        "with a true reduce_scatter it would be 9 / 4."
    )
    return [
        "## HSDP and FSDP when the link between the hosts is slow",
        bench.table(rows),
        about,
    ]


# ---- gradient compression

RANKS = {"PowerSGD, rank 4": 4, "PowerSGD, rank 1": 1}


def compression(repeats: int) -> dict:
    def fp16(model, group):
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)

    def low_rank(rank, model, group):
        state = power_sgd.PowerSGDState(group, rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, power_sgd.powerSGD_hook)

    prepare = {"none": lambda model, group: None, "fp16": fp16}
    prepare |= {name: partial(low_rank, rank) for name, rank in RANKS.items()}
    made = {name: ddp_step([0, 2], how) for name, how in prepare.items()}
    torch.manual_seed(dist.get_rank())
    found = bench.alternate(
        repeats, {name: partial(sample, step, SLOW) for name, (step, _) in made.items()}
    )
    with torch.no_grad():
        losses = {
            name: F.cross_entropy(model.module(IMAGES.float() / 16), LABELS).item()
            for name, (_, model) in made.items()
            if model
        }
    return found | {"losses": losses}


def compression_text(repeats: int) -> list[str]:
    found = run("compression", repeats)
    plain = [seconds for seconds, _ in found["none"]]
    steps = STEPS * (repeats + 1)
    rows = [("DDP", "s per step", "MB sent by a host", "none / this", f"loss after {steps} steps")]
    for name in ("none", "fp16", *RANKS):
        seconds, sent = zip(*found[name], strict=True)
        ratio = bench.summary(bench.ratio_of_pairs(plain, seconds))
        loss = f"{found['losses'][name]:.3f}"
        rows.append((name, bench.summary(seconds), megabytes(sent), ratio, loss))
    about = (
        f"Two hosts with one rank each, {SLOW}; {PARAMETERS:,} fp32 parameters. fp16: "
        "fp16_compress_hook, half the bytes. PowerSGD sends two thin matrices for each large one; "
        "its first two steps, in the warm-up, are not compressed. Each loss is of one short run "
        "with its own batches: they are close, not equal."
    )
    return ["## Gradient compression", bench.table(rows), about]


PARTS = {f.__name__: f for f in (links, hsdp, compression)}
TEXTS = {"links": links_text, "hsdp": hsdp_text, "compression": compression_text}


if __name__ == "__main__":
    main()
