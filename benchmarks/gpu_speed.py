"""The measurement "speed" of gpu_measurements.py: a GPT in bf16, next to goals and a formula."""

import gc
import statistics
from types import SimpleNamespace

import bench
import torch
from arguments import UserError
from benchmark import MeshRun, config_of
from float8 import check_device
from flops import matmul_peak
from metrics import peak_memory
from model import GPT, GPTConfig
from runtime import Worker

H100 = 989e12  # FLOP/s in bf16, dense: NVIDIA H100 SXM data sheet

VARIANTS = {
    "eager": {},
    "compile": {"compile": True},
    "compile, activation checkpointing": {"compile": True, "activation_checkpointing": "full"},
    "compile, fp8": {"compile": True, "fp8": True},
}
GOALS = {"124M": 0.45, "1B": 0.55}  # MFU, of 989 TFLOP/s on an H100
# Peak memory and expected_bytes may differ by 15 % (an emulated GPU showed 5 %; cuBLAS and the
# attention kernels need memory, too). With torch.compile the peak may be lower, because fused
# operations keep no intermediate results.
MARGIN = 0.15
SAVED = "less, compiled"  # how much less, the formula does not say
SHARE = 0.85  # of the free memory, for what the formula counts


def speed(worker: Worker, size: str) -> None:
    failures = []
    for variant, flags in VARIANTS.items():
        recomputes = "activation_checkpointing" in flags
        free_memory(worker.device)
        batch, row = batch_that_fits(config_of(size), worker.device, recomputes), None
        needs = expected_bytes(config_of(size), 1, recomputes) / 1e9
        why = f"one sequence needs {needs:.3g} GB, more than {SHARE:.0%} of the free memory"
        if "fp8" in flags:
            try:
                check_device(worker.device.type, torch.bfloat16)
            except UserError as error:
                batch, why = 0, str(error)
        if not batch:
            bench.report(worker, {f"{size}, {variant}": {"left out": why}})
            continue
        while row is None:
            try:
                row = train_fast(worker, size, flags, batch)
            except torch.OutOfMemoryError:
                if batch == 1:
                    raise
            if row is None:
                batch //= 2
                free_memory(worker.device)
        if worker.device.type != "cpu":  # on a CPU it is the memory of the whole process
            expected = expected_bytes(config_of(size), batch, recomputes)
            ratio = row["peak memory_mb"] * 1e6 / expected
            verdict = verdict_on_memory(ratio, is_compiled="compile" in flags)
            row |= {"formula (eager), MB": expected / 1e6, "peak / formula": ratio}
            row["verdict on memory"] = verdict
            # In a tiny model one MB is a large share.
            if verdict not in ("as computed", SAVED) and size != "tiny":
                failures.append(f"{variant}: the peak is {ratio:.3f} of the formula, {verdict}")
        bench.report(worker, {f"{size}, {variant}": row})
    if failures:
        raise AssertionError("\n".join(failures))


def verdict_on_memory(ratio: float, is_compiled: bool) -> str:
    if ratio > 1 + MARGIN:
        return f"more than {MARGIN:.0%} above"
    if ratio < 1 - MARGIN:
        return SAVED if is_compiled else f"more than {MARGIN:.0%} below"
    return "as computed"


def verdict_on_mfu(size: str, mfu: float, gpu: str) -> dict:
    """The goal for an H100 SXM, and whether the measured MFU (of 989 TFLOP/s) reaches it."""
    goal = GOALS.get(size)
    if goal is None:
        return {"goal": "none", "verdict on MFU": ""}
    if "H100" not in gpu or "HBM3" not in gpu:  # "H100 PCIe" and "H100 NVL" are slower
        return {"goal": f"{goal} on an H100", "verdict on MFU": "another device"}
    return {"goal": goal, "verdict on MFU": "reached" if mfu >= goal else "missed"}


def free_memory(device: torch.device) -> None:
    """Free the previous variant's memory, and the code compiled for its batch."""
    torch.compiler.reset()
    gc.collect()  # a model is full of reference cycles
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def train_fast(worker: Worker, size: str, flags: dict, batch: int) -> dict:
    """20 steps to warm up, then 10 samples of 5 steps (tiny: 1, then 2 samples of 1)."""
    warm_up, samples, steps = (1, 2, 1) if size == "tiny" else (20, 10, 5)
    options = {"compile": False, "activation_checkpointing": None, "fp8": False, **flags}
    options["compile"] &= size != "tiny"  # compiling takes a minute on a CPU
    options |= {"size": size, "batch_size": batch, "precision": "bf16", "clip": 1.0}
    options |= {"keep_gathered": True, "sequence_parallel": False}
    run = MeshRun("dp_shard=1", SimpleNamespace(**options), worker)
    run.tokens_per_second(warm_up)
    if worker.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(worker.device)
    rates = [run.tokens_per_second(steps) for _ in range(samples)]
    memory = {f"peak {name}": value for name, value in peak_memory(worker.device).items()}
    config = config_of(size)
    flops = statistics.median(rates) * config.flops_per_token(config.block_size)
    peak = matmul_peak(worker.device, torch.bfloat16, size=256 if size == "tiny" else None)
    return {
        "B x T": f"{batch} x {config.block_size}",
        "tokens/s": rates,
        "ms per step": [1e3 * run.tokens / rate for rate in rates],
        "matmul peak, TFLOP/s": peak / 1e12,
        "MFU of that peak": flops / peak,
        "MFU of 989 TFLOP/s": flops / H100,
        **verdict_on_mfu(size, flops / H100, bench.device_name(worker.device)),
        **memory,
    }


def batch_that_fits(config: GPTConfig, device: torch.device, recomputes: bool) -> int:
    """The largest power of two, up to 64 sequences, whose formula fills at most SHARE of the GPU.

    0: not even one sequence does.
    """
    if device.type == "cpu":
        return 2
    free, _ = torch.cuda.mem_get_info(device)
    sizes = (64, 32, 16, 8, 4, 2, 1)
    fits = [n for n in sizes if expected_bytes(config, n, recomputes) < SHARE * free]
    return fits[0] if fits else 0


def expected_bytes(config: GPTConfig, batch: int, recomputes: bool) -> int:
    """Peak of a bf16 step on one rank: at the start of backward, or at its end.

    A parameter takes 12 bytes (fp32: itself and AdamW's two averages), 2 for the unsharded bf16
    copy, and at the end 4 for its gradient. A block keeps 32 bytes per token and channel: inputs
    of the two norms (2 each), of query, key and value (2 together), of attention (6), its output
    (2), inputs of the MLP, of GELU and of the last layer (2, 8, 8). A block that recomputes keeps
    its input (2); one block at a time holds the rest. The loss holds three fp32 logits tensors.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(config).parameters())
    tokens = batch * config.block_size
    block = 32 * tokens * config.dim
    blocks = config.layers * block // 16 + block if recomputes else config.layers * block
    start = 14 * parameters + blocks + 12 * tokens * config.vocab_size
    return max(start, 18 * parameters)
