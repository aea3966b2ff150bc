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
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
LONGEST = 10_000_000  # bytes of a text file that is one document
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Part:
    """A file, or a part of it: what `documents_of` reads at a time."""

    kind: str
    file: str
    nbytes: int
    first: int = 0  # the lines that begin from this byte on; Parquet: row groups
    stop: int = 0


def pieces_of(files: list[Path], most: int, are_chats: bool = False) -> list[list[Part]]:
    """Divide the files, in this order, into pieces of about `most` bytes, each for one shard.

    Small files and row groups share a piece: no window of training crosses a shard, so many short
    shards would lose text. The pieces follow from the files alone, so any number of processes
    writes the same shards. Raises `UserError` if a file is missing, or of a kind without a reader.
    """
    pieces, nbytes = [], most
    for part in (part for file in files for part in parts_of(file, most, are_chats)):
        if nbytes >= most:
            pieces.append([])
            nbytes = 0
        pieces[-1].append(part)
        nbytes += part.nbytes
    return pieces


def parts_of(file: Path, most: int, are_chats: bool) -> list[Part]:
    if not file.is_file():
        raise UserError(f"there is no file {file}")
    name, size = str(file), file.stat().st_size
    check_not_packed(file)
    kind = "chat" if are_chats else KINDS.get(file.suffix, "text")
    if kind == "parquet":
        metadata = open_parquet(name).metadata
        groups = range(metadata.num_row_groups)
        sizes = [metadata.row_group(group).total_byte_size for group in groups]
        return [Part(kind, name, sizes[group], group, group + 1) for group in groups]
    if kind == "chat" or (kind == "text" and size <= LONGEST):  # in one part: errors name the line
        return [Part(kind, name, size)]
    kind = "long text" if kind == "text" else kind
    return [Part(kind, name, b - a, a, b) for a, b in pairwise([*range(0, size, most), size])]


def check_not_packed(file: Path) -> None:
    """Raise `UserError` for a compressed file, whose bytes would be taken for text."""
    if file.suffix in PACKED:
        raise UserError(f"{file} is compressed: unpack it first")


def documents_of(part: Part, field: str) -> Iterator[bytes]:
    """The texts of the documents of a part, in their order; empty ones are left out.

    field: the name of the field, or column, that has the text. Raises `UserError` if it is missing.
    """
    readers = {"text": text_file, "long text": long_text, "jsonl": json_lines, "parquet": rows}
    return filter(None, readers[part.kind](part, field))


def lines_of(part: Part) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of the lines that begin in the part: the last one may end behind it."""
    with open(part.file, "rb") as file:
        if part.first:  # the previous part has the line that crosses this border
            file.seek(part.first - 1)
            file.readline()
        start = file.tell()
        while start < part.stop:
            line = file.readline()
            yield start, line
            start += len(line)


def check_is_text(text: bytes, name: str) -> bytes:
    """Return `text`. Raise `UserError` if more than one in 1,000 of its characters is not UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        found = text.decode(errors="replace")  # as in tokenizing.py
        if 1000 * found.count("\ufffd") > len(found):
            raise UserError(
                f"{name} is no text in UTF-8: leave it out, or convert it "
                "(iconv -f LATIN1 -t UTF-8 FILE)"
            ) from None
    return text


def text_file(part: Part, field: str) -> Iterator[bytes]:
    yield check_is_text(Path(part.file).read_bytes(), part.file)


def long_text(part: Part, field: str) -> Iterator[bytes]:
    """The whole file as one document could not be divided into training and held-out text."""
    lines, size = [], 0
    for _, line in lines_of(part):
        lines.append(line)
        size += len(line)
        if size >= MEGABYTE:
            yield check_is_text(b"".join(lines), part.file)
            lines, size = [], 0
    yield check_is_text(b"".join(lines), part.file)


def json_lines(part: Part, field: str) -> Iterator[bytes]:
    for start, line in lines_of(part):
        if line.strip():
            yield text_in(line, field, f"the line from byte {start} of {part.file}")


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


def rows(part: Part, field: str) -> Iterator[bytes]:
    name, file = part.file, open_parquet(part.file)
    if field not in file.schema_arrow.names:
        raise UserError(f"{name} has no column {field!r}: --field names the column of the text")
    for group in range(part.first, part.stop):
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
