"""Compile the device, once for each torch and state of the sources (half a minute).

.venv-emulated/bin/python tests/emulated_gpu/build.py    # also: import it as this Python starts
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

# This file must not import torch: PyTorch looks for CUDA once, and has to find the device then.
TORCH = version("torch")
HERE = Path(__file__).resolve().parent
SOURCES = sorted([*HERE.glob("*.h"), HERE / "device.cpp"])
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w"]  # -w: torch's headers warn
# A line that Python executes as it starts, in a file that ends in .pth.
AT_START = (
    "import os, sys; 'EMULATED_GPUS' in os.environ and "
    "(sys.path.append({0!r}), __import__('emulated_gpu'), sys.path.remove({0!r}))\n"
)


def load() -> ModuleType:
    """The compiled module, compiled first if need be.

    Raises RuntimeError with one sentence where it cannot be compiled.
    """
    file = library()
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        with (file.parent / "building").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process at a time
            if not file.exists():
                compile_to(file)
    spec = importlib.util.spec_from_file_location("emulated_cuda", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library() -> Path:
    """In the environment, not in the user's caches: tests give their jobs other homes."""
    digest = hashlib.sha256(f"{TORCH} {sys.version} {compiler()} {FLAGS}".encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return Path(sys.prefix) / "emulated_gpu" / f"{digest.hexdigest()[:16]}.so"


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def compile_to(file: Path) -> None:
    if "+cpu" not in TORCH:
        raise RuntimeError(f"an emulated GPU needs a CPU-only torch, this is {TORCH}")
    if shutil.which(compiler()) is None:
        raise RuntimeError(f"{compiler()} not found: install a C++ compiler (apt install g++)")
    # Not through a link, as a copy of the tree may have: the library remembers where torch's lie.
    home = Path(importlib.util.find_spec("torch").origin).resolve().parent
    folders = [home / "include", home / "include/torch/csrc/api/include"]
    command = [compiler(), *FLAGS, "-DTORCH_API_INCLUDE_EXTENSION_H"]
    command += ["-DTORCH_EXTENSION_NAME=emulated_cuda"]
    command += [f"-I{folder}" for folder in (*folders, sysconfig.get_paths()["include"])]
    command += [str(HERE / "device.cpp"), "-o", f"{file}.unfinished", f"-L{home / 'lib'}"]
    command += [f"-l{name}" for name in ("c10", "torch_cpu", "torch_python", "torch")]
    command += [f"-Wl,-rpath,{home / 'lib'}"]
    build = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if build.returncode:
        raise RuntimeError(f"the emulated GPU could not be compiled:\n{build.stdout[-3000:]}")
    os.replace(f"{file}.unfinished", file)  # where it is, it is whole


def main() -> None:
    load()
    start = Path(sysconfig.get_paths()["purelib"]) / "emulated_gpu.pth"
    start.write_text(AT_START.format(str(HERE.parent)))


if __name__ == "__main__":
    main()
