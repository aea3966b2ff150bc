"""Several calls under way at once: take each as it ends, and notice who is gone."""

import queue
from collections.abc import Iterator
from functools import partial

from rpc_worker import RpcWorker
from torch.distributed import rpc
from torch.futures import Future


def as_they_end(
    calls: dict[int, Future], silence: float = 5
) -> Iterator[tuple[int, Future | None]]:
    """(rank, call) for each call, in the order in which they end, well or not.

    To wait for them in the order of the ranks would notice late that a later one has failed.
    None instead of the call: its worker is gone. A call to a worker that dies fails at once, though
    not always; so now and then those who are left are asked whether they are there.
    silence: seconds without an answer after which one counts as gone.
    """
    ended = queue.SimpleQueue()
    for rank, call in calls.items():
        call.add_done_callback(partial(note, ended, rank))
    left = set(calls)
    while left:
        try:
            rank, call = ended.get(timeout=1)
        except queue.Empty:
            for rank in sorted(left):
                if not is_there(rank, silence):
                    left.remove(rank)
                    yield rank, None
            continue
        if rank in left:
            left.remove(rank)
            gone = has_failed(call) and not is_there(rank, silence)
            yield rank, None if gone else call


def note(ended: queue.SimpleQueue, rank: int, call: Future) -> None:
    ended.put((rank, call))


def has_failed(call: Future) -> bool:
    try:
        call.value()
    except RuntimeError:
        return True
    return False


def is_there(rank: int, timeout: float) -> bool:
    """Whether this worker answers."""
    try:
        return rpc.rpc_sync(RpcWorker.name_of(rank), bool, args=(1,), timeout=timeout)
    except RuntimeError:
        return False
