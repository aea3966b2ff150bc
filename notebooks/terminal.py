"""A terminal on the page: commands that run here, and a record of them where they cannot.

hosts = Terminal()
said = hosts("lab_up", "python clusters/lab.py up 3")    prints what the commands say; returns it
agent = start("torchrun ...")                            the same in the background

The commands are lines of bash, typed in the root of the repository; $RUNS is a folder for files
that may be deleted. Some need root, a GPU, or packages of the system. Where lab.py, streams.py
or test_cluster.sh say that they cannot run here, this terminal shows recorded/lab_up.txt, now and
from then on, and a first line says which of the two it is, and why. Everything else that fails
raises.

    RECORD=yes python notebooks/execute.py notebooks/19_clusters.ipynb    # write recorded/ again
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from course import FOLDER, KERNEL, ROOT
from processes import end_processes

RECORDED = Path(__file__).resolve().parent / "recorded"
RUNS = FOLDER / "runs"
# What these say where they cannot run at all. Nothing else is made up for.
NOT_HERE = (
    r"error: (?:a lab needs|no hosts could be made|there is no \w+ here|the daemons of"
    r"|streams need a GPU).*"
)


class Terminal:
    """Runs commands, or shows what was recorded; what one call starts, the next one finds."""

    def __init__(self):
        self.missing = None  # why nothing can run here, once that is known
        self.lab = f"course-{uuid.uuid4().hex[:8]}"  # a lab of its own: lab.py reads $LAB

    def __call__(self, name: str, commands: str, timeout: float = 240) -> str:
        """Run `commands`, stop at the first that fails; print and return their output.

        name: of the file in recorded/. Raises RuntimeError with the output if a command fails, and
        TimeoutError after `timeout` seconds.
        """
        file = RECORDED / f"{name}.txt"
        if not self.missing:
            started = start(commands, LAB=self.lab)
            status, text = started.wait(timeout), started.output
            if status:
                found = re.search(NOT_HERE, text)
                if not found:
                    raise RuntimeError(f"exit status {status}\n{text[-3000:]}")
                self.missing = found[0].removeprefix("error: ")
        if not self.missing:
            print(f"Run here:\n{text}", end="")
            if os.environ.get("RECORD"):
                RECORDED.mkdir(exist_ok=True)
                file.write_text(f"{machine()}\n{text}")
            return text
        when, _, text = file.read_text().partition("\n")
        print(f"Not run here: {self.missing}. Recorded ({when}):\n{text}", end="")
        return text


class Started:
    """Lines of bash in the background; they end with the kernel at the latest."""

    def __init__(self, commands: str, **environment: str):
        RUNS.mkdir(parents=True, exist_ok=True)
        self.mark = f"{KERNEL}/{uuid.uuid4().hex}"
        here = {"RUNS": str(RUNS), "PYTHONUNBUFFERED": "1", "COURSE_MARK": self.mark}
        here["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # A file, not a pipe: whatever outlives the commands would hold the pipe open.
        self.log = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115
        self.process = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", commands],
            cwd=ROOT,
            env=os.environ | here | environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt of the kernel is not for them
        )

    @property
    def output(self) -> str:
        """What has been said so far, without the paths of this machine."""
        size = os.fstat(self.log.fileno()).st_size
        text = os.pread(self.log.fileno(), size, 0).decode(errors="replace")
        text = text.replace(str(RUNS), "$RUNS").replace(f"{ROOT}{os.sep}", "")
        return text.replace(sys.prefix, "...")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout: float = 120) -> int:
        """The exit status. Raises TimeoutError, with the output, and ends all of it."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"no end within {timeout} s\n{self.output[-3000:]}") from None

    def wait_until(self, condition: Callable[[], object], timeout: float = 120) -> object:
        """The first true value of condition(). Raises if the commands end before, or time is up."""
        until = time.monotonic() + timeout
        while not (value := condition()):
            if not self.running or time.monotonic() > until:
                raise RuntimeError(f"it never happened:\n{self.output[-3000:]}")
            time.sleep(0.01)
        return value

    def kill(self) -> None:
        """kill -9, of the commands and of whatever they have started: a host that is lost."""
        self.process.kill()
        self.process.wait()
        end_processes(self.mark)  # torchrun's ranks are in sessions of their own


def start(commands: str, **environment: str) -> Started:
    """Begin to run `commands` and return at once. environment: more variables."""
    return Started(commands, **environment)


def machine() -> str:
    """When and where something was recorded, in one line."""
    from torch import __version__

    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, torch {__version__}"
