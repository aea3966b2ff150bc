import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: as in every job, see helpers.py
import torch
from xdist.scheduler import LoadScopeScheduling

NOTEBOOK = "test_runs_again_with_the_same_outputs"
TESTS = Path(__file__).parent
EXAMPLES = sorted(path.parent for path in TESTS.parent.glob("*/runtime.py"))
sys.path[:0] = map(str, (TESTS, *EXAMPLES))  # helpers, and the examples' modules


class Scheduling(LoadScopeScheduling):
    """Of pytest -n: the tests of a file stay together, as they share fixtures; a notebook is alone.

    (A group of --dist loadgroup would say that, but pytest-xdist 3.8 loses it under pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if NOTEBOOK in nodeid else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:  # what takes longest first, the longest notebook is 06
        items.sort(key=lambda item: item.nodeid if NOTEBOOK in item.nodeid else "", reverse=True)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
