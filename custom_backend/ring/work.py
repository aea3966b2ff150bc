"""What an operation returns at once, done or not: a Work, in Python."""

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist


class Work(dist.Work):
    def __init__(self, tensors: list[torch.Tensor], what: str, seconds: float | None = None):
        """what: for messages. seconds: how long wait() waits unless told; None: for ever."""
        super().__init__()
        self.tensors, self.what, self.seconds = tensors, what, seconds
        self.done = Future()
        self.source = -1  # of a receive, once it is done: the rank in the group

    def complete(self, error: BaseException | None = None) -> None:
        if error is None:
            self.done.set_result(self.tensors)
        else:
            self.done.set_exception(error)

    def follow(self, other: Future, then: Callable = lambda result: None) -> None:
        """Complete with `other`, after then(its result)."""

        def end(other: Future) -> None:
            try:
                then(other.result())
            except Exception as error:
                self.complete(dist.DistBackendError(f"{self.what}: {error}"))
            else:
                self.complete()

        other.add_done_callback(end)

    # What PyTorch calls.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds() or self.seconds
        try:
            self.done.result(seconds)
        except TimeoutError:
            raise dist.DistBackendError(f"{self.what}: not done after {seconds:g} s") from None
        return True

    def get_future(self) -> torch.futures.Future:
        """For DDP, whose C++ code waits for it. Its value is the tensors, or an error.

        The error has to be raised inside then(): that of Future.set_exception() is a Python object
        which only Python knows to be one. DDP takes it for the tensors, and crashes.
        """
        ended = torch.futures.Future()
        future = ended.then(lambda _: self.done.result())
        self.done.add_done_callback(lambda _: ended.set_result(None))
        return future

    def is_completed(self) -> bool:
        return self.done.done()

    def is_success(self) -> bool:
        return self.done.done() and self.done.exception() is None

    def exception(self) -> BaseException | None:
        return self.done.exception()

    def result(self) -> list[torch.Tensor]:
        return self.done.result()

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank  # the name by which dist.recv(src=None) asks
