"""Tokens on the disk: shards of token ids, the borders of their documents, and an index.

    FOLDER/index.json              the vocabulary; of each shard its name, sizes and checksum
    FOLDER/train_00000.bin         the token ids: uint16, or uint32 for more than 65,536 tokens
    FOLDER/train_00000.starts      int64: where in this shard each document begins
    FOLDER/train_00000.counts      only of chats: uint8 per token, 1 if the loss counts it
    FOLDER/validation_00000.bin    ...

Each file gets its name when it is complete, and the index is written last. The files are memory-
mapped: a rank reads the pages that its batches touch, and the ranks of a node share these pages.
"""

import errno
import hashlib
import json
import os
import resource
import zlib
from array import array
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from arguments import UserError
from tokenizing import Tokenizer

PARTS = ("train", "validation")
FILES = {".bin": "tokens", ".starts": "documents"}  # suffix -> what the index calls its length
FILES |= {".counts": "counts"}  # only of chats
DTYPES = {".starts": "int64", ".counts": "uint8"}  # of tokens, the index has it
FORMAT = 1


@dataclass(frozen=True)
class Shard:
    tokens: np.ndarray  # one row of token ids, mapped from a file
    starts: np.ndarray  # int64, ascending: the index of the first token of each document
    counts: np.ndarray | None = None  # uint8, per token: 1 if it is a target; None: all are


class ShardWriter:
    """Write one shard, document by document; `close` gives the files their names."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.starts, self.length, self.crc = folder, name, array("q"), 0, 0
        self.counts = bytearray()
        self.file = self.temporary(".bin").open("wb")  # until `close`

    def temporary(self, suffix: str) -> Path:
        return self.folder / f"{self.name}{suffix}.{os.getpid()}.tmp"

    def add(self, tokens: np.ndarray, counts: np.ndarray | None = None) -> None:
        """tokens: of one document, in the dtype of the shard. counts: of a chat, see `Shard`."""
        if counts is not None:
            self.counts += counts.astype(np.uint8).tobytes()
        self.starts.append(self.length)
        self.length += len(tokens)
        piece = tokens.tobytes()
        self.crc = zlib.crc32(piece, self.crc)
        self.file.write(piece)

    def close(self) -> list[dict]:
        """The entry of this shard in the index, in a list; an empty shard leaves no file: []."""
        with self.file:
            flush(self.file)
        if not self.length:
            self.temporary(".bin").unlink()
            return []
        starts = self.starts.tobytes()
        write_file(self.folder / f"{self.name}.starts", starts)
        sizes = {"tokens": self.length, "documents": len(self.starts)}
        if self.counts:
            write_file(self.folder / f"{self.name}.counts", self.counts)
            sizes["counts"] = len(self.counts)
        os.replace(self.temporary(".bin"), self.folder / f"{self.name}.bin")
        crc = zlib.crc32(self.counts, zlib.crc32(starts, self.crc))
        return [{"name": self.name, **sizes, "crc32": crc}]


def flush(file) -> None:
    """The bytes are on the disk before the file gets its name, also if the power fails."""
    file.flush()
    os.fsync(file.fileno())


def write_file(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        flush(file)
    os.replace(temporary, path)


def write_json(path: Path, value: dict) -> None:
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def vocabulary_of(tokenizer: Tokenizer) -> dict:
    """These values must be equal when the tokens are written and when they are read."""
    return {
        "tokenizer": tokenizer.name,
        "vocabulary": tokenizer.checksum,
        "token_count": tokenizer.token_count,
        "dtype": tokenizer.dtype,
    }


def write_index(folder: Path, tokenizer: Tokenizer, entries: dict[str, list[dict]]) -> None:
    """entries: part -> what `ShardWriter.close` returned for its shards, in their order."""
    write_json(folder / "index.json", {"format": FORMAT, **vocabulary_of(tokenizer), **entries})


def read_index(folder: Path) -> dict:
    """The index of `folder`. Raises `UserError` if it is missing, broken or of another format."""
    file = folder / "index.json"
    try:
        index = json.loads(file.read_bytes())
        is_ours = index["format"] == FORMAT and all(isinstance(index[part], list) for part in PARTS)
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no index.json: prepare.py writes it last, so run prepare.py to its end"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        raise UserError(
            f"{file} is no index of prepare.py, or broken: delete {folder} and prepare the "
            "text again"
        )
    return index


def checksum_of(index: dict) -> str:
    """It identifies the tokens of a run: their sizes, their checksums and their order."""
    return hashlib.sha256(json.dumps([index[part] for part in PARTS]).encode()).hexdigest()[:16]


def open_shards(folder: Path, index: dict, part: str) -> list[Shard]:
    """Map the files of one part; nothing is read. Raises `UserError` if one has another size."""
    limit = raise_limit_of_files()
    shards = []
    for entry in index[part]:
        arrays = []
        for suffix, count in files_of(entry).items():
            file = folder / f"{entry['name']}{suffix}"
            dtype = np.dtype(DTYPES.get(suffix, index["dtype"]))
            expected = entry[count] * dtype.itemsize
            try:
                size = file.stat().st_size
                if size != expected:
                    raise UserError(
                        f"{file} has {size:,} bytes, not {expected:,} as index.json says: delete "
                        f"{folder} and prepare the text again"
                    )
                arrays.append(np.memmap(file, dtype, mode="r"))
            except OSError as error:
                if error.errno == errno.EMFILE:
                    raise UserError(
                        f"{file} cannot be opened: the limit of open files is {limit:,}, and each "
                        f"file of {folder} stays open: raise the limit with `ulimit -n`"
                    ) from None
                raise UserError(
                    f"{file} cannot be read ({error.strerror}): copy all files of {folder}, or "
                    "delete it and prepare the text again"
                ) from None
        shards.append(Shard(*arrays))
    return shards


def raise_limit_of_files() -> int:
    """Allow this process all the open files it may have, and return how many these are.

    A mapped file keeps its descriptor, and the usual limit, 1,024, is less than a long text needs.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS refuses "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def files_of(entry: dict) -> dict[str, str]:
    """Those of `FILES` that this shard has."""
    return {suffix: count for suffix, count in FILES.items() if count in entry}


def check_bytes(folder: Path, entries: list[dict]) -> None:
    """Read every byte of these shards. Raises `UserError` if a checksum is wrong."""
    for entry in entries:
        crc = 0
        for suffix in files_of(entry):
            with open(folder / f"{entry['name']}{suffix}", "rb") as file:
                while piece := file.read(1 << 20):
                    crc = zlib.crc32(piece, crc)
        if crc != entry["crc32"]:
            raise UserError(
                f"shard {entry['name']} of {folder} is broken (its checksum is wrong): delete "
                f"{folder} and prepare the text again"
            )
