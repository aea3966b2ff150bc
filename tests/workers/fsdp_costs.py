"""What memory.py and communication.py measure in worlds of 2, 3 and 4 ranks, and how training goes.

Started by test_fsdp_basics_cost.py with 4 ranks. Smaller worlds are groups of the first ranks. Each
rank saves what it has seen; the tests compare.
"""

import gc
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fsdp_basics"))

import communication
import measure_memory
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import load_dataset
from differences import full_tensor
from model import VisionTransformer
from runtime import distributed_worker
from strategies import build, make_meshes
from torch.distributed.device_mesh import DeviceMesh

CPU = torch.device("cpu")
# dim, blocks, heads, classes. Of the odd one nothing divides: 9 rows over 4 ranks are 3, 3, 3 and
# none, and 2 classes leave the third and fourth rank of the head without a row.
MODELS = {"even": (24, 1, 4, 10), "odd": (9, 1, 3, 2), "large": (132, 1, 4, 10)}
# Not all of it in all worlds: time is short.
MEMORY = {2: ("odd",), 3: ("odd",), 4: ("even", "odd")}
TRAFFIC = {2: ("large",), 3: ("large", "odd"), 4: ("large",)}
SMALL_WORLDS = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def run_cases(world: int, images, labels, meshes) -> dict:
    seen = {}
    for name, mesh in meshes.items():
        for what, script, cases in (
            ("memory", measure_memory, MEMORY),
            ("communication", communication, TRAFFIC),
        ):
            for case in cases[world]:
                key = what, case, name
                seen[key] = as_in_script(script, case, name, images, labels, mesh)
        if world > 2:
            seen["losses", name], seen["weights", name] = train(name, images, labels, mesh)
    return seen


def as_in_script(script, case: str, name: str, images, labels, mesh) -> dict:
    dim, depth, heads, classes = MODELS[case]
    script.HEADS = heads
    script.VisionTransformer = partial(VisionTransformer, classes=classes)
    return script.measure(name, dim, depth, images, labels % classes, mesh, CPU)


def train(name: str, images, labels, mesh) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of this rank's part, and the whole weights after three steps."""
    torch.manual_seed(0)
    bare = VisionTransformer(dim=12, depth=1)
    model, optimizer = build(name, bare, mesh)
    if name != "one process":
        images, labels = (t[dist.get_rank() :: mesh.size()] for t in (images, labels))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = {n: p.detach() for n, p in bare.named_parameters()}
    return losses, {n: full_tensor(p) for n, p in weights.items()}


def main() -> None:
    with distributed_worker("cpu") as worker:
        gc.freeze()  # memory.py collects garbage often: do not look through all modules each time
        seen = {}
        images, labels = (t[:24].clone() for t in load_dataset("digits")[0][:])
        groups = {world: dist.new_group(range(world), backend="gloo") for world in (2, 3)}
        for world, group in groups.items():
            if worker.rank < world:
                line = DeviceMesh.from_group(group, "cpu")
                seen[world] = run_cases(world, images, labels, dict.fromkeys(SMALL_WORLDS, line))
        seen[4] = run_cases(4, images, labels, make_meshes("cpu", 4))
        torch.save(seen, f"{sys.argv[1]}/{worker.rank}.pt")
        gc.unfreeze()


if __name__ == "__main__":
    main()
