"""Run transformer_basics/train.py. After as many steps as its first argument says comes SIGTERM."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import torch.distributed as dist
import train

last, done, real = int(sys.argv.pop(1)), [], train.train_step


def step(*args):
    done.append(1)
    if len(done) == last and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(*args)


train.train_step = step
try:
    train.main()
except SystemExit as end:
    if end.code != (143 if last else 0):
        raise
