"""How a train.py joins the job: joining.py TRAIN.PY ARGUMENTS... prints what it asked for."""

import importlib
import runpy
import sys
from pathlib import Path

del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runtime = importlib.import_module("runtime")


def joined(device, timeout, backend):
    sys.exit(f"{device}, {timeout.total_seconds()} s, {backend}")


runtime.distributed_worker = joined
runpy.run_path(sys.argv[0], run_name="__main__")
