"""Run real jobs: start a script under torchrun, watch it, stop it, and leave no process behind.

A Job is a new process, with all that it starts. python() and Torchrun here and all of pool.py fork
their processes from one that has imported PyTorch (forks.py), unless they are told to be cold.
"""

import contextlib
import importlib.util
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import forks
import psutil

ROOT = Path(__file__).resolve().parent.parent
REPEAT = int(os.environ.get("REPEAT", "1"))  # how often what once failed rarely is tried
COLD = os.environ.get("TEST_COLD") == "1"  # pytest --cold: nothing is forked
PROGRAMS = Path(sys.executable).parent  # where this Python and its torchrun lie
PYTHON = Path(sys.executable)
EMULATED = ROOT / ".venv-emulated/bin/python"  # a Python with emulated GPUs: emulated_gpu/
HAS_EMULATED = (ROOT / ".venv-emulated/installed").exists()
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


def keeper(number: int, interpreter: Path = PYTHON) -> forks.Keeper:
    """Forks processes for as long as this one lives. Each number has a hash seed of its own."""
    known = KEEPERS.get((number, interpreter))
    if known is None or known.process.poll() is not None:  # the kernel may have killed it
        # The emulated device is loaded before the fork, whose environment has the number of GPUs.
        environment = {"EMULATED_GPUS": "0"} | clean_environment()
        KEEPERS[number, interpreter] = forks.Keeper(number, environment, interpreter)
    return KEEPERS[number, interpreter]


KEEPERS: dict[tuple[int, Path], forks.Keeper] = {}


