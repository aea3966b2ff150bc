"""The backend "pipe": asynchronous, over shared memory, for ranks on one host. C++ in backend.cpp.

    import pipe                             # registers it, without pip: compiled on first use
    dist.init_process_group("pipe")

After `pip install --no-build-isolation custom_backend/`, `import torch` registers it.
"""

from __future__ import annotations  # a torch without torch.distributed has none of these types

import atexit
import contextlib
import importlib.util
import os
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

HERE = Path(__file__).resolve().parent
INSTALLED = importlib.util.find_spec("pipe.compiled") is not None
if not INSTALLED:  # now: run_on.py hides the files next to this folder from the script
    from compile_once import compile_once


def register() -> None:
    """Tell torch.distributed the name. pyproject.toml lets every `import torch` call this function.

    So it has to be quick, and must not fail: an error here would be an error of `import torch`.
    """
    if dist.is_available() and "pipe" not in dist.Backend.backend_list:
        dist.Backend.register_backend("pipe", create_backend, devices=["cpu"])


@cache
def compiled() -> ModuleType:
    """The C++ part: built by pip, or compiled here if this folder is only on the path."""
    if INSTALLED:
        module = importlib.import_module("pipe.compiled")
    else:
        module = compile_once("pipe_backend", HERE / "backend.cpp")
    atexit.register(module.close_all)  # ends the workers of groups that were not destroyed
    return module


def create_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> object:
    """torch calls this on all ranks of a new group, with a store for this group alone.

    The memory of the group is a file without a name (memfd) of rank 0. The other ranks open it
    through /proc, so nothing stays behind, however the processes end.

    Raises RuntimeError, with one sentence, if the ranks cannot share memory or one does not come.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"pipe: needs Linux (memfd, pidfd), this is {sys.platform}: take gloo")
    module = compiled()
    # Groups created one after another may share a store, so each rank counts its groups.
    store = dist.PrefixStore(f"life {store.add(f'lives of {rank}', 1)}", store)

    def of_all_ranks(key: str, value: object) -> list[str]:
        store.set(f"{key}/{rank}", str(value))
        return [ask(store, f"{key}/{r}", r, timeout) for r in range(size)]

    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    hosts = of_all_ranks("host", boot + os.readlink("/proc/self/ns/pid"))
    if other := [r for r in range(size) if hosts[r] != hosts[rank]]:
        raise RuntimeError(
            f"pipe: connects processes of one host and container: rank {other[0]} is in another "
            f"one than rank {rank}. Take gloo"
        )
    with contextlib.ExitStack() as files:  # closes the file, also after an error
        memory = -1
        if rank == 0:
            memory = os.memfd_create("pipe")
            files.callback(os.close, memory)
            os.ftruncate(memory, size * module.bytes_of_a_pipe)
        pids = [int(pid) for pid in of_all_ranks("pid", os.getpid())]
        file = of_all_ranks("file", f"/proc/{os.getpid()}/fd/{memory}")[0]
        if rank > 0:
            memory = os.open(file, os.O_RDWR)
            files.callback(os.close, memory)
            if not os.readlink(f"/proc/self/fd/{memory}").startswith("/memfd:pipe"):
                raise RuntimeError("pipe: rank 0 has closed the memory of the group: it gave up")
        # The kernel may reuse the number of an ended process. A pidfd keeps its process.
        left, right = (os.pidfd_open(pids[r % size]) for r in (rank - 1, rank + 1))
        backend = module.create(memory, rank, size, left, right, timeout)
        of_all_ranks("mapped", "yes")  # rank 0 may not close its file earlier
    return backend


def ask(store: dist.Store, key: str, rank: int, timeout: timedelta) -> str:
    """The value that this rank sets; waits for it. (set_timeout() would change the job's store.)"""
    try:
        store.wait([key], timeout)
        return store.get(key).decode()
    except RuntimeError as error:
        why = f"rank {rank} did not join the group in {timeout.total_seconds():g} s"
        raise RuntimeError(f"pipe: {why}: {error}") from None


register()
