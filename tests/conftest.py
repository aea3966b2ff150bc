import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
EXAMPLES = sorted(path.parent for path in TESTS.parent.glob("*/runtime.py"))
sys.path[:0] = map(str, (TESTS, *EXAMPLES))  # helpers, and the examples' modules


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # Under pytest -n 2 --dist loadgroup a file stays together, as its tests share fixtures that
    # cost seconds; notebooks share nothing.
    for item in items:
        alone = "test_notebooks" in item.path.name and hasattr(item, "callspec")
        item.add_marker(pytest.mark.xdist_group(item.callspec.id if alone else item.path.stem))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
