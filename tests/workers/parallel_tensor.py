"""Tensor and sequence parallelism in every way of the matrix; saves what came out.

Started by test_parallel_basics_tensor.py with 4 ranks; some cases use the first 2 or 3 of them.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.place
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parallel_basics"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import OPTIMIZERS, as_it_is, norm_of, train
from counting import CountCollectives
from model import GPT, GPTConfig, cross_entropy, initialize
from sequence_parallel import apply_sequence_parallel, measure_kept, sum_gradients
from sequence_parallel import run as run_sequence_parallel
from tensor_parallel import apply_tensor_parallel
from tensor_parallel import run as run_tensor_parallel
from tensor_parallel_from_scratch import (
    CopyToRanks,
    ReduceFromRanks,
    cut_dim,
    cut_model,
    full_tensor,
    gradient_norm,
    local_part,
    vocab_parallel_cross_entropy,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from workers.place import on_cpu, worker_of_test

CPU = torch.device("cpu")
SMALL = {"vocab_size": 256, "length": 12, "layers": 2, "heads": 4, "dim": 32}
ODD = {"vocab_size": 258, "length": 7, "layers": 3, "heads": 6, "dim": 30}
CASES = {  # name -> (ranks, sizes, tied, optimizer)
    "2 sgd": (2, SMALL, False, "sgd"),
    "2 adamw": (2, SMALL, False, "adamw"),
    "2 tied sgd": (2, SMALL, True, "sgd"),
    "2 tied adamw": (2, SMALL, True, "adamw"),
    "2 recompute": (2, SMALL, False, "sgd"),
    "3 odd sgd": (3, ODD, False, "sgd"),
    "4 sgd": (4, SMALL, False, "sgd"),
    "4 tied adamw": (4, SMALL, True, "adamw"),
}
DTENSORS = {  # name -> (sequence parallel, logits sharded, optimizer, gradients summed by hand)
    "gathered sgd": (False, False, "sgd", False),
    "gathered adamw": (False, False, "adamw", False),
    "cut sgd": (False, True, "sgd", False),
    "cut adamw": (False, True, "adamw", False),
    "cut sgd, one call for each group": (False, True, "sgd foreach", False),
    "cut adamw, one call for each group": (False, True, "adamw foreach", False),
    "cut, of sequence_parallel.py": (False, True, "sgd", False),
    "sequence sgd": (True, True, "sgd", True),
    "sequence adamw": (True, True, "adamw", True),
    "sequence lazy adamw": (True, True, "adamw", False),
}


def foreach(make):
    """The optimizer that `make` makes, as on a GPU: one call updates all parameters of a group."""

    def made(parameters):
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            group["foreach"] = True
        return optimizer

    return made


OPTIMIZERS |= {f"{name} foreach": foreach(make) for name, make in OPTIMIZERS.items()}


def arguments(sizes: dict, optimizer: str) -> SimpleNamespace:
    return SimpleNamespace(**sizes, optimizer=optimizer, steps=4, batch_size=3, seed=1)


def config_of(sizes: dict, tied: bool = False) -> GPTConfig:
    names = ("vocab_size", "length", "layers", "heads", "dim")
    return GPTConfig(*(sizes[name] for name in names), tied)


def one_process(sizes: dict, optimizer: str, tied: bool = False) -> list[dict]:
    model = initialize(GPT(config_of(sizes, tied)), seed=1)
    return train(model, cross_entropy, norm_of, as_it_is, arguments(sizes, optimizer), CPU)


def by_hand(name: str, group, device) -> dict:
    _, sizes, tied, optimizer = CASES[name]
    model = cut_model(initialize(GPT(config_of(sizes, tied)), seed=1).to(device), group)
    for block in model.blocks.values() if "recompute" in name else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    count = CountCollectives(model)
    steps = train(
        model,
        partial(vocab_parallel_cross_entropy, group=group),
        partial(gradient_norm, group=group),
        partial(full_tensor, group=group),
        arguments(sizes, optimizer),
        device,
        count,
    )
    named = dict(model.named_parameters())
    copies = {n: p.detach().clone() for n, p in named.items() if cut_dim(n) is None}
    own = {
        "held": {n: tuple(p.shape) for n, p in named.items()},
        "memory": {n: p.untyped_storage().nbytes() for n, p in named.items()},
        "copies": copies,
        "sent": (count.calls, count.nbytes),
    }
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, on_cpu(own), group=group)
    return {"steps": steps, "ranks": everyone}


def with_dtensors(name: str, worker) -> dict:
    sequence, cut_logits, optimizer, by_hand = DTENSORS[name]
    args, config = arguments(SMALL, optimizer), config_of(SMALL)
    if sequence or "sequence" in name:  # that file has the other plan, too, to compare
        finish = sum_gradients if by_hand else None
        model, steps, count = run_sequence_parallel(config, args, worker, sequence, finish)
    else:
        model, steps, count = run_tensor_parallel(config, args, worker, cut_logits)
    found = {"steps": steps, "sent": (count.calls, count.nbytes)}
    if cut_logits:
        found["kept"] = measure_kept(model, args, worker)
    return found


def operators(rank: int, device) -> dict:
    """f and g: results and gradients on each rank."""
    x = torch.full((2,), 10.0**rank, requires_grad=True, device=device)
    shared, summed = CopyToRanks.apply(x, None), ReduceFromRanks.apply(x * 1, None)
    (to_share,) = torch.autograd.grad(shared, x, torch.full_like(x, 2.0 * 10**rank))
    (to_sum,) = torch.autograd.grad(summed, x, torch.full_like(x, 3.0))
    return {"f": shared.detach(), "f back": to_share, "g": summed.detach(), "g back": to_sum}


def losses(device) -> list[dict]:
    """Cross-entropy over sharded logits, and torch's over full logits; extreme values, too."""
    found = []
    for scale, shift, dtype, left_out in (
        (1, 0, torch.float32, 0),
        (30, 1e4, torch.float32, 0),
        (5, 0, torch.bfloat16, 0),
        (1, 0, torch.float32, 4),
    ):
        generator = torch.Generator().manual_seed(0)
        logits = (torch.randn(5, 7, 20, generator=generator) * scale + shift).to(device, dtype)
        targets = torch.randint(20, (5, 7), generator=generator).to(device)
        targets[:left_out] = -100  # padding, or a prompt
        logits.requires_grad_()
        expected = 3 * F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        expected.backward()
        mine = local_part(logits.detach(), 2).requires_grad_()
        loss = 3 * vocab_parallel_cross_entropy(mine, targets)
        loss.backward()
        gradient = gathered(mine.grad)
        found.append({"loss": (loss.detach(), expected.detach())})
        found[-1]["gradient"] = (gradient, logits.grad)
    return found


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts, -1)


