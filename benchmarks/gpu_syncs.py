"""Run a train.py in which five hot steps raise an error if they wait for the GPU.

    python benchmarks/gpu_syncs.py ddp_basics --device cuda --epochs 1

The arguments after the directory are train.py's. A step that reads a number from the GPU (.item(),
float(), .cpu()) keeps the program from queuing work ahead. From the third call of train_step to the
eighth, including the loop between the calls, torch raises an error at such a line. (torch reports
.item() and similar calls, not torch.cuda.synchronize() and not collectives.)
"""

import importlib
import sys
from pathlib import Path

import torch

FIRST, LAST = 3, 8  # the calls of train_step between which no line may wait


def main() -> None:
    directory = Path(__file__).resolve().parent.parent / sys.argv.pop(1)
    sys.path[0] = str(directory)
    sys.argv[0] = str(directory / "train.py")
    train = importlib.import_module("train")
    train_step, calls = train.train_step, 0

    def watched(*args):
        nonlocal calls
        calls += 1
        if torch.cuda.is_initialized() and calls == FIRST:
            set_mode("error")
        if torch.cuda.is_initialized() and calls == LAST:
            set_mode("default")
        return train_step(*args)

    train.train_step = watched
    try:
        train.main()
    except SystemExit as end:
        if end.code:
            raise
    if calls < LAST:
        sys.exit(f"train_step was called {calls} times, not {LAST}: nothing was watched to the end")
    found = (
        "torch reported no wait for the GPU"
        if torch.cuda.is_initialized()
        else "there is no GPU to wait for"
    )
    print(f"from step {FIRST} to step {LAST} {found}", flush=True)


def set_mode(mode: str) -> None:
    """torch.cuda.set_sync_debug_mode, and a line that must raise an error in mode "error"."""
    torch.cuda.set_sync_debug_mode(mode)
    number = torch.ones((), device="cuda")
    try:
        number.item()
    except RuntimeError:
        if mode == "default":
            raise
    else:
        if mode == "error":
            sys.exit("set_sync_debug_mode has no effect here: .item() raised no error")


if __name__ == "__main__":
    main()
