"""Run transformer_basics/train.py on a disk that is slow.

First argument: "kill": the disk never finishes the second save, and SIGKILL ends the last rank in
its 11th step. "stop": SIGTERM comes in the 6th step, and the disk finishes the save once the run
waits for it.
"""

import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import train
from torch.distributed.checkpoint import FileSystemWriter

how, steps, saves, writes, waited = sys.argv.pop(1), [], [], [], threading.Event()
train_step, save = train.train_step, train.CheckpointWriter.save
finish, write_data = train.CheckpointWriter.finish, FileSystemWriter.write_data
is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def step(*args):
    steps.append(1)
    if is_last and how == "kill" and len(steps) == 11:
        print("killed in step 11", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if is_last and how == "stop" and len(steps) == 6:
        os.kill(os.getpid(), signal.SIGTERM)
    return train_step(*args)


def note_save(writer, number: int, run: dict) -> None:
    save(writer, number, run)
    saves.append(number)


def note_wait(writer) -> None:
    if saves:
        waited.set()
    finish(writer)


def slow(writer, *args):
    writes.append(1)
    if len(writes) == 2 and how == "kill":
        threading.Event().wait()
    if how == "stop":
        waited.wait()
    done = write_data(writer, *args)
    print("written after", len(steps), "steps", flush=True)
    return done


train.train_step, FileSystemWriter.write_data = step, slow
train.CheckpointWriter.save, train.CheckpointWriter.finish = note_save, note_wait
try:
    train.main()
except SystemExit as end:
    if end.code != 143:
        raise
except Exception as error:
    if how == "kill":  # the thread that writes would keep this process
        print(error, flush=True)
        os._exit(1)
    raise
