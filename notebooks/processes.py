"""The end of what a kernel has started: processes are found by a mark in their environment.

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
    """Of its temporary files."""
    return Path(tempfile.gettempdir(), f"course_{kernel}")


def end_processes(mark: str) -> None:
    """Kill the processes whose COURSE_MARK begins with `mark`.

    What one of them starts while it is being killed is found by the next look.
    """
    while found := marked(mark):
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if psutil.wait_procs(found, timeout=10)[1]:
            return  # waiting for a device, say: it ends when that answers


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):  # gone, or another user's
            # Not from process_iter(): that keeps the object of whoever had this number before.
            process = psutil.Process(pid)
            if environment(process).get("COURSE_MARK", "").startswith(mark):
                found.append(process)
    return found


def environment(process: psutil.Process, seconds: float = 1) -> dict[str, str]:
    """In the middle of exec() a process has none for a moment: that is waited for."""
    until = time.monotonic() + seconds
    while not (variables := process.environ()) and time.monotonic() < until:
        time.sleep(0.001)
    return variables


if __name__ == "__main__":
    sys.stdin.read()  # returns once the kernel is gone
    end_processes(kernel := sys.argv[1])
    shutil.rmtree(folder_of(kernel), ignore_errors=True)
