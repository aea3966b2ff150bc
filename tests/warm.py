"""Ranks without their seconds of imports: each is forked from a process that has PyTorch loaded.

For tests of what a script computes. What a launch does (first imports, exit status, signals,
restarts, errors) is tested with torchrun itself: see helpers.py.
"""

import faulthandler
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist
from helpers import ROOT, Job, Result, clean_environment

# It forks from a process with one thread. To fork from torchrun's agent, which has several, would
# let one start in thirty hang: on a lock that another thread held in that moment.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.rpc",
        "torch.distributed.tensor.parallel",
        "sklearn.datasets",
    ]
)


def run(
    script, *args, ranks: int = 1, timeout: float = 300, cwd: Path = ROOT, **changes: str
) -> Result:
    """Run `script` to its end on `ranks` ranks, or as one plain process; no process is left.

    changes: of the environment.
    """
    command = [str(part) for part in (script, *args)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.NamedTemporaryFile("r") as log:
        processes = [
            SERVER.Process(target=_rank, args=(log.name, command, told, cwd))
            for told in (environment(rank, ranks, store, **changes) for rank in range(ranks))
        ]
        try:
            for process in processes:
                process.start()
            status = _wait_for(processes, timeout)
            if status is None:  # they say what they were doing
                for process in processes:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGABRT)
                wait([p.sentinel for p in processes], 5)
        finally:
            left = [_kill_group(process) for process in processes if process.pid]
        output = log.read()
    if status is None:
        raise TimeoutError(f"no end within {timeout} s\n{output[-20_000:]}")
    assert status or not any(left), f"processes were left running\n{output[-3000:]}"
    return Result(status, output)


class Rank(Job):
    """One rank as a job of its own, which has an output of its own and can be killed alone.

    with Rank(script, "--steps", 5, **environment(0, 2, store)) as rank: ...
    """

    def __init__(self, script, *args, **told: str):
        self.log = tempfile.NamedTemporaryFile("r+b")  # noqa: SIM115
        command = [str(part) for part in (script, *args)]
        self.process = SERVER.Process(target=_rank, args=(self.log.name, command, told))
        self.process.start()

    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    def kill(self) -> bool:
        """Kill what still runs, children included; say whether there was anything."""
        return _kill_group(self.process)

    def wait(self, timeout: float = 300) -> Result:
        self.process.join(timeout)
        if not self.has_ended():
            os.kill(self.process.pid, signal.SIGABRT)  # it says what it was doing
            self.process.join(5)
            self.kill()
            raise TimeoutError(f"no end within {timeout} s\n{self.output[-20_000:]}")
        return Result(self.process.exitcode, self.output)


def environment(rank: int, ranks: int, store: dist.TCPStore, **changes: str) -> dict[str, str]:
    """What torchrun tells a rank."""
    if ranks == 1:
        return clean_environment(**changes)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    told |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # we serve it, not rank 0
    return clean_environment(**{name: str(value) for name, value in told.items()}, **changes)


def _wait_for(processes: list, timeout: float) -> int | None:
    """The first exit status that is not 0; 0 if all end so; None if they do not in time."""
    deadline, running = time.monotonic() + timeout, list(processes)
    while running:
        if not wait([p.sentinel for p in running], max(0, deadline - time.monotonic())):
            return None
        for process in [p for p in running if p.exitcode is not None]:
            if process.exitcode:
                return process.exitcode
            running.remove(process)
    return 0


def _kill_group(process) -> bool:
    """Kill what still runs in this process's group; say whether there was anything."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    process.join(10)
    return True


def _rank(log: str, command: list[str], environment: dict[str, str], cwd: Path = ROOT) -> None:
    """In the forked process: do what `python script args` does."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    # A line in one go: with PYTHONUNBUFFERED print() would write "a", " ", "b" and a newline, and
    # another rank in between.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    multiprocessing.set_start_method("fork", force=True)  # as in other processes, not the server's
    sys.argv = command
    more = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    # What Python itself finds, and nothing of the tests: a script that imports one of their files
    # must fail, as it would for a reader.
    for name in ("warm", "helpers"):
        sys.modules.pop(name, None)
    installed = [p for p in sys.path if p.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [str(Path(command[0]).resolve().parent), *more, *installed]
    if "PYTHONPATH" in environment:  # may hold one, which Python imports when it starts
        sys.modules.pop("sitecustomize", None)
        with suppress(ImportError):
            importlib.import_module("sitecustomize")
    runpy.run_path(command[0], run_name="__main__")
