"""Tokens in memory-mapped files, and global batches of their windows that are equal on all ranks.

The tokens are a folder of shards that prepare.py has written, or text files, which one process per
node tokenises first. All ranks of a node map the same pages of memory, without a copy per rank, and
a rank holds nothing that grows with the text.
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from arguments import UserError
from checkpoint import together
from order import shuffled
from packing import IGNORED, UNCOUNTED
from runtime import Worker
from shards import (
    PARTS,
    Shard,
    check_bytes,
    checksum_of,
    open_shards,
    read_index,
    vocabulary_of,
)
from text_files import tokenise_files
from tokenizing import Tokenizer, load_tokenizer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

MOST_CHECKED = 256_000_000  # bytes of tokens per rank whose checksums are checked at the start


@dataclass(frozen=True)
class Corpus:
    train: list[Shard]
    validation: list[Shard]
    checksum: str  # of all shards: it identifies the tokens of a run
    tokenizer: Tokenizer


def load_corpus(sources: list[Path], tokenizer_name: str | None, worker: Worker) -> Corpus:
    """All ranks call this and get the same corpus.

    sources: one folder that prepare.py has written; or text files, each one document; or none: the
        modules of Python's own standard library.
    tokenizer_name: id on the Hugging Face hub or a directory; None: one token per byte.
    Raises `UserError` if a source is missing, empty, broken, or was prepared with another
    tokenizer; or if the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(tokenizer_name)
    if len(sources) == 1 and sources[0].is_dir():
        folder = sources[0]
    else:
        folder = tokenise_files(sources, tokenizer, worker)
    index, parts = {}, {}

    def open_all() -> None:
        index.update(read_index(folder))
        check_vocabulary(folder, index, tokenizer)
        parts.update({part: open_shards(folder, index, part) for part in PARTS})

    together(open_all)
    check_same_text(checksum_of(index), worker)
    check_some_bytes(folder, index, worker)
    return Corpus(**parts, checksum=checksum_of(index), tokenizer=tokenizer)


def check_vocabulary(folder: Path, index: dict, tokenizer: Tokenizer) -> None:
    """Raise `UserError` unless the tokens of `folder` are those of this tokenizer."""
    ours = vocabulary_of(tokenizer)
    if all(index[name] == value for name, value in ours.items() if name != "tokenizer"):
        return  # also if its directory has moved
    if index["tokenizer"] != tokenizer.name:
        before, now = (name or "none (bytes)" for name in (index["tokenizer"], tokenizer.name))
        raise UserError(
            f"{folder} was prepared with --tokenizer {before}, not {now}: give train.py the "
            "--tokenizer of prepare.py, or prepare the text again"
        )
    raise UserError(
        f"{folder} was prepared with --tokenizer {tokenizer.name} as it was before it changed: "
        "prepare the text again"
    )


def check_some_bytes(folder: Path, index: dict, worker: Worker) -> None:
    """All ranks call this. Each checks the checksums of its share of the shards.

    It takes bounded time: if the tokens have more than MOST_CHECKED bytes per rank, only the sizes
    are known to be right, and `prepare.py --verify` checks every byte.
    """
    entries = [entry for part in PARTS for entry in index[part]]
    nbytes = sum(entry["tokens"] for entry in entries) * np.dtype(index["dtype"]).itemsize
    if nbytes <= MOST_CHECKED * worker.world_size:
        together(lambda: check_bytes(folder, entries[worker.rank :: worker.world_size]))


def check_same_text(checksum: str, worker: Worker) -> None:
    """All ranks call this. Raise `UserError` if a host has other tokens than the host of rank 0."""
    found = [None] * worker.world_size
    dist.all_gather_object(found, (checksum, socket.gethostname()))
    text, first_host = found[0]
    for rank, (other, host) in enumerate(found):
        if other != text:
            raise UserError(
                f"rank {rank} on {host} has another text than rank 0 on {first_host}: copy the "
                "same files to every host (without --data: install the same Python everywhere)"
            )