# Libraries that a test imports set variables for their own process: scikit-learn KMP_INIT_AT_FORK.
AT_START = {k: v for k, v in os.environ.items() if k.startswith(forks.READ_AT_START)}


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment without what torchrun and make set; one thread; no network."""
    drop = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCH")
    drop += ("MAKE", "MFLAGS", "REQUIREMENTS", "BUDGET", "TEST_JOB_MARK")
    env = {k: v for k, v in os.environ.items() if not k.startswith(forks.READ_AT_START)} | AT_START
    env = {k: v for k, v in env.items() if not k.startswith(drop)}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    env |= {"PYTHONFAULTHANDLER": "1", **changes}  # SIGABRT shows where a process is
    return env


def on_backend(script, *args) -> list:
    """The script and its arguments; with pytest --backend shm, run on that backend."""
    backend = os.environ.get("TEST_BACKEND", "gloo")  # see conftest.py
    switch = [] if backend == "gloo" else [ROOT / "custom_backend/run_on.py", backend]
    return [*switch, script, *args]


@dataclass
class Result:
    returncode: int
    output: str  # stdout and stderr of all ranks and of torchrun
    command: str = field(default="", compare=False)  # what to type to run it again
    failed: int | None = field(default=None, compare=False)  # the first rank to fail, if known
    by_then: int | None = field(default=None, compare=False)  # the length of the output by then

    def check(self) -> "Result":
        who = "" if self.failed is None else f" of rank {self.failed}, the first to fail,"
        ended = f"exit status {self.returncode}{who} of\n{self.command}"
        # What the other ranks then say of lost connections may be long.
        said = self.output[: self.by_then][-6000:]
        assert self.returncode == 0, f"{ended}\n{said}\n{ended}"
        return self


def typed(command: list, cwd: Path, **environment: str) -> str:
    """A line for a shell that runs this command as a test has run it."""
    variables = {"OMP_NUM_THREADS": "1", **environment}
    if os.environ.get("TEST_DEVICE", "cpu") != "cpu":  # workers/place.py reads it
        variables |= {"TEST_DEVICE": os.environ["TEST_DEVICE"]}
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return f"cd {cwd} && {' '.join(words)} {shlex.join(map(str, command))}"


RAN: list[tuple[str, str]] = []  # (command, last lines of output): conftest.py shows them


def note(command: str, output: str) -> None:
    """Remember a job that has ended, for the report of a test that fails."""
    RAN.append((command, "\n".join(output.splitlines()[-40:])))


class Job:
    """A running command with all its descendants.

    with Job(command) as job: ... ; on leaving the block whatever still runs is killed. Descendants
    are found by a mark in their environment, because torchrun puts its workers in sessions of their
    own and a killed torchrun leaves them without a parent. A fork shows the environment of its
    keeper, and is found by its session; a program that it starts in another session has the mark.
    """

    def __init__(
        self,
        command,
        cwd: Path = ROOT,
        fork: int | None = None,
        beside: "Job | None" = None,
        interpreter: Path = PYTHON,
        **environment: str,
    ):
        """command: what to run; with `fork`, a script and its arguments for the interpreter.

        fork: None starts a new process; a rank is forked from its keeper: ranks 0 and 1 have
        different ones. beside: another job; this one then shares its mark and its log.
        """
        self.mark = beside.mark if beside else uuid.uuid4().hex
        # The sessions of forks: the number of the process that leads each -> when it began.
        self.leaders: dict[int, float | None] = beside.leaders if beside else {}
        # A file, not a pipe: an orphan would hold the pipe open. Opened for appending, so that no
        # process writes over what another has written.
        self.log = beside.log if beside else tempfile.NamedTemporaryFile(mode="a+b")  # noqa: SIM115
        command = [str(part) for part in command]
        self.command = typed(command if fork is None else ["python", *command], cwd, **environment)
        environment = clean_environment(**environment, TEST_JOB_MARK=self.mark)
        parent = None if fork is None or COLD else keeper(fork % 2, interpreter)
        if parent and parent.may_fork(environment):
            self.process = forks.Fork(parent, command, cwd, environment, self.log.name)
            self.leaders[self.process.pid] = began(self.process.pid)
        else:
            self.process = subprocess.Popen(
                command if fork is None else [interpreter, *command],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        note(self.command, self.output)
        self.log.close()

    @property
    def output(self) -> str:
        """The output of all processes so far; callable at any time.

        The children share the file's offset: to move it would let them write at a wrong place.
        """
        read = bytearray()
        while chunk := os.pread(self.log.fileno(), 2**20, len(read)):
            read += chunk
        return read.decode(errors="replace")  # a character may be half written

    def processes(self) -> list[psutil.Process]:
        """Those in the sessions of its forks, and those with the mark in their environment."""

        def is_ours(process: psutil.Process) -> bool:
            leader = os.getsid(process.pid)
            # A number is used again, but not while a session has it.
            if leader in self.leaders and began(leader) in (None, self.leaders[leader]):
                return True
            return environment(process).get("TEST_JOB_MARK") == self.mark

        return those(is_ours, filter(self.may_be_ours, psutil.pids()))

    def may_be_ours(self, pid: int) -> bool:
        """What psutil does is slow: leave out what is certainly another's."""
        if sys.platform != "linux":
            return True
        with contextlib.suppress(OSError):  # it is gone, or of another user
            if os.getsid(pid) in self.leaders:
                return True
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            return not variables or self.mark.encode() in variables
        return False

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks that run now, in order."""
        numbers = {}
        for process in self.processes():
            with contextlib.suppress(*GONE, KeyError):  # KeyError: no rank
                numbers[process] = int(environment(process)["RANK"])
        return sorted(numbers, key=numbers.get)

    def agents(self) -> list[psutil.Process]:
        """torchrun's own processes, one a host."""

        def is_agent(process: psutil.Process) -> bool:
            words = process.cmdline()[1:3]  # -m torch.distributed.run, or the script torchrun
            return words == [*TORCHRUN[1:]] or Path(*words[:1]).name == "torchrun"

        return those(is_agent, self.processes())

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
                    process.name()  # which repr() then has after the end, too
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
        """Wait for the end; without progress for `timeout` seconds, kill everything and raise.

        The error has the output so far, which then ends with what each process was doing, the
        stacks of all its threads.
        """
        patience = Patience([self], timeout)
        while not self.has_ended():
            if patience.is_over():
                self.abort()
                raise TimeoutError(f"{patience.why}\n{self.command}\n{self.output[-200_000:]}")
            forks.pause([self.process])
        return Result(self.process.returncode, self.output, self.command)

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
        """Return the first true value of `condition()`.

        Raises AssertionError if the job ends before, or makes no progress for `timeout` seconds.
        """
        patience = Patience([self], timeout)
        while True:
            ended = self.has_ended()
            asked = time.monotonic()
            if value := condition():
                return value
            if ended or patience.is_over():
                why = "the job has ended" if ended else patience.why
                raise AssertionError(f"{why}\n{self.output[-6000:]}")
            time.sleep(max(0.005, 4 * (time.monotonic() - asked)))  # the job needs the processors


class Patience:
    """Over when jobs have printed nothing and computed next to nothing for this many seconds.

    A limit on the wall clock would fail on a busy machine, where a job gets little of a processor;
    it gets some. A job that waits for what will not come uses less than 2 % of one, or it spins:
    so a job that computes and prints nothing has four times as long, not for ever.
    """

    def __init__(self, jobs: list[Job], seconds: float):
        self.jobs, self.seconds = jobs, seconds
        self.size, self.used = self.printed(), 0.0
        self.looked = self.grown = time.monotonic()  # when it was looked at, and had grown
        self.why = ""  # why it is over; "" while it is not

    def is_over(self) -> bool:
        now = time.monotonic()
        if now < self.looked + self.seconds:
            return False
        size, used = self.printed(), self.computed()
        if size != self.size:
            self.grown = now
        if size == self.size and used - self.used < 0.02 * self.seconds:
            self.why = f"printed nothing and computed next to nothing for {self.seconds:g} s"
        elif now > self.grown + 4 * self.seconds:
            self.why = f"computed and printed nothing for {4 * self.seconds:g} s"
        self.looked, self.size, self.used = now, size, used
        return bool(self.why)

    def printed(self) -> int:
        return sum(os.stat(job.log.name).st_size for job in self.jobs)

    def computed(self) -> float:
        """Seconds of a processor, of the processes that run and of those that they waited for."""
        found = set()
        for job in self.jobs:
            found.update(job.processes())
        seconds = 0.0
        for process in found:
            with contextlib.suppress(*GONE):
                seconds += sum(process.cpu_times()[:4])
        return seconds


