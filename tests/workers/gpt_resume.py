"""Run transformer_basics/train.py. After as many steps as its first argument says comes SIGTERM."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import start
import torch.distributed as dist
import train

last, done = int(sys.argv.pop(1)), []


def counted(function):
    calls = []

    def call(*args):
        calls.append(1)
        return function(*args)

    return call, calls


def step(*args):
    done.append(1)
    if len(done) == last and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(*args)


real, train.train_step = train.train_step, step
start.read_weights, read = counted(start.read_weights)
start.initialize, drew = counted(start.initialize)
try:
    train.main()
except SystemExit as end:
    if end.code != (143 if last else 0):
        raise
if os.environ.get("RANK", "0") == "0":  # after the sample, which this rank has written
    print(f"read weights: {len(read)}, drew first values: {len(drew)}")
