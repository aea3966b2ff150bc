"""Train fsdp_basics/lora.py's adapters in float64, and save what rank 0 has seen.

fsdp_lora.py FOLDER: writes FOLDER/RANKS.pt, and loads the adapters that two ranks left there.
Started by test_fsdp_basics_lora.py on 1, 2 and 3 ranks.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fsdp_basics"))

import lora
import torch
import torch.nn.functional as F
from collective_calls import CollectiveCalls
from data import load_dataset
from model import VisionTransformer
from runtime import distributed_worker
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
}
STEPS, BATCH, RANK, ALPHA = 4, 12, 2, 4.0


def build(mesh) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(dim=16, depth=2).double()
    lora.add_adapters(model, RANK, ALPHA)
    lora.shard(model, mesh)
    return model


def full(tensors: dict) -> dict:
    return {name: t.full_tensor().detach().clone() for name, t in tensors.items()}


def run(optimizer_name: str, worker) -> dict:
    mesh = init_device_mesh("cpu", (worker.world_size,))
    images, labels = load_dataset("digits")[0][:]
    images = images.double()
    model = build(mesh)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = OPTIMIZERS[optimizer_name](trainable.values())
    seen = {"start": full(dict(model.named_parameters())), "steps": []}
    for step in range(STEPS):
        batch = slice(step * BATCH + worker.rank, (step + 1) * BATCH, worker.world_size)
        optimizer.zero_grad()
        with CollectiveCalls() as calls:
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        seen["reduced"] = calls.bytes["reduce_scatter"]
        seen["steps"].append({"gradients": full(gradients)})
        optimizer.step()
        seen["steps"][-1]["parameters"] = full(dict(model.named_parameters()))
    seen["state"] = list(get_optimizer_state_dict(model, optimizer)["state"])
    with CollectiveCalls() as calls:
        seen["adapters"] = lora.adapters_of(model)
    seen["gathered"] = calls.count["all_gather"]
    seen["merged"] = lora.merged(model)
    with torch.no_grad():
        seen["logits"] = model(images[:20])
    return seen


def main() -> None:
    folder = Path(sys.argv[1])
    with distributed_worker("cpu") as worker:
        seen = {name: run(name, worker) for name in OPTIMIZERS}
        if worker.world_size != 2:  # the adapters that two ranks have saved, on other ranks
            model = build(init_device_mesh("cpu", (worker.world_size,)))
            adapters = torch.load(folder / "2.pt")["sgd"]["adapters"] if worker.is_main else {}
            with torch.no_grad():
                model(load_dataset("digits")[0][:][0][:20].double())  # leaves the root gathered
            lora.load_adapters(model, adapters)
            with torch.no_grad():
                seen["loaded"] = model(load_dataset("digits")[0][:][0][:20].double())
            del model
        if worker.is_main:
            torch.save(seen, folder / f"{worker.world_size}.pt")


if __name__ == "__main__":
    main()
