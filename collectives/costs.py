"""A stop-watch for collectives, and what its numbers are compared with: formulas and limits."""

import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from runtime import Worker


def time_calls(run: Callable, repeats: int, calls: int, device, group=None) -> list[float]:
    """Seconds per call: `repeats` samples of `calls` calls in a row, after one that warms up.

    Of each sample the slowest rank's: an operation is over when its last rank is.
    """
    samples = []
    for _ in range(repeats + 1):
        synchronize(device)  # or this sample would pay for what was queued before it
        dist.barrier(group=group)  # start together, or a rank's time would hold another's delay
        started = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        samples.append((time.perf_counter() - started) / calls)
    slowest = torch.tensor(samples[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was told: calls return before the work is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def bus_factor(operation: str, world_size: int) -> float:
    """busbw / algbw: the bytes that a rank must send per byte of the operation.

    As in nccl-tests, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    n = world_size
    if operation in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"):
        return (n - 1) / n  # a rank has its own part already; `bytes` count all parts together
    if operation in ("broadcast", "reduce", "send_recv"):
        return 1.0  # all bytes have to leave the root, or arrive there
    return 2 * (n - 1) / n  # all_reduce is a reduce_scatter, then an all_gather; ours are too


def fit_alpha_beta(sizes: list[float], seconds: list[float]) -> tuple[float, float]:
    """(alpha, beta) of seconds = alpha + beta * bytes, both 0 or more.

    Least squares of the relative errors: the plain ones would be those of the largest size alone.
    """
    s, t = (torch.tensor(v, dtype=torch.float64) for v in (sizes, seconds))
    columns = torch.stack([1 / t, s / t], dim=1)
    alpha, beta = torch.linalg.lstsq(columns, torch.ones_like(t)).solution.tolist()
    if alpha < 0 or beta < 0:  # noise: keep the one of the two that explains more
        only = [(c @ torch.ones_like(t) / (c @ c)).item() for c in columns.T]
        errors = [(c * a - 1).norm().item() for c, a in zip(columns.T, only, strict=True)]
        alpha, beta = (only[0], 0.0) if errors[0] < errors[1] else (0.0, only[1])
    return alpha, beta


def measure_limits(nbytes: int, repeats: int, worker: Worker) -> dict[str, list[float]]:
    """Bytes per second of one rank, per repeat. All ranks at once, as in a collective."""
    source = torch.ones(nbytes // 4, device=worker.device)
    target = torch.ones_like(source)
    copy = partial(target.copy_, source)
    seconds = {
        "memory copy, all ranks at once": time_calls(copy, repeats, 1, worker.device),
    }
    if worker.world_size > 1:
        to_next, from_previous = connect_ring(worker)
        message, space = bytes(nbytes), bytearray(nbytes)

        def stream(sends: bool, receives: bool) -> None:
            sender = threading.Thread(target=to_next.sendall, args=(message,))
            if sends:  # in a thread of its own, since this one may have to receive meanwhile
                sender.start()
            missing = memoryview(space)
            while receives and missing:
                missing = missing[from_previous.recv_into(missing) :]
            if sends:
                sender.join()

        one_way = partial(stream, sends=worker.rank == 0, receives=worker.rank == 1)
        all_ways = partial(stream, sends=True, receives=True)
        for name, run in (
            ("socket, rank 0 to rank 1", one_way),
            ("socket, every rank to its next", all_ways),
        ):
            seconds[name] = time_calls(run, repeats, 1, worker.device)
        to_next.close()
        from_previous.close()
    return {name: [nbytes / s for s in samples] for name, samples in seconds.items()}


def connect_ring(worker: Worker) -> tuple[socket.socket, socket.socket]:
    """Plain TCP, as Gloo uses it, to the next rank and from the previous one."""
    one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    host = "127.0.0.1" if one_node else socket.gethostname()
    with socket.create_server((host, 0)) as server:
        addresses = [None] * worker.world_size
        dist.all_gather_object(addresses, server.getsockname())
        to_next = socket.create_connection(addresses[(worker.rank + 1) % worker.world_size])
        return to_next, server.accept()[0]
