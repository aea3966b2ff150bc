"""The documents of text files, JSON lines and Parquet files, divided into pieces of about one size.

FILE.jsonl, FILE.json    one JSON object per line, with the text in one of its fields
FILE.jsonl of --chat     one chat per line: chat.py
FILE.parquet             one document per row, with the text in one of its columns
any other name           a text file: one document; above 10 MB, its lines in documents of 1 MB
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from arguments import UserError

KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # other files: "text"
LONGEST = 10_000_000  # bytes of a text file that is one document
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Piece:
    """What one process reads at a time: text files, or a part of another file."""

    kind: str
    files: tuple[str, ...]
    nbytes: int
    first: int = 0  # the lines that begin from this byte on; Parquet: row groups
    stop: int = 0


def pieces_of(files: list[Path], most: int, are_chats: bool = False) -> list[Piece]:
    """Divide the files, in this order, into pieces of about `most` bytes.

    The pieces follow from the files alone, so any number of processes writes the same shards.
    Raises `UserError` if a file is missing or no Parquet file.
    """
    pieces, texts, nbytes = [], [], 0
    for file in files:
        if not file.is_file():
            raise UserError(f"there is no file {file}")
        name, size = str(file), file.stat().st_size
        kind = "chat" if are_chats else KINDS.get(file.suffix, "text")
        if kind == "text" and size > LONGEST:
            kind = "long text"
        if kind == "text":
            texts.append(name)
            nbytes += size
        if texts and (kind != "text" or nbytes >= most):
            pieces.append(Piece("text", tuple(texts), nbytes))
            texts, nbytes = [], 0
        if kind == "chat":  # in one piece: an error names the number of the line
            pieces.append(Piece(kind, (name,), size))
        if kind in ("jsonl", "long text"):
            edges = [*range(0, size, most), size]
            ranges = pairwise(edges)
            pieces += [Piece(kind, (name,), b - a, a, b) for a, b in ranges]
        if kind == "parquet":
            metadata = open_parquet(name).metadata
            for group in range(metadata.num_row_groups):
                size = metadata.row_group(group).total_byte_size
                pieces.append(Piece(kind, (name,), size, group, group + 1))
    if texts:
        pieces.append(Piece("text", tuple(texts), nbytes))
    return pieces


def documents_of(piece: Piece, field: str) -> Iterator[bytes]:
    """The texts of the documents of a piece, in their order; empty ones are left out.

    field: the name of the field, or column, that has the text. Raises `UserError` if it is missing.
    """
    readers = {"text": text_files, "long text": long_text, "jsonl": json_lines, "parquet": rows}
    return filter(None, readers[piece.kind](piece, field))


def lines_of(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of the lines that begin in the piece: the last one may end behind it."""
    (name,) = piece.files
    with open(name, "rb") as file:
        if piece.first:  # the previous piece has the line that crosses this border
            file.seek(piece.first - 1)
            file.readline()
        start = file.tell()
        while start < piece.stop:
            line = file.readline()
            yield start, line
            start += len(line)


def text_files(piece: Piece, field: str) -> Iterator[bytes]:
    for file in piece.files:
        yield Path(file).read_bytes()


def long_text(piece: Piece, field: str) -> Iterator[bytes]:
    """The whole file as one document could not be divided into training and held-out text."""
    lines, size = [], 0
    for _, line in lines_of(piece):
        lines.append(line)
        size += len(line)
        if size >= MEGABYTE:
            yield b"".join(lines)
            lines, size = [], 0
    yield b"".join(lines)


def json_lines(piece: Piece, field: str) -> Iterator[bytes]:
    (name,) = piece.files
    for start, line in lines_of(piece):
        if line.strip():
            yield text_in(line, field, f"the line from byte {start} of {name}")


def text_in(line: bytes, field: str, place: str) -> bytes:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"{place} is no JSON object: the file must have one object per line "
            "(jq -c '.[]' x.json > x.jsonl)"
        )
    text = found.get(field)
    if not isinstance(text, str):
        raise UserError(f"{place} has no text in a field {field!r}: --field names the field")
    return text.encode(errors="replace")  # JSON can hold half a pair of surrogates


def rows(piece: Piece, field: str) -> Iterator[bytes]:
    (name,) = piece.files
    file = open_parquet(name)
    if field not in file.schema_arrow.names:
        raise UserError(f"{name} has no column {field!r}: --field names the column of the text")
    for group in range(piece.first, piece.stop):
        for batch in file.iter_batches(row_groups=[group], columns=[field]):
            for text in batch.column(0).to_pylist():
                if text is not None and not isinstance(text, str):
                    raise UserError(f"column {field!r} of {name} has no texts: --field names it")
                yield (text or "").encode()


def open_parquet(name: str):
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{name}: Parquet files need pyarrow: pip install pyarrow") from None
    try:
        return ParquetFile(name)
    except ArrowInvalid:
        raise UserError(f"{name} is no Parquet file, or broken") from None
