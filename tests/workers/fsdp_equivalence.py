"""Run fsdp_basics/train.py's own step on every case of the matrix and save what came out (rank 0).

Started by test_fsdp_basics.py with 2, 3 and 4 ranks, and as one process for the reference. The
global batches are the same in all of them. Names of cases after the file: only these.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.batches
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fsdp_basics"))

import torch
import torch.nn.functional as F
import train
from communication import CountTraffic
from config import Settings
from materialize import build_on_meta, initialize, move_buffers
from model import VisionTransformer
from optimizer import make_optimizer, set_learning_rate
from task import compute_loss, units
from torch import nn
from workers.batches import GLOBAL_BATCH, batches, padded_loss
from workers.place import gather_shards, worker_of_test

STEPS = 3
SETTINGS = {"batch_size": GLOBAL_BATCH, "lr": 1e-2, "warmup": 0.3, "weight_decay": 0.1}
CASES = {
    "sgd": {},
    "adamw": {"optimizer": "adamw"},
    "sgd, keep gathered": {"keep_gathered": True},
    "adamw, keep gathered, accumulate": {
        "optimizer": "adamw", "keep_gathered": True, "accumulate": 2,
    },
    "sgd, accumulate": {"accumulate": 2},
    "sgd, accumulate, reduce once": {"accumulate": 2, "reduce_once": True},
    "sgd, clip": {"clip": 0.1},
    "adamw, clip, accumulate": {"optimizer": "adamw", "clip": 0.1, "accumulate": 2},
    "sgd, offload, clip": {"offload": True, "clip": 0.1},
    "adamw, recompute": {"optimizer": "adamw", "recompute": True},
    "sgd, prefetch": {"prefetch": 2},
    "sgd, fewer rows than ranks": {"model": "one patch"},
    "sgd, frozen": {"model": "frozen"},
    "sgd, unused": {"model": "unused"},
    "sgd, tied": {"model": "tied"},
    "adamw, tied, recompute, accumulate": {
        "optimizer": "adamw", "model": "tied", "recompute": True, "accumulate": 2,
    },
    "sgd, hybrid": {"dp_replicate": 2},
    "adamw, hybrid, clip": {"optimizer": "adamw", "dp_replicate": 2, "clip": 0.1},
    "sgd, hybrid, padded, accumulate": {"dp_replicate": 2, "padded": True, "accumulate": 2},
    "sgd, padded": {"padded": True},
    "sgd, padded, accumulate, clip": {"padded": True, "accumulate": 2, "clip": 0.1},
    "adamw, padded": {"padded": True, "optimizer": "adamw"},
    "adamw, padded, accumulate, reduce once": {
        "padded": True, "optimizer": "adamw", "accumulate": 2, "reduce_once": True,
    },
    "sgd, bf16": {"precision": "bf16"},
    "sgd, bf16, clip, accumulate": {
        "precision": "bf16", "clip": 0.1, "accumulate": 2,
    },
}  # fmt: skip
HYBRID_RANKS = 4  # two copies, each in two shards


class Tied(VisionTransformer):
    """A second head with the weight of the first."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.other = nn.Linear(self.head.in_features, self.head.out_features)
        self.other.weight = self.head.weight

    def forward(self, images):
        return super().forward(images) + self.other(self.position.mean(0))


class Unused(VisionTransformer):
    """One layer takes no part in the forward pass."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.idle = nn.Linear(3, 3)


def build(kind: str) -> nn.Module:
    """20, 60 and 80 rows divide by 4 but not by 3; 10 classes and 3 idle rows by neither."""
    torch.manual_seed(0)
    sizes = {"dim": 20, "depth": 2, "patch_size": 8 if kind == "one patch" else 2}
    model = {"tied": Tied, "unused": Unused}.get(kind, VisionTransformer)(**sizes)
    if kind == "frozen":
        model.patches.requires_grad_(False)
        model.blocks[0].expand.weight.requires_grad_(False)
    return model


def reference(model="plain", optimizer="sgd", clip=0.0, padded=False, **_) -> list[dict]:
    """One process in plain PyTorch, without a line of train.py's step."""
    module = build(model)
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
    if optimizer == "sgd":
        optim = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    else:
        optim = torch.optim.AdamW(groups, lr=1e-2)
    steps = []
    for step, (images, labels) in enumerate(batches(STEPS, padded)):
        for group in optim.param_groups:  # a step up to the peak, then half a cosine
            group["lr"] = 1e-2 * (1, 1, 0.5)[step]
        optim.zero_grad()
        loss = F.cross_entropy(module(images), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip or math.inf)
        steps.append({"loss": loss.item(), "norm before clipping": norm.item()})
        note_gradients(steps, module)
        optim.step()
    note_parameters(steps, module)
    return steps


