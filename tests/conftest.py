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
sys.path.insert(0, str(TESTS))  # helpers


def pytest_collectstart(collector):
    """train, model and others exist in several example directories: test_ddp_basics_faults.py
    imports those of ddp_basics/. (At its top: later imports may find another directory's.)"""
    if isinstance(collector, pytest.Module):
        folders = {str(path) for path in EXAMPLES}
        for name, module in list(sys.modules.items()):
            if str(Path(getattr(module, "__file__", None) or "").parent) in folders:
                del sys.modules[name]
        own = [str(p) for p in EXAMPLES if collector.path.stem.startswith(f"test_{p.name}")]
        sys.path[:] = own + [entry for entry in sys.path if entry not in folders]


def unit(nodeid: str) -> str:
    """What a worker of pytest -n takes: a file, whose tests share fixtures, or one notebook."""
    return nodeid if NOTEBOOK in nodeid else nodeid.split("::")[0]


class Scheduling(LoadScopeScheduling):
    # (--dist loadgroup was made for this, but pytest-xdist 3.8 loses the groups under pytest 9.2.)
    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:
        # What takes long comes first, or one worker would be left with it in the end: the notebooks
        # and then, as it happens, the files in the opposite order of their names.
        items.sort(key=lambda item: (NOTEBOOK in item.nodeid, unit(item.nodeid)), reverse=True)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
