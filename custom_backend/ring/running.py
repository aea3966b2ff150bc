"""Run a collective: its messages, its deadline, and the late rank after a timeout."""

import time
from collections.abc import Callable
from queue import SimpleQueue

import torch
import torch.distributed as dist

from ring.wire import COLLECTIVE, LABEL_BYTES, Wire
from ring.work import Work

FAILED = " (failed)"  # behind the label of a collective that an error has ended
PATIENCE = 2.0  # seconds for a living rank to answer where it is


class Link:
    """A collective's view of its Wire: sends and receives the messages of this collective."""

    def __init__(self, wire: Wire, number: int, label: str, seconds: float):
        self.wire, self.number, self.label = wire, number, label
        self.deadline = time.monotonic() + seconds
        self.rank, self.size = wire.rank, wire.size
        self.left, self.right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.sends = []

    def send(self, to: int, tensor: torch.Tensor) -> None:
        self.sends.append(self.wire.send(to, COLLECTIVE, self.number, tensor, self.label))

    def receive(self, source: int, like: torch.Tensor) -> torch.Tensor:
        message = self.wait(self.wire.expect(source, COLLECTIVE, self.number))
        if message.label != self.label:
            raise ValueError(f"rank {self.wire.names[source]} has called {message.label} instead")
        check_size(message, like, self.wire)
        return message.data.view(like.dtype)

    def finish(self) -> None:
        """Wait until all messages are sent: then the tensors may change."""
        for sent in self.sends:
            self.wait(sent)

    def wait(self, future):
        return future.result(max(0.001, self.deadline - time.monotonic()))


def check_size(message, like: torch.Tensor, wire: Wire) -> None:
    if len(message.data) != like.nbytes:
        name, got = wire.names[message.source], len(message.data)
        raise ValueError(f"rank {name} has sent {got} bytes, {like.nbytes} were expected")


def run_all(queue: SimpleQueue) -> None:
    """The thread of a group runs one collective after another, in the order of the calls."""
    for job in iter(queue.get, None):
        job()
        del job  # it holds tensors


def run_one(wire: Wire, work: Work, number: int, label: str, seconds: float, run: Callable) -> None:
    wire.begun = (number, label)
    link = Link(wire, number, label, seconds)
    try:
        # Not for speed: outside of this mode a thread must not write to tensors made inside it.
        with torch.inference_mode():
            run(link)
        link.finish()
        error = None
    except TimeoutError:
        error = f"not done after {seconds:g} s. {who_is_late(wire, number)}"
    except Exception as problem:
        error = str(problem)
        wire.begun = (number, label[: LABEL_BYTES - len(FAILED)] + FAILED)
    if error is None:
        work.complete()
    else:
        me = wire.names[wire.rank]
        work.complete(dist.DistBackendError(f"rank {me}, {work.what}: {error}"))


def who_is_late(wire: Wire, number: int) -> str:
    """Ask all ranks, since on a ring every rank waits for its neighbour, not for the late one."""
    found = wire.whereabouts(PATIENCE)
    says = []
    for peer, place in found.items():
        rank = f"rank {wire.names[peer]}"
        if place is None:
            says.append(f"{rank} does not answer")
        elif place[0] < number:
            says.append(f"{rank} has not begun it (its last: {place[1]}, number {place[0]})")
        elif place[0] == number and place[1].endswith(FAILED):
            says.append(f"{rank} has failed in it: read its own error")
    return "; ".join(says) or "All ranks have begun it: too slow for this timeout"
