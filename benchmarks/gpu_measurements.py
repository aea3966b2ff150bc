"""The measurements of benchmarks/gpu.py: each prints rows of the report, or ends with an error.

    python benchmarks/gpu_measurements.py numbers --device cuda
    torchrun --standalone --nproc_per_node=2 benchmarks/gpu_measurements.py equivalence

environment   names, versions, and the ceilings: memory copies, matrix products
numbers       losses and gradient norms of train.py's step, compared with plain PyTorch on the CPU
speed         tokens per second, MFU and peak memory of one GPT, compared with goals and a formula
kernels       masked attention with and without FlexAttention; dropout next to torch's
equivalence   train.py's step on every mesh of this job's ranks, compared with one process
"""

import argparse
import math
import platform
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "transformer_basics")]
sys.path.append(str(ROOT / "collectives"))  # last: both directories have runtime.py

import bench
import torch
import torch.nn.functional as F
from benchmark import SIZES
from comparing import batches
from comparing_meshes import one_process, train_on_mesh
from config import Settings
from costs import time_calls
from flops import matmul_peak
from gpu_kernels import kernels
from gpu_speed import speed
from model import GPT, GPTConfig, initialize
from optimizer import make_optimizer
from parallelize import spread_model
from runtime import Worker, distributed_worker
from step import train_step
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="GPT size (default: tiny)")
    args = parser.parse_args()
    with distributed_worker(args.device) as worker:
        MEASUREMENTS[args.measurement](worker, args.size)


