"""Run real jobs: start a script under torchrun, watch it, stop it, and leave no process behind.

Python, where a job starts it (as torchrun starts its ranks), is spared its seconds of imports:
warm_python.py stands in for it and has it forked from a process that has PyTorch loaded. What first
imports do, and how an interpreter ends, is tested with jobs that are cold.
"""

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "notebooks"))
import warm_server  # noqa: E402

REPEAT = int(os.environ.get("REPEAT", "1"))  # how often what once failed rarely is tried
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

# For Ray on a busy machine. Its first process ends when two others have not begun within 15 s
# (ray-project/ray, issue 65983), so let them begin sooner; for itself it may have longer than 30 s.
QUICK_RAY = {"PYTHONPATH": str(ROOT / "tests/quick_ray"), "RAY_raylet_start_wait_time_s": "120"}


def installed(package: str) -> bool:
    """Whether it can be imported; a folder of the same name, such as clusters/ray, is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def before_others(*command) -> list:
    """The command, in a session that has ten times the weight of another, if we may (as root).

    Linux deals the processors out to sessions first, and to the processes of each by nice.
    """
    if sys.platform != "linux":
        return [*command]
    weigh = 'echo -10 2>/dev/null >/proc/self/autogroup; exec "$@"'
    return ["setsid", "--wait", "sh", "-c", weigh, "sh", *command]


@functools.cache
def warm_folder() -> Path:
    """The folder of a warm_server.py that lives as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    server = warm_server.start(folder, clean_environment())
    deadline = time.monotonic() + 120
    while not (folder / "server.json").exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("warm_server.py did not start")
        time.sleep(0.02)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.communicate)  # first: closes the pipe, which ends it
    return folder


def warm_executable(patch: pytest.MonkeyPatch) -> None:
    """What starts this Python from here on, by sys.executable, starts what stands in for it."""
    patch.setattr(sys, "executable", f"{warm_folder()}/python")
    environment = clean_environment(WARM_PYTHON=str(warm_folder()))
    for name in os.environ.keys() - environment:
        patch.delenv(name)
    for name, value in environment.items():
        patch.setenv(name, value)


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment without what torchrun and make set; one thread; no network."""
    drop = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCH")
    drop += ("MAKE", "MFLAGS", "REQUIREMENTS")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    env |= {"PYTHONFAULTHANDLER": "1", **changes}  # SIGABRT shows where a process is
    if "DISTRIBUTED_BACKEND" in env:  # pytest --backend shm: that is where shm is found
        folders = [env.get("PYTHONPATH"), str(ROOT / "custom_backend")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return env


@dataclass
class Result:
    returncode: int
    output: str  # stdout and stderr of all ranks and of torchrun

    def check(self) -> "Result":
        assert self.returncode == 0, f"exit status {self.returncode}\n{self.output[-6000:]}"
        return self


class Job:
    """A running command with all its descendants.

    with Job(command) as job: ... ; on leaving the block whatever still runs is killed. Descendants
    are found by a mark in their environment, because torchrun puts its workers in sessions of their
    own and a killed torchrun leaves them without a parent.
    """

    def __init__(
        self, command, cwd: Path = ROOT, cold: bool = False, beside=None, **environment: str
    ):
        """beside: another job; this one then shares its mark and its log."""
        self.mark = beside.mark if beside else uuid.uuid4().hex
        command = [str(part) for part in command]
        if not cold and sys.platform == "linux":  # warm_server.py reads /proc
            folder = warm_folder()
            # torchrun starts its ranks by PYTHON_EXEC.
            stand_in = {"PYTHON_EXEC": f"{folder}/python", "WARM_PYTHON": str(folder)}
            environment = stand_in | environment
            # Not only the first word: a command that runs in a host of a lab names another Python.
            command = [f"{folder}/python" if part == sys.executable else part for part in command]
        # A file, not a pipe: an orphan would hold the pipe open. Opened for appending, so that no
        # process writes over what another has written.
        self.log = beside.log if beside else tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=clean_environment(**environment, TEST_JOB_MARK=self.mark),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        self.log.close()

    @property
    def output(self) -> str:
        """What all processes have printed so far; may be asked at any time.

        The children share the file's offset: to move it would let them write at a wrong place.
        """
        read = bytearray()
        while chunk := os.pread(self.log.fileno(), 2**20, len(read)):
            read += chunk
        return read.decode(errors="replace")  # a character may be half written

    def processes(self) -> list[psutil.Process]:
        return those(lambda p: p.environ().get("TEST_JOB_MARK") == self.mark)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks that run now, in order."""
        numbers = {}
        for process in self.processes():
            with contextlib.suppress(*GONE, KeyError):  # KeyError: no rank
                numbers[process] = int(process.environ()["RANK"])
        return sorted(numbers, key=numbers.get)

    def agents(self) -> list[psutil.Process]:
        """torchrun's own processes, one a host."""
        started_as = ["-m", "torch.distributed.run"]
        return those(lambda p: p.cmdline()[1:3] == started_as, self.processes())

    def kill(self) -> list[psutil.Process]:
        """Kill whatever still runs; return what that was.

        Whoever is just being started may not bear the mark yet, or may hand it on to its fork while
        we look. So the command itself is killed in any case, and we look until nothing is found.
        """
        killed = []
        while True:
            alive = still_running(self.processes())
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.kill()
            psutil.wait_procs(alive, timeout=10)
            self.process.wait(timeout=10)
            if not alive:
                return killed
            killed += alive

    def left_running(self, patience: float = 10) -> list[psutil.Process]:
        """Kill and return what does not end by itself soon, now that the command has ended.

        multiprocessing's resource tracker, for one, ends when it sees that its parent has.
        """
        deadline = time.monotonic() + patience
        while still_running(self.processes()):
            if time.monotonic() > deadline:
                return self.kill()
            time.sleep(0.05)
        return []

    def wait(self, timeout: float = 300) -> Result:
        """Wait for the end; on time-out kill everything and raise with the output so far.

        The output then ends with what each process was doing, the stacks of all its threads.
        """
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.abort()
            raise TimeoutError(f"no end within {timeout} s\n{self.output[-20_000:]}") from None
        return Result(self.process.returncode, self.output)

    def abort(self) -> None:
        """Kill whatever still runs, once it has said what it was doing."""
        hanging = self.processes()
        for process in hanging:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGABRT)
        psutil.wait_procs(hanging, timeout=5)
        self.kill()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait_until(self, condition: Callable[[], object], timeout: float = 300) -> object:
        """Return the first true value of `condition()`; raise if the job ends or time runs out."""
        deadline = time.monotonic() + timeout
        while True:
            asked = time.monotonic()
            if value := condition():
                return value
            now = time.monotonic()
            if self.has_ended() or now > deadline:
                raise AssertionError(f"the job ended or {timeout} s passed\n{self.output[-6000:]}")
            time.sleep(max(0.005, 4 * (now - asked)))  # the job needs the processors itself


