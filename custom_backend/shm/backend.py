"""Register the backend "shm", and connect the ranks of a group.

    import shm
    dist.init_process_group("shm")

A process sends two file descriptors to another one: of the group's segment, and of its own heap.
Both are files without a name, in memory only (memfd). The descriptors travel over Unix sockets with
random names, which only the store of the group lists. The kernel tells each end the user at the
other end.
"""

import atexit
import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shm import build

MODULE = None  # the compiled part
FAILED = "failed: "  # in the store, instead of a value: what follows is the reason


def register() -> None:
    """Register "shm" with torch.distributed; "cpu:shm,cuda:nccl" also works.

    Raises RuntimeError with one sentence if it is not compiled and there is no compiler.
    """
    build.check_tools()
    if "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", create_backend, devices=["cpu"])


def empty(*size: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As torch.empty: a CPU tensor, in the heap of this process, where other ranks read and write.

    size: as numbers, or as one sequence.
    """
    like = torch.empty(*size, dtype=dtype, device="meta")
    return compiled().allocate(like.nbytes).view(dtype).view(like.shape)


def adopt(tensor: torch.Tensor) -> torch.Tensor:
    """Move the storage of a tensor, and with it all its views, into the heap.

    Pointers outside of torch, such as a numpy array, keep pointing to the old memory.
    """
    if not lies_in_heap(tensor):
        compiled().adopt(tensor)
    return tensor


def lies_in_heap(tensor: torch.Tensor) -> bool:
    return compiled().lies_in_heap(tensor)


def ddp_hook(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the buckets of DDP without copies: model.register_comm_hook(None, shm.ddp_hook).

    DDP allocates its buckets of gradients itself. This hook moves each bucket into the heap at its
    first reduction; from then on, ranks reduce it in place.
    """
    buffer = adopt(bucket.buffer())
    options = dist.ReduceOp.AVG
    work = dist.all_reduce(buffer, options, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def create_backend(store: dist.Store, rank: int, size: int, timeout: timedelta):
    """torch calls this on all ranks of a new group, with a store for this group alone."""
    # Groups created one after another may share a store, so each rank counts its groups.
    store = dist.PrefixStore(f"life {store.add(f'lives of {rank}', 1)}", store)
    sockets = Meeting(store, rank, size, timeout)
    try:
        module = compiled()
        if size > 64:
            raise ValueError(f"shm connects at most 64 ranks of one host, not {size}")
        with sockets:
            segment, heaps = sockets.exchange(module)
        group = module.create(segment, rank, size, heaps, *sockets.patience(), timeout)
        sockets.wait_for_all("entered")  # from here on every death is noticed
    except OSError as error:  # such as "Too many open files"
        raise RuntimeError(sockets.tell(error)) from error
    except Exception as error:
        sockets.tell(error)
        raise
    return group


def compiled():
    global MODULE
    if MODULE is None:
        MODULE = build.load()
        atexit.register(MODULE.close_all)  # closes groups that the program has not destroyed
    return MODULE


class Meeting:
    """Connects the ranks of a new group: through the store, then over Unix sockets."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout

    def __enter__(self) -> "Meeting":
        name = secrets.token_hex(16)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.settimeout(0.2)
        self.listener.bind(f"\0{name}")  # an abstract name: no file, ends with the socket
        self.listener.listen(self.size)
        mine = {
            "host": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "network": os.readlink("/proc/self/ns/net"),
            "name": socket.gethostname(),
            "socket": name,
            "cores": sorted(os.sched_getaffinity(0)),
            "build": build.fingerprint(),
        }
        self.ranks = [json.loads(text) for text in self.everybodys("rank", json.dumps(mine))]
        self.check()
        return self

    def __exit__(self, *_) -> None:
        self.listener.close()

    def everybodys(self, key: str, value: str) -> list[str]:
        """The values of all ranks under this key; raises what a rank has told instead."""
        self.store.set(f"shm/{key}/{self.rank}", value)
        return [self.get(key, rank) for rank in range(self.size)]

    def get(self, key: str, rank: int) -> str:
        try:
            self.store.wait([f"shm/{key}/{rank}"], self.timeout)
        except RuntimeError as error:
            raise RuntimeError(f"shm: rank {rank} did not join the group: {error}") from None
        value = self.store.get(f"shm/{key}/{rank}").decode()
        if value.startswith(FAILED):
            raise RuntimeError(value.removeprefix(FAILED))
        return value

    def tell(self, error: Exception) -> str:
        """Tell the ranks that wait for a key of this rank why it will not come. Returns it."""
        text = str(error) or type(error).__name__
        if "could not join" not in text:  # else another rank has told it
            text = f"shm: rank {self.rank} could not join: {text.removeprefix('shm: ')}"
        with contextlib.suppress(RuntimeError):  # the store may have ended, with rank 0
            for key in ("rank", "entered"):
                if not self.store.check([f"shm/{key}/{self.rank}"]):
                    self.store.set(f"shm/{key}/{self.rank}", FAILED + text)
        return text

    def wait_for_all(self, key: str) -> None:
        self.everybodys(key, "yes")

    def check(self) -> None:
        mine = self.ranks[self.rank]
        for rank, other in enumerate(self.ranks):
            if other["host"] != mine["host"]:
                raise ValueError(
                    f"shm connects ranks of one host: rank {self.rank} is on {mine['name']}, "
                    f"rank {rank} on {other['name']}. Take gloo, or nccl, between hosts"
                )
            if other["network"] != mine["network"]:
                raise ValueError(
                    f"shm connects ranks of one network namespace: rank {self.rank} and rank {rank}"
                    " have two, like two containers of one host. Give the containers one network "
                    "(docker run --network host), or take gloo"
                )
            if other["build"] != mine["build"]:
                raise ValueError(f"shm: rank {rank} runs another build than rank {self.rank}")

    def patience(self) -> tuple[float, int]:
        """How long to spin, in microseconds, and how often to yield, before sleeping."""
        cores = set().union(*(rank["cores"] for rank in self.ranks))
        return (50.0, 4) if len(cores) >= self.size else (2.0, 64)

    def exchange(self, module) -> tuple[int, list[int]]:
        """The descriptors of the group's segment and of every rank's heap (-1: its own)."""
        own = [module.heap_fd()]
        if self.rank == 0:
            segment = os.memfd_create("torch shm group")
            os.ftruncate(segment, module.segment_bytes(self.size))
            module.prepare_segment(segment, self.size)
            own.append(segment)
        received = {self.rank: [-1, *own[1:]]}
        # Each rank connects to all lower ranks, and accepts all higher ranks.
        for peer in range(self.rank):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(self.timeout.total_seconds())
                try:
                    connection.connect("\0" + self.ranks[peer]["socket"])
                except OSError as error:
                    text = f"shm: rank {self.rank} can not connect to rank {peer}: {error}"
                    raise RuntimeError(text) from error
                self.swap(connection, own, received)
        while len(received) < self.size:
            with self.accept(set(range(self.size)) - set(received)) as connection:
                if user_of(connection) != os.getuid():
                    continue  # every user can see the names of sockets: give a stranger no answer
                connection.settimeout(self.timeout.total_seconds())
                self.swap(connection, own, received)
        return received[0][1], [received[peer][0] for peer in range(self.size)]

    def accept(self, missing: set[int]) -> socket.socket:
        """The next connection; raises what a missing rank has told instead of connecting."""
        end = time.monotonic() + self.timeout.total_seconds()
        while time.monotonic() < end:
            for rank in missing:
                if self.store.check([f"shm/entered/{rank}"]):
                    self.get("entered", rank)
            with contextlib.suppress(TimeoutError):  # after 0.2 s
                return self.listener.accept()[0]
        ranks = ", ".join(map(str, sorted(missing)))
        raise RuntimeError(f"shm: timeout: rank {self.rank} waits for ranks {ranks} to connect")

    def swap(self, connection: socket.socket, own: list[int], received: dict) -> None:
        """Send my descriptors, and receive those of the rank at the other end."""
        if user_of(connection) != os.getuid():
            raise PermissionError(f"shm: user {user_of(connection)} answers at a rank's socket")
        # Only ranks of this group can read the names in the store.
        hello = json.dumps([self.rank, self.ranks[self.rank]["socket"]]).encode()
        socket.send_fds(connection, [hello], own)
        message, descriptors, flags, _ = socket.recv_fds(connection, 4096, 2)
        if flags & socket.MSG_CTRUNC:  # the kernel has dropped what did not fit
            raise RuntimeError("shm: too many open files: raise the limit (ulimit -n)")
        for descriptor in descriptors:  # child programs do not inherit them
            os.set_inheritable(descriptor, False)
        if not message:
            raise RuntimeError(f"shm: rank {self.rank}: a rank has hung up while it was joining")
        peer, name = json.loads(message)
        if name != self.ranks[peer]["socket"]:
            raise PermissionError("shm: a process that is no rank of this group has called")
        received[peer] = descriptors


def user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[1]
