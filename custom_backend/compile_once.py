"""Compile one C++ file that torch loads as a Python module; one rank at a time, and only once."""

import fcntl
import hashlib
import os
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension


def compile_once(name: str, source: Path) -> ModuleType:
    """The module `name` of this source: compiled by the first rank, loaded by the other ranks.

    load() has a lock too: a file, which a killed build leaves behind before torch 2.15, so that the
    next load() would wait for ever. Our lock is the kernel's and ends with its process. While we
    hold it no other rank compiles, so a lock file that is there was left behind.
    """
    folder = build_folder(name, source)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "ranks").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process to compile {source.name}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(name, [str(source)], build_directory=str(folder))


def build_folder(name: str, source: Path) -> Path:
    """A folder for this torch and this text: two clones never overwrite each other's library."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR", cpp_extension.get_default_build_root())
    files = sorted(f for f in source.parent.iterdir() if f.suffix in (".h", ".cpp"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return Path(root) / f"{name}_{torch.__version__}_{digest[:8]}"
