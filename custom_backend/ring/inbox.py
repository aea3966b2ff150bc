"""Match the messages that arrive with the receives that wait for them.

expect() returns a Future of a message. The thread that reads a connection gives each message to the
oldest matching Future, or keeps it, and reports when no more messages can come.
"""

import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist

ANY = None  # as a source: the first rank that sends


@dataclass
class Message:
    source: int
    kind: int  # COLLECTIVE, TAGGED ... of wire.py
    number: int
    label: str  # the operation, to print and to compare
    data: torch.Tensor  # bytes
    due: float = 0.0  # hold the message until then (slow_wire.py)


class Inbox:
    def __init__(self, needs_all: int):
        """needs_all: the kind of message that no rank can send any more once one rank is dead."""
        self.needs_all = needs_all
        self._lock = threading.Lock()
        self._kept = defaultdict(deque)  # (source, kind, number) -> messages in their order
        self._expected = []  # (source, kind, number, Future), oldest first
        self._lost = {}  # source -> why no message comes from it any more
        self.death = None  # a sentence on the first rank that ended without GOODBYE

    def expect(self, source: int | None, kind: int, number: int) -> Future:
        future = Future()
        with self._lock:
            message, why = self._take(source, kind, number), self._hopeless(source, kind)
            if message is not None:
                future.set_result(message)
            elif why is not None:
                future.set_exception(dist.DistBackendError(why))
            else:
                self._expected.append((source, kind, number, future))
        return future

    def put(self, message: Message) -> None:
        with self._lock:
            future = self._wanted_by(message)
            if future is None:
                self._kept[message.source, message.kind, message.number].append(message)
        if future is not None:  # without the lock: the callbacks of the Future run now
            future.set_result(message)

    def lose(self, source: int, why: str) -> None:
        """No message comes from this source any more."""
        with self._lock:
            self._lost.setdefault(source, why)
        self._end_hopeless()

    def mourn(self, why: str) -> None:
        """A rank ended without GOODBYE: no collective can finish any more."""
        with self._lock:
            self.death = self.death or why
        self._end_hopeless()

    def why_lost(self, source: int) -> str | None:
        return self._lost.get(source)

    def _wanted_by(self, message: Message) -> Future | None:
        """Remove and return the oldest Future that waits for such a message."""
        for place, (source, kind, number, future) in enumerate(self._expected):
            same = (kind, number) == (message.kind, message.number)
            if same and source in (ANY, message.source):
                del self._expected[place]
                return future
        return None

    def _take(self, source: int | None, kind: int, number: int) -> Message | None:
        """Remove and return the oldest matching message."""
        for key in [k for k in self._kept if k[1:] == (kind, number) and source in (ANY, k[0])]:
            message = self._kept[key].popleft()
            if not self._kept[key]:
                del self._kept[key]
            return message
        return None

    def _end_hopeless(self) -> None:
        with self._lock:
            waiting, self._expected, hopeless = self._expected, [], []
            for source, kind, number, future in waiting:
                why = self._hopeless(source, kind)
                if why is None:
                    self._expected.append((source, kind, number, future))
                else:
                    hopeless.append((future, why))
        for future, why in hopeless:
            future.set_exception(dist.DistBackendError(why))

    def _hopeless(self, source: int | None, kind: int) -> str | None:
        """Why such a message cannot come any more; None: it still can."""
        if kind == self.needs_all and self.death:
            return self.death  # on a ring, every rank waits for every other rank
        return self._lost.get(source)
