"""Stands in for `python`: what it is told to run runs in a fork that has PyTorch loaded.

    WARM_PYTHON=FOLDER python -IS warm_python.py [-u] SCRIPT|-m MODULE ARGUMENTS...

The fork is made by warm_server.py, which left its address and what it has read at its own start in
FOLDER. It gets this process's arguments, environment, folder, limits and open files 0, 1 and 2.
This process passes signals on to it and ends as it ends; if this one is killed, so is the fork.
Whoever looks for a job by its arguments or environment, as with ps, finds the fork only. Where a
fork would not be like a new process, this process becomes a plain `python` instead (exec).

The tests and course.quick_start() use it: to import PyTorch takes a processor for 2 to 5 seconds,
in torchrun and in each rank. Only what is imported in milliseconds is imported here.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time

# What Python and PyTorch read when they start or are imported:
READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "MALLOC_", "TORCH_", "HF_", "CUDA_")
READ_AT_START += ("HOME", "XDG_")  # where caches lie; for these a fork is too late ...
# ... but for these, which warm_server.py looks after, or which are read when they are used.
READ_LATER = {
    "PYTHONBREAKPOINT",
    "PYTHONPATH",
    "PYTHONFAULTHANDLER",
    "PYTHONUNBUFFERED",
    "PYTHON_EXEC",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
PATIENCE = 60  # seconds until the server has imported everything
MAKES_NAMESPACES = "lab.py"  # process 1 of one must not be a fork's stand-in
NAMESPACES = ("cgroup", "ipc", "user", "pid", "net", "uts", "mnt")
ENTERED = {"pid", "net", "uts", "mnt"}  # the fork follows this process there: hosts of a lab
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGABRT", "SIGUSR1", "SIGUSR2")
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def main() -> None:
    arguments = sys.argv[1:]
    until = time.monotonic() + PATIENCE
    while not os.path.exists(address := f"{os.environ['WARM_PYTHON']}/server.json"):
        if time.monotonic() > until:  # it has failed: then without it
            os.execv(sys.executable, [sys.executable, *arguments])
        time.sleep(0.02)
    server = json.loads(read(address))
    command = arguments[1:] if arguments[:1] == ["-u"] else arguments
    is_plain = bool(command) and (command[0] == "-m" or not command[0].startswith("-"))
    is_plain = is_plain and os.path.basename(command[0]) != MAKES_NAMESPACES
    is_plain &= read_at_start() == server["read_at_start"]
    elsewhere = [n for n, here in namespaces().items() if here != server["namespaces"][n]]
    if not is_plain or not ENTERED.issuperset(elsewhere):
        os.execv(server["executable"], [server["executable"], *arguments])
    sys.exit(run(command, elsewhere, server))


def run(command: list[str], elsewhere: list[str], server: dict) -> int:
    """The exit status of `command` in a fork. Dies of the signal of which the fork has died."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(server["address"])
        told = {
            "command": command,
            "namespaces": elsewhere,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": set_umask(),
            "limits": [(limit, resource.getrlimit(limit)) for limit in LIMITS],
            "processors": sorted(os.sched_getaffinity(0)),
            "nice": os.nice(0),
            "leads": os.getpid() == os.getpgrp(),  # then what it gets is meant for a whole group
        }
        names = [getattr(signal, name) for name in FORWARDED]
        signal.pthread_sigmask(signal.SIG_BLOCK, names)  # until there is whom to pass them on to
        until, hidden = os.pipe()  # the fork begins when the other end is closed
        socket.send_fds(connection, [json.dumps(told).encode()], [0, 1, 2, until])
        os.close(until)
        pid = told_by(connection, "pid")
        show("environment", b"")
        os.close(hidden)

        def pass_on(number, _):
            with contextlib.suppress(ProcessLookupError):  # if so, its status is on its way
                os.kill(-pid if told["leads"] else pid, number)

        for name in names:
            signal.signal(name, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, names)
        status = told_by(connection, "status")
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def told_by(connection: socket.socket, what: str) -> int:
    """A number that comes as "WHAT NUMBER"."""
    message = connection.recv(64).decode()
    if not message.startswith(what):
        sys.exit(f"warm_python.py: instead of a {what} came {message!r}")
    return int(message.split()[1])


def show(what: str, text: bytes) -> None:
    """What other processes read as this one's "command" or "environment": it lies in its memory."""
    first = {"command": 45, "environment": 47}[what]  # see proc(5), and that two fields are cut off
    start, end = (int(n) for n in read("/proc/self/stat").rpartition(")")[2].split()[first:][:2])
    size = end - start
    # Where the last byte is none, the kernel shows all of it; else what is before the first zero.
    last = b"." if what == "command" else b"\0"
    with open("/proc/self/mem", "wb", buffering=0) as memory:
        memory.seek(start)
        memory.write(text[: size - 2].ljust(size - 1, b"\0") + last)


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def read_at_start() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(READ_AT_START) and name not in READ_LATER
    }


def namespaces() -> dict[str, str]:
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}


def set_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


if __name__ == "__main__":
    main()