def outputs(device) -> dict:
    """The outputs of the sharded model and of its embedding, without gradients."""
    tokens = torch.arange(24, device=device).view(2, 12) * 10
    with torch.no_grad():
        one = initialize(GPT(config_of(SMALL)), seed=1).to(device)
        ours = cut_model(initialize(GPT(config_of(SMALL)), seed=1).to(device))
        embedded = (ours.token_embedding(tokens), one.token_embedding(tokens))
        logits, generator = ours(tokens), torch.Generator().manual_seed(0)
        x = torch.randn(2, 12, SMALL["dim"], generator=generator).to(device)
        starts = torch.arange(12, device=device).div(5, rounding_mode="floor").mul(5).expand(2, 12)
        attention = one.blocks["0"].attention, ours.blocks["0"].attention
        return {
            "documents": [attention[0](x, starts), attention[1](x, starts)],
            "embedded": embedded,
            "logits": (gathered(logits), one(tokens)),
            "here": logits.shape,
        }


def padded_vocabulary(device) -> dict:
    """The loss that the model itself computes, of six words that pad the vocabulary; its norm."""
    config = replace(config_of(SMALL), token_count=250, qkv_bias=True)
    tokens = torch.arange(24, device=device).view(2, 12) * 10
    targets = tokens.roll(1, 1)
    targets[0, :5] = -100
    found, norms = [], (norm_of, gradient_norm)
    for cut, norm in zip((as_one, cut_model), norms, strict=True):
        model = cut(initialize(GPT(config), seed=1).to(device))
        loss = model(tokens, targets)
        loss.backward()
        found.append((loss.detach(), norm(model).detach()))
    return {"loss": [loss for loss, _ in found], "norm": [norm for _, norm in found]}


