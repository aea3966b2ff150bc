"""Several calls under way at once: take each as it ends, and tell who is gone."""

import queue
from collections.abc import Iterator
from functools import partial

from rpc_worker import RpcWorker
from torch.distributed import rpc
from torch.futures import Future


def as_they_end(
    calls: dict[int, Future], patience: float | None = None
) -> Iterator[tuple[int, Future]]:
    """(rank, call) for each call, in the order in which they end, well or not.

    To wait for them in the order of the ranks would notice late that a later one has failed.
    patience: seconds to wait for another one once the first has ended well; then the rest is left
        out. None: without end.
    """
    ended = queue.SimpleQueue()
    for rank, call in calls.items():
        call.add_done_callback(partial(note, ended, rank))
    seconds = None
    for _ in calls:
        try:
            rank, call = ended.get(timeout=seconds)
        except queue.Empty:
            return
        yield rank, call
        if is_answered(call):
            seconds = patience


def note(ended: queue.SimpleQueue, rank: int, call: Future) -> None:
    ended.put((rank, call))


def is_answered(call: Future) -> bool:
    """False: it has failed."""
    try:
        call.value()
    except RuntimeError:
        return False
    return True


def is_there(rank: int, timeout: float) -> bool:
    """Whether this worker still answers: to tell its end from an error of its own."""
    try:
        return rpc.rpc_sync(RpcWorker.name_of(rank), bool, args=(1,), timeout=timeout)
    except RuntimeError:
        return False
