"""Run train.py's own step on every case of the matrix and save what came out (rank 0).

Started by test_ddp_basics.py with 2 and 3 ranks, and as one process: that is the reference, a loop
in plain PyTorch without a line of train.py's step. The global batches are the same in all of them.

In float64, but for the loss, which train.py takes in float32: AdamW divides gradients by their own
size and so magnifies rounding, on some processors more than on others.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.batches
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ddp_basics"))

import torch
import torch.nn.functional as F
import train
from config import Settings
from model import SmallCNN
from runtime import distributed_worker
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers.batches import batches

STEPS = 5
CASES = {
    "sgd": {},
    "adamw": {"optimizer": "adamw"},
    "sgd, accumulate": {"accumulate": 4},
    "adamw, accumulate": {"optimizer": "adamw", "accumulate": 2},
    "sgd, clip": {"clip": 0.1},
    "adamw, clip, accumulate": {"optimizer": "adamw", "clip": 0.1, "accumulate": 2},
    "sgd, frozen": {"model": "frozen"},
    "sgd, unused": {"model": "unused"},
    "sgd, tied": {"model": "tied"},
    "adamw, tied, accumulate": {"optimizer": "adamw", "model": "tied", "accumulate": 2},
}


class Tied(nn.Module):
    """Two layers that share one weight matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, images):
        return self.head(self.second(self.first(images.flatten(1)).relu()).relu())


class Unused(SmallCNN):
    """One layer takes no part in the forward pass."""

    def __init__(self):
        super().__init__(channels=8)
        self.idle = nn.Linear(3, 3)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "tied":
        return Tied().double()
    if kind == "unused":
        return Unused().double()
    model = SmallCNN(channels=8).double()
    if kind == "frozen":
        model.net[0].requires_grad_(False)
    return model


def reference(model="plain", optimizer="sgd", clip=0.0, **_) -> list[dict]:
    """One process: the steps as everybody would write them."""
    module = build(model)
    optim = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if optimizer == "sgd":
        optim = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    steps = []
    for images, labels in batches(STEPS):
        optim.zero_grad()
        loss = F.cross_entropy(module(images.double()), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip or math.inf)
        optim.step()
        steps.append(noted(module, loss.item(), norm))
    return steps


def run_case(worker, model="plain", optimizer="sgd", accumulate=1, clip=0.0) -> list[dict]:
    module = build(model)
    if worker.rank > 0:  # DDP must replace this by rank 0's weights
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
    ddp_model = DistributedDataParallel(
        module,
        gradient_as_bucket_view=True,
        static_graph=accumulate == 1 and model != "unused",
        find_unused_parameters=model == "unused",
    )
    settings = Settings(optimizer=optimizer, lr=99.0, accumulate=accumulate, clip=clip)
    optim = train.make_optimizer(settings, module)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    steps = []
    for images, labels in batches(STEPS):
        local = slice(worker.rank, None, worker.world_size)
        loss, norm = train.train_step(  # at its own rate, not the optimizer's of 99
            ddp_model, images[local].double(), labels[local], optim, scaler, 1e-2, settings
        )
        steps.append(noted(module, train.all_sum([loss], worker)[0] / worker.world_size, norm))
    return steps


def noted(module: nn.Module, loss: float, norm_before_clipping: torch.Tensor) -> dict:
    gradients = {  # an unused parameter has none in one process, and zeros under DDP
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    return {
        "loss": loss,
        "gradients": gradients,
        "norm": torch.nn.utils.get_total_norm(gradients.values()),
        "norm before clipping": norm_before_clipping,
        "parameters": {n: p.detach().clone() for n, p in module.named_parameters()},
    }


def all_reduces_per_step(accumulate: int) -> int:
    """How many buckets one step of train.py sends (the model fits into one bucket)."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    sent = []

    def hook(state, bucket):
        sent.append(bucket.index())
        return allreduce_hook(None, bucket)

    ddp_model = DistributedDataParallel(build("plain"))
    ddp_model.register_comm_hook(None, hook)
    settings = Settings(optimizer="sgd", lr=0.1, accumulate=accumulate)
    images, labels = torch.rand(8, 1, 8, 8).double(), torch.zeros(8, dtype=torch.int64)
    optim = train.make_optimizer(settings, ddp_model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    train.train_step(ddp_model, images, labels, optim, scaler, 0.1, settings)
    return len(sent)


def main() -> None:
    with distributed_worker("cpu") as worker:
        if worker.world_size == 1:
            results = {name: reference(**case) for name, case in CASES.items()}
        else:
            results = {name: run_case(worker, **case) for name, case in CASES.items()}
            results["all_reduces"] = {n: all_reduces_per_step(n) for n in (1, 2, 4)}
        if worker.is_main:
            torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
