import gc
import os
import signal
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: as in every job, see helpers.py
import helpers
from xdist.scheduler import LoadScopeScheduling

# torch is imported where it is used: the main process of pytest -n does without it, and starts
# its workers 2 s sooner.
gc.disable()  # until all is imported: there is no garbage, and to look for it takes 2 s

pytest_plugins = ["processor_time"]
NOTEBOOK = "test_runs_again_with_the_same_outputs"
TESTS = Path(__file__).parent
EXAMPLES = sorted(path.parent for path in TESTS.parent.glob("*/runtime.py"))
EXAMPLES += [TESTS.parent / "planner"]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]  # helpers, check_environment


NAMES = {path.stem for directory in EXAMPLES for path in directory.glob("*.py")}
modules = {}  # example directory -> its modules by name, while another one's are in use
in_use = [None]
compiled = []


def use(test_file: Path) -> None:
    """Let imports in `test_ddp_basics*.py` find ddp_basics/: train, model exist elsewhere, too."""
    own = next((d for d in EXAMPLES if test_file.stem.startswith(f"test_{d.name}")), None)
    if own == in_use[0]:
        return
    for name in NAMES & sys.modules.keys():
        folder = Path(getattr(sys.modules[name], "__file__", None) or "").parent
        if folder in EXAMPLES:
            modules.setdefault(folder, {})[name] = sys.modules.pop(name)
    sys.modules.update(modules.get(own, {}))
    others = {str(directory) for directory in EXAMPLES}
    sys.path[:] = [str(own)] * (own is not None) + [p for p in sys.path if p not in others]
    in_use[0] = own


def pytest_addoption(parser):
    says = "what the ranks talk through, where a script does not name it"
    parser.addoption("--backend", choices=("gloo", "shm"), default="gloo", help=says)
    says = "cuda: run the tests marked `device`, with their ranks on GPUs (see workers/place.py)"
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help=says)
    parser.addoption("--cold", action="store_true", help="start new processes, fork none")
    says = "after so many seconds begin no slow test: where a limit would end all"
    parser.addoption("--budget", type=float, default=float("inf"), metavar="SECONDS", help=says)


def pytest_configure(config):
    if config.getoption("device") == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: torch finds no CUDA device here")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell has started pytest with "&"
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or no job would hear Ctrl-C
    # nbformat needs jsonschema, which takes 3 s to build 39 grammars of addresses, if it can.
    sys.modules["rfc3987_syntax"] = None
    os.environ["TEST_BACKEND"] = config.getoption("backend")  # helpers.py reads these
    os.environ["TEST_DEVICE"] = config.getoption("device")
    os.environ["TEST_COLD"] = str(int(config.getoption("cold")))


def pytest_collectstart(collector):
    if isinstance(collector, pytest.Module):
        use(collector.path)


def pytest_collection_finish():
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    no_time_is_left = time.monotonic() - BEGAN_AT > item.config.getoption("budget")
    if no_time_is_left and "slow" in item.keywords:
        pytest.skip("no time is left: --budget")
    use(item.path)
    item.stash[BEGAN] = len(helpers.RAN)


COLLECTED = pytest.StashKey[set[str]]()  # all ids, also those that -m leaves out
BEGAN_AT = time.monotonic()
BEGAN = pytest.StashKey[int]()  # how many jobs had ended when the test began
of_fixtures = {}  # name -> the jobs that its last setup ran


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    before = len(helpers.RAN)
    try:
        return (yield)
    finally:
        of_fixtures[fixturedef.argname] = helpers.RAN[before:]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A failing test's report ends with the last jobs of the test and its fixtures."""
    report = yield
    if report.failed:
        jobs = [job for name in item.fixturenames for job in of_fixtures.get(name, [])]
        jobs += helpers.RAN[item.stash.get(BEGAN, 0) :]
        for command, output in list(dict.fromkeys(jobs))[-3:]:
            says = f"{output}\n\nTo run this job again, with an empty output folder:\n{command}"
            report.sections.append(("a job of this test", says))
    return report


def unit(nodeid: str) -> str:
    """What a worker of pytest -n takes: a file, whose tests share fixtures, or one notebook."""
    return nodeid if NOTEBOOK in nodeid else nodeid.split("::")[0]


def in_turn(units: Iterable[str]) -> list[str]:
    """The order in which workers take them.

    What takes long comes first, or one worker would be left with it in the end: the notebooks and
    then, as it happens, the files in the opposite order of their names. Every third is one of
    those of clusters/ instead, which mostly wait: for what is lost to be missed.
    """
    first = sorted(units, key=lambda unit: (NOTEBOOK in unit, unit), reverse=True)
    waiting = [unit for unit in first if "test_clusters" in unit]
    busy = iter(unit for unit in first if "test_clusters" not in unit)
    order = []
    for unit in waiting:
        order += [unit, *islice(busy, 2)]
    return order + list(busy)


class Scheduling(LoadScopeScheduling):
    # (--dist loadgroup was made for this, but pytest-xdist 3.8 loses the groups under pytest 9.2.)
    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    gc.enable()  # here, in the main process
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    import torch

    config.stash[COLLECTED] = {item.nodeid for item in items}
    for item in items:
        if "release" in item.keywords:
            item.add_marker("slow")
    if config.getoption("device") == "cuda":
        config.hook.pytest_deselected(items=[i for i in items if "device" not in i.keywords])
        items[:] = [item for item in items if "device" in item.keywords]
        leave_out_what_gloo_cannot_send(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {name: at for at, name in enumerate(in_turn({unit(i.nodeid) for i in items}))}
        items.sort(key=lambda item: place[unit(item.nodeid)])
    if torch.__version__ < "2.14":
        needs = ("shm", "counting", "switch")  # these two backends, and a switch to them
        for item in items:
            if item.path.stem.startswith(tuple(f"test_custom_backend_{name}" for name in needs)):
                item.add_marker(pytest.mark.skip(reason="this backend needs torch 2.14 or newer"))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def leave_out_what_gloo_cannot_send(items):
    """Tests marked `gpu_per_rank` whose ranks share a GPU: see workers/place.py."""
    import torch

    gpus = torch.cuda.device_count()
    for item in items:
        needs = item.get_closest_marker("gpu_per_rank")
        if needs and gpus < needs.args[0]:
            why = f"{needs.args[0]} ranks share a GPU through Gloo, which lacks what they use"
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="module", autouse=True)
def shm_is_compiled(request):
    """Before the clocks of tests run: on a new machine it takes minutes."""
    asked_for = request.config.getoption("backend") == "shm"
    if (asked_for or request.path.stem.startswith("test_custom_backend_shm")) and not compiled:
        helpers.python(TESTS.parent / "custom_backend/shm/build.py", timeout=800).check()
        compiled.append("shm")


@pytest.fixture
def group():
    """A group of one rank, this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