def as_one(model: GPT) -> GPT:
    return model


def norm_of_trained(model: GPT) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def frozen(device) -> dict:
    """The norm by hand, if only sharded parameters train, or only replicated ones."""
    tokens = torch.arange(24, device=device).view(2, 12) * 10
    found = {}
    for end in ("query.weight", "norm.weight"):
        found[end] = []
        for cut, norm in ((as_one, norm_of_trained), (cut_model, gradient_norm)):
            model = cut(initialize(GPT(config_of(SMALL)), seed=1).to(device))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith(end))
            model(tokens, tokens).backward()
            found[end].append(norm(model).detach())
    return found


def refusals(worker) -> dict[str, str]:
    llama, mesh = GPTConfig(architecture="llama"), init_device_mesh(worker.device.type, (4,))
    norms = GPTConfig(qk_norm=True)  # each rank would have the gradient of its own heads
    small = GPT(config_of(SMALL)).to(worker.device)
    sequence = apply_sequence_parallel(GPT(config_of(SMALL)).to(worker.device), mesh)
    tokens = torch.zeros(2, 10, dtype=torch.int64, device=worker.device)
    small(tokens).sum().backward()
    tries = {
        "heads": lambda: cut_model(GPT(GPTConfig(heads=6, dim=36))),
        "vocab_size": lambda: cut_model(GPT(GPTConfig(vocab_size=258))),
        "kv_heads": lambda: cut_model(GPT(GPTConfig(heads=4, kv_heads=2, dim=32))),
        "mlp_dim": lambda: cut_model(GPT(GPTConfig(mlp_dim=9))),
        "norms by hand": lambda: cut_model(GPT(norms)),
        "norms": lambda: apply_tensor_parallel(GPT(norms), mesh),
        "norms, sequence": lambda: apply_sequence_parallel(GPT(norms), mesh),
        "llama by hand": lambda: cut_model(GPT(llama)),
        "llama": lambda: apply_tensor_parallel(GPT(llama), mesh),
        "llama, sequence": lambda: apply_sequence_parallel(GPT(llama), mesh),
        "length": lambda: sequence(tokens),
        "no style": lambda: sum_gradients(small),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    return found


def collect(worker) -> dict:
    # A rank's number in its group is another one in the job: [0, 3], [0, 2, 3], all.
    members = {n: [0, *range(5 - n, 4)] for n in (2, 3, 4)}
    groups = {n: dist.new_group(ranks) for n, ranks in members.items()}
    results = {"refusals": refusals(worker), "outputs": outputs(worker.device)}
    results["losses"] = losses(worker.device)
    results["padded"] = padded_vocabulary(worker.device)
    results["frozen"] = frozen(worker.device)
    everyone = [None] * worker.world_size
    dist.all_gather_object(everyone, on_cpu(operators(worker.rank, worker.device)))
    results["operators"] = everyone
    for name, (ranks, *_) in CASES.items():
        if worker.rank in members[ranks]:
            results["by hand", name] = by_hand(name, groups[ranks], worker.device)
    dist.barrier()
    for name in DTENSORS:
        results["dtensors", name] = with_dtensors(name, worker)
    if worker.is_main:
        for _, sizes, tied, optimizer in CASES.values():
            key = (sizes["dim"], tied, optimizer)
            if key not in results:
                results[key] = one_process(sizes, optimizer, tied)
    return results


def main() -> None:
    with worker_of_test(gpu_per_rank=True) as worker:
        results = collect(worker)
        if worker.is_main:
            torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
