"""Tokenise text of any size into shards for train.py, with all processors of a machine.

    python transformer_basics/prepare.py runs/tokens */*.md --held-out-every 5
    python transformer_basics/prepare.py FOLDER FILE.jsonl --field text --tokenizer gpt2
    python transformer_basics/prepare.py FOLDER FILE.jsonl --chat        # chat.py says what counts
    python transformer_basics/train.py --data runs/tokens --steps 100 --document-masks
    python transformer_basics/prepare.py runs/tokens --verify        # reads every byte

The input is text files (each one document, or one per MB above 10 MB), JSON lines or Parquet files.
Each piece of the input becomes one shard of training tokens and one of held-out tokens: so neither
the number of processes nor a kill changes the result. The same command continues after a kill with
the pieces that lack their shards. Look at index.json in the folder: the shards, their sizes and
their checksums.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

from arguments import ArgumentParser, UserError, above, at_least
from chat import chats_of, tokens_of_chat
from documents import Part, documents_of, pieces_of
from shards import (
    PARTS,
    ShardWriter,
    check_bytes,
    open_shards,
    read_index,
    vocabulary_of,
    write_index,
    write_json,
)
from tokenizing import ids, load_tokenizer


def main() -> None:
    parser, args = parse_args()
    try:
        if args.verify:
            verify(args.folder)
        else:
            prepare(args)
    except (UserError, OSError) as error:
        parser.error(str(error))


def prepare(args) -> None:
    """Write the shards that are missing, then the index."""
    folder, tokenizer = args.folder, load_tokenizer(args.tokenizer)
    pieces = pieces_of(args.files, round(args.shard_mb * 1e6), args.chat)
    check_plan(folder, plan_of(args, pieces))
    sidecars = [folder / f"piece_{number:05}.json" for number in range(len(pieces))]
    if not (folder / "index.json").exists():
        todo = [number for number, file in enumerate(sidecars) if not file.exists()]
        if len(todo) < len(pieces):
            print(f"continuing: {len(pieces) - len(todo)} of {len(pieces)} pieces are done")
        sizes = [sum(part.nbytes for part in piece) for piece in pieces]
        progress = Progress(sum(sizes[number] for number in todo), len(todo))
        for number in in_processes(args, folder, pieces, todo):
            progress.done(sizes[number])
        done = [json.loads(file.read_bytes()) for file in sidecars]
        entries = {part: [entry for piece in done for entry in piece[part]] for part in PARTS}
        for part, found in entries.items():
            if not found:
                raise UserError(
                    f"of all documents none is for {part}: give more of them, or another "
                    "--held-out-every, and an empty folder (up to 10 MB a text file is one)"
                )
        write_index(folder, tokenizer, entries)  # from here on train.py takes the folder
    for file in (*sidecars, *folder.glob("*.tmp")):
        file.unlink(missing_ok=True)
    index = read_index(folder)
    for part in PARTS:
        tokens, documents = (sum(e[k] for e in index[part]) for k in ("tokens", "documents"))
        print(f"{part}: {tokens:,} tokens, {documents:,} documents, {len(index[part])} shard(s)")


def plan_of(args, pieces: list[list[Part]]) -> dict:
    """What determines the shards: a continued run must have the same plan."""
    times = {str(file): file.stat().st_mtime_ns for file in args.files}
    tokenizer = load_tokenizer(args.tokenizer)
    return {
        **vocabulary_of(tokenizer),
        "chat_template": tokenizer.template if args.chat else None,
        "field": args.field,
        "held_out_every": args.held_out_every,
        "modified": times,
        "pieces": [[asdict(part) for part in piece] for piece in pieces],
    }


def check_plan(folder: Path, plan: dict) -> None:
    """Write the plan into an empty folder. Raise `UserError` if the folder has another one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "plan.json"
    if file.exists():
        before = json.loads(file.read_bytes())
        changed = [name for name, value in plan.items() if before.get(name) != value]
        if changed:
            raise UserError(
                f"{folder} was begun with other input ({', '.join(changed)} differ): choose "
                "another folder, or delete it"
            )
    elif any(path.suffix != ".tmp" for path in folder.iterdir()):
        raise UserError(f"{folder} has files that prepare.py did not write: choose another folder")
    else:
        write_json(file, plan)