def began(pid: int) -> float | None:
    """When the process began; None if it is gone.

    Linux counts from its own start: the time of day, which psutil has, is set meanwhile.
    """
    with contextlib.suppress(OSError):
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).create_time()
    return None


# Errors of psutil if a process ends during the query, or belongs to another user.
GONE = (psutil.Error, FileNotFoundError, ProcessLookupError)


def those(
    condition: Callable[[psutil.Process], bool],
    among: Iterable[psutil.Process | int] | None = None,
) -> list[psutil.Process]:
    """Those processes of this machine (or `among` some, or their numbers) of which it is true."""
    found = []
    for known in psutil.pids() if among is None else among:
        with contextlib.suppress(*GONE):
            # process_iter() may return an old object, of an ended process with the same number.
            process = psutil.Process(known) if isinstance(known, int) else known
            if condition(process):
                found.append(process)
    return found


def environment(process: psutil.Process) -> dict[str, str]:
    """Its variables: a process has none while it becomes another program, so it is asked again.

    A zombie has none any more, nor memory; nor has a thread of the kernel, if root asks.
    """
    until = time.monotonic() + 1
    while not (variables := process.environ()) and process.memory_info().vms:
        if time.monotonic() > until:
            break
        time.sleep(0.001)
    return variables


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended by now."""
    return those(lambda p: p.status() != psutil.STATUS_ZOMBIE, processes)


def python(
    script, *args, timeout: float = 300, cwd: Path = ROOT, cold: bool = False, **environment: str
) -> Result:
    """Run `script` as one plain process: a fork, or a new one if it is to be cold."""
    command = on_backend(script, *args)
    job = Job(
        [sys.executable, *command] if cold else command, cwd, None if cold else 0, **environment
    )
    return to_the_end(job, timeout)


def torchrun_command(script, *args, ranks: int = 2, options: tuple = ()) -> list:
    alone = not any(option.startswith("--nnodes") for option in options)
    launcher = [*TORCHRUN, *["--standalone"] * alone, f"--nproc_per_node={ranks}", *options]
    return [*launcher, *on_backend(script, *args)]


class Torchrun(Job):
    """torchrun with `ranks` ranks on this machine.

    It and its ranks are forks, by torchrun's own options --run-path and --start-method=fork: then
    the ranks have one hash seed, and get SIGINT if torchrun is killed.
    cold: as a reader starts it, for what it prints of ranks that fail, and for how they exit. With
    a GPU it is always cold: torchrun looks for GPUs, and CUDA then does not start in a fork.
    """

    def __init__(
        self, script, *args, ranks=2, options=(), cwd: Path = ROOT, cold=False, **environment: str
    ):
        command = torchrun_command(script, *args, ranks=ranks, options=options)
        import torch  # not above: the main process of pytest -n does without it, and starts sooner

        cold = cold or COLD or torch.cuda.is_available()
        if cold or not keeper(0).may_fork(clean_environment(**environment)):
            super().__init__(command, cwd, **environment)
        else:
            by_forks = [BY_FORKS, *command[len(TORCHRUN) :]]
            super().__init__(by_forks, cwd, fork=0, **environment)
            self.command = typed(command, cwd, **environment)

    def ranks(self) -> list[psutil.Process]:
        if not self.leaders:
            return super().ranks()
        children = still_running(psutil.Process(self.process.pid).children())
        return sorted(children, key=psutil.Process.create_time)


BY_FORKS = ROOT / "tests/workers/torchrun_by_forks.py"


def torchrun(script, *args, timeout=300, **options) -> Result:
    """Run Torchrun(script, *args, **options) to its end."""
    return to_the_end(Torchrun(script, *args, **options), timeout)


def to_the_end(job: Job, timeout: float) -> Result:
    """Wait for the end of the job; also asserts that it has left no process."""
    with job:
        result = job.wait(timeout)
        left = job.left_running()
        assert not left, f"left running: {left}\n{result.output[-3000:]}"
        return result


def free_port() -> int:
    """A TCP port of this machine that is free, for rendezvous that must name one.

    It lies outside the range from which the kernel gives ports to connections, if it can: until the
    rendezvous has begun, which takes seconds, other tests open hundreds of connections, and one
    could get this port.
    """
    low, high = 49152, 65535
    with contextlib.suppress(OSError):  # not Linux
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    named = [port for port in range(5000, 65536) if not low <= port <= high]
    while True:
        port = random.choice(named or range(low, high + 1))
        if port in (29400, 29500):  # torchrun's own
            continue
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


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
    measured |= {"memory_mb", "reserved_mb", "largest_memory_mb", "largest_reserved_mb"}
    measured |= {"hours", "rank_hours"}
    lines = read_metrics(output_dir)
    return [{name: line[name] for name in line if name not in measured} for line in lines]
