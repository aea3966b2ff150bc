"""SIGTERM, agreed upon: all ranks leave the loop after the same step, in time to save."""

import os
import signal
import socket
import threading
import time

import torch
import torch.distributed as dist
from runtime import Worker


class StopRequests:
    """A cluster sends SIGTERM before it takes the machine; torchrun passes it on to its ranks.

        stop = StopRequests(worker)
        for step in ...:
            ...
            if stop.agreed(step):
                break  # on all ranks

    Then there are 30 seconds, until torchrun kills. All ranks construct it: it is a collective.
    """

    def __init__(self, worker: Worker):
        self.asked = False
        self.last_look = None  # (step, time)
        self.next_look, self.interval = 0, 1  # in steps
        signal.signal(signal.SIGTERM, self._ask)
        self._watch_neighbours(worker)

    def _ask(self, *_) -> None:
        self.asked = True

    def agreed(self, step: int) -> bool:
        """True on all ranks after the same step, once any of them was asked to stop.

        To be called after each step by every rank. They compare notes about once a second: after
        every step if steps take longer, else after so many that it costs nothing.
        """
        if step < self.next_look:
            return False
        now, seconds_per_step = time.perf_counter(), 1.0
        if self.last_look:
            last_step, last_time = self.last_look
            seconds_per_step = (now - last_time) / (step - last_step)
        self.last_look = step, now
        # Gloo adds numbers on the CPU, also beside NCCL: no GPU is waited for.
        notes = torch.tensor([self.asked, seconds_per_step], dtype=torch.float64)
        dist.all_reduce(notes, op=dist.ReduceOp.MAX)
        any_asked, slowest = notes.tolist()
        # From the same numbers all ranks conclude the same. Doubling keeps one odd step harmless.
        self.interval = max(1, min(int(1 / slowest), 2 * self.interval))
        self.next_look = step + self.interval
        return bool(any_asked)

    def _watch_neighbours(self, worker: Worker) -> None:
        """Make SIGTERM end this process at once if a rank of this node has died.

        torchrun then sends SIGTERM, too, to be rid of the survivors. One that waits in a collective
        for the dead rank never returns to Python, where the handler above would run, and torchrun
        waits 30 seconds for it. A thread hears of the signal all the same.
        """
        everyone = [None] * worker.world_size
        dist.all_gather_object(everyone, (socket.gethostname(), os.getpid()))
        neighbours = [pid for host, pid in everyone if host == socket.gethostname()]
        signals, signal_writer = os.pipe()
        os.set_blocking(signal_writer, False)
        signal.set_wakeup_fd(signal_writer)  # each signal writes a byte there, whatever Python does

        def watch() -> None:
            while os.read(signals, 1):
                if not all(_is_running(pid) for pid in neighbours):
                    os._exit(128 + signal.SIGTERM)

        threading.Thread(target=watch, daemon=True).start()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # sends nothing, but fails if there is nobody to send it to
    except ProcessLookupError:
        return False
    return True
