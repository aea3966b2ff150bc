"""Train every case of fsdp_basics' smaller ideas on 2, 3 and 4 ranks, save what came out (rank 0).

Started by test_fsdp_basics_ideas.py as one job of 4 ranks; fewer ranks are subgroups of it. The
reference, one process on the global batch, is computed by every rank on its own.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fsdp_basics"))

import hybrid_sharding
import torch
import torch.distributed as dist
import torch.nn.functional as F
from differences import largest_differences
from fsdp1_models import make_job
from fsdp1_options import OPTIONS
from fsdp1_to_fsdp2 import Run
from fsdp_from_scratch import shard_by_hand
from runtime import distributed_worker
from sharding import shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

STEPS, GLOBAL_BATCH = 4, 24
CASES = {
    "sgd": {},
    "adamw": {"optimizer": "adamw"},
    "sgd, keep": {"keep": True},
    "adamw, keep, accumulate": {"optimizer": "adamw", "keep": True, "accumulate": 2},
    "sgd, accumulate": {"accumulate": 2},
    "adamw, frozen block, keep": {"kind": "frozen block", "optimizer": "adamw", "keep": True},
    "sgd, frozen block": {"kind": "frozen block"},
    "sgd, frozen start, keep": {"kind": "frozen start", "keep": True},
    "adamw, frozen biases": {"kind": "frozen biases", "optimizer": "adamw"},
    "sgd, only blocks": {"kind": "only blocks"},
    "adamw, tied, accumulate": {"kind": "tied", "optimizer": "adamw", "accumulate": 2},
    "sgd, twice": {"kind": "twice"},
    "adamw, twice, keep": {"kind": "twice", "optimizer": "adamw", "keep": True},
    "sgd, unused": {"kind": "unused"},
    "sgd, checkpoint": {"kind": "checkpoint"},
    "adamw, dictionary": {"kind": "dictionary", "optimizer": "adamw"},
    "sgd, double": {"kind": "double"},
}
# All on 3 ranks, over which the sizes do not divide; some on others, some with fully_shard too.
RUNS = {
    2: ["sgd", "adamw, keep, accumulate", "adamw, frozen biases", "sgd, twice"],
    3: list(CASES),
    4: ["adamw", "adamw, tied, accumulate"],
}
WITH_TORCH = {
    (2, "sgd"),
    (2, "adamw, keep, accumulate"),
    (2, "adamw, frozen biases"),
    (2, "sgd, twice"),
    (3, "sgd, keep"),
    (3, "adamw, tied, accumulate"),
}
SHAPES = {(2, 2): "sgd", (4, 1): "adamw", (1, 4): "adamw"}  # of the mesh of hybrid sharding


class Block(nn.Module):
    """Sizes that divide by nothing."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.norm, self.first = nn.LayerNorm(7), nn.Linear(7, 7 if kind == "tied" else 11)
        self.second = nn.Linear(7 if kind == "tied" else 11, 7)
        if kind == "tied":
            self.second.weight = self.first.weight
        if kind == "unused":
            self.idle = nn.Linear(3, 5)

    def forward(self, x):
        if isinstance(x, dict):
            x = x["parts"][0]
        x = x + self.second(self.first(self.norm(x)).relu())
        return {"parts": [x]} if self.kind == "dictionary" else x


class Net(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.first, self.head = nn.Linear(64, 7), nn.Linear(7, 10)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, images):
        x = self.first(images.flatten(1))
        for i in (0, 1, 0) if self.kind == "twice" else (0, 1):
            block = self.blocks[i]
            x = checkpoint(block, x, use_reentrant=False) if self.kind == "checkpoint" else block(x)
        return self.head(x["parts"][0] if isinstance(x, dict) else x)


def build(kind: str, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net(kind)
    if kind == "double":
        model.blocks[1].double()
        model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0].double(),))
        model.blocks[1].register_forward_hook(lambda module, args, output: output.float())
    frozen = {
        "frozen block": [model.blocks[1]],
        "frozen start": [model.first, model.blocks[0]],
        "frozen biases": [m for m in model.modules() if isinstance(m, nn.Linear)],
        "only blocks": [model.first, model.head],
    }
    for module in frozen.get(kind, ()):
        (module.bias if kind == "frozen biases" else module).requires_grad_(False)
    return model


