"""Run fsdp_basics/train.py's own step on every case of the matrix and save what came out (rank 0).

Started by test_fsdp_basics.py with 2, 3 and 4 ranks, and as one process: then the model is bare,
without sharding and without accumulation. The global batches are the same in all of them.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fsdp_basics"))

import torch
import train
from model import VisionTransformer
from runtime import distributed_worker
from sharding import materialize, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

STEPS, GLOBAL_BATCH = 3, 24
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


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def run_case(
    worker, model="plain", optimizer="sgd", accumulate=1, clip=0.0, recompute=False, hybrid=False,
    **options,
) -> list[dict]:  # fmt: skip
    args = SimpleNamespace(optimizer=optimizer, lr=1e-2, accumulate=accumulate, clip=clip)
    if worker.world_size == 1:  # the reference
        module, args.accumulate = build(model), 1
        module.set_requires_gradient_sync = lambda _: None
    else:
        shape, names = ((worker.world_size,), None)
        if hybrid:
            shape, names = (2, worker.world_size // 2), ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with torch.device("meta"):
            module = build(model)
        shard(module, mesh, **options)
        materialize(module, lambda: build(model), torch.device("cpu"), worker.is_main)
    for block in module.blocks:
        block.recompute = recompute
    optim = train.make_optimizer(args, module)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    generator = torch.Generator().manual_seed(1)
    steps = []
    for step in range(STEPS):
        images = torch.rand(GLOBAL_BATCH, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (GLOBAL_BATCH,), generator=generator)
        share = slice(worker.rank, None, worker.world_size)
        loss = train.train_step(module, images[share], labels[share], optim, scaler, args)
        steps.append({"loss": train.all_sum([loss], worker)[0] / worker.world_size})
        if step in (0, STEPS - 1):  # to gather them costs more than a step
            gradients = {
                name: torch.zeros(p.shape) if p.grad is None else whole(p.grad)
                for name, p in module.named_parameters()
                if p.requires_grad
            }
            norm = torch.nn.utils.get_total_norm(gradients.values())
            steps[-1] |= {"gradients": gradients, "norm": norm}
        if step == STEPS - 1:  # all steps led to them
            parameters = {n: whole(p.detach()) for n, p in module.named_parameters()}
            steps[-1]["parameters"] = parameters
    return steps


def main() -> None:
    with distributed_worker("cpu") as worker:
        results = {
            name: run_case(worker, **case)
            for name, case in CASES.items()
            if worker.world_size in (1, HYBRID_RANKS) or "hybrid" not in case
        }
        if worker.is_main:
            torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
