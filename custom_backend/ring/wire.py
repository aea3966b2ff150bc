"""Messages between the ranks of a group, over plain TCP sockets.

    wire.send(to, TAGGED, tag, tensor)       returns at once: a Future, done when sent
    wire.expect(source, TAGGED, tag)         a Future of the Message

Each connection has two threads: one writes, one reads. The reader never stops, and keeps messages
that the program has not asked for yet. So every send completes, even if the receiving program is
busy, and no order of sends and receives can block a connection. (Kept messages take memory.)
"""

import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from ring.connecting import connect, read_into
from ring.inbox import Inbox, Message

# The header of a message: kind, number, bytes, when it is due, label.
LABEL_BYTES = 48
HEADER = struct.Struct(f"!B q q d {LABEL_BYTES}s")

# The kinds of message; the comment tells the meaning of their number.
COLLECTIVE = 1  # collectives of this group before this one
TAGGED = 2  # the tag of send and recv
WHERE = 3  # asks after a timeout: "in which collective are you?"
HERE = 4  # answers WHERE, from the reading thread, even if the program is busy
GOODBYE = 5  # the sender leaves the group in good order
DEATH = 6  # another rank died: the sender names it, and is about to fail itself

A_MOMENT = 1.0  # seconds for an action that a living rank completes at once


