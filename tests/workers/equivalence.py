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
from optimizer import make_optimizer, set_learning_rate
from task import compute_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers.batches import GLOBAL_BATCH, batches, padded_loss
from workers.place import worker_of_test

STEPS = 5
SETTINGS = {"batch_size": GLOBAL_BATCH, "lr": 1e-2, "warmup": 0.3, "weight_decay": 0.1}
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
    "sgd, padded": {"padded": True},
    "sgd, padded, accumulate": {"padded": True, "accumulate": 2, "clip": 0.1},
    "adamw, padded": {"padded": True, "optimizer": "adamw"},
    "adamw, padded, accumulate": {"padded": True, "optimizer": "adamw", "accumulate": 2},
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


def reference(model="plain", optimizer="sgd", clip=0.0, padded=False, **_) -> list[dict]:
    """One process: the steps as everybody would write them."""
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
        for group in optim.param_groups:  # two steps up to the peak, then half a cosine
            factor = (0.5, 1, 1, 0.75, 0.25)[step]
            group["lr"] = 1e-2 * factor
        optim.zero_grad()
        loss = F.cross_entropy(module(images.double()), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip or math.inf)
        optim.step()
        steps.append(noted(module, loss.item(), norm))
    return steps


def run_case(
    worker, model="plain", optimizer="sgd", accumulate=1, clip=0.0, padded=False
) -> list[dict]:
    module = build(model).to(worker.device)
    if worker.rank > 0:  # DDP must replace this by rank 0's weights
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
    ddp_model = DistributedDataParallel(
        module, gradient_as_bucket_view=True, find_unused_parameters=model == "unused"
    )
    settings = Settings(**SETTINGS, optimizer=optimizer, accumulate=accumulate, clip=clip)
    optim = make_optimizer(module, settings)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    train.compute_loss = padded_loss if padded else compute_loss
    steps = []
    for step, (images, labels) in enumerate(batches(STEPS, padded)):
        local = slice(worker.rank, None, worker.world_size)
        set_learning_rate(optim, step, STEPS, settings)
        batch = [tensor[local].to(worker.device) for tensor in (images.double(), labels)]
        loss, norm = train.train_step(ddp_model, batch, optim, scaler, settings, worker)
        steps.append(noted(module, float(loss), norm))
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


def all_reduces_per_step(worker, accumulate: int) -> int:
    """How many buckets one step of train.py sends (the model fits into one bucket)."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    sent = []

    def hook(state, bucket):
        sent.append(bucket.index())
        return allreduce_hook(None, bucket)

    ddp_model = DistributedDataParallel(build("plain").to(worker.device))
    ddp_model.register_comm_hook(None, hook)
    settings = Settings(batch_size=8 * worker.world_size, optimizer="sgd", accumulate=accumulate)
    batch = [torch.rand(8, 1, 8, 8).double(), torch.zeros(8, dtype=torch.int64)]
    batch = [tensor.to(worker.device) for tensor in batch]
    optim = make_optimizer(ddp_model, settings)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    train.train_step(ddp_model, batch, optim, scaler, settings, worker)
    return len(sent)


def main() -> None:
    with worker_of_test() as worker:
        if worker.world_size == 1:
            results = {name: reference(**case) for name, case in CASES.items()}
        else:
            results = {name: run_case(worker, **case) for name, case in CASES.items()}
            results["all_reduces"] = {n: all_reduces_per_step(worker, n) for n in (1, 2, 4)}
        if worker.is_main:
            torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
