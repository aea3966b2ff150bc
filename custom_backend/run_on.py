r"""Run a script of another directory on a backend of this one, or on your own.

    torchrun --standalone --nproc_per_node=2 custom_backend/run_on.py shm ddp_basics/train.py
    torchrun --standalone --nproc_per_node=2 custom_backend/run_on.py ring \
        parallel_basics/tensor_parallel.py --device cpu

The script does not change: a script that names no backend asks torch for the default of its device,
and run_on.py changes this default. The backend belongs to torch, or to a module that registers it
on import: NAME_backend.py or NAME.py, here or on PYTHONPATH.

Look at the first line of the output, which names the backend. run_on.py does not switch processes
that the script itself starts (ddp_basics/spawn.py).
"""

import argparse
import importlib
import importlib.util
from pathlib import Path

import torch.distributed as dist
from arguments import ArgumentParser
from run_script import run_script


def main() -> None:
    args = parse_args()
    for device in dist.Backend.backend_capability[args.backend]:
        dist.Backend.default_device_backend_map[device] = args.backend
    run_script(args.script, args.arguments)


def known_backend(name: str) -> str:
    """A type for add_argument: a backend of torch, or of a module that registers it on import."""
    modules = (f"{name}_backend", name)
    if name.isidentifier() and not dist.is_backend_available(name):
        module = next(filter(importlib.util.find_spec, modules), None)
        try:
            if module:
                importlib.import_module(module)
        except (ImportError, RuntimeError) as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from None
    if not dist.is_backend_available(name):
        raise argparse.ArgumentTypeError(
            f"{name} is not in this build of torch, and no module {' or '.join(modules)} here or "
            "on PYTHONPATH registers it"
        )
    return name.lower()  # as torch stores it


def parse_args():
    parser = ArgumentParser(description="Run a script on another backend.")
    add = parser.add_argument
    add("backend", type=known_backend, help="shm, ring, or the name of a module that registers it")
    add("script", type=Path, help="script that joins the job without naming a backend")
    add("arguments", nargs="...", help="arguments of the script")
    args = parser.parse_args()
    if not args.script.is_file():
        parser.error(f"there is no script {args.script}")
    return args


if __name__ == "__main__":
    main()
