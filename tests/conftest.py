import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: as in every job, see helpers.py
import torch

TESTS = Path(__file__).parent
EXAMPLES = sorted(path.parent for path in TESTS.parent.glob("*/runtime.py"))
sys.path[:0] = map(str, (TESTS, *EXAMPLES))  # helpers, and the examples' modules


def pytest_collection_modifyitems(items):
    # The notebooks take longest: begun last, they would keep one worker busy while the other idles.
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
