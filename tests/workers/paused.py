"""Run a train.py that waits after its Nth optimizer step until a file is there.

paused.py FILE N SCRIPT [ARGUMENT ...]

A test can then look for the ranks, and kill one, before the run is over.
"""

import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

file, last = Path(sys.argv[1]), int(sys.argv[2])
steps = []


def pause(*_) -> None:
    steps.append(1)
    while len(steps) == last and not file.exists():
        time.sleep(0.05)


sys.argv = sys.argv[3:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
register_optimizer_step_post_hook(pause)
runpy.run_path(sys.argv[0], run_name="__main__")
