"""Run another script in this process, as `python SCRIPT ARGUMENTS` would.

from run_script import run_script  # custom_backend/run_script.py
"""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_script(script: Path, arguments: list[str]) -> None:
    """Run it so that it imports its own siblings, such as runtime.py, not those of this file."""
    for name, module in list(sys.modules.items()):
        if name != "__main__" and Path(getattr(module, "__file__", None) or "/").parent == HERE:
            del sys.modules[name]
    sys.argv = [str(script), *arguments]
    sys.path[:] = [str(script.resolve().parent), *(p for p in sys.path if p != str(HERE))]
    runpy.run_path(str(script), run_name="__main__")
