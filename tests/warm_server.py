"""Forks the processes of warm_python.py: see there.

    python warm_server.py FOLDER ROOM < PIPE

Ends, with all its forks, when PIPE is closed: whoever holds it is gone then. FOLDER gets
server.json, and `python`, which stands in for Python. ROOM is as long as the arguments of a fork may
be, and WARM_PYTHON_ROOM, a variable, as its environment: both are written over there.

It forks from a process with one thread. To fork from torchrun's agent, which has several, would let
one start in thirty hang: on a lock that another thread held in that moment.
"""

import atexit
import faulthandler
import importlib
import json
import os
import random
import resource
import runpy
import selectors
import signal
import socket
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


def main() -> dict | None:
    """Serve until the pipe is closed; in a fork return what it is to do."""
    folder = Path(sys.argv[1]).resolve()
    at_start = warm_python.read_at_start()  # what is imported sets more of them
    for name in IMPORTED:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{folder}/socket")
    listener.listen(256)
    stand_in = make_tools(folder)
    about = {
        "address": f"{folder}/socket",
        "executable": sys.executable,
        "read_at_start": at_start,
        "in": warm_python.namespaces(),
    }
    (folder / "server.part").write_text(json.dumps(about))
    (folder / "server.part").rename(folder / "server.json")

    events = selectors.DefaultSelector()
    events.register(sys.stdin.fileno(), selectors.EVENT_READ, "owner")
    events.register(listener, selectors.EVENT_READ, "new")
    children = {}  # process -> (the connection to its stand-in, a file that says when it ends)
    while True:
        for key, _ in events.select():
            if key.data == "owner":
                for process in children:
                    kill(process)
                return None
            if key.data == "new":
                connection, _ = listener.accept()
                events.register(connection, selectors.EVENT_READ, "request")
            elif key.data == "request":
                connection = key.fileobj
                events.unregister(connection)
                message, files, *_ = socket.recv_fds(connection, 2**20, 3)
                if not message:  # it is gone already
                    connection.close()
                    continue
                assert len(os.listdir("/proc/self/task")) == 1, "a fork of several threads"
                process = os.fork()
                if process == 0:
                    events.close()
                    for held in (listener, connection):
                        held.close()
                    for other, ended in children.values():
                        other.close()
                        os.close(ended)
                    return json.loads(message) | {"files": files, "executable": str(stand_in)}
                for file in files:
                    os.close(file)
                ended = os.pidfd_open(process)
                children[process] = (connection, ended)
                connection.send(str(process).encode())
                events.register(connection, selectors.EVENT_READ, ("left", process))
                events.register(ended, selectors.EVENT_READ, ("ended", process))
            else:
                what, process = key.data
                if process not in children:
                    continue
                connection, ended = children[process]
                if what == "left":  # the stand-in was killed
                    events.unregister(connection)
                    kill(process)
                    continue
                _, status = os.waitpid(process, 0)
                with suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                with suppress(KeyError):
                    events.unregister(connection)
                events.unregister(ended)
                connection.close()
                os.close(ended)
                del children[process]


def make_tools(folder: Path) -> Path:
    """`python`, `torchrun`, and all else that lies beside the real ones: for the PATH."""
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
            (folder / tool.name).symlink_to(tool)
    return folder / "python"


def kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def become(told: dict) -> None:
    """In the fork: be like the process that `python` would have been."""
    os.setsid()
    for target, file in enumerate(told["files"]):
        os.dup2(file, target)
    for file in told["files"]:
        if file > 2:
            os.close(file)
    os.chdir(told["folder"])
    os.umask(told["umask"])
    os.nice(told["nice"] - os.nice(0))
    os.sched_setaffinity(0, told["processors"])
    for limit, values in told["limits"]:
        with suppress(ValueError):
            resource.setrlimit(limit, values)

    environment = told["environment"]
    os.environ.clear()
    os.environ.update(environment)
    block = "".join(f"{name}={value}\0" for name, value in environment.items())
    warm_python.show("environment", block.encode())
    warm_python.show("command", " ".join([told["executable"], *told["command"]]).encode())
    if "JPY_PARENT_PID" in environment:  # a kernel that ends when its parent changes
        os.environ["JPY_PARENT_PID"] = str(os.getppid())
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    # A line in one go: unbuffered, print() would write "a", " ", "b" and a newline, and another
    # rank in between.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.executable = told["executable"]
    random.seed()
    sys.modules["numpy"].random.seed()
    for name in ("warm_python", "__mp_main__"):
        sys.modules.pop(name, None)


def search_path(first: str, environment: dict[str, str]) -> None:
    """What Python itself finds, and nothing of the tests: a script that imports one of their files
    must fail, as it would for a reader."""
    more = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    installed = [p for p in sys.path if p.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [first, *more, *installed]
    if "PYTHONPATH" in environment:  # may hold one, which Python imports when it starts
        sys.modules.pop("sitecustomize", None)
        with suppress(ImportError):
            importlib.import_module("sitecustomize")


def run(command: list[str], environment: dict[str, str]) -> None:
    """What `python command` runs, as __main__."""
    if command[0] == "-m":
        search_path(os.getcwd(), environment)
        sys.argv = command[1:]
        sys.modules.pop(command[1], None)  # or runpy warns
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        search_path(str(Path(command[0]).resolve().parent), environment)
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def end(reason: BaseException | None) -> None:
    """As Python ends, but for the second that it takes to free what was imported."""
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
        sys.excepthook(type(reason), reason, frames)
        status = 1
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if isinstance(reason, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    told = main()
    if told:
        become(told)
        reason = None
        try:
            run(told["command"], told["environment"])
        except BaseException as error:
            reason = error
        end(reason)
