"""Connect the ranks of a group: addresses in the store, one socket per pair of ranks.

A rank listens, writes "host port secret" into the store, connects to all lower ranks and accepts
all higher ranks. The secret keeps out any other process that finds the port, such as a port scan.
"""

import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

PATIENCE = 5.0  # seconds for a greeting, which a rank sends as soon as it has connected
GREETING = struct.Struct("!q32s")  # rank, and the secret of the listening rank


def connect(
    store: dist.Store, rank: int, size: int, seconds: float, names: list[int]
) -> dict[int, socket.socket]:
    """Return peer -> socket. Ranks are ranks in the group; `names` has the global ranks."""
    deadline, sockets = time.monotonic() + seconds, {}
    secret = secrets.token_hex(16)
    with socket.create_server(("", 0), backlog=size) as server:
        store.set(f"address_{rank}", f"{own_address()} {server.getsockname()[1]} {secret}")
        for peer in range(rank):
            host, port, theirs = look_up(store, peer, deadline, seconds, names)
            try:
                sockets[peer] = socket.create_connection((host, int(port)), left(deadline))
            except OSError as error:
                raise dist.DistBackendError(
                    f"rank {names[rank]} cannot reach rank {names[peer]} at {host}:{port}: {error}"
                ) from None
            sockets[peer].sendall(GREETING.pack(rank, theirs.encode()))
        while len(sockets) < size - 1:
            server.settimeout(left(deadline))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = [names[p] for p in range(rank + 1, size) if p not in sockets]
                raise dist.DistBackendError(
                    f"rank {names[rank]} waited {seconds:g} s: no connection from rank(s) {missing}"
                ) from None
            greeting = None
            with suppress(OSError):  # a stranger may say nothing, or hang up
                connection.settimeout(PATIENCE)
                greeting = read(connection, GREETING.size)
            peer, theirs = GREETING.unpack(greeting) if greeting else (-1, b"")
            if secrets.compare_digest(theirs, secret.encode()):
                sockets[peer] = connection
            else:
                connection.close()
    for connection in sockets.values():
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer that takes no bytes for that long counts as dead. (settimeout would also apply to
        # reading, where silence is no error.)
        pause = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pause)
    return sockets


def look_up(store, peer: int, deadline: float, seconds: float, names: list[int]) -> list[str]:
    key = f"address_{peer}"
    try:
        store.wait([key], timedelta(seconds=left(deadline)))
    except RuntimeError:  # DistStoreError, or the error of another kind of store
        raise dist.DistBackendError(
            f"rank {names[peer]} did not join the group within {seconds:g} s"
        ) from None
    return store.get(key).decode().split()


def left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def own_address() -> str:
    """The address of the interface that leads to MASTER_ADDR."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return probe.getsockname()[0]


def read(connection: socket.socket, nbytes: int) -> bytes | None:
    """Read nbytes bytes; None if the connection ends before."""
    space = bytearray(nbytes)
    return bytes(space) if read_into(connection, memoryview(space)) else None


def read_into(connection: socket.socket, space: memoryview) -> bool:
    """Fill `space`; False if the connection ends before."""
    while len(space):
        received = connection.recv_into(space)
        if received == 0:
            return False
        space = space[received:]
    return True