# What psutil raises about a process that ends while it is asked, or is another user's.
GONE = (psutil.Error, FileNotFoundError)


def those(
    condition: Callable[[psutil.Process], bool], among: Iterable[psutil.Process] | None = None
) -> list[psutil.Process]:
    """Those processes (of this machine, or `among` some) of which that is true by now."""
    found = []
    for process in psutil.process_iter() if among is None else among:
        with contextlib.suppress(*GONE):
            if condition(process):
                found.append(process)
    return found


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended by now."""
    return those(lambda p: p.status() != psutil.STATUS_ZOMBIE, processes)


def parent_of(process: psutil.Process) -> psutil.Process:
    """Who has started it; or who has started what stands in for it."""
    stand_in = process.environ().get("WARM_STAND_IN")
    return (psutil.Process(int(stand_in)) if stand_in else process).parent()


def python(
    script, *args, timeout: float = 300, cwd: Path = ROOT, cold: bool = False, **environment: str
) -> Result:
    """Run `script` as one plain process."""
    with Job([sys.executable, script, *args], cwd, cold, **environment) as job:
        return job.wait(timeout)


def torchrun_command(script, *args, ranks: int = 2, options: tuple = ()) -> list:
    return [*TORCHRUN, "--standalone", f"--nproc_per_node={ranks}", *options, script, *args]


def torchrun(
    script,
    *args,
    ranks=2,
    options=(),
    timeout=300,
    cwd: Path = ROOT,
    cold: bool = False,
    **environment: str,
) -> Result:
    """Run `script` on `ranks` ranks of this machine; also asserts that no process is left."""
    command = torchrun_command(script, *args, ranks=ranks, options=options)
    with Job(command, cwd, cold, **environment) as job:
        result = job.wait(timeout)
        left = job.left_running()
        assert not left, f"left running: {left}\n{result.output[-3000:]}"
        return result


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago, for rendezvous that must name one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def read_metrics(output_dir: Path) -> list[dict]:
    return read_lines(Path(output_dir) / "metrics.jsonl")


def read_lines(path: Path) -> list[dict]:
    """The whole lines of a log: where a run is under way the last may be half written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def reached(output_dir: Path, step: int) -> bool:
    """Whether metrics.jsonl has a whole line for `step` by now."""
    path = output_dir / "metrics.jsonl"
    return path.exists() and f'{{"step": {step},' in path.read_text()


def learned(output_dir: Path) -> list[dict]:
    """The lines of the metrics without what is of the machine, not of the model."""
    measured = {"samples_per_second", "pairs_per_second", "tokens_per_second", "mfu"}
    measured |= {"memory_mb", "reserved_mb"}
    lines = read_metrics(output_dir)
    return [{name: line[name] for name in line if name not in measured} for line in lines]
