"""Stop on a signal: all ranks agree on a step, leave the loop after it, and save."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist
from runtime import Worker

# From a scheduler, Ctrl-C, a closed terminal, a scheduler that warns before the time limit.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopRequests:
    """Catch the signals after which a run saves and ends; torchrun passes on all but SIGUSR1.

        stop = StopRequests(worker)
        for step in ...:
            ...
            if stop.agreed(step):
                break  # on all ranks

    torchrun kills the ranks 30 seconds after the signal; for longer saves set its environment
    variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT (from torch 2.12 on). The constructor is a collective.
    A second Ctrl-C ends the process at once.
    """

    def __init__(self, worker: Worker):
        keep_fork_server()
        self.asked = 0  # the number of the signal that came, or 0
        self.last_look = None  # (step, time)
        self.next_look, self.interval = 0, 1  # in steps
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            signal.signal(number, self._ask)
        self._watch_neighbours(worker)

    def _ask(self, number: int, frame) -> None:
        if number == self.asked == signal.SIGINT:
            signal.default_int_handler(number, frame)
        self.asked = number

    def agreed(self, step: int) -> int:
        """Return the signal that any rank got, or 0: equal on all ranks after a step.

        Every rank calls this after each step. The ranks exchange it about once per second, or
        after every step if a step takes longer, and at least every 20 steps.
        """
        if step < self.next_look:
            return 0
        now, seconds_per_step = time.perf_counter(), 1.0
        if self.last_look:
            last_step, last_time = self.last_look
            seconds_per_step = (now - last_time) / (step - last_step)
        self.last_look = step, now
        # Gloo reduces a CPU tensor, also next to NCCL, so this does not wait for the GPU.
        notes = torch.tensor([self.asked, seconds_per_step], dtype=torch.float64)
        dist.all_reduce(notes, op=dist.ReduceOp.MAX)
        asked, slowest = notes.tolist()
        # All ranks compute one interval. It at most doubles, so one fast step does little harm, and
        # it is at most 20 steps, which end in time even if each suddenly takes a second.
        self.interval = max(1, min(int(1 / slowest), 2 * self.interval, 20))
        self.next_look = step + self.interval
        return int(asked)

    def _watch_neighbours(self, worker: Worker) -> None:
        """Make a signal end this process at once if a rank of this node has died.

        torchrun also sends SIGTERM to end the survivors of a failure. A survivor that waits in a
        collective for the dead rank never returns to Python, where the handler above would run, and
        torchrun waits 30 seconds for it. A thread can react to the signal even then.
        """
        # Containers may share the host's name, but each has its own process numbers.
        namespace = Path("/proc/self/ns/pid")  # Linux only
        here = (socket.gethostname(), os.readlink(namespace) if namespace.exists() else "")
        everyone = [None] * worker.world_size
        dist.all_gather_object(everyone, (here, os.getpid()))
        neighbours = [pid for place, pid in everyone if place == here]
        signals, signal_writer = os.pipe()
        os.set_blocking(signal_writer, False)
        signal.set_wakeup_fd(signal_writer)  # each signal writes a byte, whatever Python does

        def watch() -> None:
            while number := os.read(signals, 1):
                alive = all(_is_running(pid) for pid in neighbours)
                if number[0] in SIGNALS and not alive:
                    os._exit(128 + number[0])

        threading.Thread(target=watch, daemon=True).start()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # sends nothing; fails if the process is gone
    except ProcessLookupError:
        return False
    return True


def keep_fork_server() -> None:
    """Start the server that forks a DataLoader's workers with the signals blocked.

    Under forkserver, the default of Python 3.14, torchrun signals this process, too, and workers
    end with it.
    """
    methods = multiprocessing.get_all_start_methods()  # the default first
    if (multiprocessing.get_start_method(allow_none=True) or methods[0]) == "forkserver":
        resource_tracker.ensure_running()  # now: the server starts it, which unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_the_rank_only(worker_id: int) -> None:
    """worker_init_fn of a DataLoader: torchrun and Slurm send signals to its processes, too.

    A rank needs its worker processes until it has saved, so they end only when the rank asks them.
    (macOS does not tell who has sent a signal: there they end at once.)
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def wait() -> None:
        rank = multiprocessing.parent_process().pid  # os.getppid() may be a fork server
        while signal.sigwaitinfo(SIGNALS).si_pid != rank:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def goodbye(stopped_by: int, step: int, total_steps: int, folder, worker: Worker) -> None:
    """Rank 0 prints why the run ends. folder: the folder of its checkpoints, or None."""
    if worker.is_main:
        saved = f"saved to {folder}, the same command continues" if folder else "not saved"
        name = signal.Signals(stopped_by).name
        with contextlib.suppress(OSError):  # the terminal has been closed
            print(f"stopped by {name} after step {step} of {total_steps}: {saved}", flush=True)
