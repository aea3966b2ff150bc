"""Training pairs without a download: functions of Python's standard library, their docstrings."""

import ast
import json
import os
import platform
import re
import sysconfig
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

from arguments import fail
from data import Pair

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def library_files(data_dir: Path) -> list[Path]:
    """Files of pairs (train, eval, names), written into `data_dir` unless they are there.

    In train and eval, a pair is a function's source and the first line of its docstring. In names,
    a pair is the first two lines of the source and the name, if the name has several words;
    functions without docstrings count, too. Modules in eval are in no other file.

    Call it before joining the job: local rank 0 writes the files, the other ranks return at once
    and wait for local rank 0 when they join.
    """
    folder = data_dir / f"python-{platform.python_version()}"
    files = [folder / f"{part}.jsonl" for part in ("train", "eval", "names")]
    if os.environ.get("LOCAL_RANK", "0") != "0" or files[-1].exists():  # it is written last
        return files
    train, held_out, names = [], [], []
    for pair in library_functions():
        path, name = pair.name.split(":")
        # A checksum of the module's or package's name decides: it is equal on every machine.
        module = re.split(r"[/.]", path)[0].lstrip("_")
        is_held_out = zlib.crc32(module.encode()) % 10 == 0
        if pair.summary:
            (held_out if is_held_out else train).append(pair)
        if re.search(r"[a-z0-9](_[^_]|[A-Z])", name) and not is_held_out:
            first_lines = "\n".join(pair.text.split("\n")[:2])
            names.append(Pair(first_lines, name.strip("_"), pair.name))
    # The library has copies of functions: do not evaluate on a copy of a training pair.
    seen = {(pair.name.split(":")[1], pair.summary) for pair in train}
    held_out = [pair for pair in held_out if (pair.name.split(":")[1], pair.summary) not in seen]
    # In a random order, so that the first hundred are a fair sample.
    held_out.sort(key=lambda pair: zlib.crc32(pair.name.encode()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, pairs in zip(files, (train, held_out, names), strict=True):
            temporary = folder / uuid.uuid4().hex  # unique: several nodes may share the disk
            temporary.write_text("".join(json.dumps(pair._asdict()) + "\n" for pair in pairs))
            os.replace(temporary, file)
    except OSError as error:
        fail(f"--data-dir {data_dir} cannot be written: {error.strerror}")
    return files


def library_functions() -> Iterator[Pair]:
    """Each function of Python's standard library; without a summary if it has none."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        file = path.relative_to(library)
        if NOT_LIBRARY.isdisjoint(file.parts):
            yield from functions_in(path, file.as_posix())


def functions_in(path: Path, file: str) -> Iterator[Pair]:
    """(source without the docstring, the docstring's first line, "file:name") of each function."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return  # the library has files that are broken on purpose
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                del node.body[0]
            if node.body:
                yield Pair(ast.unparse(node), first_line(docstring or ""), f"{file}:{node.name}")


def first_line(docstring: str) -> str:
    """The first line, if it is a sentence of 3 to 16 words and no example; otherwise ""."""
    first, _, rest = docstring.partition("\n")
    is_whole = first.endswith(".") or not rest.split("\n")[0].strip()
    is_plain = first.isascii() and ">>>" not in first
    return first if is_whole and is_plain and 3 <= len(first.split()) <= 16 else ""
