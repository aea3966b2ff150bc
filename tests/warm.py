"""Ranks without their seconds of imports: each is forked from a process that has PyTorch loaded.

For tests of what a script computes. What a launch does (first imports, exit status, signals,
restarts, errors) is tested with torchrun itself: see helpers.py.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import uuid
from pathlib import Path

from helpers import Result, clean_environment

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch._dynamo", "torch.distributed.run", "sklearn.datasets"])


def run(script, *args, ranks: int = 1, timeout: float = 120) -> Result:
    """Run `script` to its end on `ranks` ranks, or as one plain process; no process is left."""
    command = [str(part) for part in (script, *args)]
    with tempfile.NamedTemporaryFile("r") as log:
        process = SERVER.Process(target=_lead, args=(log.name, ranks, command))
        process.start()
        try:
            process.join(timeout)
            status = process.exitcode
        finally:
            left = _kill_group(process.pid)
        output = log.read()
    if status is None:
        raise TimeoutError(f"no end within {timeout} s\n{output[-6000:]}")
    assert not left, f"processes were left running\n{output[-3000:]}"
    return Result(status, output)


def _kill_group(group: int) -> bool:
    """Kill what still runs in this process group; say whether there was anything."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _lead(log: str, ranks: int, command: list[str]) -> None:
    """In the forked process: lead a process group of its own, then be the one rank, or the agent
    that torchrun is, which forks the ranks."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    sys.stdout.reconfigure(line_buffering=True)
    environment = clean_environment()
    os.environ.clear()
    os.environ.update(environment)
    if ranks == 1:
        return _script(command)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
    )
    elastic_launch(config, _script)(command)


def _script(command: list[str]) -> None:
    """What `python script args` does."""
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")
