"""Grouped-query attention on 1, 2 or 4 ranks: what each rank saw; saves it on rank 0.

Started by test_parallel_basics_grouped.py.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.place
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parallel_basics"))

import torch
from compare_pipelines import gather
from comparing import batches
from grouped_query_attention import build, gradient_norm, train
from workers.place import on_cpu, worker_of_test

ARGS = SimpleNamespace(steps=3, batch_size=2, length=5, dim=16, heads=4, seed=2)


def main(output: Path) -> None:
    found = {}
    with worker_of_test() as worker:
        found["batches"] = batches(ARGS, worker.device)
        for kv_heads in (1, 2, 4):
            found["start", kv_heads] = build(ARGS, kv_heads, worker.device).state_dict()
            found["norms", kv_heads] = norms(kv_heads, worker.device)
            for optimizer in ("sgd", "adamw"):
                args = SimpleNamespace(**vars(ARGS), optimizer=optimizer)
                found[optimizer, kv_heads] = gather(on_cpu(train(args, kv_heads, worker.device)))
        if worker.is_main:
            torch.save(found, output)


def norms(kv_heads: int, device) -> list[torch.Tensor]:
    """Of equal gradients of two modules: the model, and one that has the model inside."""
    model = build(ARGS, kv_heads, device)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return [gradient_norm(module, kv_heads).cpu() for module in (model, torch.nn.Sequential(model))]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
