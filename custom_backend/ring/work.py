"""Work in Python: the handle that an operation returns at once."""

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist


class Work(dist.Work):
    def __init__(self, tensors: list[torch.Tensor], what: str, seconds: float | None = None):
        """what: for error messages. seconds: default timeout of wait(); None: wait forever."""
        super().__init__()
        self.tensors, self.what, self.seconds = tensors, what, seconds
        self.done = Future()
        self.source = -1  # after a receive: the sender's rank in the group

    def complete(self, error: BaseException | None = None) -> None:
        if error is None:
            self.done.set_result(self.tensors)
        else:
            self.done.set_exception(error)

    def follow(self, other: Future, then: Callable = lambda result: None) -> None:
        """Complete when `other` does, after calling then() with its result."""

        def end(other: Future) -> None:
            try:
                then(other.result())
            except Exception as error:
                self.complete(dist.DistBackendError(f"{self.what}: {error}"))
            else:
                self.complete()

        other.add_done_callback(end)

    # PyTorch calls the following methods.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds() or self.seconds
        try:
            self.done.result(seconds)
        except TimeoutError:
            raise dist.DistBackendError(f"{self.what}: not done after {seconds:g} s") from None
        return True

    def get_future(self) -> torch.futures.Future:
        """A future for DDP, whose C++ code waits for it. Its value is the tensors, or an error.

        The error must be raised inside then(). Future.set_exception() stores a Python object that
        C++ does not recognise as an error: DDP takes it for the tensors, and crashes.
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
        return self.done.exception() if self.done.done() else None

    def result(self) -> list[torch.Tensor]:
        return self.done.result()

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank  # dist.recv(src=None) calls this name
