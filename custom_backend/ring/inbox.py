"""What has arrived and what is waited for: where messages and those who want them meet.

Whoever wants a message gets a Future from expect(). The thread that reads from a connection gives
each message that arrives to the oldest who waits for it, or keeps it, and says when nothing more
will come.
"""

import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist

ANY = None  # as a source: whoever sends first


@dataclass
class Message:
    source: int
    kind: int  # what number counts: collectives, or tags
    number: int
    label: str  # what it belongs to, for people and for comparison
    data: torch.Tensor  # bytes
    due: float = 0.0  # not to be seen before (slow_wire.py)


class Inbox:
    def __init__(self, needs_all: int):
        """needs_all: the kind of message that stops coming from everybody when one rank dies."""
        self.needs_all = needs_all
        self._lock = threading.Lock()
        self._kept = defaultdict(deque)  # (source, kind, number) -> messages in their order
        self._expected = []  # (source, kind, number, Future), oldest first
        self._lost = {}  # source -> why nothing comes from it any more
        self.death = None  # of the first rank that ended without a goodbye: a sentence

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
        if future is not None:  # without the lock: what hangs on the Future runs now
            future.set_result(message)

    def lose(self, source: int, why: str) -> None:
        """Nothing comes from this source any more."""
        with self._lock:
            self._lost.setdefault(source, why)
        self._end_hopeless()

    def mourn(self, why: str) -> None:
        """Somebody is gone without a goodbye: no collective can be finished any more."""
        with self._lock:
            self.death = self.death or why
        self._end_hopeless()

    def why_lost(self, source: int) -> str | None:
        return self._lost.get(source)

    def _wanted_by(self, message: Message) -> Future | None:
        """Of the oldest that waits for such a message, and now waits no longer."""
        for place, (source, kind, number, future) in enumerate(self._expected):
            same = (kind, number) == (message.kind, message.number)
            if same and source in (ANY, message.source):
                del self._expected[place]
                return future
        return None

    def _take(self, source: int | None, kind: int, number: int) -> Message | None:
        """The oldest message that fits, which then is no longer kept."""
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
        """Why such a message cannot come any more."""
        if kind == self.needs_all and self.death:
            return self.death  # in a ring, everybody waits for everybody
        return self._lost.get(source)
