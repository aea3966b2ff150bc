r"""Measures the constants of this machine in a minute, and writes them as a cluster for plan.py.

    torchrun --standalone --nproc_per_node=2 planner/calibrate.py --output runs/this_machine.toml
    python planner/plan.py --gpu runs/this_machine.toml --model gpt-template --gpus 2 \
        --sequence 128 --batch-tokens 2K

Look at: the share of the datasheet's numbers that this machine reaches. It measures a matrix
product, a copy, a layer so small that only the host's work is left, an all_reduce of two sizes,
and, on a CPU, a layer of width 256.
"""

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from network import REACHED
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

SMALL, LARGE = 2**14, 2**24  # bytes of the two all_reduce: latency, and bandwidth
CPU = torch.device("cpu")


@record
def main():
    args = parse_args()
    device = torch.device(args.device)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=5))  # the rings are measured
    found = measure(device, args.seconds, ranks)
    if int(os.environ.get("RANK", "0")) == 0:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(as_toml(found))
        print(as_toml(found).rstrip())
        print(f"# written to {args.output}")
    if ranks > 1:
        dist.barrier()  # a rank that left first would end the other ranks' measurements
        dist.destroy_process_group()


def measure(device: torch.device, seconds: float, ranks: int) -> dict[str, float]:
    """All constants, measured by all ranks at the same time, as they share the machine."""
    torch.optim.AdamW([torch.zeros(1, device=device)])  # imports 0.15 GiB, as in each training
    base = resident_gib(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    n = 8192 if device.type == "cuda" else 768
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product = median_seconds(lambda: a @ b, device, seconds)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    source = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), device, seconds)
    launch = median_seconds(layer(8, 1, 1, 8, device), device, seconds)
    flop_s, bytes_s = 2 * n**3 / product, 2 * 4 * source.numel() / copy
    found = {
        "peak_tflops": flop_s / 1e12,
        "hbm_gb_s": bytes_s / 1e9,
        "memory_passes": passes(flop_s, bytes_s, seconds) if device.type == "cpu" else 9,
        "activation_factor": 1 if device.type == "cuda" else 2,
        "launch_s": launch,
        "base_gib": base,
        "gpu_memory_gb": memory_gb(device) / (1 if device.type == "cuda" else here),
        "hop_s": 0.0,
        "fp8": device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9),
    }
    if ranks > 1:
        found |= links(device, seconds, ranks)
    return found


def links(device: torch.device, seconds: float, ranks: int) -> dict[str, float]:
    """Bandwidth and latency inside this node, and between nodes if there are several.

    The ports of a node carry a ring over several nodes together.
    """
    found, here = {}, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if here > 1:
        own, _ = dist.new_subgroups(here) if ranks > here else (None, None)
        found["nvlink_gb_s"], found["hop_s"] = ring(device, seconds, here, own)
    if ranks > here:
        reached, found["nic_hop_s"] = ring(device, seconds, ranks)
        found["nic_gb_s"] = reached / here
    return found


def ring(device: torch.device, seconds: float, ranks: int, group=None) -> tuple[float, float]:
    """Bandwidth (GB/s) and latency (s) of a hop, from an all_reduce of few and of many bytes.

    It is two rings, each (n-1)/n of the bytes over the wire and n-1 hops: two unknowns.
    """
    times = []
    for size in (SMALL, LARGE):
        tensor = torch.ones(size // 4, device=device)
        call = partial(dist.all_reduce, tensor, group=group)
        times.append(median_seconds(call, device, seconds, 50))
    per_byte = max(1e-13, (times[1] - times[0]) / (2 * (ranks - 1) / ranks * (LARGE - SMALL)))
    latency = times[0] - 2 * (ranks - 1) / ranks * SMALL * per_byte
    return 1 / per_byte / REACHED / 1e9, max(0.0, latency / (2 * (ranks - 1)))


def passes(flop_s: float, bytes_s: float, seconds: float) -> float:
    """memory_passes, from a layer of width 256 on a CPU: what its products leave of its time.

    A GPU waits for memory between the products; a CPU computes there (exponentials, norms), and a
    product of a layer's shapes reaches less than a large one. So its number has to be measured.
    6 FLOP per weight (12 h^2) and token, 12 s h for attention, 34 h bytes kept: step_time.py.
    """
    width, sequences, length = 256, 8, 128
    whole = median_seconds(layer(width, 4, sequences, length, CPU), CPU, seconds)
    tokens = sequences * length
    # Of the weights, and of an attention without a mask.
    products = 6 * (12 * width**2 + 2 * length * width) * tokens / flop_s
    return max(0.0, whole - products) * bytes_s / (34 * width * tokens)


def layer(
    width: int, heads: int, sequences: int, length: int, device: torch.device
) -> Callable[[], None]:
    """Forward and backward of a Transformer layer. Of width 8, only the host's work is left."""
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, **options).to(device)
    x = torch.randn(sequences, length, width, device=device, requires_grad=True)

    def run() -> None:
        layer(x).sum().backward()

    return run


def median_seconds(
    call: Callable[[], object], device: torch.device, seconds: float, count: int | None = None
) -> float:
    """Median of the calls that fit into `seconds`, or of `count`; the first three do not count.

    All ranks must make the same number of collective calls: these are counted, not timed.
    """

    def timed() -> float:
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(3):
        timed()
    end = time.perf_counter() + seconds
    samples = []
    while len(samples) < (count or 5) or (count is None and time.perf_counter() < end):
        samples.append(timed())
    return statistics.median(samples)


def memory_gb(device: torch.device) -> float:
    """GiB of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def resident_gib(device: torch.device) -> float:
    """GiB that a process holds before its model: on a CPU its peak so far, on a GPU the context."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # of bytes, or of KiB


def as_toml(found: dict[str, float]) -> str:
    """A cluster as plan.py reads it: without the links that no ring used.

    fp32 on a CPU keeps twice the bytes of the formulas' bf16.
    """
    keys = (
        "gpu_memory_gb",
        "peak_tflops",
        "hbm_gb_s",
        "nvlink_gb_s",
        "nic_gb_s",
        "nic_hop_s",
        "fp8",
    )
    cluster = {key: found[key] for key in keys if found.get(key)}
    cluster["gpus_per_node"] = int(os.environ.get("LOCAL_WORLD_SIZE", "8"))
    measured = ("activation_factor", "memory_passes", "launch_s", "hop_s", "base_gib")
    constants = {"gemm_efficiency": 1} | {key: found[key] for key in measured} | {"fixed_s": 0}
    lines = [f"{key} = {value:.3g}" for key, value in cluster.items()]
    lines += ["", "[constants]", *(f"{key} = {value:.3g}" for key, value in constants.items())]
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    output = Path("runs/this_machine.toml")
    add("--output", type=Path, default=output, help="write the constants to this TOML file")
    add("--seconds", type=float, default=8, help="measure each constant for this many seconds")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cpu", "cuda"), default=default, help="measure this device")
    return parser.parse_args()


if __name__ == "__main__":
    main()
