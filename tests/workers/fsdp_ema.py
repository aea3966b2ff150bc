"""Train with fsdp_basics/ema.py's average, in float64, and save what rank 0 has seen.

fsdp_ema.py FOLDER RESULTS: continues the saves in FOLDER, or makes them. Started by
test_fsdp_basics_ema.py on 1, 2 and 3 ranks.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fsdp_basics"))

import ema
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collective_calls import CollectiveCalls
from data import load_dataset
from runtime import distributed_worker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

ARGS = SimpleNamespace(batch_size=12, seed=3)
STEPS, DECAY = 4, 0.9


def full(state: dict) -> dict:
    """Everything in full: shards put together, buffers averaged over the ranks."""
    found = {}
    for name, tensor in state.items():
        if hasattr(tensor, "full_tensor"):
            found[name] = tensor.full_tensor().detach().clone()
        else:
            found[name] = tensor.clone()
            if tensor.is_floating_point():
                dist.all_reduce(found[name])
                found[name] /= dist.get_world_size()
    return found


def run(optimizer_name: str, folder: Path, worker) -> dict:
    images, labels = load_dataset("digits")[0][:]
    data = TensorDataset(images.double(), labels)
    torch.manual_seed(0)
    model = ema.build_model().double()
    mesh = init_device_mesh("cpu", (worker.world_size,))
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = ema.OPTIMIZERS[optimizer_name](model.parameters(), 0.1)
    average = ema.EMA(model, DECAY)
    done = ema.resume(folder, model, optimizer, average)
    seen = {"done": done, "loaded": full(average.state), "steps": []}
    for step in range(done, done + STEPS):
        x, y = ema.local_batch(data, step, ARGS, worker)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with CollectiveCalls() as calls:
            average.update(model)
        seen["calls of update"] = dict(calls.count)
        seen["steps"].append({"average": full(average.state), "own": full(model.state_dict())})
        if step == done + 1:  # in the middle: evaluation must leave no trace in what follows
            model.eval()
            with torch.no_grad():
                model(x)
            before = {name: t.clone() for name, t in model.state_dict().items()}
            with average.in_place_of(model), torch.no_grad():
                seen["logits"] = model(images[:20].double().flatten(1))
                seen["in place"] = full(model.state_dict())
            after = model.state_dict()
            seen["back"] = all(
                torch.equal(ema.local_tensor(t), ema.local_tensor(after[name]))
                for name, t in before.items()
            )
            model.train()
    if not done:
        ema.save(folder / f"step_{STEPS:06}", model, optimizer, average)
    return seen


def main() -> None:
    folder, results = map(Path, sys.argv[1:])
    with distributed_worker("cpu") as worker:
        seen = {name: run(name, folder / name, worker) for name in ema.OPTIMIZERS}
        if worker.is_main:
            torch.save(seen, results)


if __name__ == "__main__":
    main()
