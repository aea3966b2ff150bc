"""Ranks that are threads of the test's own process, where only the group is tested."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


def on_all(ranks: Sequence, run: Callable) -> list:
    """run(rank), of all at once; what each returns, or the error that it raises."""

    def attempt(rank):
        try:
            return run(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(attempt, ranks))


def wire_threads() -> list[str]:
    """The names of the threads of ring/wire.py that still run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wire")]


def eventually(condition: Callable, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
