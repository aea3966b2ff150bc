"""A pytest plugin: the processor time of each test and each file, of all processes they started.

pytest's --durations are wall time, which says little where tests run side by side, and where some
of them mostly wait.
"""

import resource
from collections import Counter
from contextlib import suppress

import psutil
import pytest
from helpers import KEEPERS

NAME = "processor seconds"


def used() -> float:
    """Seconds so far: of this process, of its children that have ended, of keepers and theirs.

    What is missing: processes that nobody has waited for, such as the ranks of a killed torchrun.
    """
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        seconds += usage.ru_utime + usage.ru_stime
    for keeper in KEEPERS.values():
        with suppress(psutil.NoSuchProcess):  # the kernel has killed it
            seconds += sum(psutil.Process(keeper.process.pid).cpu_times()[:4])
    return seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """What fixtures of a file cost belongs to the first test that asks for them."""
    before = used()
    try:
        return (yield)
    finally:
        item.config.stash[SPENT][item.nodeid] += used() - before


SPENT = pytest.StashKey[Counter]()


def pytest_configure(config):
    config.stash[SPENT] = Counter()


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # pytest-xdist carries it to the main process
        session.config.workeroutput[NAME] = dict(session.config.stash[SPENT])


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})  # none of a worker that has crashed
    node.config.stash[SPENT].update(output.get(NAME, {}))


def pytest_terminal_summary(terminalreporter, config):
    tests, files = config.stash[SPENT], Counter()
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds
    if tests and config.pluginmanager.hasplugin("cacheprovider"):  # all, for comparisons
        config.cache.set("processor_seconds", dict(tests))
    terminalreporter.section(f"{NAME}: {files.total():,.0f}")
    for spent in (files, tests):
        for name, seconds in spent.most_common(25):
            terminalreporter.line(f"{seconds:7.1f}  {name}")
        terminalreporter.line("")
