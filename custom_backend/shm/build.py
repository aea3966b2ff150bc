"""Compile the C++ part, once for each torch, compiler and state of the sources.

python custom_backend/shm/build.py          # or let the first rank that needs it do it
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).resolve().parent
SOURCES = [HERE / "shared_memory.cpp", HERE / "reduce.cpp"]
# Contraction would give a * b + c one rounding instead of two on some processors.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off"]


def load() -> ModuleType:
    """The compiled module; compiles it first where that has not been done on this machine.

    Raises RuntimeError with one sentence where there is no compiler, or it fails.
    """
    file = library()
    file.parent.mkdir(parents=True, exist_ok=True)
    with alone(file.parent / "building"):
        if not file.exists():
            check_tools()
            print("shm: compiling the backend, once (about a minute)", file=sys.stderr)
            compile_into(file.parent)
    spec = importlib.util.spec_from_file_location("shm_backend", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_into(directory: Path) -> None:
    """Make the library in a folder of its own: where it is at last, it is whole.

    In a process of its own, too: torch loads what it has compiled, and from there.
    """
    folder = directory / "unfinished"
    shutil.rmtree(folder, ignore_errors=True)  # of a build that was killed, with torch's lock
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
    """What has been compiled, or will be."""
    return cache() / fingerprint() / "shm_backend.so"


def cache() -> Path:
    """Where builds are kept: $SHM_BUILD_DIR, else with other caches of this user."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch_shm_backend"
    return Path(os.environ.get("SHM_BUILD_DIR", default))


def fingerprint() -> str:
    """Changes with whatever a build depends on."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {compiler()} {FLAGS}".encode())
    for file in sorted(HERE.glob("*.h")) + SOURCES:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def check_tools() -> None:
    """Raises RuntimeError with one sentence where what is to be compiled cannot be."""
    if library().exists():
        return
    if torch.__version__ < "2.14":  # operations have other names there
        raise RuntimeError(f"shm: needs torch 2.14 or newer, this is {torch.__version__}")
    missing = [tool for tool in (compiler(), "ninja") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(
            f"shm: {' and '.join(missing)} not found. The backend is compiled on first use, by a "
            "C++ compiler (Debian, Ubuntu: apt install g++; conda: conda install gxx) and ninja "
            '(pip install ninja). Without them take "gloo"'
        )


@contextlib.contextmanager
def alone(path: Path):
    """One process of this machine at a time; the system lets go of it if the process is killed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    argparse.ArgumentParser(description="Compile the backend shm, if need be.").parse_args()
    print(load().__file__)


if __name__ == "__main__":
    main()
