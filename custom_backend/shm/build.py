"""Compile the C++ part of shm, once for each torch, compiler and version of the sources.

python custom_backend/shm/build.py          # ahead of a job; else its first rank compiles

From the folder custom_backend, `python -m shm.build` does the same.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

# `python -m shm.build` imports the package shm first, and with it this file; runpy warns of that.
warnings.filterwarnings("ignore", "'shm.build' found in sys.modules", RuntimeWarning)

HERE = Path(__file__).resolve().parent
SOURCES = [HERE / "shared_memory.cpp", HERE / "reduce.cpp"]
# Contraction would round a * b + c once instead of twice on some processors.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off"]


def load() -> ModuleType:
    """Load the compiled module; compile it first, if it is not in the cache.

    Raises RuntimeError with one sentence if there is no compiler, or if it fails.
    """
    file = library()
    if not file.exists():  # else the cache may be read-only, as in a container's image
        check_tools()
        try:
            build_in(file.parent)
        except OSError as error:
            why = f"shm: cannot build in {file.parent}: {error.strerror}"
            raise RuntimeError(f"{why}. Set SHM_BUILD_DIR to a folder for the build") from None
    spec = importlib.util.spec_from_file_location("shm_backend", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_in(directory: Path) -> None:
    """Compile, or wait for another process that compiles."""
    directory.mkdir(parents=True, exist_ok=True)
    with alone(directory / "building", "shm: waiting for another process to compile the backend"):
        if not (directory / "shm_backend.so").exists():
            print("shm: compiling the backend, once (about a minute)", file=sys.stderr, flush=True)
            compile_into(directory)


def compile_into(directory: Path) -> None:
    """Compile in a temporary folder, then move the library: a killed build leaves no broken one.

    Use a separate process, because torch also loads what it compiles, from that folder.
    """
    folder = directory / "unfinished"
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed build, with torch's lock
    folder.mkdir()
    arguments = {"sources": [str(source) for source in SOURCES], "extra_cflags": FLAGS}
    arguments |= {"name": "shm_backend", "build_directory": str(folder)}
    program = f"from torch.utils import cpp_extension; cpp_extension.load(**{arguments!r})"
    build = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if build.returncode:
        raise RuntimeError(f"shm: the backend could not be compiled:\n{build.stdout[-3000:]}")
    os.replace(folder / "shm_backend.so", directory / "shm_backend.so")
    shutil.rmtree(folder)


def library() -> Path:
    """The path of the compiled library, whether it exists or not."""
    return cache() / fingerprint() / "shm_backend.so"


def cache() -> Path:
    """The folder of all builds: $SHM_BUILD_DIR, else in the cache of this user."""
    if folder := os.environ.get("SHM_BUILD_DIR"):
        return Path(folder)
    # A process in a container may have no home.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_shm_backend"


def fingerprint() -> str:
    """A digest of everything that a build depends on."""
    parts = torch.__version__, sys.version, platform.machine(), compiler(), FLAGS
    digest = hashlib.sha256(repr(parts).encode())
    for file in sorted(HERE.glob("*.h")) + SOURCES:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def check_tools() -> None:
    """Raise RuntimeError with one sentence if the library is missing and cannot be compiled."""
    if sys.platform != "linux":
        raise RuntimeError(
            f"shm: needs Linux (futex, memfd, robust mutexes), this is {sys.platform}. Take gloo"
        )
    if library().exists():
        return
    if torch.__version__ < "2.14":  # older versions name the operations differently
        raise RuntimeError(f"shm: needs torch 2.14 or newer, this is {torch.__version__}")
    missing = [tool for tool in (compiler(), "ninja") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(
            f"shm: {' and '.join(missing)} not found. The backend is compiled on first use, by a "
            "C++ compiler (Debian, Ubuntu: apt install g++; conda: conda install gxx) and ninja "
            '(pip install ninja). Without them take "gloo"'
        )


@contextlib.contextmanager
def alone(path: Path, while_waiting: str):
    """Hold a file lock, one process at a time; the kernel frees it if the process is killed.

    Prints `while_waiting` if another process holds it.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(while_waiting, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    argparse.ArgumentParser(description="Compile the backend shm, once.").parse_args()
    print(load().__file__)


if __name__ == "__main__":
    main()
