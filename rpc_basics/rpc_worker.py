"""Join an RPC job under torchrun (init_rpc), and leave it, also when another worker has died.

    with rpc_worker(timeout=60) as worker:
        if worker.rank == 0:
            rpc.rpc_sync(worker.name_of(1), work)

A worker with nothing to do goes to the end of the block and answers calls there.
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
        """The name of the worker of this rank."""
        return f"worker{rank}"


@contextmanager
def rpc_worker(
    timeout: float = 60,
    threads: int = 16,
    least: int = 1,
    required: Collection[int] | None = None,
) -> Iterator[RpcWorker]:
    """Join the job that torchrun describes in the environment; without torchrun, a job of one.

    timeout: seconds to wait for the other workers at the beginning, for an answer of each at the
        end, and for the answer to a call without its own timeout.
    threads: the number of threads that answer calls. A thread that itself waits for a call is busy
        meanwhile; if all threads wait, not even a timeout ends their calls.
    least: with fewer workers the program ends with one sentence and exit status 2.
    required: ranks without which the job has failed; None: all. If another rank dies, or does not
        answer for 5 s at the end, the remaining workers end as if it had never existed.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    worker = RpcWorker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if worker.world_size < least:
        fail(f"needs {least} workers or more, not {worker.world_size}: --nproc_per_node={least}")
    with suppress(RuntimeError):  # an earlier job of this process has registered it
        dist.register_rendezvous_handler("attempt", meet)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads,
        rpc_timeout=timeout,
        init_method=f"attempt://?timeout={timeout}",  # see meet()
    )
    with CHANGED:  # of an earlier job
        ENDED.clear()
        GONE.clear()
    # torch's own init_rpc uses a deprecated object, and torch warns of it.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    rpc.init_rpc(
        worker.name, rank=worker.rank, world_size=worker.world_size, rpc_backend_options=options
    )
    try:
        yield worker
        wait_for_all(worker, timeout, required)
    except BaseException as error:
        if not isinstance(error, UserError):  # print now: torchrun may end this process soon
            print(f"{worker.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        leave_alone(error)
        if isinstance(error, UserError):
            fail(str(error))
        raise
    try:  # all workers are done, so this is quick; a graceful shutdown would wait for a dead worker
        rpc.shutdown(graceful=not GONE, timeout=timeout)
    except RuntimeError:
        if required is None:
            raise  # else a worker died just now that was not needed any more


def meet(url: str, **_) -> Iterator[tuple[dist.Store, int, int]]:
    """The rendezvous of init_rpc: a store with a prefix for this attempt, and a timeout.

    torchrun --max-restarts begins another attempt with the same store. init_rpc by itself would
    read the addresses of the previous workers there, and would wait for half an hour.
    Raises RuntimeError if a worker is missing. Two workers of one rank, or a port in use, are
    mistakes of the user: one sentence, exit status 2.
    """
    seconds = float(parse_qs(urlparse(url).query)["timeout"][0])
    worker = RpcWorker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    limit = timedelta(seconds=seconds)
    try:
        store = meeting_point(limit)
        here = dist.PrefixStore(f"rpc_worker_{next(JOBS)}", store)
        launched = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun starts each rank once
        if here.add(worker.name, 1) > 1 and not launched:
            fail(f"there is a {worker.name} already: two processes have RANK={worker.rank}")
        here.wait([worker.name_of(rank) for rank in range(worker.world_size)], limit)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            fail(f"{place} is in use: choose another MASTER_PORT")
        message = f"{worker.name} waited {seconds:g} s at {place} for {worker.world_size} workers"
        raise RuntimeError(message) from error
    yield store, worker.rank, worker.world_size


JOBS = itertools.count()  # this process can join one job after another; RRefs only in the first
ENDED = set()  # workers that have said that they are done
GONE = set()  # workers that did not answer some worker
CHANGED = threading.Condition()  # hold it to read or change ENDED and GONE


def wait_for_all(
    worker: RpcWorker, timeout: float, required: Collection[int] | None = None
) -> None:
    """Answer calls until every worker has come here, or is gone and not required.

    Raises RuntimeError if a required worker is gone. rpc.shutdown() alone would wait for
    ever, or as long as its timeout.
    """
    others = {worker.name_of(rank) for rank in range(worker.world_size)} - {worker.name}
    needed = others if required is None else {worker.name_of(rank) for rank in required}
    # A call to a dead worker may last as long as the timeout: be short where it may be ignored.
    patience = {other: timeout if other in needed else min(timeout, 5) for other in others}
    # First ask which workers answer. Then tell them, repeatedly, that this worker is done.
    for message in itertools.chain([note_gone], itertools.repeat(note_end)):
        asked = {other: patience[other] for other in others - GONE}
        silent = ask(asked, message, set(GONE), worker.name)
        # Workers that leave without a dead one do not wait for each other, so a worker that has
        # said that it is done may have left.
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


def ask(others: dict[str, float], function: Callable, *args) -> set[str]:
    """Call function(*args) on each worker; returns those that do not answer.

    others: worker -> seconds to wait for its answer.
    """
    silent = set()
    for other, timeout in sorted(others.items()):
        try:
            rpc.rpc_sync(other, function, args=args, timeout=timeout)
        except RuntimeError:
            silent.add(other)
    return silent


def note_gone(missed: set[str], _name: str) -> None:
    """Called by worker `_name`, which got no answer from the workers `missed`."""
    with CHANGED:
        GONE.update(missed)


def note_end(missed: set[str], name: str) -> None:
    """Called repeatedly by worker `name`, when it is done and only answers calls."""
    with CHANGED:
        GONE.update(missed)
        ENDED.add(name)
        CHANGED.notify_all()


def leave_alone(error: BaseException, seconds: float = 5) -> None:
    """Leave at once, because of `error`; other workers notice when they call this one.

    A process that ends without any shutdown may abort. But shutdown waits for the functions that
    other workers have called here: after `seconds` the process ends with status 1.
    """

    def give_up() -> None:
        traceback.print_exception(error)
        os._exit(1)

    limit = threading.Timer(seconds, give_up)
    limit.start()
    rpc.shutdown(graceful=False)
    limit.cancel()
