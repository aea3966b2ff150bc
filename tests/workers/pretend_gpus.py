"""Join a job on GPUs that are not there, and print what torch is asked for.

pretend_gpus.py --device auto [--backend nccl], with $GPUS: for each rank, the ids of those it sees.
"""

import json
import os
import platform
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ddp_basics"))

from arguments import ArgumentParser
from runtime import distributed_worker

rank = int(os.environ["RANK"])
gpus = json.loads(os.environ["GPUS"])[rank]
chosen = []


def joined(backend: str, device_id: torch.device | None, **_) -> None:
    print(f"rank {rank} on {device_id}, {chosen}, {backend}", flush=True)
    sys.exit()


def properties(device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(uuid=gpus[device.index])


platform.node = lambda: f"node{os.environ['GROUP_RANK']}"
torch.accelerator.current_accelerator = lambda **_: torch.device("cuda") if gpus else None
torch.accelerator.device_count = lambda: len(gpus)
torch.accelerator.set_device_index = chosen.append
torch.get_device_module = lambda device: SimpleNamespace(get_device_properties=properties)
dist.init_process_group = joined

parser = ArgumentParser()
parser.add_argument("--device")
parser.add_argument("--backend")
args = parser.parse_args()
with distributed_worker(args.device, timedelta(seconds=100), args.backend):
    raise AssertionError("not reached")
