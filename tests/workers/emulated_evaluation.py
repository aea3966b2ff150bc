"""Evaluate a network on an emulated GPU; print how often the host waits, for 2 batches and for 6.

emulated_evaluation.py DIRECTORY: whose evaluation.py.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / sys.argv[1]))

import evaluation
import torch.nn.functional as F
from emulated_gpu.cuda import device
from runtime import distributed_worker
from torch.utils.data import TensorDataset


def compute_loss(model, batch):
    x, y = batch
    loss = F.cross_entropy(model(x), y, reduction="sum")
    return loss, len(y), {"accuracy": (model(x).argmax(1) == y).sum()}


def main() -> None:
    evaluation.compute_loss, evaluation.collate = compute_loss, None
    with distributed_worker("cuda") as worker:
        model = torch.nn.Linear(3, 2).to(worker.device)
        for batches in (2, 6):
            data = TensorDataset(torch.randn(4 * batches, 3), torch.zeros(4 * batches).long())
            before = device.host_waits()
            evaluation.evaluate(model, data, 4, 0, worker)
            print("batches:", batches, "waits:", device.host_waits() - before, flush=True)


if __name__ == "__main__":
    main()