class Windows:
    """The windows of `length` tokens of all shards, by number; a window lies in one shard."""

    def __init__(self, shards: list[Shard], length: int, document_masks: bool = False):
        self.shards, self.length, self.document_masks = shards, length, document_masks
        if not document_masks and any(shard.counts is not None for shard in shards):
            raise UserError(
                "the data are chats: give --document-masks, or a chat would see the chat before it"
            )
        self.tokens = sum(len(shard.tokens) for shard in shards)
        counts = [max(0, len(shard.tokens) - 1) // length for shard in shards]
        self.first = np.cumsum([0, *counts])  # the number of each shard's first window
        self.count = int(self.first[-1])

    def read(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """The windows with these numbers, and the windows one token later (the targets).

        With document masks, a target that begins another document is `IGNORED`. In chats, a target
        that no assistant has written is `UNCOUNTED`.
        """
        rows, borders, counts = [], [], []
        for number in np.asarray(numbers, np.int64):
            shard = np.searchsorted(self.first, number, "right") - 1
            start = (number - self.first[shard]) * self.length
            tokens, starts = self.shards[shard].tokens, self.shards[shard].starts
            rows.append(tokens[start : start + self.length + 1])
            first, stop = np.searchsorted(starts, [start + 1, start + 1 + self.length])
            borders.append(starts[first:stop] - (start + 1))
            if self.shards[shard].counts is not None:
                counts.append(self.shards[shard].counts[start + 1 : start + 1 + self.length])
        rows = torch.from_numpy(np.stack(rows).astype(np.int64))
        x_BT, y_BT = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if counts:
            y_BT[torch.from_numpy(np.stack(counts)) == 0] = UNCOUNTED
        if self.document_masks:
            for y_T, places in zip(y_BT, borders, strict=True):
                y_T[torch.from_numpy(places)] = IGNORED
        return x_BT, y_BT


class Batches:
    """Global batches of windows of the tokens: batch `step` is the same for any mesh.

    This class has no position: the number of a step determines the windows in its batch, so a
    checkpoint needs only the number of steps. Each epoch has an order of its own, which is computed
    and not stored: order.py.
    """

    def __init__(
        self,
        shards: list[Shard],
        length: int,
        batch_size: int,
        seed: int,
        document_masks: bool = False,
    ):
        """length: tokens of a window. batch_size: windows per optimizer step, over all ranks.

        document_masks: no target crosses the border of a document: packing.py.
        Raises `UserError` if the text is too short for one batch.
        """
        self.windows = Windows(shards, length, document_masks)
        self.batch_size, self.seed = batch_size, seed
        self.per_epoch = self.windows.count // batch_size
        if not self.per_epoch:
            raise UserError(
                f"the text is too short: {self.windows.tokens:,} tokens are no batch of "
                f"{batch_size} windows of {length} tokens: give more text, or a smaller "
                "--batch-size or --block-size"
            )

    def get(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """Part number `part` of `parts` of the batch: inputs and targets, int64, each (B, T).

        Data-parallel ranks take different parts. Ranks that share one model (tensor or pipeline
        parallel) take the same part.
        """
        epoch, batch = divmod(step, self.per_epoch)
        first = batch * self.batch_size
        places = np.arange(first + part, first + self.batch_size, parts)
        return self.windows.read(shuffled(places, self.windows.count, self.seed, epoch))

    def from_step(
        self, step: int, end: int, mesh: DeviceMesh, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's parts of the batches `step` to `end` - 1, on the device.

        A GPU runs asynchronously: while it computes a step, the program reads the next batch from
        the disk. The program does not wait for the copy, because it is from pinned memory; the GPU
        makes it after the step, in the same stream.
        """
        part, parts = batch_part(mesh)
        for number in range(step, end):
            batch = self.get(number, part, parts)
            if device.type == "cuda":
                batch = [tensor.pin_memory() for tensor in batch]
            x_BT, y_BT = (tensor.to(device, non_blocking=True) for tensor in batch)
            yield x_BT, y_BT


def batch_part(mesh: DeviceMesh) -> tuple[int, int]:
    """(the part of a global batch that this rank trains on, the number of parts)."""
    replicate, shard = mesh["dp_replicate"], mesh["dp_shard"]
    part = replicate.get_local_rank() * shard.size() + shard.get_local_rank()
    return part, replicate.size() * shard.size()


def bigram_loss(
    train: list[Shard], inputs_BT: Tensor, targets_BT: Tensor, vocab_size: int
) -> float:
    """The loss of a bigram model, which sees one token, on these windows, in nats per token.

    The model is the counts of pairs in the training text, plus one for each pair (Laplace's rule).
    """
    counts = torch.ones(vocab_size**2, dtype=torch.float64)
    for tokens in (shard.tokens for shard in train):
        for start in range(0, len(tokens), 1 << 20):
            piece = torch.from_numpy(tokens[start : start + (1 << 20) + 1].astype(np.int64))
            pairs = piece[:-1] * vocab_size + piece[1:]
            counts += torch.bincount(pairs, minlength=vocab_size**2)
    counts = counts.view(vocab_size, vocab_size)
    probability = counts / counts.sum(1, keepdim=True)
    counts_in_loss = targets_BT >= 0
    losses = -probability[inputs_BT[counts_in_loss], targets_BT[counts_in_loss]].log()
    return losses.mean().item()
