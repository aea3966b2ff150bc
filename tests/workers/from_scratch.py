"""Train every case with each of the DDP versions and save what came out (rank 0).

Started by test_ddp_basics_gradients.py under torchrun with 2 and 3 ranks. The reference, one
process on the global batch, is computed by every rank on its own.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.place
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ddp_basics"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare_ddp import StepLog
from ddp_from_scratch import BucketedDDP, NaiveDDP
from model import SmallCNN
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from workers.place import worker_of_test

STEPS, GLOBAL_BATCH = 5, 24
ONE_PARAMETER, SEVERAL, ALL = 1e-6, 0.004, 25  # bucket_cap_mb
CASES = {
    "sgd": {},
    "adamw": {"optimizer": "adamw"},
    "sgd, bucket per parameter": {"cap": ONE_PARAMETER},
    "sgd, one bucket": {"cap": ALL},
    "sgd, accumulate": {"accumulate": 4},
    "adamw, accumulate": {"optimizer": "adamw", "accumulate": 2},
    "sgd, frozen": {"kind": "frozen"},
    "adamw, frozen": {"kind": "frozen", "optimizer": "adamw"},
    "sgd, unused": {"kind": "unused"},
    "sgd, tied": {"kind": "tied"},
    "adamw, tied, accumulate": {"kind": "tied", "optimizer": "adamw", "accumulate": 2},
    "sgd, sometimes": {"kind": "sometimes"},
    "adamw, sometimes": {"kind": "sometimes", "optimizer": "adamw"},
    "adamw, sometimes, accumulate": {"kind": "sometimes", "optimizer": "adamw", "accumulate": 2},
}


EVENTS = []  # what happened in this step, in its order
real_all_reduce = dist.all_reduce


def recorded_all_reduce(*args, **kwargs):
    EVENTS.append("all_reduce")
    return real_all_reduce(*args, **kwargs)


class Tied(nn.Module):
    """Two layers that share one weight matrix, and a buffer that matters."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, images):
        return self.head(self.second(self.first(images.flatten(1)).relu()).relu()) * self.scale


class Sometimes(nn.Module):
    """A middle layer that only marked images (first pixel above 1) pass through."""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, images):
        hidden = self.first(images.flatten(1)).relu()
        marked = images[:, 0, 0, 0] > 1
        if marked.any():
            hidden = hidden + marked[:, None] * self.extra(hidden)
        return self.head(hidden)


class Unused(SmallCNN):
    def __init__(self):
        super().__init__(channels=8)
        self.idle = nn.Linear(3, 3)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in ("tied", "sometimes", "unused"):
        return {"tied": Tied, "sometimes": Sometimes, "unused": Unused}[kind]()
    module = SmallCNN(channels=32 if kind == "wide" else 8)
    if kind == "frozen":
        module.net[0].requires_grad_(False)
        module.net[9].bias.requires_grad_(False)
    return module


def wrap(version: str, module: nn.Module, kind: str, cap: float) -> nn.Module:
    if version == "naive":
        return NaiveDDP(module)
    if version == "bucketed":
        return BucketedDDP(module, bucket_cap_mb=cap)
    unused = kind in ("unused", "sometimes")
    return DistributedDataParallel(module, bucket_cap_mb=cap, find_unused_parameters=unused)


def train(version, worker, kind="plain", optimizer="sgd", accumulate=1, cap=SEVERAL) -> dict:
    reference = version == "one process"
    device = torch.device("cpu") if reference else worker.device
    module = build(kind).to(device)
    if worker.rank > 0 and not reference:  # to be replaced by rank 0's values
        for tensor in (*module.parameters(), *module.buffers()):
            nn.init.zeros_(tensor)
    model = module if reference else wrap(version, module, kind, cap)
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), "adamw": torch.optim.AdamW}
    optim = make[optimizer](module.parameters())
    share = slice(None) if reference else slice(worker.rank, None, worker.world_size)
    accumulate = 1 if reference else accumulate
    for parameter in module.parameters():  # after the version's own hooks: they run first
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: EVENTS.append("gradient"))
    generator, steps = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        images = torch.rand(GLOBAL_BATCH, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (GLOBAL_BATCH,), generator=generator)
        if step % 2 == 0:  # mark an image of the last rank's first part; in odd steps, none at all
            images[worker.world_size - 1, 0, 0, 0] = 2
        images, labels = images.to(device), labels.to(device)
        images, labels = images[share].chunk(accumulate), labels[share].chunk(accumulate)
        optim.zero_grad()
        total = 0.0
        EVENTS.clear()
        with StepLog(device) as log:
            for x, y in list(zip(images, labels, strict=True))[:-1]:
                with model.no_sync():
                    loss = F.cross_entropy(model(x), y) / accumulate
                    loss.backward()
                total += loss.detach()
            silent = "all_reduce" not in EVENTS and not log.bytes
            loss = F.cross_entropy(model(images[-1]), labels[-1]) / accumulate
            loss.backward()
        gradients = {n: p.grad for n, p in module.named_parameters()}
        gradients = {n: None if g is None else g.clone() for n, g in gradients.items()}
        optim.step()
        total += loss.detach()
        if not reference:
            real_all_reduce(total.div_(worker.world_size))
        parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
        steps.append(
            {
                "loss": total,
                "gradients": gradients,
                "parameters": parameters,
                "ranks_agree": agree([*gradients.values(), *parameters.values()], worker),
                "silent": silent,  # no message before the last backward
                "events": list(EVENTS),
                "calls": len(log.bytes),
                "bytes": sum(log.bytes),
            }
        )
    return {"steps": steps}


def copies(set_to_none: bool, make, device) -> dict[str, int]:
    """How often a step of this DDP writes one gradient or bucket to another place, per operation.

    In its third step, because torch's DDP arranges its buckets after the first.
    """
    module = build("plain").to(device)
    model = make(module)
    optim = torch.optim.SGD(module.parameters(), lr=1e-2)
    images = torch.rand(4, 1, 8, 8, device=device)
    labels = torch.zeros(4, dtype=torch.int64, device=device)
    for _ in range(3):
        optim.zero_grad(set_to_none=set_to_none)
        loss = F.cross_entropy(model(images), labels)
        with CountOperations() as count:
            loss.backward()
    return count.calls


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[str(function)] = self.calls.get(str(function), 0) + 1
        return function(*args, **(kwargs or {}))


COPIES = {
    "torch": DistributedDataParallel,
    "torch, view": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "bucketed": BucketedDDP,
}


def agree(tensors: list, worker) -> bool:
    """True if all ranks have the same bits, and None at the same places."""
    mine = [None if t is None else t.cpu().numpy().tobytes() for t in tensors]
    everyone = [None] * worker.world_size
    dist.all_gather_object(everyone, mine)
    return all(theirs == mine for theirs in everyone)


def main() -> None:
    with worker_of_test() as worker:
        dist.all_reduce = recorded_all_reduce
        versions = ("one process", "naive", "bucketed", "torch")
        results = {
            (name, version): train(version, worker, **case)
            for name, case in CASES.items()
            for version in versions
        }
        results["copies"] = {
            (name, set_to_none): copies(set_to_none, make, worker.device)
            for name, make in COPIES.items()
            for set_to_none in (True, False)
        }
        if worker.is_main:
            torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
