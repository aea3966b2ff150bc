"""The processes behind start_ranks(): PyTorch is imported once, and each rank is a fork of that.

    python notebooks/ranks.py 4 --profile-dir=FOLDER --cluster-id=ID

Four ranks that import it one by one need four times as long on a machine with few processors. A
fork must come before anything that starts threads: here nothing has been computed yet.
"""

import os
import signal
import sys

import torch._dynamo  # noqa: F401 (what optimizers and DDP import at their first use: 3 s)
from ipyparallel.engine.app import IPEngine

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell's & started us
ranks, *options = sys.argv[1:]
for _ in range(int(ranks)):
    if os.fork() == 0:
        IPEngine.launch_instance(argv=options)
        sys.exit()
os.wait()  # for the first that ends. start_ranks() then says why, if not all were ready
