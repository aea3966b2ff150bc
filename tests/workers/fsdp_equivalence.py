"""Run fsdp_basics/train.py's own step on every case of the matrix and save what came out (rank 0).

Started by test_fsdp_basics.py with 2, 3 and 4 ranks, and as one process for the reference. The
global batches are the same in all of them.
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
from materialize import materialize
from model import VisionTransformer
from runtime import distributed_worker
from sharding import shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from workers.batches import batches

STEPS = 3
CASES = {
    "sgd": {},
    "adamw": {"optimizer": "adamw"},
    "sgd, keep gathered": {"reshard_after_forward": False},
    "adamw, keep gathered, accumulate": {
        "optimizer": "adamw", "reshard_after_forward": False, "accumulate": 2,
    },
    "sgd, accumulate": {"accumulate": 2},
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
    "sgd, hybrid": {"hybrid": True},
    "adamw, hybrid, clip": {"optimizer": "adamw", "hybrid": True, "clip": 0.1},
    "sgd, bf16": {"compute_dtype": torch.bfloat16},
    "sgd, bf16, clip, accumulate": {
        "compute_dtype": torch.bfloat16, "clip": 0.1, "accumulate": 2,
    },
}  # fmt: skip
HYBRID_RANKS = 4  # the other worlds are not cut into copies and shards


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


def full_tensor(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def reference(model="plain", optimizer="sgd", clip=0.0, **_) -> list[dict]:
    """One process in plain PyTorch, without a line of train.py's step."""
    module = build(model)
    optim = train.make_optimizer(Settings(optimizer=optimizer, lr=1e-2), module)
    steps = []
    for images, labels in batches(STEPS):
        optim.zero_grad()
        loss = F.cross_entropy(module(images), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip or math.inf)
        steps.append({"loss": loss.item(), "norm before clipping": norm.item()})
        note_gradients(steps, module)
        optim.step()
    note_parameters(steps, module)
    return steps


def run_case(
    worker, model="plain", optimizer="sgd", accumulate=1, clip=0.0, recompute=False, hybrid=False,
    **options,
) -> list[dict]:  # fmt: skip
    shape, names = ((worker.world_size,), None)
    if hybrid:
        shape, names = (2, worker.world_size // 2), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with torch.device("meta"):
        module = build(model)
    shard(module, mesh, **options)
    materialize(module, lambda: build(model), torch.device("cpu"), worker)
    for block in module.blocks:
        block.recompute = recompute
    settings = Settings(optimizer=optimizer, lr=99.0, accumulate=accumulate, clip=clip)
    optim = train.make_optimizer(settings, module)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    steps = []
    for images, labels in batches(STEPS):
        local = slice(worker.rank, None, worker.world_size)
        loss, norm = train.train_step(  # at its own rate, not the optimizer's of 99
            module, images[local], labels[local], optim, scaler, 1e-2, settings
        )
        loss = train.all_sum([loss], worker)[0] / worker.world_size
        steps.append({"loss": loss, "norm before clipping": norm.item()})
        note_gradients(steps, module)
    note_parameters(steps, module)
    return steps


def reduce_scatters_per_step(worker, accumulate: int) -> int:
    module = shard(build("plain"), init_device_mesh("cpu", (worker.world_size,)))
    settings = Settings(optimizer="sgd", accumulate=accumulate)
    images, labels = torch.rand(6, 1, 8, 8), torch.zeros(6, dtype=torch.int64)
    optim = train.make_optimizer(settings, module)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with CountTraffic() as count:
        train.train_step(module, images, labels, optim, scaler, 0.1, settings)
    return count.calls["reduce_scatter"]


def note_gradients(steps: list[dict], module: nn.Module) -> None:
    """Of the first and the last step: to gather them costs more than a step."""
    if len(steps) in (1, STEPS):
        gradients = {
            name: torch.zeros(p.shape) if p.grad is None else full_tensor(p.grad)
            for name, p in module.named_parameters()
            if p.requires_grad
        }
        steps[-1]["gradients"] = gradients
        steps[-1]["norm"] = torch.nn.utils.get_total_norm(gradients.values())


def note_parameters(steps: list[dict], module: nn.Module) -> None:
    """Of the last step: all steps led to them."""
    steps[-1]["parameters"] = {n: full_tensor(p.detach()) for n, p in module.named_parameters()}


def main() -> None:
    with distributed_worker("cpu") as worker:
        results = {
            name: reference(**case) if worker.world_size == 1 else run_case(worker, **case)
            for name, case in CASES.items()
            if worker.world_size in (1, HYBRID_RANKS) or "hybrid" not in case
        }
        if worker.world_size > 1:
            counts = {parts: reduce_scatters_per_step(worker, parts) for parts in (1, 3)}
            results["reduce_scatters"] = counts
        if worker.is_main:
            torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
