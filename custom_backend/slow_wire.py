"""Delay the messages of ring/wire.py: they leave and arrive when a table of links says.

    register(read_links("default 5ms 100Mbit"))
    dist.init_process_group("slow")

A message carries the time at which it is due, and the receiver holds it until then. The time is
from time.monotonic(), which only processes of one machine share: a job cannot use several machines.
"""

import time
from functools import partial
from queue import SimpleQueue

import torch.distributed as dist
from links import Links, Schedule
from ring.group import new_ring_group
from ring.inbox import Message
from ring.wire import Wire, start_thread


class SlowWire(Wire):
    backend = "slow"

    def __init__(self, store, rank: int, size: int, timeout, names, schedule: Schedule):
        self.schedule = schedule
        # Messages from each rank that are not due yet; a last text says why no more come.
        self.arrived = [SimpleQueue() for _ in range(size)]
        super().__init__(store, rank, size, timeout, names)
        self.late = [start_thread(f"wire late {p}", self.hand_over, p) for p in self.sockets]

    def transmit(self, peer: int, message: Message, asked: float) -> None:
        source, to = self.names[self.rank], self.names[peer]
        left, message.due = self.schedule.book(source, to, len(message.data), asked)
        super().transmit(peer, message, asked)
        wait_until(left)  # the Future of a send is done when its last byte leaves the link

    def arrive(self, message: Message) -> None:
        self.arrived[message.source].put(message)  # the reader continues

    def lose(self, peer: int, why: str) -> None:
        self.arrived[peer].put(why)  # after all earlier messages, such as GOODBYE

    def close(self) -> None:
        super().close()
        for thread in self.late:
            thread.join(self.timeout)

    def hand_over(self, peer: int) -> None:
        for message in iter(self.arrived[peer].get, None):
            if isinstance(message, str):
                super().lose(peer, message)
                return
            wait_until(message.due)
            super().arrive(message)


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def register(links: Links) -> None:
    """Make "slow" a backend. All groups of this process share its links."""
    wire = partial(SlowWire, schedule=Schedule(links))
    creator = partial(new_ring_group, wire=wire)
    dist.Backend.register_backend("slow", creator, extended_api=True, devices=["cpu"])
