"""One worker of a job in which something goes wrong: see test_rpc_basics_faults.py."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "rpc_basics"))

from rpc_worker import rpc_worker
from torch.distributed import rpc


def main() -> None:
    with rpc_worker(timeout=float(sys.argv[2])) as worker:
        globals()[sys.argv[1]](worker)
    print("left", flush=True)


def killed(worker) -> None:
    """Worker 2 dies while worker 0 waits for its answer, and worker 1 for the end of all."""
    if worker.rank == 0:
        try:
            rpc.rpc_sync("worker2", die)
        except RuntimeError:
            print("the call ended with a RuntimeError", flush=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


CALLED = threading.Event()


def raises(worker) -> None:
    """Worker 2 fails, while a call of worker 0 is still running in it."""
    if worker.rank == 0:
        rpc.rpc_async("worker2", stay)
    if worker.rank == 2:
        assert CALLED.wait(20)
        raise ValueError("worker2 cannot go on")


def stay() -> None:
    CALLED.set()
    time.sleep(600)  # longer than the test


def late(worker) -> None:
    """Worker 0 needs the others for longer than the time-out of a call."""
    if worker.rank == 0:
        begin, calls = time.monotonic(), 0
        while time.monotonic() < begin + float(sys.argv[2]) + 1:
            calls += rpc.rpc_sync("worker1", int, args=(1,))
        print("all calls answered", flush=True)


if __name__ == "__main__":
    main()
