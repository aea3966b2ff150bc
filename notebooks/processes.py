"""End the processes that a kernel has started. A mark in their environment identifies them.

By mark and not by parent: a killed torchrun leaves its workers without one. As a script this is the
guard of one kernel, which waits for the end of its standard input: a kernel that is killed runs no
clean-up of its own, but its end of the pipe closes.
"""

import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil


def folder_of(kernel: str) -> Path:
    """The folder of a kernel's temporary files."""
    return Path(tempfile.gettempdir(), f"course_{kernel}")


def end_processes(mark: str) -> None:
    """Kill the processes whose COURSE_MARK begins with `mark`.

    A process may start another one while it is being killed: we look again until none is left.
    """
    while found := marked(mark):
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if psutil.wait_procs(found, timeout=10)[1]:
            return  # the kernel holds one back, for a device perhaps: it ends later


def marked(mark: str) -> list[psutil.Process]:
    """The running processes whose COURSE_MARK begins with `mark`."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):  # gone, or another user's
            # process_iter() may return an old object, of an ended process with the same number.
            process = psutil.Process(pid)
            if environment(process).get("COURSE_MARK", "").startswith(mark):
                found.append(process)
    return found


def environment(process: psutil.Process, seconds: float = 1) -> dict[str, str]:
    """The variables of a process. In the middle of exec() it has none: wait up to `seconds`.

    A zombie has none any more, nor memory; nor has a thread of the kernel, if root asks.
    """
    until = time.monotonic() + seconds
    while not (variables := process.environ()) and process.memory_info().vms:
        if time.monotonic() > until:
            break
        time.sleep(0.001)
    return variables


if __name__ == "__main__":
    sys.stdin.read()  # returns once the kernel is gone
    end_processes(kernel := sys.argv[1])
    shutil.rmtree(folder_of(kernel), ignore_errors=True)
