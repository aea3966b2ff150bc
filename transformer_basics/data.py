"""Text as one long row of tokens in a memory-mapped file, and batches that are equal on all ranks.

The documents become two rows: every twentieth document is for validation, the remaining ones for
training. One process per node writes the rows once; all ranks then map the same pages of memory,
without a copy per rank.
"""

import hashlib
import json
import os
import socket
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from arguments import UserError
from runtime import Worker
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

CACHE = Path(tempfile.gettempdir()) / "gpt_tokens"


@dataclass(frozen=True)
class Corpus:
    train: np.ndarray  # one row of token ids, mapped from a file
    validation: np.ndarray
    checksum: str  # of both rows: it identifies the text of a run
    token_count: int  # ids are below it
    vocab_size: int  # token_count, rounded up to divide by the usual numbers of ranks
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def load_corpus(files: list[Path], tokenizer: str | None, worker: Worker) -> Corpus:
    """All ranks call this and get the same corpus.

    files: each one document; none: the modules of Python's own standard library.
    tokenizer: id on the Hugging Face hub or a directory; None: one token per byte.
    Raises `UserError` if a file is missing or empty, or if the tokenizer cannot be loaded.
    """
    documents = [Path(file) for file in files] or standard_library()
    for file in documents:
        if not file.is_file():
            raise UserError(f"there is no file {file}: --data takes text files")
        if files and not file.stat().st_size:
            raise UserError(f"{file} is empty: --data takes text files")
    encode, decode, token_count, end = load_tokenizer(tokenizer)
    vocab_size = -(-token_count // 64) * 64  # GPT-2's 50,257 rows divide by no number of ranks
    dtype = np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32
    seen = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in documents]
    key = hashlib.sha256(json.dumps([tokenizer, seen]).encode()).hexdigest()[:16]
    paths = [CACHE / f"{key}.{part}" for part in ("train", "validation")]
    checksum_path = CACHE / f"{key}.checksum"  # written last: if it exists, the rows are complete

    def write() -> None:
        checksums = []
        parts = split([(file.name, file.read_bytes()) for file in documents])
        for path, part in zip(paths, parts, strict=True):
            tokens = (np.array([*ids(text, encode), end], dtype) for text in telling(part))
            checksums.append(replace_file(path, (row.tobytes() for row in tokens)))
        replace_file(checksum_path, ["-".join(f"{n:08x}" for n in checksums).encode()])

    once_per_node(lambda: None if checksum_path.exists() else write(), worker)
    train, validation = (np.memmap(path, dtype, mode="r") for path in paths)
    checksum = checksum_path.read_text()
    check_same_text(checksum, worker)
    return Corpus(train, validation, checksum, token_count, vocab_size, encode, decode)


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


def once_per_node(action: Callable[[], None], worker: Worker) -> None:
    """All ranks call this. One rank per node runs `action`; all ranks wait until all have finished.

    They wait in the store, not in a collective, which would fail after --timeout: a long text takes
    long. (If a rank dies, the launcher ends the job.)
    Raises `UserError` on all ranks if the action raises `UserError` or `OSError` on any rank.
    """
    local_ranks = [None] * worker.world_size
    dist.all_gather_object(local_ranks, worker.local_rank)
    first_of_nodes = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]
    if worker.local_rank == 0:
        error = ""
        try:
            action()
        except (UserError, OSError) as failure:
            error = str(failure)
        worker.store.set(f"rank {worker.rank} has its tokens", error)
    keys = [f"rank {rank} has its tokens" for rank in first_of_nodes]
    while not worker.store.check(keys):
        time.sleep(0.1)
    for error in filter(None, map(worker.store.get, keys)):
        raise UserError(error.decode())


def telling(texts: list[bytes]) -> Iterator[bytes]:
    """Yield the texts one after another, and print the progress every ten seconds."""
    total, done, last = sum(map(len, texts)), 0, time.monotonic()
    print(f"tokenising {total / 1e6:,.1f} MB of text, once per node", flush=True)
    for text in texts:
        yield text
        done += len(text)
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"tokenising: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB", flush=True)


