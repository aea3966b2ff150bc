import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "ddp_basics")]  # helpers, and train, model, data ...


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
