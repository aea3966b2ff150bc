"""Split images into files of different length, one per rank, for uneven_inputs_*.py."""

import torch
from arguments import ArgumentParser, UserError, at_least
from data import load_dataset
from runtime import Worker
from torch import Tensor

IMAGES = 1437  # in the training set


def add_data_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--images", type=at_least(1), default=997, help="images in all files")
    parser.add_argument("--batch-size", type=at_least(1), default=32, help="images per local batch")


def uneven_files(count: int, world_size: int) -> list[Tensor]:
    """The indices 0 ... count - 1, split into one file per rank in the proportion 3 : 4 : 5 : ...

    Raises `UserError` if a rank would get no image, or if there are fewer than `count` images.
    """
    if count > IMAGES:
        raise UserError(f"--images must be at most {IMAGES}, not {count}")
    proportions = torch.arange(3, 3 + world_size)
    ends = (count * proportions.cumsum(0) // proportions.sum()).tolist()
    starts = [0, *ends[:-1]]
    files = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    if min(len(file) for file in files) == 0:
        raise UserError(f"--images {count} leaves some of {world_size} ranks none")
    return files


def read_batches(args, worker: Worker, device: torch.device) -> list[list[tuple[Tensor, Tensor]]]:
    """The files of all ranks: for each rank a list of batches (images, labels)."""
    images, labels = (t.to(device) for t in load_dataset("digits")[0][:])
    return [
        [(images[indices], labels[indices]) for indices in file.split(args.batch_size)]
        for file in uneven_files(args.images, worker.world_size)
    ]
