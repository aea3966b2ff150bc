"""Run transformer_basics/train.py with a text that takes long, or that cannot be written.

Arguments: how many seconds it takes to tokenise it, and to count its pairs, or "full"; train.py's.
"""

import errno
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import report
import text_files
import train

how = sys.argv.pop(1)


def slow(function):
    def call(*args):
        time.sleep(int(how))
        return function(*args)

    return call


def full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if how == "full":
    text_files.ShardWriter = full
else:
    text_files.ids = slow(text_files.ids)
    report.bigram_loss = slow(report.bigram_loss)
train.main()
