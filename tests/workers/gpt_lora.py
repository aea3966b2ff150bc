"""Train adapters with transformer_basics/train.py's own step on every mesh, and save the results.

Started by test_transformer_basics_lora.py with 2 and 4 ranks, which compares that with what
`one_process` returns: a GPT without adapters, whose weights are computed from A and B in each step.
"""

import sys
import zlib
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.place
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import parallelize
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting_by_axis import CountByAxis
from data import batch_part
from evaluation import mean_over_ranks
from lora import initialize_adapters
from model import GPT
from replicas import check_replicas
from sharded_state import optimizer_tensors
from step import train_step
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from workers.gpt_equivalence import (
    BATCH,
    LENGTH,
    LLAMA,
    LR,
    STEPS,
    VOCABULARY,
    batches,
    first_values,
    optimizer_of,
    settings_of,
    spread,
)
from workers.gpt_masks import Dropping
from workers.place import worker_of_test

KINDS = {  # flags, optimizer; each has a reference of its own
    "gpt2": ("--clip 0 --lora-rank 3 --lora-alpha 5", "sgd"),
    "llama": (f"--clip 0.1 {LLAMA} --lora-rank 4", "sgd"),
    "adamw": (f"--clip 0.1 {LLAMA} --lora-rank 4", "adamw"),
    "deep": ("--clip 0 --layers 4 --lora-rank 4 --lora-alpha 2", "sgd"),
    "shared": (f"--clip 0.1 {LLAMA} --kv-heads 1 --tied --lora-rank 2 --lora-alpha 1.5", "sgd"),
    # Masks from another program: gpt_masks.py. With a larger alpha some tokens of the residual
    # stream are nearly 0, and a norm divides by them: one process in float32, too, is off by 1e-5.
    "dropout": (f"--clip 0.05 {LLAMA} --lora-rank 4 --lora-alpha 2 --dropout 0.3", "sgd"),
}
SP = "--tp 2 --sequence-parallel"
GROUPS = {  # name -> ranks, flags -> kinds
    "quick": (2, {"--dp-shard 2": ("gpt2",), "--tp 2": ("gpt2", "llama", "dropout")}),
    "two": (
        2,
        {
            "": ("gpt2", "adamw"),
            "--dp-shard 2": ("adamw", "shared"),
            "--dp-shard 2 --accumulate 4 --activation-checkpointing": ("gpt2", "dropout"),
            "--tp 2": ("shared", "adamw"),
            SP: ("gpt2", "llama", "shared", "dropout"),
            f"{SP} --loss-parallel --accumulate 2 --activation-checkpointing selective": ("llama",),
            "--cp 2": ("llama", "dropout"),
            "--pp 2": ("gpt2", "shared"),
            "--pp 2 --accumulate 4 --schedule zero-bubble": ("deep",),
        },
    ),
    "compiled": (2, {"--tp 2 --compile": ("llama",)}),
    "four": (
        4,
        {
            "--dp-shard 2 --tp 2": ("gpt2", "llama"),
            f"--dp-shard 2 {SP}": ("gpt2", "shared"),
            "--dp-shard 4": ("shared",),
            "--pp 2 --dp-shard 2": ("dropout",),
            f"--pp 2 --accumulate 4 {SP}": ("llama", "dropout"),
        },
    ),
}
CASES = [(g, m, k) for g, (_, meshes) in GROUPS.items() for m, ks in meshes.items() for k in ks]
# Kinds that magnify rounding: only float64 can tell it from an error.
RANK_1 = "--clip 0 --layers 4 --lora-rank 1 --lora-alpha 2"
KINDS |= {"rank 1": (RANK_1, "sgd"), "rank 1, adamw": (RANK_1, "adamw")}
IN_FLOAT64 = {
    "--pp 2": ("rank 1", "rank 1, adamw"),
    "--pp 2 --accumulate 4 --schedule zero-bubble": ("rank 1", "rank 1, adamw"),
    SP: ("rank 1",),
}
# Frozen weights in fp8: compared with one process that runs the same program.
KINDS |= {"fp8": (f"--clip 0.1 {LLAMA} --dim 64 --fp8 --lora-rank 4 --lora-alpha 2", "sgd")}
IN_FLOAT8 = {mesh: ("fp8",) for mesh in ("--dp-shard 2", SP, "--pp 2", "--cp 2")}
OTHERS = {"float64": IN_FLOAT64, "fp8": IN_FLOAT8, "fp8 alone": {"": ("fp8",)}}
LAYERS = ("query", "key", "value", "out", "expand", "contract", "gate")  # of a block


def settings_with(flags: str):
    return settings_of(f"{flags} --init-from unread")


