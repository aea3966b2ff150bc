"""Run a train.py on emulated GPUs, then print how often its process had waited for its GPU.

emulated_waits.py SCRIPT [ARGUMENT ...]

Two lines per rank: "waits: " with the number at the end of each optimizer step, and at the end of
the script; "connected to " with the GPU that the process group had before its first operation.
"""

import runpy
import sys
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from emulated_gpu.cuda import device
from torch.optim.optimizer import register_optimizer_step_post_hook

waits, groups = [], []


def note(*_) -> None:
    waits.append(device.host_waits())
    groups.append(dist.group.WORLD.bound_device_id)


sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
register_optimizer_step_post_hook(note)
with suppress(SystemExit):
    runpy.run_path(sys.argv[0], run_name="__main__")
waits.append(device.host_waits())
# Two calls: with one, the other rank could print between its lines.
print("waits:", *waits, flush=True)
print(f"connected to {groups[0]}", flush=True)
