"""End the commands of benchmarks/gpu.py when it ends in any way, even by SIGKILL.

gpu.py starts it, with the mark in the environment of all its commands as the only argument, and
holds the other end of its standard input. It imports no torch, so it is ready at once.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

KILL_SECONDS = 10


def main() -> None:
    sys.stdin.read()  # returns when gpu.py is gone
    kill_all(lambda: processes_with(sys.argv[1]))


def kill_all(find) -> list[int]:
    """Kill until find() returns no process, because a process may be starting another one.

    Returns the processes left after KILL_SECONDS: stuck in a broken GPU's driver, for example.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        alive = find()
        if not alive or time.monotonic() > deadline:
            return alive
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes_with(mark: str) -> list[int]:
    """The processes with this mark in their environment, on Linux; a zombie has none."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


if __name__ == "__main__":
    main()
