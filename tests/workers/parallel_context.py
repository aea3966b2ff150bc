"""Ring attention, and a GPT with it, on rings of 1 to 4 ranks: every rank saves what it found.

Started by test_parallel_basics_context.py as one job of 4 ranks. Rings of fewer ranks are
subgroups that do not begin with rank 0, so that a rank's number in its ring is another than in the
job. The reference, one process with whole sequences, is computed by rank 0 alone, with the model as
it is.
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.place
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parallel_basics"))

import attention_ring
import compare_ring_attention as harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention_ring import Ring, own_tokens, ring_attention
from model import GPT, GPTConfig, initialize
from ring_attention import (
    apply_ring_attention,
    count_ring,
    sum_gradients,
)
from torch.utils.checkpoint import checkpoint
from workers.place import worker_of_test

STEPS, BATCH, LENGTH, VOCABULARY = 3, 4, 24, 11
RINGS = {1: [2], 2: [1, 3], 3: [1, 2, 3], 4: [0, 1, 2, 3]}
FLOATS = {"double": torch.float64, "float": torch.float32, "bf16": torch.bfloat16}
ATTENTION = {  # kind -> dtype, factor on the queries
    "double": ("double", 1.0),
    "float": ("float", 1.0),
    "large": ("float", 200.0),  # exp(score) alone would be infinite
    "grouped": ("double", 1.0),  # three query heads share one key head
    "bf16": ("bf16", 1.0),
}
# float64 on all rings; other dtypes on rings whose size does not divide by two.
DOUBLE = ("double", "grouped")
ATTENTIONS = [(kind, size) for kind in ATTENTION for size in RINGS if kind in DOUBLE or size == 3]
MODELS = {  # (ranks of a ring, balanced, what differs)
    (1, True, "sgd"),
    (2, True, "sgd"),
    (2, False, "adamw"),
    (2, False, "sgd double"),
    (2, True, "adamw double tied recompute"),
    (3, False, "sgd"),
    (3, True, "adamw double"),
    (4, True, "sgd"),
    (4, True, "adamw tied"),
    (4, False, "sgd double recompute"),
    (4, True, "adamw double"),
    (2, True, "sgd data"),  # two rings, each with half of the batch
    (2, False, "adamw double tied data"),
}
# The script's sizes for what it counts, on 4 ranks.
SIZES = SimpleNamespace(batch_size=2, heads=2, length=256, dim=16)


def qkv(kind: str) -> list[torch.Tensor]:
    """Queries, keys, values of full sequences, and a gradient of the output."""
    dtype, factor = ATTENTION[kind]
    generator = torch.Generator().manual_seed(3)
    tensors = torch.randn(4, 2, 3, LENGTH, 5, generator=generator, dtype=torch.float64)
    tensors[0] *= factor
    q, k, v, dout = tensors.to(FLOATS[dtype])
    return [q, k[:, :1], v[:, :1], dout] if kind == "grouped" else [q, k, v, dout]


def attention(kind: str, ring: Ring, device) -> dict:
    q, k, v, dout = (
        own_tokens(t.to(device), 2, ring.rank, ring.size, ring.balanced).requires_grad_()
        for t in qkv(kind)
    )
    with mock.patch.object(attention_ring, "TILE", 2):  # chunks have 3 to 24 tokens here
        out = ring_attention(q, k, v, ring)
        out.backward(dout.detach())
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def build(how: str) -> GPT:
    """Odd heads, more positions than tokens, weights large enough that attention is not uniform."""
    config = GPTConfig(VOCABULARY, LENGTH + 5, 2, 3, 15, tied="tied" in how)
    model = initialize(GPT(config), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    for block in model.blocks.values() if "recompute" in how else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model.double() if "double" in how else model


def loss_of(logits, targets):
    """model.py computes its loss in float32 for any dtype of the logits; this one does not."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> list[tuple]:
    generator = torch.Generator().manual_seed(2)
    shape = (BATCH, LENGTH + 1)
    tokens = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(STEPS)]
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def optimizer(how: str, parameters) -> torch.optim.Optimizer:
    if "adamw" in how:
        return torch.optim.AdamW(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def one_process(how: str) -> list[dict]:
    """A single-process training loop."""
    model, steps = build(how), []
    step_of = optimizer(how, model.parameters())
    for x, y in batches():
        step_of.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        named = list(model.named_parameters())
        steps.append({"loss": loss.detach()})
        steps[-1] |= {f"gradient of {n}": p.grad.clone() for n, p in named}
        step_of.step()
        steps[-1] |= {f"value of {n}": p.detach().clone() for n, p in named}
    return steps


def with_ring(how: str, balanced: bool, group, share: int, shares: int, device) -> list[dict]:
    """The script's own loop. share: this ring's share of the batch, if there are several rings."""
    model = apply_ring_attention(build(how).to(device), group, balanced)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = [
        [own_tokens(t[share::shares].to(device), 1, rank, size, balanced) for t in batch]
        for batch in batches()
    ]
    everyone = None if shares > 1 else group  # the gradients are summed over both rings
    return harness.train(model, own, how.split()[0], sum_gradients, everyone)


def collect(worker) -> dict:
    found, device = {}, worker.device
    for size, ranks in RINGS.items():
        group = dist.new_group(ranks)
        if worker.rank not in ranks:
            continue
        for balanced in (True, False):
            for causal in (True, False):
                ring = Ring(group, causal, balanced)
                key = (size, balanced, causal)
                found["visible", *key] = [list(ring.visible(step)) for step in range(size)]
                for kind, _ in (a for a in ATTENTIONS if a[1] == size):
                    found["attention", kind, *key] = attention(kind, ring, device)
        for case in sorted(MODELS):
            if case[0] == size and "data" not in case[2]:
                found["model", case] = with_ring(case[2], case[1], group, 0, 1, device)
    dist.barrier()
    rings = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for case in sorted(MODELS):
        if "data" in case[2]:
            mine = worker.rank % 2
            found["model", case] = with_ring(case[2], case[1], rings[mine], mine, 2, device)
    for balanced in (True, False):
        found["counts", balanced] = count_ring(SIZES, worker, balanced)
    found["refusals"] = refusals(rings[worker.rank % 2])
    if worker.is_main:
        for how in {how for _, _, how in MODELS}:
            found["one process", how] = one_process(how)
        for kind, counts in harness.count_one_process(SIZES, worker.device).items():
            found["counts", kind] = counts
    return found


def refusals(group) -> list[str]:
    """Before anything is sent."""
    said = []
    odd = torch.zeros(1, 1, 3, 2)
    for attempt in (
        lambda: own_tokens(torch.arange(10), 0, 1, 4),
        lambda: ring_attention(odd, odd, odd, Ring(group)),
    ):
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))
    return said


def main() -> None:
    harness.cross_entropy = loss_of
    harness.OPTIMIZERS = {
        name: lambda p, name=name: optimizer(name, p) for name in ("sgd", "adamw")
    }
    with worker_of_test(gpu_per_rank=True) as worker:
        torch.save(collect(worker), Path(sys.argv[1]) / f"{worker.rank}.pt")


if __name__ == "__main__":
    main()
