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
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from arguments import UserError, fail
from runtime import meeting_point
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
def rpc_worker(
    timeout: float = 60,
    threads: int = 16,
    least: int = 1,
    required: Collection[int] | None = None,
) -> Iterator[RpcWorker]:
    """Join the job that torchrun describes in the environment; without torchrun, a job of one.

    timeout: seconds. How long to wait for the others at the beginning and at the end, and for the
        answer to a call that names no time-out of its own.
    threads: that answer calls. One that itself waits for a call is busy meanwhile; if all are,
        not even a time-out ends it.
    least: with fewer workers the program ends with one sentence and exit status 2.
    required: ranks without which the job has failed; None: all. If another one is gone, those left
        end as if it had never been there.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    worker = RpcWorker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if worker.world_size < least:
        fail(f"needs {least} workers or more, not {worker.world_size}: --nproc_per_node={least}")
    with suppress(RuntimeError):  # an earlier job of this process has done it
        dist.register_rendezvous_handler("attempt", meet)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads,
        rpc_timeout=timeout,
        init_method=f"attempt://?timeout={timeout}",  # see meet()
    )
    # torch's own init_rpc passes an object of a deprecated kind, and torch warns of it.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    rpc.init_rpc(
        worker.name, rank=worker.rank, world_size=worker.world_size, rpc_backend_options=options
    )
    try:
        yield worker
        wait_for_all(worker, timeout, required)
    except BaseException as error:
        if not isinstance(error, UserError):  # said now: torchrun may end this process any moment
            print(f"{worker.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        leave_alone(error)
        if isinstance(error, UserError):
            fail(str(error))
        raise
    try:  # all are at their end: this takes a moment. But it would wait for one that is gone
        rpc.shutdown(graceful=not GONE, timeout=timeout)
    except RuntimeError:
        if required is None:
            raise  # else one died in this very moment, and was not needed any more


def meet(url: str, **_) -> Iterator[tuple[dist.Store, int, int]]:
    """Where init_rpc meets the others: in the store of this attempt, and not without end.

    torchrun --max-restarts begins another attempt in the same store, where init_rpc by itself
    would read the addresses of the workers before; and it would wait for half an hour.
    Raises RuntimeError if a worker is missing. Two workers of one rank, and a port that something
    else has, are mistakes of the user's: one sentence, exit status 2.
    """
    seconds = float(parse_qs(urlparse(url).query)["timeout"][0])
    worker = RpcWorker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    limit = timedelta(seconds=seconds)
    try:
        store = meeting_point(limit)
        here = dist.PrefixStore(f"rpc_worker_{next(JOBS)}", store)
        launched = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun gives each rank once
        if here.add(worker.name, 1) > 1 and not launched:
            fail(f"there is a {worker.name} already: two processes have RANK={worker.rank}")
        here.wait([worker.name_of(rank) for rank in range(worker.world_size)], limit)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            fail(f"{place} is in use: choose another MASTER_PORT")
        message = f"{worker.name} waited {seconds:g} s at {place} for {worker.world_size} workers"
        raise RuntimeError(message) from error
    yield store, worker.rank, worker.world_size


JOBS = itertools.count()  # this process can join one job after the other
ENDED = set()  # the workers that have said that they need nothing any more
GONE = set()  # those that did not answer somebody
CHANGED = threading.Condition()  # holds whoever reads or changes them


def wait_for_all(
    worker: RpcWorker, timeout: float, required: Collection[int] | None = None
) -> None:
    """Answer calls until all workers have come here, or are gone and not required.

    Raises RuntimeError if a required one is gone. rpc.shutdown() alone would wait for it without
    end.
    """
    others = {worker.name_of(rank) for rank in range(worker.world_size)} - {worker.name}
    needed = others if required is None else {worker.name_of(rank) for rank in required}
    # A dead one's silence may last as long as the time-out: where it does not matter, be short.
    timeout = timeout if required is None else min(timeout, 5)
    # First of all: who is there? Only then, and now and then: we are at the end.
    for message in itertools.chain([note_gone], itertools.repeat(note_end)):
        silent = ask(others - GONE, timeout, message, set(GONE), worker.name)
        # Those who leave without one that is gone do not wait for each other: one that has said
        # that it is at its end may have left.
        missed = silent & needed if required is None else silent & needed - ENDED
        if missed:
            names = ", ".join(sorted(missed))
            raise RuntimeError(f"{worker.name} leaves before the end: no answer from {names}")
        note_gone(silent, worker.name)
        if message is note_end:
            with CHANGED:
                CHANGED.wait_for(lambda: others <= ENDED, timeout=1)
                if others <= ENDED | GONE:
                    return


def ask(others: set[str], timeout: float, function: Callable, *args) -> set[str]:
    """Have each of the others call function(*args); returns those that do not answer."""
    silent = set()
    for other in sorted(others):
        try:
            rpc.rpc_sync(other, function, args=args, timeout=timeout)
        except RuntimeError:
            silent.add(other)
    return silent


def note_gone(missed: set[str], _name: str) -> None:
    """Called by `_name`, which misses the others."""
    with CHANGED:
        GONE.update(missed)


def note_end(missed: set[str], name: str) -> None:
    """Called by `name`, now and then, once it has only to answer."""
    with CHANGED:
        GONE.update(missed)
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