def standard_library() -> list[Path]:
    """The source files of this Python's standard library, its tests too: tens of MB."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (file for file in root.rglob("*.py") if file.stat().st_size)
    return sorted(f for f in files if "site-packages" not in f.relative_to(root).parts)


def split(documents: list[tuple[str, bytes]]) -> tuple[list[bytes], list[bytes]]:
    """Split documents (name, text) into texts for training, and one in twenty for validation.

    A checksum of the name chooses full documents: half a document in training would make the other
    half a poor test. A single document gives its last part.
    """
    if len(documents) == 1:
        text = documents[0][1]
        cut = text.rfind(b"\n", 0, len(text) * 19 // 20) + 1 or len(text) * 19 // 20
        return [text[:cut]], [text[cut:]]
    ordered = sorted(documents, key=lambda d: zlib.crc32(d[0].encode()))
    held_out = -(-len(ordered) // 20)
    return [text for _, text in ordered[held_out:]], [text for _, text in ordered[:held_out]]


def load_tokenizer(name: str | None) -> tuple[Callable, Callable, int, int]:
    """(encode, decode, number of tokens, the id of the token that ends a document)."""
    if name is None:

        def decode(tokens: list[int]) -> str:
            return bytes(tokens).decode(errors="replace")

        return lambda text: list(text.encode()), decode, 256, 0
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot load --tokenizer {name}: {reason}") from None

    def encode(text: str) -> list[int]:
        return loaded.encode(text, add_special_tokens=False)

    return encode, loaded.decode, len(loaded), loaded.eos_token_id or 0


def ids(text: bytes, encode: Callable) -> list[int] | bytes:
    return encode(text.decode(errors="replace"))


def replace_file(path: Path, pieces: Iterable[bytes]) -> int:
    """Write the pieces one after another; the file gets its name when it is complete.

    Returns its CRC-32.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, checksum = path.with_suffix(f".{os.getpid()}"), 0
    with open(temporary, "wb") as file:
        for piece in pieces:
            file.write(piece)
            checksum = zlib.crc32(piece, checksum)
    os.replace(temporary, path)
    return checksum


class Batches:
    """Global batches of windows of a row of tokens: batch `step` is the same for any mesh.

    This class has no position: the number of a step determines the windows in its batch, so a
    checkpoint needs only the number of steps. Each epoch has its own order.
    """

    def __init__(self, tokens: np.ndarray, length: int, batch_size: int, seed: int):
        """length: tokens of a window. batch_size: windows per optimizer step, over all ranks.

        Raises `UserError` if the text is too short for one batch.
        """
        self.tokens, self.length, self.batch_size, self.seed = tokens, length, batch_size, seed
        self.windows = (len(tokens) - 1) // length
        self.per_epoch, self.epoch = self.windows // batch_size, None
        if not self.per_epoch:
            raise UserError(
                f"the text is too short: {len(tokens):,} tokens are no batch of {batch_size} "
                f"windows of {length} tokens"
            )

    def get(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """Part number `part` of `parts` of the batch: inputs and targets, int64, each (B, T).

        Data-parallel ranks take different parts. Ranks that share one model (tensor or pipeline
        parallel) take the same part.
        """
        epoch, batch = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self.order, self.epoch = torch.randperm(self.windows, generator=generator), epoch
        first = batch * self.batch_size
        numbers = self.order[first + part : first + self.batch_size : parts]
        return windows(self.tokens, numbers, self.length)

    def from_step(
        self, step: int, end: int, mesh: DeviceMesh, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's parts of the batches `step` to `end` - 1, on the device.

        A GPU runs asynchronously: while it computes a step, the program reads the next batch from
        the disk and copies it. The copy does not wait, because it is from pinned memory.
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


def windows(tokens: np.ndarray, numbers: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The windows with these numbers, and the windows one token later (the targets)."""
    rows = [tokens[i * length : (i + 1) * length + 1] for i in numbers.tolist()]
    rows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def bigram_loss(train: np.ndarray, inputs_BT: Tensor, targets_BT: Tensor, vocab_size: int) -> float:
    """The loss of a bigram model, which sees one token, on these windows, in nats per token.

    The model is the counts of pairs in the training text, plus one for each pair (Laplace's rule).
    """
    counts = torch.ones(vocab_size**2, dtype=torch.float64)
    for start in range(0, len(train), 1 << 20):
        piece = torch.from_numpy(train[start : start + (1 << 20) + 1].astype(np.int64))
        counts += torch.bincount(piece[:-1] * vocab_size + piece[1:], minlength=vocab_size**2)
    counts = counts.view(vocab_size, vocab_size)
    probability = counts / counts.sum(1, keepdim=True)
    return -probability[inputs_BT, targets_BT].log().mean().item()
