"""Run a script on emulated GPUs, then print how often its process has waited for its GPU.

emulated_waits.py SCRIPT [ARGUMENT ...]
"""

import runpy
import sys
from contextlib import suppress
from pathlib import Path

from emulated_gpu.cuda import device

sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
with suppress(SystemExit):
    runpy.run_path(sys.argv[0], run_name="__main__")
print(f"waits: {device.host_waits()}", flush=True)
