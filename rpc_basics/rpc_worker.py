"""Join a job of remote calls under torchrun, and leave it, also when another worker is gone.

    with rpc_worker(timeout=60) as worker:
        if worker.rank == 0:
            rpc.rpc_sync(worker.name_of(1), work)

A worker that has nothing to do itself goes to the end of the block, and answers calls there.
"""

import itertools
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from arguments import UserError, fail
from torch.distributed import rpc


@dataclass(frozen=True)
class RpcWorker:
    rank: int
    world_size: int

    @property
    def name(self) -> str:
        return self.name_of(self.rank)

    @staticmethod
    def name_of(rank: int) -> str:
        """What the worker of this rank is called by the others."""
        return f"worker{rank}"


@contextmanager
def rpc_worker(timeout: float = 60, threads: int = 16, least: int = 1) -> Iterator[RpcWorker]:
    """Join the job that torchrun describes in the environment; without torchrun, a job of one.

    timeout: seconds. How long to wait for the others at the beginning and at the end, and for the
        answer to a call that names no time-out of its own.
    threads: that answer calls. One that itself waits for a call is busy meanwhile; if all are,
        not even a time-out ends it.
    least: with fewer workers the program ends with one sentence and exit status 2.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    worker = RpcWorker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if worker.world_size < least:
        fail(f"needs {least} workers or more, not {worker.world_size}: --nproc_per_node={least}")
    store = meet(worker, timedelta(seconds=timeout))  # rank 0's is the server: to be kept
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=threads, rpc_timeout=timeout)
    rpc.init_rpc(
        worker.name, rank=worker.rank, world_size=worker.world_size, rpc_backend_options=options
    )
    try:
        yield worker
        wait_for_all(worker, timeout)
    except BaseException as error:
        if not isinstance(error, UserError):  # said now: torchrun may end this process any moment
            print(f"{worker.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        leave_alone(error)
        if isinstance(error, UserError):
            fail(str(error))
        raise
    rpc.shutdown(timeout=timeout)  # all are at their end: this takes a moment
    del store


JOBS = itertools.count()  # this process can join one job after the other


def meet(worker: RpcWorker, limit: timedelta) -> dist.Store:
    """Wait until all workers are there; init_rpc alone would wait for half an hour.

    Raises RuntimeError if one is missing. Two workers of one rank, and a port that something else
    has, are mistakes of the user's: one sentence, exit status 2.
    """
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=limit))
        store = dist.PrefixStore(f"rpc_worker_{next(JOBS)}", store)
        if store.add(worker.name, 1) > 1:
            fail(f"there is a {worker.name} already: two processes have RANK={worker.rank}")
        store.wait([worker.name_of(rank) for rank in range(worker.world_size)], limit)
        return store
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            fail(f"{place} is in use: choose another MASTER_PORT")
        seconds = limit.total_seconds()
        message = f"{worker.name} waited {seconds:g} s at {place} for {worker.world_size} workers"
        raise RuntimeError(message) from error


ENDED = set()  # the workers that have said that they need nothing any more
CHANGED = threading.Condition()  # holds whoever reads or changes it


def wait_for_all(worker: RpcWorker, timeout: float) -> None:
    """Answer calls until all workers have come here.

    Raises RuntimeError if one of them is gone. rpc.shutdown() alone would wait for it without end.
    """
    others = {worker.name_of(rank) for rank in range(worker.world_size)} - {worker.name}
    gone = tell(others, worker.name, timeout)
    while not gone and not others <= ENDED:
        with CHANGED:
            CHANGED.wait_for(lambda: others <= ENDED, timeout=1)
        gone = tell(others, worker.name, timeout)  # now and then: are they still there?
    if gone:
        raise RuntimeError(f"{worker.name} leaves before the end: no answer from {', '.join(gone)}")


def tell(others: set[str], name: str, timeout: float) -> list[str]:
    """Tell the others that `name` is at its end; returns those that do not answer."""
    gone = []
    for other in sorted(others):
        try:
            rpc.rpc_sync(other, note_end, args=(name,), timeout=timeout)
        except RuntimeError:
            gone.append(other)
    return gone


def note_end(name: str) -> None:
    """Called by `name`, once it has only to answer."""
    with CHANGED:
        ENDED.add(name)
        CHANGED.notify_all()


def leave_alone(error: BaseException, seconds: float = 5) -> None:
    """Leave at once, because of `error`: the others find out when they call.

    A process that ends without any shutdown may abort. But shutdown waits for the functions that
    run here for others: after `seconds` we do not, and the process ends with status 1.
    """

    def give_up() -> None:
        traceback.print_exception(error)
        os._exit(1)

    limit = threading.Timer(seconds, give_up)
    limit.start()
    rpc.shutdown(graceful=False)
    limit.cancel()
