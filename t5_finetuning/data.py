"""The training data of T5: files with pairs of a text and its summary, and batches of tokens.

A file has one pair per line, {"text": ..., "summary": ...}, and stays on the disk: a rank knows
where each line begins, and reads only the lines of its own batches. Without --train-file and
--eval-file, library.py writes such files.
"""

import json
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from arguments import UserError
from runtime import Worker
from saves import checksum
from stopping import obey_the_rank_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

IGNORED = -100  # a label that cross_entropy leaves out: padding


class Pair(NamedTuple):
    text: str
    summary: str
    name: str  # the origin: "json/decoder.py:raw_decode", or "news.jsonl:17"


class JsonLines(Dataset):
    """The pairs of a file; each pair is read from the disk when it is used.

    The constructor checks all lines, so that a bad line fails now and not after three days of
    training. Raises `UserError` that names the file and the line.
    """

    def __init__(self, path: Path):
        self.path, self.checksum, lengths = path, 0, []
        try:
            with open(path, "rb") as file:
                for line in file:
                    lengths.append(len(line))
                    self.checksum = zlib.crc32(line, self.checksum)
                    self.parse(line, len(lengths))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if not lengths:
            raise UserError(f'{path} is empty: expected lines of {{"text": ..., "summary": ...}}')
        self.lengths = torch.tensor(lengths)  # in bytes
        self.starts = self.lengths.cumsum(0) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Pair:
        with open(self.path, "rb") as file:
            file.seek(self.starts[index])
            return self.parse(file.readline(), number=int(index) + 1)

    def parse(self, line: bytes, number: int) -> Pair:
        try:
            values = json.loads(line)
            name = values.get("name") or f"{self.path.name}:{number}"
            pair = Pair(values["text"], values["summary"], str(name))
            if not (pair.text.strip() and pair.summary.strip()):
                raise ValueError
            "".join(pair).encode()  # half of an emoji, as in "\\ud83d", is an error
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f'{self.path}, line {number}: expected {{"text": ..., "summary": ...}} with texts '
                f"that are not empty, not {line[:80].decode(errors='replace').strip()!r}"
            ) from None
        return pair


def check_same_files(datasets: list[JsonLines], worker: Worker) -> None:
    """All ranks call this. Raise `UserError` if a host does not have the files that rank 0 read."""
    problem = None
    for dataset in datasets if worker.local_rank == 0 else []:  # one rank per host reads the files
        try:
            if checksum(dataset.path) != dataset.checksum:
                problem = "differs from the file that rank 0 read"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        if problem:
            host = socket.gethostname()
            problem = f"{dataset.path} on {host} (rank {worker.rank}) {problem}"
            break
    problems = [None] * worker.world_size
    dist.all_gather_object(problems, problem)
    for problem in filter(None, problems):
        raise UserError(f"{problem}: copy the same files to every host")


def epoch_batches(lengths: Tensor, batch_size: int, seed: int) -> Tensor:
    """The global batches of an epoch: (batches, batch_size) indices, the same on every rank.

    Pairs of similar length share a batch, which saves padding; otherwise the order is random. All
    batches are full: up to batch_size - 1 pairs are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    pools = torch.randperm(len(lengths), generator=generator).split(20 * batch_size)
    # Sorted, so that the local batches (every N-th pair of a global batch) have similar lengths.
    order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
    batches = order[: len(order) // batch_size * batch_size].view(-1, batch_size)
    return batches[torch.randperm(len(batches), generator=generator)]


def make_loader(
    dataset: JsonLines,
    batches: list[list[int]],
    collate: Callable,
    workers: int,
    device: torch.device,
) -> DataLoader:
    """Yields the given batches of pairs as tokens; `workers` processes read and tokenize.

    device: the rank's. The batches are in CPU memory: pinned if the rank copies them to a GPU.
    """
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        worker_init_fn=obey_the_rank_only,
        pin_memory=device.type != "cpu",
        generator=torch.Generator(),  # its own: the model's dropout draws from the global one
    )
