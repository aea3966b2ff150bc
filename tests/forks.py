"""Processes that need no `import torch`: they are forked from one that has imported it.

The import costs 2 to 5 seconds of a processor. A *keeper* pays them once: it imports what scripts
import, then waits, with one thread, and forks a process for each script that it is asked to run.
The fork runs the script by runpy, and ends. Keepers have different hash seeds, as new processes
have: ranks that iterate over a set of strings do so in different orders.

A fork has imported more than its script did, and its environment comes too late for what Python
and PyTorch read at their start: see Keeper.may_fork(). New processes are started by the tests that
read commands from the READMEs, and by all tests with `pytest --cold`.
"""

import atexit
import faulthandler
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

IMPORTED = (
    "torch._dynamo",  # what optimizers and DDP import at their first use
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.rpc",
    "torch.distributed.tensor.parallel",
    "sklearn.datasets",
    "sklearn.model_selection",
    "transformers.models.t5.modeling_t5",
)
# A process with another value of these is a new one: Python and its libraries read them at start.
READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "MALLOC_", "TORCH_", "HF_", "CUDA_")
READ_AT_START += ("HOME", "XDG_")  # where caches lie
READ_LATER = ("CUDA_VISIBLE_DEVICES", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")  # in the fork


def keep(requests: Connection) -> None:
    """Fork a process for each request; when the other end is closed, end them and return.

    requests: receives a number and the arguments of `play`; sends ("started", number, pid) for each
    and, once it has ended, ("ended", number, exit status).
    """
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # collections in forks need not look at, and so copy, what was there before
    fork = get_context("fork")
    running = {}  # the numbers of their requests
    ends = []  # Linux: a descriptor of each process. A sentinel would also wait for its children.
    while True:
        events = wait([requests, *ends], 0.01 if running and not ends else None)
        if requests in events:
            try:
                number, *told = requests.recv()
            except EOFError:
                for process in running:
                    end_session(process.pid)
                return
            process = fork.Process(target=play, args=(requests, *told))
            process.start()
            running[process] = number
            if hasattr(os, "pidfd_open"):
                ends.append(os.pidfd_open(process.pid))
            requests.send(("started", number, process.pid))
        for end in events:
            if end is not requests:
                ends.remove(end)
                os.close(end)
        for process in [process for process in running if process.exitcode is not None]:
            requests.send(("ended", running.pop(process), process.exitcode))


def play(requests: Connection, command: list[str], cwd: str, environment: dict, log: str) -> None:
    """In a fork: run `command`, a script and its arguments, as `python` would.

    It is a process of multiprocessing. So its start method is set already, and it ends without what
    atexit has noted (Python 3.11), and without the half second that it takes to free all modules.
    """
    requests.close()
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # Whole lines: unbuffered, print() would write "a", " ", "b", and another rank in between.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()  # SIGABRT shows where it is
    os.chdir(cwd)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)  # no longer the tests: a reader has none
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)


def end_session(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


NUMBERS = count()  # of requests, to all keepers


class Keeper:
    """The tests' end of a keeper: asks it for forks, and hears how they have ended."""

    def __init__(self, seed: int, environment: dict[str, str], interpreter: Path):
        self.environment = environment
        self.connection, other = Pipe()
        self.process = subprocess.Popen(
            [interpreter, __file__, str(other.fileno())],
            env=environment | {"PYTHONHASHSEED": str(seed)},
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
        other.close()
        # By the number of the request. A test that is interrupted between a request and its answer
        # leaves an answer that belongs to no fork: it is dropped.
        self.asked: dict[tuple[int, int], Fork] = {}
        self.lock = threading.Lock()
        atexit.register(self.process.wait)
        atexit.register(self.connection.close)  # first: this ends it

    def may_fork(self, environment: dict[str, str]) -> bool:
        """Whether a fork is like a new process with this environment."""
        names = {n for n in environment | self.environment if n.startswith(READ_AT_START)}
        names.difference_update(READ_LATER)
        return all(environment.get(name) == self.environment.get(name) for name in names)

    def start(self, fork: "Fork", *told) -> None:
        with self.lock:
            number = os.getpid(), next(NUMBERS)  # the runner of mutants forks this process
            self.asked[number] = fork
            self.connection.send((number, *told))
            while fork.pid is None:
                self.hear()

    def look(self) -> None:
        """Hear what there is to hear."""
        with self.lock:
            while self.connection.poll():
                self.hear()

    def hear(self) -> None:
        said, number, value = self.connection.recv()  # EOFError: the keeper has ended
        fork = self.asked.get(number)
        if fork and said == "started":
            fork.pid = value
        elif fork:
            self.asked.pop(number).status = value


class Fork:
    """A process of a keeper, with the methods of subprocess.Popen that the tests use."""

    def __init__(
        self, keeper: Keeper, command: list[str], cwd: Path, environment: dict[str, str], log: str
    ):
        """command: a script and its arguments. log: a file that exists, for all that it prints."""
        self.keeper = keeper
        self.pid: int | None = None
        self.status: int | None = None  # None: it runs
        keeper.start(self, command, str(cwd), environment, log)

    def poll(self) -> int | None:
        if self.status is None:
            self.keeper.look()
        return self.status

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("fork", timeout)
            pause([self])
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ends in this moment
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def pause(processes: list["Fork | subprocess.Popen"]) -> None:
    """Return when a keeper of these has news, or after a moment."""
    if all(isinstance(process, Fork) for process in processes):
        wait({process.keeper.connection for process in processes}, 0.25)  # or another thread hears
    else:
        time.sleep(0.01)


if __name__ == "__main__":
    keep(Connection(int(sys.argv[1])))
    os._exit(0)  # to free what was imported takes a second
