"""Run transformer_basics/train.py on two ranks; rank 1 never returns from its third step."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import train

train_step, calls = train.train_step, []


def hang_in_the_third(*args):
    calls.append(args)
    if len(calls) == 3 and os.environ["RANK"] == "1":
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        signal.pause()
    return train_step(*args)


train.train_step = hang_in_the_third
train.main()