class Wire:
    """Connects this rank with every other rank of its group. Ranks are ranks in the group."""

    backend = "ring"

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, names: list[int]
    ):
        """names: the global ranks of the group, for error messages."""
        self.rank, self.size, self.names = rank, size, names
        self.timeout = timeout.total_seconds()
        self.begun = (-1, "nothing")  # number and label of the last collective of this rank
        self.bytes_sent = 0  # without headers
        self.inbox = Inbox(needs_all=COLLECTIVE)
        self.expect = self.inbox.expect
        self.left = set()  # peers that sent GOODBYE
        self.sockets = connect(store, rank, size, self.timeout, names)
        self.closed = False
        self.to_write = {peer: SimpleQueue() for peer in self.sockets}
        self.readers = {p: start_thread(f"wire from {p}", self.read_from, p) for p in self.sockets}
        self.writers = [start_thread(f"wire to {p}", self.write_to, p) for p in self.sockets]

    def send(self, to: int, kind: int, number: int, tensor: torch.Tensor, label="") -> Future:
        """Start to send a contiguous tensor, which must not change before the Future is done."""
        data = tensor.detach().reshape(-1).view(torch.uint8)
        message = Message(self.rank, kind, number, label, data)
        sent = Future()
        self.to_write[to].put((message, sent, time.monotonic()))
        return sent

    def write_to(self, peer: int) -> None:
        """Run the writing thread of a connection."""
        queue = self.to_write[peer]
        for message, sent, asked in iter(queue.get, None):
            try:
                self.transmit(peer, message, asked)
                sent.set_result(None)
            except OSError as error:
                why = error.strerror or str(error)
                if isinstance(error, BlockingIOError):  # SO_SNDTIMEO: with half a message written
                    why = f"it took no bytes for {self.timeout:g} s"
                    self.lose(peer, why)
                    shut(self.sockets[peer], socket.SHUT_RDWR)
                if message.kind != DEATH:
                    self.readers[peer].join(A_MOMENT)  # it also sees the end, and tells other ranks
                sent.set_exception(dist.DistBackendError(f"rank {self.names[peer]} is gone: {why}"))
            del message, sent  # hold no tensor while waiting
        shut(self.sockets[peer], socket.SHUT_WR)

    def transmit(self, peer: int, message: Message, asked: float) -> None:
        """Write to the socket. asked: when send() was called (slow_wire.py)."""
        m = message
        head = HEADER.pack(m.kind, m.number, len(m.data), m.due, m.label.encode())
        more_follows = getattr(socket, "MSG_MORE", 0) if len(m.data) else 0  # Linux: one packet
        self.sockets[peer].sendall(head, more_follows)
        self.sockets[peer].sendall(m.data.numpy())
        self.bytes_sent += len(m.data)

    def read_from(self, peer: int) -> None:
        """Run the reading thread of a connection."""
        connection, head = self.sockets[peer], bytearray(HEADER.size)
        try:
            while read_into(connection, memoryview(head)):
                kind, number, nbytes, due, label = HEADER.unpack(head)
                data = torch.empty(nbytes, dtype=torch.uint8)
                if not read_into(connection, memoryview(data.numpy())):
                    break
                label = label.rstrip(b"\0").decode(errors="replace")
                self.arrive(Message(peer, kind, number, label, data, due))
                del data
            self.lose(peer, "its connection has ended, as when its process dies")
        except OSError as error:
            self.lose(peer, error.strerror or str(error))

    def arrive(self, message: Message) -> None:
        if message.kind == WHERE:
            number, label = self.begun
            self.send(message.source, HERE, 0, torch.tensor(number), label)
        elif message.kind == GOODBYE:
            self.left.add(message.source)
        elif message.kind == DEATH:
            self.inbox.mourn(bytes(message.data.numpy()).decode())
        else:
            self.inbox.put(message)

    def lose(self, peer: int, why: str) -> None:
        """No message comes from this peer any more."""
        if self.closed:
            self.inbox.lose(peer, "this rank has left the group")
        elif peer in self.left:
            self.inbox.lose(peer, f"rank {self.names[peer]} has left the group")
        else:
            why = f"rank {self.names[peer]} is gone: {why}"
            if not self.inbox.death:
                self.tell_others(peer, why)
            self.inbox.mourn(why)
            self.inbox.lose(peer, why)

    def tell_others(self, dead: int, why: str) -> None:
        """Name the dead rank before this rank fails too, or other ranks would blame this one."""
        text = torch.frombuffer(bytearray(why.encode()), dtype=torch.uint8)
        others = [peer for peer in self.sockets if peer != dead]
        wait([self.send(peer, DEATH, 0, text) for peer in others], A_MOMENT)

    def whereabouts(self, patience: float) -> dict[int, tuple[int, str] | None]:
        """peer -> number and label of the last collective it began; None: it did not answer."""
        answers = {peer: self.expect(peer, HERE, 0) for peer in self.sockets}
        for peer in self.sockets:
            self.send(peer, WHERE, 0, torch.empty(0))
        deadline, found = time.monotonic() + patience, {}
        for peer, answer in answers.items():
            try:
                message = answer.result(max(0.0, deadline - time.monotonic()))
                found[peer] = (int(message.data.view(torch.int64)), message.label)
            except (TimeoutError, dist.DistBackendError):
                found[peer] = None
        return found

    def close(self) -> None:
        """Leave in good order: messages that were sent before still arrive."""
        for peer, queue in self.to_write.items():
            self.send(peer, GOODBYE, 0, torch.empty(0))
            queue.put(None)
        for writer in self.writers:
            writer.join(self.timeout)
        # A thread that is inside PyTorch when Python exits would abort the process.
        self.closed = True
        for peer, reader in self.readers.items():
            shut(self.sockets[peer], socket.SHUT_RD)
            reader.join(self.timeout)

    def cut(self) -> None:
        """Leave at once: to other ranks it looks like the death of this process."""
        self.inbox.mourn("this rank has cut its connections")
        for peer, connection in self.sockets.items():
            shut(connection, socket.SHUT_RDWR)
            self.to_write[peer].put(None)


def shut(connection: socket.socket, how: int) -> None:
    with suppress(OSError):  # the other side was faster
        connection.shutdown(how)


def start_thread(name: str, run: Callable, *args) -> threading.Thread:
    """Start a thread that does not keep the process alive."""
    thread = threading.Thread(target=run, args=args, daemon=True, name=name)
    thread.start()
    return thread
