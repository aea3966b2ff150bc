"""Samples per second of two ranks, backend by backend: the training part of backend.py."""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bench
import shm
import torch
import torch.distributed as dist
from benchmark import SIZES, config_of
from model import GPT, cross_entropy, initialize
from tensor_parallel_from_scratch import cut_model, vocab_parallel_cross_entropy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

SCRIPT = Path(__file__).with_name("backend.py")  # the script that calls this module


def training(groups: dict, repeats: int) -> dict:
    mlp = {
        f"MLP, DDP, {name}": steps(wide_mlp, partial(ddp, group=group, hook=hook), mlp_loss)
        for name, group, hook in ddp_sides(groups)
    }
    for name in ("gloo", "shm"):  # gradients travel in half precision
        wrap = partial(ddp, group=groups[name], hook=fp16_compress_hook)
        mlp[f"MLP, DDP, {name}, float16"] = steps(wide_mlp, wrap, mlp_loss)
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
        kept = partial(sharded, mesh=mesh, free=False, allocate=name == "shm")
        half = partial(kept, reduce_dtype=torch.bfloat16)
        sides[f"GPT, FSDP2 kept, {name}, bfloat16 reduced"] = gpt(half)
    return bench.alternate(repeats, sides)


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
    return bench.alternate(repeats, sides)


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


def sharded(
    model: nn.Module,
    mesh: DeviceMesh,
    free: bool,
    allocate: bool,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=free, mp_policy=policy)
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
    return vocab_parallel_cross_entropy(model(x), y, group=group)


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
        dist.all_reduce(rate, op=dist.ReduceOp.MIN)  # the slower rank's rate
        return rate.item()

    return samples_per_second


def alone_with_two_threads(side: Callable[[], float]) -> float:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))  # torchrun's: all we may use
    torch.set_num_threads(2)
    # Rank 1 only takes part in the common start and end: its own copy would compete.
    rate = side() if dist.get_rank() == 0 else wait_for_the_other()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores)
    return rate


def wait_for_the_other() -> float:
    dist.barrier()
    dist.all_reduce(torch.tensor(float("inf")), op=dist.ReduceOp.MIN)
    return 0.0


def training_text(repeats: int) -> list[str]:
    found = bench.measure_part(SCRIPT, "training", 2, repeats)
    sending_nothing = {"GPT": "GPT, nothing sent", "MLP": "MLP, DDP, nothing sent"}
    rows = [("samples/s of two ranks: median (min ... max)", "", "/ nothing sent", "/ gloo")]
    for name, rates in found.items():
        alone = found[sending_nothing[name[:3]]]
        gloo = found.get(name.replace("shm, zero copy", "gloo").replace("shm", "gloo"), rates)
        ratios = (statistics.median(bench.ratio_of_pairs(rates, other)) for other in (alone, gloo))
        rows.append((name, bench.summary(rates), *(f"{ratio:.3f}" for ratio in ratios)))
    kept = bench.ratio_of_pairs(found["GPT, FSDP2 kept, shm"], found["GPT, DDP, shm"])
    tensor = bench.measure_part(SCRIPT, "tensor_parallel", 2, repeats)
    tp_rows = [("samples/s: median (min ... max)", "", "/ one process")]
    for name, rates in tensor.items():
        one = tensor[f"{name.split(',')[0]}, one process, two threads"]
        ratio = statistics.median(bench.ratio_of_pairs(rates, one))
        tp_rows.append((name, bench.summary(rates), f"{ratio:.3f}"))
    return [
        "## Training on two ranks: GPT of 10.9 M parameters, 4 sequences per rank; MLP of 10 M",
        bench.table(rows),
        f"FSDP2 kept / DDP, both on shm: {bench.summary(kept)}",
        "## Two tensor-parallel ranks against one process with two threads",
        bench.table(tp_rows),
    ]
