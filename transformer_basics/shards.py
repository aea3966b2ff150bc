"""Tokens on the disk: shards of token ids, the borders of their documents, and an index.

    FOLDER/index.json              the vocabulary; of each shard its name, sizes and checksum
    FOLDER/train_00000.bin         the token ids: uint16, or uint32 for more than 65,536 tokens
    FOLDER/train_00000.starts      int64: where in this shard each document begins
    FOLDER/validation_00000.bin    ...

Each file gets its name when it is complete, and the index is written last. The files are memory-
mapped: a rank reads the pages that its batches touch, and the ranks of a node share these pages.
"""

import hashlib
import json
import os
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from arguments import UserError
from tokenizing import Tokenizer

PARTS = ("train", "validation")
FILES = {".bin": "tokens", ".starts": "documents"}  # suffix -> what the index calls its length
FORMAT = 1


@dataclass(frozen=True)
class Shard:
    tokens: np.ndarray  # one row of token ids, mapped from a file
    starts: np.ndarray  # int64, ascending: the index of the first token of each document


class ShardWriter:
    """Write one shard, document by document; `close` gives the files their names."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.starts, self.length, self.crc = folder, name, array("q"), 0, 0
        self.file = self.temporary(".bin").open("wb")  # until `close`

    def temporary(self, suffix: str) -> Path:
        return self.folder / f"{self.name}{suffix}.{os.getpid()}.tmp"

    def add(self, tokens: np.ndarray) -> None:
        """tokens: of one document, in the dtype of the shard."""
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
        os.replace(self.temporary(".bin"), self.folder / f"{self.name}.bin")
        sizes = {"tokens": self.length, "documents": len(self.starts)}
        return [{"name": self.name, **sizes, "crc32": zlib.crc32(starts, self.crc)}]


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
        raise UserError(f"{file} is no index of prepare.py, or broken: prepare the text again")
    return index


def checksum_of(index: dict) -> str:
    """It identifies the tokens of a run: their sizes, their checksums and their order."""
    return hashlib.sha256(json.dumps([index[part] for part in PARTS]).encode()).hexdigest()[:16]


def open_shards(folder: Path, index: dict, part: str) -> list[Shard]:
    """Map the files of one part; nothing is read. Raises `UserError` if one has another size."""
    shards = []
    for entry in index[part]:
        arrays = []
        for suffix, count in FILES.items():
            file = folder / f"{entry['name']}{suffix}"
            dtype = np.dtype(index["dtype"] if suffix == ".bin" else np.int64)
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
                raise UserError(
                    f"{file} cannot be read ({error.strerror}): copy all files of {folder}, or "
                    "prepare the text again"
                ) from None
        shards.append(Shard(*arrays))
    return shards


def check_bytes(folder: Path, entries: list[dict]) -> None:
    """Read every byte of these shards. Raises `UserError` if a checksum is wrong."""
    for entry in entries:
        crc = 0
        for suffix in FILES:
            with open(folder / f"{entry['name']}{suffix}", "rb") as file:
                while piece := file.read(1 << 20):
                    crc = zlib.crc32(piece, crc)
        if crc != entry["crc32"]:
            raise UserError(
                f"shard {entry['name']} of {folder} is broken (its checksum is wrong): delete "
                f"{folder} and prepare the text again"
            )
