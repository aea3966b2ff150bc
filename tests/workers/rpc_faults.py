"""One worker of a job in which something goes wrong: see test_rpc_basics_faults.py."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "rpc_basics"))

import torch
from arguments import UserError
from rpc_worker import ENDED, GONE, rpc_worker
from torch.distributed import rpc


def main() -> None:
    timeout, threads = float(sys.argv[2]), int(sys.argv[3])
    with rpc_worker(timeout, threads) as worker:
        globals()[sys.argv[1]](worker)
    if sys.argv[1] == "again":
        with rpc_worker(timeout, threads) as worker:
            if worker.rank == 0:
                print("of before:", rpc.rpc_sync("worker1", of_before), flush=True)
    print("left", flush=True)


def again(worker) -> None:
    """A second job follows."""


def of_before() -> set[str]:
    return ENDED | GONE


def killed(worker) -> None:
    """Worker 2 dies while worker 0 waits for its answer, and worker 1 for the end of the job."""
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


def mistaken(worker) -> None:
    """Worker 0 raises UserError."""
    if worker.rank == 0:
        raise UserError("there is no such file")


def stay() -> None:
    CALLED.set()
    time.sleep(600)  # longer than the test


def late(worker) -> None:
    """Worker 0 needs worker 1 for longer than the timeout of a call."""
    if worker.rank == 0:
        begin, calls = time.monotonic(), 0
        while time.monotonic() < begin + float(sys.argv[2]) + 1:
            calls += rpc.rpc_sync("worker1", int, args=(1,))
        print("all calls answered", flush=True)


def too_much(worker) -> None:
    """One answer that no memory can hold, and one that cannot arrive in time."""
    if worker.rank == 0:
        for size, timeout in ((10**15, 20), (2**28, 0.01)):
            try:
                rpc.rpc_sync("worker1", zeros, args=(size,), timeout=timeout)
            except RuntimeError as error:
                print(f"{size}: {error}", flush=True)
        print("then", rpc.rpc_sync("worker1", zeros, args=(2,)).tolist(), flush=True)


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size)


def joins(worker) -> None:
    print(f"{worker.name} is there", flush=True)


def nested(worker) -> None:
    """A call that calls back: with one thread no thread is left to answer it or to time it out."""
    print("the answer is", rpc.rpc_sync("worker0", call_back), flush=True)


def call_back() -> int:
    return rpc.rpc_sync("worker0", int, args=(42,), timeout=1)


if __name__ == "__main__":
    main()
