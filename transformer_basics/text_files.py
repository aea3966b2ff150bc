"""Text files given to train.py directly, and its default text: one process per node tokenises them.

The documents become two shards, which are kept for the next run: about a twentieth of the text is
for validation, the rest for training. prepare.py is for more text, and uses all processors.
"""

import hashlib
import json
import os
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
from arguments import UserError
from documents import KINDS, check_is_text, check_not_packed
from runtime import Worker
from shards import PARTS, ShardWriter, open_shards, read_index, vocabulary_of, write_index
from tokenizing import Tokenizer, ids

# A folder per user: a second user of this machine may not write into the first one's.
CACHE = Path(tempfile.gettempdir()) / f"gpt_tokens_{os.getuid()}"
# Bytes that train.py tokenises itself, while the other ranks wait. A tokenizer of Hugging Face gets
# a tenth: it needs 150 bytes of memory per byte of a file.
MOST_TEXT = 200_000_000
ADVICE = "run `python prepare.py FOLDER FILES...` once, and train with --data FOLDER"


def tokenise_files(files: list[Path], tokenizer: Tokenizer, worker: Worker) -> Path:
    """All ranks call this. The folder of the shards of these files: each node writes them once.

    The ranks wait meanwhile; MOST_TEXT bounds how long.
    """
    documents = [Path(file) for file in files] or standard_library()
    for file in documents if files else []:
        if not file.is_file():
            kinds = "text files, or one folder that prepare.py has written"
            raise UserError(f"there is no file {file}: --data takes {kinds}")
        if not file.stat().st_size:
            raise UserError(f"{file} is empty: --data takes text files")
        check_not_packed(file)
        if file.suffix in KINDS:
            raise UserError(f"{file} is no text file: {ADVICE}")
    size = sum(file.stat().st_size for file in documents)
    most = MOST_TEXT if tokenizer.name is None else MOST_TEXT / 10
    if files and size > most:
        raise UserError(
            f"--data has {size / 1e6:,.0f} MB of text: for more than {most / 1e6:,.0f} MB {ADVICE}"
        )
    seen = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in documents]
    key = json.dumps([vocabulary_of(tokenizer), seen])
    folder = CACHE / hashlib.sha256(key.encode()).hexdigest()[:16]

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        texts = [(file.name, file.read_bytes()) for file in documents]
        for name, text in texts if files else []:
            check_is_text(text, name)
        parts = split(texts)
        entries = {}
        for part, texts in zip(PARTS, parts, strict=True):
            shard = ShardWriter(folder, f"{part}_00000")
            for text in telling(texts):
                shard.add(ids(text, tokenizer))
            entries[part] = shard.close()
        write_index(folder, tokenizer, entries)  # last: if it exists, the shards are complete

    once_per_node(lambda: None if are_there(folder) else write(), worker)
    return folder


def are_there(folder: Path) -> bool:
    """Whether an earlier run has left all shards: something may have removed files of the cache."""
    try:
        index = read_index(folder)
        for part in PARTS:
            open_shards(folder, index, part)
    except UserError:
        return False
    return True


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
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name != "site-packages"]  # it may be 100 times it
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(file for file in files if file.stat().st_size)


def split(documents: list[tuple[str, bytes]]) -> tuple[list[bytes], list[bytes]]:
    """Split documents (name, text) into texts for training, and about a twentieth for validation.

    Of 20 documents or more, a checksum of the name chooses one in 20: half a document in training
    would make the other half a poor test. If there are fewer, or if those have not 2 to 10 % of the
    text, the sizes are too unequal for that: each document gives its last part.
    """
    if len(documents) == 1:
        text = documents[0][1]
        most = len(text) * 19 // 20
        cut = text.rfind(b"\n", len(text) * 9 // 10, most) + 1 or most
        return [text[:cut]], [text[cut:]]
    ordered = sorted(documents, key=lambda d: zlib.crc32(d[0].encode()))
    count = -(-len(ordered) // 20)
    held_out, train = ([text for _, text in part] for part in (ordered[:count], ordered[count:]))
    share = sum(map(len, held_out)) / sum(len(text) for _, text in documents)
    if len(documents) < 20 or not 0.02 <= share <= 0.1:
        pairs = [split([document]) for document in documents]
        return [first for (first,), _ in pairs], [last for _, (last,) in pairs]
    return train, held_out