def train(version, group, kind="plain", optimizer="sgd", accumulate=1, keep=False) -> dict:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # Only rank 0 begins with the right values: shard_by_hand must broadcast them.
    model = build(kind, seed=rank if version == "by hand" else 0)
    units, events = [], []
    if version == "by hand":
        units = shard_by_hand(model, model.blocks, keep, group, events)
    elif version == "fully_shard":
        shard(model, DeviceMesh.from_group(group, "cpu"), reshard_after_forward=not keep)
    params = [unit.shard for unit in units] or list(model.parameters())
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), "adamw": torch.optim.AdamW}
    optim = make[optimizer](params)
    alone = version == "one process"
    share = slice(None) if alone else slice(rank, None, size)
    accumulate = 1 if alone else accumulate
    generator, steps = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        images = torch.rand(GLOBAL_BATCH, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (GLOBAL_BATCH,), generator=generator)
        optim.zero_grad()
        events.clear()
        parts = zip(images[share].chunk(accumulate), labels[share].chunk(accumulate), strict=True)
        total = torch.zeros(())
        for x, y in parts:
            loss = F.cross_entropy(model(x), y) / accumulate
            events.append(("backward", "", 0))
            loss.backward()
            total += loss.detach()
        local_gradients = [n for n, p in model.named_parameters() if p.grad is not None]
        gradients = values(model, units, "grad")
        optim.step()
        if not alone:
            dist.all_reduce(total.div_(size), group=group)
        steps.append(
            {
                "loss": total,
                "gradients": gradients,
                "parameters": values(model, units, "value"),
                "events": list(events),
            }
        )
        with torch.no_grad():
            output = model(images[:2])  # evaluation in between must leave no trace
    found = {"steps": steps, "output": output}
    if units:
        left = {id(p): p.untyped_storage().nbytes() for p in model.parameters()}
        found |= {"left": sum(left.values()), "local_gradients": local_gradients}
        found["shards"] = {f"{u.name} {i}": u.shard.numel() for i, u in enumerate(units)}
    return found


def values(model, units, what: str) -> dict:
    """Gradients (not of frozen parameters) or parameters, whole, by name."""
    found = {}
    for unit in units:
        shard = unit.shard.grad if what == "grad" else unit.shard
        found |= {} if shard is None else unit.full(shard)
    if not units:
        for name, p in model.named_parameters():
            tensor = p.grad if what == "grad" else p.detach()
            if tensor is not None:
                found[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return {name: tensor.clone() for name, tensor in found.items()}


def refusal() -> str:
    """Two units with one parameter between them."""
    model = build("plain")
    model.head.weight = model.blocks[0].first.weight
    try:
        shard_by_hand(model, model.blocks)
    except ValueError as error:
        return str(error)
    return "accepted"


def hybrid(worker, shape, optimizer: str) -> dict:
    args = SimpleNamespace(steps=3, batch_size=24, seed=0, optimizer=optimizer)
    torch.manual_seed(1)
    images, labels = torch.rand(96, 1, 8, 8), torch.randint(10, (96,))
    results = []
    for mesh in (None, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))):
        torch.manual_seed(0)
        model = hybrid_sharding.VisionTransformer(dim=20, depth=2)
        if mesh is not None:
            shard(model, mesh)
        results.append(hybrid_sharding.train(model, images, labels, args, worker, mesh is None))
    (reference, _), (steps, counts) = results
    held = sum(p.to_local().numel() for p in model.parameters())
    everyone = [None] * worker.world_size
    dist.all_gather_object(everyone, (counts, held))
    return {"steps": steps, "reference": reference, "ranks": everyone}


def hybrid_of_fsdp1(worker) -> dict:
    args = SimpleNamespace(batch_size=48, optimizer="sgd")
    torch.manual_seed(1)
    data = torch.rand(96, 1, 8, 8), torch.randint(10, (96,))
    job = make_job(worker)
    found = {"shape": tuple(job.hybrid_mesh.shape)}
    for option in OPTIONS:
        if "HYBRID" in option.name:
            runs = [Run(model, args, worker, data) for model in option.build(job)]
            steps = [run.step(0, look=True) for run in runs]
            found[option.name] = largest_differences(*steps)
    return found


def main() -> None:
    with distributed_worker("cpu") as worker:
        results = collect(worker)
        if worker.is_main:
            torch.save(results, sys.argv[1])


def collect(worker) -> dict:
    results = {"refusal": refusal()}
    for size, names in RUNS.items():
        group = dist.new_group(list(range(size)))
        for name in names if worker.rank < size else ():
            for version in ("one process", "by hand", "fully_shard"):
                if version != "fully_shard" or (size, name) in WITH_TORCH:
                    results[size, name, version] = train(version, group, **CASES[name])
        dist.barrier()
    for shape, optimizer in SHAPES.items():
        results["hybrid", shape] = hybrid(worker, shape, optimizer)
    results["fsdp1"] = hybrid_of_fsdp1(worker)
    return results


if __name__ == "__main__":
    main()
