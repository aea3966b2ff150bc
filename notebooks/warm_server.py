"""Forks the processes of warm_python.py: see there. For Linux.

    server = warm_server.start(folder, environment)

`folder` has a `python` and a `torchrun` for the PATH then. They wait until the server has imported
everything. It ends, with all its forks, when the pipe to it is closed: server.communicate(), or the
end, of whatever kind, of the process that has started it.

It forks from a process with one thread. To fork from torchrun's agent, which has several, would let
one start in thirty hang: on a lock that another thread held in that moment.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import random
import resource
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import warm_python

IMPORTED = (
    "torch._dynamo",  # what optimizers and DDP import at their first use
    "torch._inductor.compile_fx",  # what torch.compile does
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.rpc",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "sklearn.datasets",
    "transformers.models.t5.modeling_t5",
)


def start(folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    """A server in the background. environment: what it, and a fork at its start, has read."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tools(folder)
    # As long as a fork's environment and arguments may be, which are written over these. And
    # pyarrow, which scikit-learn imports where there is one, must not start a thread.
    room = {"WARM_PYTHON_ROOM": "x" * 2**16, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    command = [sys.executable, __file__, folder, "x" * 2**13]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment | room, start_new_session=True
    )


class Fork(Exception):
    """Raised in a fork, out of the server's loop: (request, connection to the stand-in, files)."""


class Server:
    def __init__(self, folder: Path):
        at_start = warm_python.read_at_start()  # what is imported sets more of them
        for name in IMPORTED:
            importlib.import_module(name)
        # An agent of torchrun notes which method calls, at each beat of its heart too, and looks
        # through the files of all modules for its name. With so many: 0.25 s of a processor.
        rendezvous = sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"]
        rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
        gc.freeze()  # collections in forks need not look at, and so copy, what was there before
        self.children = {}  # process -> (connection to its stand-in, a file that says its end)
        self.events = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"{folder}/socket")
        self.listener.listen(256)
        about = {
            "address": f"{folder}/socket",
            "executable": sys.executable,
            "read_at_start": at_start,
            "namespaces": warm_python.namespaces(),
        }
        (folder / "server.part").write_text(json.dumps(about))
        (folder / "server.part").rename(folder / "server.json")

    def serve(self) -> None:
        """Until the pipe is closed."""
        self.when_readable(sys.stdin, lambda: None)
        self.when_readable(self.listener, self.accept)
        while True:
            for key, _ in self.events.select():
                if key.fileobj is sys.stdin:
                    for process in self.children:
                        os.kill(process, signal.SIGKILL)
                    return
                if key.fd in self.events.get_map():  # not closed by what came before it
                    key.data()

    def when_readable(self, file, do) -> None:
        self.events.register(file, selectors.EVENT_READ, do)

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        self.when_readable(connection, lambda: self.fork(connection))

    def fork(self, connection: socket.socket) -> None:
        self.events.unregister(connection)
        message, files, *_ = socket.recv_fds(connection, 2**20, 4)
        if not message:  # the stand-in is gone already
            connection.close()
            return
        request = json.loads(message)
        assert len(os.listdir("/proc/self/task")) == 1, "a fork of several threads"
        process = os.fork()
        if process == 0:
            self.events.close()
            self.listener.close()
            for other, ended in self.children.values():
                other.close()
                os.close(ended)
            raise Fork(request, connection, files)
        for file in files:
            os.close(file)
        ended = os.pidfd_open(process)
        self.children[process] = connection, ended
        self.when_readable(connection, lambda: self.stand_in_is_gone(process, request["leads"]))
        self.when_readable(ended, lambda: self.has_ended(process))

    def stand_in_is_gone(self, process: int, leads: bool) -> None:
        self.events.unregister(self.children[process][0])
        with suppress(ProcessLookupError):  # it has no group of its own yet
            if leads:
                os.killpg(process, signal.SIGKILL)
        os.kill(process, signal.SIGKILL)

    def has_ended(self, process: int) -> None:
        connection, ended = self.children.pop(process)
        _, status = os.waitpid(process, 0)
        for file in (connection, ended):
            with suppress(KeyError):  # of a stand-in that is gone
                self.events.unregister(file)
        with suppress(OSError):
            connection.send(f"status {os.waitstatus_to_exitcode(status)}".encode())
        connection.close()
        os.close(ended)


