"""Write and find the files of streaming_data.py: samples in files of different length, an index."""

import json
import socket
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from arguments import UserError
from data import load_dataset
from runtime import Worker

IMAGES = 1437  # in the training set


def find_files(folder: Path, count: int, worker: Worker) -> list[tuple[Path, int]]:
    """(file, number of samples) of each file in `folder`; rank 0 writes them if there are none."""
    if count > IMAGES:
        raise UserError(f"--files must be at most {IMAGES}, not {count}")
    box = [None]
    if worker.is_main:
        index = folder / "index.json"
        if not index.exists():
            write_digits(folder, count)
        try:
            box = [(folder, json.loads(index.read_text()))]
        except ValueError:
            raise UserError(
                f"{index} is broken: delete it, then the files are written again"
            ) from None
    dist.broadcast_object_list(box, src=0)
    folder, counts = box[0]
    missing = next((name for name in counts if not (folder / name).is_file()), None)
    by_rank = [None] * worker.world_size
    dist.all_gather_object(by_rank, (socket.gethostname(), missing))
    for rank, (host, name) in enumerate(by_rank):
        if name:
            raise UserError(
                f"rank {rank} on {host} does not see {folder / name}: --data-dir must be on a disk "
                "that all hosts share"
            )
    return [(folder / name, samples) for name, samples in counts.items()]


def write_digits(folder: Path, count: int) -> None:
    """Write scikit-learn's digits to `count` files of different length, then the index."""
    images, labels = load_dataset("digits")[0][:]
    generator = torch.Generator().manual_seed(0)
    cuts = 1 + torch.randperm(len(labels) - 1, generator=generator)[: count - 1].sort().values
    counts = {}
    for file, numbers in enumerate(torch.arange(len(labels)).tensor_split(cuts)):
        name = f"digits_{file:03}.npz"
        np.savez(
            folder / name,
            numbers=numbers.numpy(),
            images=(images[numbers] * 16).round().byte().squeeze(1).numpy(),
            labels=labels[numbers].byte().numpy(),
        )
        counts[name] = len(numbers)
    temporary = folder / "index.json.tmp"  # a complete index appears, or none
    temporary.write_text(json.dumps(counts))
    temporary.rename(folder / "index.json")