def in_processes(args, folder: Path, pieces: list[list[Part]], todo: list[int]) -> Iterator[int]:
    """Write the shards of these pieces; yield the number of each piece that is done."""
    work = partial(
        write_shards,
        folder,
        tokenizer_name=args.tokenizer,
        field=args.field,
        held_out_every=args.held_out_every,
    )
    if min(args.processes, len(todo)) <= 1:
        for number in todo:
            yield work(number, pieces[number])
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    context = multiprocessing.get_context("spawn")  # a fork would share the tokenizer's locks
    with ProcessPoolExecutor(args.processes, context, end_with_parent) as pool:
        futures = [pool.submit(work, number, pieces[number]) for number in todo]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise UserError(
                "a process was killed, perhaps because memory was short: run the command again, "
                "with fewer --processes or a smaller --shard-mb"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """In each process of the pool: end when the parent is killed, instead of waiting for ever."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)  # the whole process, from a thread

    threading.Thread(target=wait, daemon=True).start()


def write_shards(
    folder: Path,
    number: int,
    piece: list[Part],
    tokenizer_name: str | None,
    field: str,
    held_out_every: int,
) -> int:
    """Tokenise one piece into a shard for training and a held-out shard; return its number."""
    tokenizer = tokenizer_of_process(tokenizer_name)
    writers = {part: ShardWriter(folder, f"{part}_{number:05}") for part in PARTS}

    def writer_for(text: bytes) -> ShardWriter:
        # By its text: equal documents are all for training, or all held out.
        is_held_out = zlib.crc32(text) % held_out_every == 0
        return writers["validation" if is_held_out else "train"]

    for part in piece:
        if part.kind == "chat":
            for line, messages, place in chats_of(part.file):
                writer_for(line).add(*tokens_of_chat(messages, tokenizer, place))
        else:
            for text in documents_of(part, field):
                writer_for(text).add(ids(text, tokenizer))
    entries = {part: writer.close() for part, writer in writers.items()}
    # This file comes last: a kill before it, and the piece is written again.
    write_json(folder / f"piece_{number:05}.json", entries)
    return number


tokenizer_of_process = cache(load_tokenizer)


class Progress:
    """Lines every ten seconds; on a terminal one line that changes."""

    def __init__(self, total: int, count: int):
        self.total, self.count, self.pieces, self.nbytes = total, count, 0, 0
        self.begin = self.printed = time.monotonic()

    def done(self, nbytes: int) -> None:
        self.pieces += 1
        self.nbytes += nbytes
        now, terminal, is_last = time.monotonic(), sys.stdout.isatty(), self.pieces == self.count
        if not is_last and now - self.printed < (0.2 if terminal else 10):
            return
        self.printed = now
        rate = self.nbytes / max(now - self.begin, 1e-3)
        left = (self.total - self.nbytes) / max(rate, 1)
        text = f"{self.pieces} of {self.count} pieces, {self.nbytes / 1e6:,.1f} MB, "
        text += f"{rate / 1e6:.1f} MB/s, {left:.0f} s left"
        print(text.ljust(70), end="\r" if terminal and not is_last else "\n", flush=True)


def verify(folder: Path) -> None:
    """Read every shard. Raises `UserError` if one is missing, truncated or broken."""
    index = read_index(folder)
    for part in PARTS:
        open_shards(folder, index, part)
        check_bytes(folder, index[part])
    print(f"{folder}: all {sum(len(index[part]) for part in PARTS)} shards are as index.json says")


def parse_args():
    parser = ArgumentParser(description="Tokenise text into shards for train.py.")
    parser.add_argument("folder", type=Path, help="write the shards to this folder")
    parser.add_argument("files", nargs="*", type=Path, help="text, .jsonl, .json or .parquet files")
    add = parser.add_argument
    add("--field", default="text", help="field or column that holds the text")
    add("--chat", action="store_true", help="JSON lines of chats: the loss counts the answers")
    add("--tokenizer", help="id on the Hugging Face hub or directory (default: bytes as tokens)")
    every = "hold out one in N documents, chosen by a checksum of its text"
    add("--held-out-every", type=at_least(2), default=20, help=every)
    add(
        "--shard-mb",
        type=above(0),
        default=256,
        help="MB of text per shard; a row group or a file of chats is not divided",
    )
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--processes", type=at_least(1), default=here, help="processes (default: all processors)")
    add("--verify", action="store_true", help="check the checksum of every shard in the folder")
    args = parser.parse_args()
    if args.verify == bool(args.files):
        parser.error("give either files to prepare, or --verify to check a folder")
    return parser, args


if __name__ == "__main__":
    main()