def make_tools(folder: Path) -> None:
    """The stand-in for `python`, a `torchrun`, and links to all else that lies beside them."""
    own = {
        "python": f"{sys.executable} -IS {warm_python.__file__}",
        "torchrun": f"{folder}/python -m torch.distributed.run",
    }
    for name, command in own.items():
        tool = folder / name
        tool.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        tool.chmod(0o755)
    for tool in Path(sys.executable).parent.iterdir():
        if tool.name not in own:
            target = folder / "python" if tool.name.startswith("python") else tool
            (folder / tool.name).symlink_to(target)


def enter(names: list[str], stand_in: int) -> None:
    """Go into the namespaces of this process, such as those of a host of clusters/lab.py."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    for file in [os.open(f"/proc/{stand_in}/ns/{name}", os.O_RDONLY) for name in names]:
        if setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns of {names}")
        os.close(file)
    if "pid" in names:  # in there are our children only
        child = os.fork()
        if child:
            for file in range(3):
                os.close(file)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os.kill(os.getpid(), -code)
            os._exit(code)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it is killed with its parent


def become(told: dict, connection: socket.socket, files: list[int]) -> None:
    """In the fork: be like the process that `python` would have been."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    stand_in, _, _ = struct.unpack("iii", credentials)
    enter(told["namespaces"], stand_in)
    os.setsid()
    *files, until = files
    for target, file in enumerate(files):
        os.dup2(file, target)
    for file in files:
        if file > 2:
            os.close(file)
    sys.executable = f"{sys.argv[1]}/python"
    os.chdir(told["folder"])
    os.umask(told["umask"])
    os.nice(told["nice"] - os.nice(0))
    os.sched_setaffinity(0, told["processors"])
    for limit, values in told["limits"]:
        with suppress(ValueError):  # one that only root may raise again
            resource.setrlimit(limit, values)

    environment = told["environment"]
    os.environ.clear()
    os.environ.update(environment)
    shown = environment | {"WARM_STAND_IN": str(stand_in)}  # for who asks; no child inherits it
    block = "".join(f"{name}={value}\0" for name, value in shown.items())
    warm_python.show("environment", block.encode())
    warm_python.show("command", " ".join([sys.executable, *told["command"]]).encode())
    if "JPY_PARENT_PID" in environment:  # a kernel ends when its parent is another one
        os.environ["JPY_PARENT_PID"] = str(os.getppid())
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    # A line in one go: unbuffered, print() would write "a", " ", "b" and a newline, and another
    # rank in between.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    # What these have done at their import is done again.
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch.distributed"].set_debug_level_from_env()  # TORCH_DISTRIBUTED_DEBUG
    library = Path(sys.modules["torch"].__file__).with_name("lib") / "libc10.so"
    ctypes.CDLL(library)._ZN3c1011initLoggingEv()  # TORCH_CPP_LOG_LEVEL
    sys.modules.pop("warm_python")
    connection.send(f"pid {os.getpid()}".encode())  # now it may be found, and signals are for it
    connection.close()
    os.read(until, 1)  # until what stands in for it is not found any more
    os.close(until)


def search_path(first: str, more: str | None) -> None:
    """What Python itself finds, and nothing of the tests.

    A script that imports one of their files must fail, as it would for a reader. more: PYTHONPATH.
    """
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [first, *filter(None, (more or "").split(os.pathsep)), *installed]
    if more:  # may hold one, which Python imports when it starts
        sys.modules.pop("sitecustomize", None)
        with suppress(ImportError):
            importlib.import_module("sitecustomize")


def run(command: list[str], more: str | None) -> None:
    """What `python COMMAND` runs, as __main__."""
    if command[0] == "-m":
        search_path(os.getcwd(), more)
        sys.argv = command[1:]
        sys.modules.pop(command[1], None)  # or runpy warns
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        search_path(str(Path(command[0]).resolve().parent), more)
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def end(reason: BaseException | None) -> None:
    """As Python ends, but for the second that it would take to free all that was imported."""
    status = 0
    if isinstance(reason, SystemExit):
        status = reason.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    elif reason:
        frames = reason.__traceback__
        while frames and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            frames = frames.tb_next
        sys.excepthook(type(reason), reason.with_traceback(frames), frames)
        status = 1
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if isinstance(reason, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def main() -> None:
    try:
        Server(Path(sys.argv[1]).resolve()).serve()
    except Fork as fork:
        told, *others = fork.args
    else:
        os._exit(0)
    become(told, *others)
    reason = None
    try:
        run(told["command"], told["environment"].get("PYTHONPATH"))
    except BaseException as error:
        reason = error
    end(reason)


if __name__ == "__main__":
    main()
