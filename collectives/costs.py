"""Time collectives; formulas (busbw, alpha and beta) and machine limits to compare with."""

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
    """Seconds per call: `repeats` samples of `calls` calls in a row, after one warm-up sample.

    Each sample is that of the slowest rank: an operation ends when its last rank ends.
    """
    samples = []
    for _ in range(repeats + 1):
        synchronize(device)  # or this sample would include kernels queued before it
        dist.barrier(group=group)  # or a rank's time would include another rank's late start
        started = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        samples.append((time.perf_counter() - started) / calls)
    slowest = torch.tensor(samples[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all queued work: calls return before the work is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def bus_factor(operation: str, world_size: int) -> float:
    """busbw / algbw: bytes that the busiest rank sends or receives per byte of the operation.

    As in nccl-tests, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    n = world_size
    if operation in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"):
        return (n - 1) / n  # a rank has its own part already; bytes counts the parts of all ranks
    if operation in ("broadcast", "reduce", "send_recv"):
        return 1.0  # all bytes leave the root, or arrive there
    return 2 * (n - 1) / n  # all_reduce: a reduce_scatter, then an all_gather; also for ours


def fit_alpha_beta(sizes: list[float], seconds: list[float]) -> tuple[float, float]:
    """(alpha, beta) of seconds = alpha + beta * bytes, both 0 or more.

    Least squares of the relative errors: the largest size would dominate absolute errors.
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
    """Bytes per second of one rank, one value per repeat. All ranks run at once."""
    source = torch.ones(nbytes // 4, device=worker.device)
    target = torch.ones_like(source)
    copy = partial(target.copy_, source)
    calls = 1 if worker.device.type == "cpu" else 20  # one launch would be a large part of a sample
    seconds = {
        "memory copy, all ranks at once": time_calls(copy, repeats, calls, worker.device),
    }
    if worker.world_size > 1:
        to_next, from_previous = connect_ring(worker)
        message, space = bytes(nbytes), bytearray(nbytes)

        def stream(sends: bool, receives: bool) -> None:
            sender = threading.Thread(target=to_next.sendall, args=(message,))
            if sends:  # in its own thread, because this one may have to receive meanwhile
                sender.start()
            missing = memoryview(space)
            while receives and missing:
                received = from_previous.recv_into(missing)
                if not received:
                    raise ConnectionError("the previous rank has left")
                missing = missing[received:]
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


def own_address() -> str:
    """Where the other nodes reach this one: this end of the route to the node of MASTER_ADDR.

    Not socket.gethostname(), which many systems resolve to 127.0.1.1.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        here, there = probe.getsockname()[0], probe.getpeername()[0]
    return os.environ["MASTER_ADDR"] if here == there or here.startswith("127.") else here


def connect_ring(worker: Worker) -> tuple[socket.socket, socket.socket]:
    """Plain TCP connections, as in Gloo, to the next rank and from the previous one."""
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    with socket.create_server(("127.0.0.1" if one_node else "", 0)) as server:
        addresses = [None] * worker.world_size
        host = "127.0.0.1" if one_node else own_address()
        dist.all_gather_object(addresses, (host, server.getsockname()[1]))
        next_rank = addresses[(worker.rank + 1) % worker.world_size]
        to_next = socket.create_connection(next_rank, timeout=30)  # to connect; then without limit
        to_next.settimeout(None)
        return to_next, server.accept()[0]