def run_case(worker, model="plain", recompute=False, padded=False, **options) -> list[dict]:
    settings = Settings(**SETTINGS | {"optimizer": "sgd", "clip": 0.0} | options)
    module = sharded(model, settings, worker)
    for block in module.blocks:
        block.recompute = recompute
    optim = make_optimizer(module, settings)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    train.compute_loss = padded_loss if padded else compute_loss
    steps = []
    for step, (images, labels) in enumerate(batches(STEPS, padded)):
        local = slice(worker.rank, None, worker.world_size)
        set_learning_rate(optim, step, STEPS, settings)
        batch = [tensor[local].to(worker.device) for tensor in (images, labels)]
        loss, norm = train.train_step(module, batch, optim, scaler, settings, worker)
        steps.append({"loss": loss.item(), "norm before clipping": norm.item()})
        note_gradients(steps, module)
    note_parameters(steps, module)
    return steps


def sharded(model: str, settings: Settings, worker) -> nn.Module:
    """As train.train() makes it."""
    train.units = tied_units if model == "tied" else units
    module = build_on_meta(lambda: build(model))
    place = torch.device("cpu") if settings.offload else worker.device
    train.shard(module, place, settings, worker)
    initialize(module, lambda: build(model), worker)
    move_buffers(module, worker.device)
    return module


def tied_units(model: Tied) -> list:
    return [model.patches, *model.blocks, [model.norm, model.head, model.other]]


def reduce_scatters_per_step(worker, **options) -> int:
    settings = Settings(batch_size=6 * worker.world_size, optimizer="sgd", **options)
    module = sharded("plain", settings, worker)
    batch = [torch.rand(6, 1, 8, 8), torch.zeros(6, dtype=torch.int64)]
    batch = [tensor.to(worker.device) for tensor in batch]
    optim = make_optimizer(module, settings)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    train.compute_loss = compute_loss
    with CountTraffic() as count:
        train.train_step(module, batch, optim, scaler, settings, worker)
    return count.calls["reduce_scatter"]


def note_gradients(steps: list[dict], module: nn.Module) -> None:
    """Of the first and the last step: to gather them costs more than a step."""
    if len(steps) in (1, STEPS):
        gradients = {
            name: torch.zeros(p.shape) if p.grad is None else gather_shards(p.grad)
            for name, p in module.named_parameters()
            if p.requires_grad
        }
        steps[-1]["gradients"] = gradients
        steps[-1]["norm"] = torch.nn.utils.get_total_norm(gradients.values())


def note_parameters(steps: list[dict], module: nn.Module) -> None:
    """Of the last step: all steps led to them."""
    steps[-1]["parameters"] = {n: gather_shards(p.detach()) for n, p in module.named_parameters()}


def main() -> None:
    output, *names = sys.argv[1:]
    with worker_of_test() as worker:
        results = {
            name: reference(**case) if worker.world_size == 1 else run_case(worker, **case)
            for name, case in CASES.items()
            if worker.world_size in (1, HYBRID_RANKS) or "dp_replicate" not in case
            if name in (names or CASES)
        }
        if worker.world_size > 1 and not names:
            results["reduce_scatters"] = [
                reduce_scatters_per_step(worker, **options)
                for options in ({}, {"accumulate": 3}, {"accumulate": 3, "reduce_once": True})
            ]
        if worker.is_main:
            torch.save(results, output)


if __name__ == "__main__":
    main()