@contextmanager
def in_float64():
    """All numbers are float64, those that the model or FSDP would make float32, too."""
    torch.set_default_dtype(torch.float64)
    no_cast = patch.object(parallelize, "MixedPrecisionPolicy", lambda **_: MixedPrecisionPolicy())
    try:
        with no_cast, patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def value_of(name: str, shape) -> torch.Tensor:
    """B is not zero here: with zeros A would have no gradient in the first step."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.3 * torch.randn(shape, generator=generator)


def adapters_for(model: GPT, rank: int) -> dict[str, torch.Tensor]:
    """A and B of each linear layer of the blocks, by the names that the script gives them."""
    found = {}
    for name, weight in model.named_parameters():
        *_, layer, kind = name.split(".")
        if layer in LAYERS and kind == "weight":
            layer = name.removesuffix("weight")
            for factor, shape in (("a", (rank, weight.shape[1])), ("b", (weight.shape[0], rank))):
                found[f"{layer}lora_{factor}"] = value_of(f"{layer}lora_{factor}", shape)
    return found


def adapted(model: GPT, adapters: dict, alpha: float, rank: int) -> dict[str, torch.Tensor]:
    """W + alpha / rank * B A for each layer that has A and B."""
    weights = dict(model.named_parameters())
    for name in list(weights):
        a, b = (adapters.get(name.replace("weight", f"lora_{factor}")) for factor in "ab")
        if a is not None:
            weights[name] = weights[name] + alpha / rank * torch.einsum("or,ri->oi", b, a)
    return weights


def one_process(kind: str) -> dict:
    flags, name = KINDS[kind]
    settings = settings_with(flags)
    rank, alpha = settings.lora_rank, settings.lora_alpha
    model = GPT(settings.model(VOCABULARY))
    first_values(model)
    dropping = Dropping(model, settings.dropout)
    dropping.rows, dropping.positions = range(BATCH), range(LENGTH)
    adapters = {n: t.requires_grad_() for n, t in adapters_for(model, rank).items()}
    if name == "sgd":
        optimizer = torch.optim.SGD(adapters.values(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(adapters.values(), LR, betas=(0.9, 0.95), weight_decay=0.1)
    found = {"loss": [], "norm": [], "gradients": []}
    for dropping.step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        logits = functional_call(model, adapted(model, adapters, alpha, rank), (x,))
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), y.reshape(-1))
        loss.backward()
        norm = sum(p.grad.square().sum() for p in adapters.values()).sqrt()
        if settings.clip and norm > settings.clip:
            for p in adapters.values():
                p.grad *= settings.clip / norm
        found["norm"].append(norm.item())
        found["loss"].append(loss.item())
        found["gradients"].append({n: p.grad.clone() for n, p in adapters.items()})
        optimizer.step()
    found["gradients"] = found["gradients"][:: STEPS - 1]
    return found | {"parameters": {n: p.detach() for n, p in adapters.items()}}


def on_mesh(flags: str, kind: str, worker) -> dict:
    more, name = KINDS[kind]
    settings = settings_with(f"{flags} {more}")
    mesh, model, pipeline = spread(settings, worker)
    initialize_adapters(model, seed=0)
    found = {"first": of_adapters(model, torch.Tensor.detach, settings.pp)}
    with torch.no_grad():
        for each, p in model.named_parameters():
            if "lora_" in each:
                full = value_of(each, p.shape).to(worker.device)
                shard = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
                p.to_local().copy_(shard.to_local())
    frozen = {n: p for n, p in model.named_parameters() if "lora_" not in n}
    before = {n: p.to_local().clone() for n, p in frozen.items()}
    optimizer, (part, parts) = optimizer_of(name, model, settings), batch_part(mesh)
    found |= {"loss": [], "norm": [], "gradients": []}
    for step, (x, y) in enumerate(batches()):
        x, y = (tensor[part::parts].to(worker.device) for tensor in (x, y))
        with CountByAxis(mesh) if step == STEPS - 1 else nullcontext() as sent:
            loss, norm = train_step(model, pipeline, x, y, optimizer, mesh, settings, step)
        found["loss"].append(mean_over_ranks(loss, mesh))
        found["norm"].append(norm.item())
        if step in (0, STEPS - 1):
            found["gradients"].append(of_adapters(model, lambda p: p.grad, settings.pp))
    check_replicas(model, STEPS, worker)
    trained = [p for n, p in model.named_parameters() if "lora_" in n]
    found["trained"] = [p.to_local().numel() for p in trained]
    found["frozen"] = all(torch.equal(p.to_local(), before[n]) for n, p in frozen.items())
    found["frozen"] &= all(p.grad is None for p in frozen.values())
    found["sent"] = dict(sent.nbytes)
    states = [s for _, _, s in optimizer_tensors({"model": model, "optimizer": optimizer})]
    found["state"] = sum(as_local(state).nbytes for state in states)
    return found | {"parameters": of_adapters(model, torch.Tensor.detach, settings.pp)}


def of_adapters(model, get, stages: int) -> dict[str, torch.Tensor]:
    """Name -> full tensor that `get` returns, for each adapter in all stages."""
    named = {n: full(get(p)) for n, p in model.named_parameters() if "lora_" in n}
    if stages > 1:
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, {n: t.cpu() for n, t in named.items()})
        named = {n: t for stage in of_ranks for n, t in stage.items()}
    return named


def full(tensor: DTensor) -> torch.Tensor:
    return tensor.full_tensor().clone()


def as_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(output: str, group: str) -> None:
    with worker_of_test(gpu_per_rank=True) as worker:
        is_float64 = group == "float64"
        meshes, results = OTHERS[group] if group in OTHERS else GROUPS[group][1], {}
        with in_float64() if is_float64 else nullcontext():
            for mesh, kinds in meshes.items():
                results |= {(mesh, kind): on_mesh(mesh, kind, worker) for kind in kinds}
        if worker.is_main:
            torch.save(results, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
