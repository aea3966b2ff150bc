"""Run a script that must not leave this machine: attempts are noted in $OFFLINE_LOG, and fail.

Python asks the audit hook before it opens a connection or looks up a name, also for libraries
written in Python. (Gloo's own sockets do not ask.)
"""

import os
import runpy
import socket
import sys
from pathlib import Path

HERE = {"localhost", "", None, socket.gethostname(), socket.gethostname().encode(), b"localhost"}
EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


def main() -> None:
    note(f"on, rank {os.environ.get('RANK', 'none')}")
    sys.addaudithook(refuse)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def refuse(event: str, args: tuple) -> None:
    if event not in EVENTS:
        return
    host = args[1] if event in ("socket.connect", "socket.sendto") else args[0]
    if isinstance(host, tuple):
        host = host[0]
    elif event in ("socket.connect", "socket.sendto"):
        return  # a Unix socket
    if host in HERE or str(host).startswith("127.") or host in ("::1", "0.0.0.0", "::"):
        return
    note(f"{event} {host!r}")
    raise OSError(f"offline: {event} {host!r}")


def note(line: str) -> None:
    with open(os.environ["OFFLINE_LOG"], "a") as log:
        log.write(line + "\n")


if __name__ == "__main__":
    main()
