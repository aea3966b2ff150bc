"""transformer_basics/train.py without its measurement of the peak: on a CPU that takes 10 s.

On a GPU it multiplies matrices of 8192 x 8192. Arguments: those of train.py.
"""

import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "transformer_basics"
sys.path.insert(0, str(FOLDER))

import report

report.matmul_peak = lambda device, dtype: 1e9
runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
