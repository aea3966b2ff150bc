"""Train a model under one strategy for a few steps, and measure the memory of the last two."""

import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import VisionTransformer
from process_memory import memory_in_use, peak_memory, reset_peak
from strategies import build, expected_memory, units_of
from tensor_memory import KINDS, Inventory, expected_activations
from torch.distributed.fsdp import FSDPModule

HEADS = 4
MOMENTS = ("between steps", "end of forward", "end of backward")


def measure(name: str, dim: int, depth: int, images, labels, mesh, device) -> dict:
    """The bytes that this rank holds under the strategy `name`: counted, and by formula.

    images, labels: the global batch. Returns

    moments: moment -> kind -> bytes counted.
    measured: kind -> the largest count of all moments. formula: kind -> expected bytes.
    peak: peak of the process in a step, minus its memory before the model was built.
    left: memory of the process after the model is deleted, minus the same.
    """
    base = memory_in_use(device)
    torch.manual_seed(0)
    model = VisionTransformer(dim=dim, depth=depth, heads=HEADS).to(device)
    units = units_of(model)
    model, optimizer = build(name, model, mesh)
    if name != "one process":  # which trains on the full global batch, on every rank
        local = slice(dist.get_rank(), None, mesh.size())
        images, labels = images[local].clone(), labels[local].clone()

    for _ in range(2):  # creates the optimizer state, and lets DDP rebuild its buckets
        train_step(model, optimizer, images, labels)
    moments = count_at_moments(model, optimizer, images, labels)
    reset_peak(device)
    train_step(model, optimizer, images, labels)
    peak = peak_memory(device) - base

    del model, optimizer
    gc.collect()  # they are full of reference cycles
    formula = expected_memory(name, units, dist.get_rank(), mesh.size())
    formula["activations"] = expected_activations(dim, depth, HEADS, len(images))
    return {
        "moments": moments,
        "measured": {kind: max(m[kind] for m in moments.values()) for kind in KINDS},
        "formula": formula,
        "peak": peak,
        "left": memory_in_use(device) - base,
    }


def train_step(model, optimizer, images, labels) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def count_at_moments(model, optimizer, images, labels) -> dict[str, dict[str, int]]:
    """Run one step, and count at three moments of it: moment -> kind -> bytes."""
    inventory = Inventory(model, optimizer)
    inventory.remember_gradients()
    optimizer.zero_grad()
    if isinstance(model, FSDPModule):  # DDP's buckets keep them
        inventory.wait_until_freed()
    between = inventory.count()
    with inventory.watch_activations():
        loss = F.cross_entropy(model(images), labels)
    end_of_forward = inventory.count()
    inventory.forget_activations()
    loss.backward()
    end_of_backward = inventory.count()
    optimizer.step()
    return dict(zip(MOMENTS, (between, end_of_forward, end_of_backward), strict=True))