def environment(worker: Worker, size: str) -> None:
    device, is_gpu, is_tiny = worker.device, worker.device.type == "cuda", size == "tiny"
    driver = "nvidia-smi is missing"
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
        ask = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        driver = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    nccl = torch.cuda.nccl.version() if is_gpu else ()
    found = {
        "device": bench.device_name(device),
        "devices": torch.cuda.device_count() if is_gpu else 0,
        "nvidia-smi": driver.replace("\n", "; "),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl)) or "none",
    }
    bench.report(worker, {name: {"value": value} for name, value in found.items()})
    numbers = 2**22 if is_tiny else 2**28  # float32: 1 GiB
    host = torch.ones(numbers, pin_memory=is_gpu)
    a, b = host.to(device), torch.ones(numbers, device=device)
    copies = {
        "memory copy, GB/s read and written": (2, partial(b.copy_, a)),
        "from pinned memory, GB/s": (1, partial(b.copy_, host, non_blocking=True)),
        "to pinned memory, GB/s": (1, partial(host.copy_, b, non_blocking=True)),
    }
    for name, (times, copy) in copies.items():
        seconds = time_calls(copy, 9, 1, device)
        bench.report(worker, {name: {"value": [times * 4 * numbers / t / 1e9 for t in seconds]}})
    side = 256 if is_tiny else None  # of the matrices
    for dtype, precision in (
        (torch.bfloat16, "highest"),
        (torch.float32, "high"),
        (torch.float32, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        peak = matmul_peak(device, dtype, size=side) / 1e12
        name = f"{str(dtype).removeprefix('torch.')}, {precision}: matmul peak, TFLOP/s"
        bench.report(worker, {name: {"value": peak}})


# ---- numbers: what a step computes

# precision, matmul precision, largest relative difference of a loss and of a gradient norm. In fp32
# only the order of sums differs: 1e-7 seen. bf16 has 7 mantissa bits: 4e-4 and 2e-3 seen after 20
# steps on a CPU. TF32 has 10 bits, so expect an eighth of that. The tolerances are about ten times
# larger; fp32's are smaller than the differences of bf16 or TF32.
MODES = {
    "fp32": ("fp32", "highest", 2e-5, 1e-4),
    "TF32": ("fp32", "high", 5e-4, 3e-3),
    "bf16": ("bf16", "highest", 4e-3, 2e-2),
}


def numbers(worker: Worker, size: str) -> None:
    config = SIZES["tiny"][0]
    steps = 3 if size == "tiny" else 20
    given = SimpleNamespace(steps=steps, batch_size=8, length=config.block_size, seed=0)
    torch.set_float32_matmul_precision("highest")
    expected = plain_losses(config, given)
    failures, differences_of = [], {}
    for mode, (precision, matmul, *tolerances) in MODES.items():
        torch.set_float32_matmul_precision(matmul)
        measured = our_losses(config, given, precision, worker.device)
        row, differences_of[mode] = {}, []
        for quantity, tolerance in zip(("loss", "norm"), tolerances, strict=True):
            pairs = zip(measured[quantity], expected[quantity], strict=True)
            difference = max(abs(a / b - 1) for a, b in pairs)
            differences_of[mode].append(difference)
            row[f"{quantity}: largest difference"] = difference
            row[f"{quantity}: tolerance"] = tolerance
            if not difference <= tolerance:  # NaN is a failure, too
                failures.append(f"{mode}, {quantity}: {measured}, on the CPU {expected}")
        bench.report(worker, {f"{mode}, {steps} steps": row})
    # The emulated GPU of the rehearsal has no TF32.
    reduced = ["TF32"] if size != "tiny" and has_tf32(worker.device) else []
    failures += modes_without_effect(differences_of, [*reduced, "bf16"])
    if failures:
        raise AssertionError("\n".join(failures))


def has_tf32(device: torch.device) -> bool:
    """NVIDIA GPUs have it since Ampere; on a T4 or V100 the mode "high" computes in fp32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def modes_without_effect(differences_of: dict[str, list[float]], reduced: list[str]) -> list[str]:
    """A mode that rounds more than fp32 must differ at least twice as much, or it was off.

    differences_of: mode -> relative differences of the loss and of the gradient norm.
    """
    return [
        f"{mode} differs from the CPU by {differences_of[mode]}, fp32 by {differences_of['fp32']}: "
        f"{mode} was not on"
        for mode in reduced
        if not max(differences_of[mode]) > 2 * max(differences_of["fp32"])
    ]


def plain_losses(config: GPTConfig, given) -> dict[str, list[float]]:
    """The single-process baseline, on the CPU: train.py's step as a loop without a mesh."""
    model = initialize(GPT(config), seed=0)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    seen = {"loss": [], "norm": []}
    for x_BT, y_BT in batches(given, torch.device("cpu")):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen["loss"].append(loss.item())
        seen["norm"].append(norm.item())
    return seen


def our_losses(config: GPTConfig, given, precision: str, device) -> dict[str, list[float]]:
    sizes = {"layers": config.layers, "heads": config.heads, "dim": config.dim}
    settings = Settings(**sizes, batch_size=given.batch_size, lr=1e-3, precision=precision).on(1)
    mesh, model, pipeline = spread_model(config, settings, device)
    with torch.no_grad():  # a GPU's generator draws other numbers
        for ours, first in zip(
            model.parameters(), initialize(GPT(config), 0).parameters(), strict=True
        ):
            ours.to_local().copy_(first)
    optimizer = make_optimizer(model, settings)
    seen = {"loss": [], "norm": []}
    for batch in batches(given, device):
        loss, norm = train_step(model, pipeline, *batch, optimizer, mesh, settings)
        seen["loss"].append(loss.item())
        seen["norm"].append(norm.item())
    return seen


# ---- two ranks or more


# Largest difference allowed in fp32, where only the order of sums differs, relative to the tensor's
# largest number. Four ranks on CPUs showed up to 2e-7, 4e-5, 3e-5 and 2e-6; GPUs add in blocks of
# other sizes. SGD, because AdamW divides a gradient by its own size: the noise of a tiny gradient
# becomes a share of a step.
LIMITS = {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-4, "parameter": 1e-5}


def equivalence(worker: Worker, size: str) -> None:
    """Three steps of SGD in fp32: losses, norms, all gradients, the parameters at the end."""
    ranks = worker.world_size
    given = SimpleNamespace(steps=3, batch_size=2 * ranks, length=64, seed=0, optimizer="sgd")
    config = GPTConfig(
        256 * ranks, given.length, layers=max(2, ranks), heads=2 * ranks, dim=32 * ranks
    )
    torch.set_float32_matmul_precision("highest")
    expected = one_process(config, given, worker)
    meshes = [{"dp_replicate": ranks}, {"dp_shard": ranks}, {"tp": ranks}, {"pp": ranks}]
    if ranks % 2 == 0 and ranks > 2:
        half = ranks // 2
        meshes += [{"dp_replicate": 2, "dp_shard": half}, {"dp_shard": half, "tp": 2}]
        meshes += [{"pp": 2, "tp": half}]
    failures = []
    for mesh_sizes in meshes:
        tp, pp = mesh_sizes.get("tp", 1), mesh_sizes.get("pp", 1)
        flags = {"sequence_parallel": tp > 1, "loss_parallel": tp > 1, "clip": 0, "accumulate": pp}
        settings = Settings(**flags, **{"dp_replicate": 1} | mesh_sizes)
        mesh, model, pipeline = spread_model(config, settings, worker.device)
        initialize(model, given.seed)
        steps, _ = train_on_mesh(model, pipeline, mesh, settings, given)
        name = " ".join(f"{axis}={n}" for axis, n in mesh_sizes.items())
        differences = relative_differences(steps, expected)
        row = {}
        for kind, (difference, tensor) in differences.items():
            row |= {f"{kind}: largest difference": difference, f"{kind}: limit": LIMITS[kind]}
            if not difference <= LIMITS[kind]:  # NaN is a failure, too
                failures.append(f"{name}: {tensor} differs by {difference}")
        bench.report(worker, {name: row})
    if failures:
        raise AssertionError("\n".join(failures))


def relative_differences(steps: list[dict], expected: list[dict]) -> dict[str, tuple[float, str]]:
    """Kind of value -> (largest relative difference, see LIMITS; the tensor's name)."""
    largest = {}
    for i, (step, expected_step) in enumerate(zip(steps, expected, strict=True)):
        if step.keys() != expected_step.keys():
            raise ValueError(f"not the same parameters: {step.keys() ^ expected_step.keys()}")
        for name, value in expected_step.items():
            kind = name.split()[0]
            difference = (step[name] - value).abs().max() / value.abs().max()
            difference = difference.nan_to_num(math.inf).item()
            largest[kind] = max(largest.get(kind, (0.0, "")), (difference, f"{name} in step {i}"))
    return largest


MEASUREMENTS = {f.__name__: f for f in (environment, numbers, speed, kernels, equivalence)}

if __name__ == "__main__":
    main()
