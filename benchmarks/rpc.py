"""Measure what a remote call costs: a tensor's round trip between two processes, in four ways.

    python benchmarks/rpc.py                # writes results/rpc.md
    python benchmarks/rpc.py --repeats 3 --no-write    # a quick look

rpc_sync, send and recv of a Gloo group, a Ray actor (if Ray is installed), a plain socket; and
calls per second, one at a time and with 100 in flight. All take turns in the same processes.
"""

import importlib.util
import os
import socket
import statistics
import sys
import threading
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "rpc_basics"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray sends statistics home
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # 30 s are too few on a busy machine

import bench
import torch
import torch.distributed as dist
from rpc_worker import RpcWorker, rpc_worker
from runtime import distributed_worker
from torch.distributed import rpc

SIZES = {"8 B": 8, "1 KB": 2**10, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24}
IN_FLIGHT = 100
RAY = importlib.util.find_spec("ray") is not None


def main() -> None:
    bench.main(
        "rpc",
        "Remote calls: how many per second",
        __doc__,
        {"latency": latency_text},
        part,
    )


def part(_name: str, repeats: int) -> None:
    with distributed_worker("cpu"), rpc_worker(120) as worker:
        samples = latency(worker, repeats)
        if worker.rank == 0:
            bench.say(samples)


def latency(worker: RpcWorker, repeats: int) -> dict:
    if worker.rank == 1 or not RAY:
        return measure_latency(worker.rank, repeats, None)
    import ray

    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    with ray.init("local", num_cpus=1, **options):
        return measure_latency(worker.rank, repeats, ray)


def measure_latency(rank: int, repeats: int, ray) -> dict:
    other, connection, actor = "worker1", None, None
    if rank == 0:
        port = rpc.rpc_sync(other, answer_on_a_socket)
        connection = socket.create_connection(("127.0.0.1", port), timeout=120)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        actor = ray and actor_of(ray)
    sides = {}
    for size, bytes in SIZES.items():
        x, count = torch.zeros(bytes // 4), max(2, min(100, 2**22 // bytes))
        calls = {
            "a plain socket": partial(over_socket, connection, x),
            "send and recv": partial(there_and_back, x, rank),
            "rpc_sync": partial(rpc.rpc_sync, other, echo, args=(x,)),
        }
        if RAY:
            calls["Ray"] = partial(over_ray, ray, actor, x)
        for name, call in calls.items():
            mine = call if rank == 0 or name == "send and recv" else nothing
            sides[f"{size}, {name}"] = partial(bench.seconds_per_call, mine, count)
    x = torch.zeros(2)
    calls = {"a plain socket": partial(many_over_socket, connection, x)}
    calls["RPC"] = partial(many_calls, other, x)
    if RAY:
        calls["Ray"] = partial(many_over_ray, ray, actor, x)
    for name, call in calls.items():
        sides[f"many, {name}"] = partial(bench.seconds_per_call, call if rank == 0 else nothing, 3)
    samples = bench.alternate(repeats, sides)
    if rank == 0:
        connection.close()
    return samples


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def actor_of(ray):
    class Echo:  # local: Ray sends all of it to its processes, which cannot import our files
        def echo(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    return ray.remote(num_cpus=1)(Echo).remote()


def there_and_back(x: torch.Tensor, rank: int) -> None:
    for step in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
        step(x, 1 - rank)


def over_ray(ray, actor, x: torch.Tensor) -> None:
    ray.get(actor.echo.remote(x), timeout=120)


def many_over_ray(ray, actor, x: torch.Tensor) -> None:
    ray.get([actor.echo.remote(x) for _ in range(IN_FLIGHT)], timeout=120)


def many_calls(other: str, x: torch.Tensor) -> None:
    torch.futures.wait_all([rpc.rpc_async(other, echo, args=(x,)) for _ in range(IN_FLIGHT)])


def over_socket(connection: socket.socket, x: torch.Tensor) -> None:
    """The minimal message: its length, then its bytes."""
    data = memoryview(x.numpy()).cast("B")
    connection.sendall(len(data).to_bytes(8, "little"))
    connection.sendall(data)
    read(connection, memoryview(bytearray(8)))
    read(connection, data)


def many_over_socket(connection: socket.socket, x: torch.Tensor) -> None:
    data = memoryview(x.numpy()).cast("B")
    for _ in range(IN_FLIGHT):
        connection.sendall(len(data).to_bytes(8, "little") + data)
    for _ in range(IN_FLIGHT):
        read(connection, memoryview(bytearray(8)))
        read(connection, data)


def answer_on_a_socket() -> int:
    """Runs on the other worker: a thread sends back what it reads. Returns the port."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_back, args=(server,), daemon=True).start()
    return server.getsockname()[1]


def send_back(server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(8)
    while read(connection, memoryview(head)):
        data = bytearray(int.from_bytes(head, "little"))
        read(connection, memoryview(data))
        connection.sendall(head)
        connection.sendall(data)


def read(connection: socket.socket, place: memoryview) -> bool:
    """Fill `place`; False at the end of the connection."""
    while len(place):
        count = connection.recv_into(place)
        if not count:
            return False
        place = place[count:]
    return True


def latency_text(repeats: int) -> list[str]:
    found = bench.measure_part(__file__, "latency", 2, repeats)
    names = ["a plain socket", "send and recv", "rpc_sync", *["Ray"] * RAY]
    rows = [("us there and back: median (min ... max)", *names, "rpc_sync / socket")]
    for size in SIZES:
        of_size = {name: found[f"{size}, {name}"] for name in names}
        cells = (bench.summary([1e6 * s for s in of_size[name]]) for name in names)
        ratio = bench.ratio_of_pairs(of_size["rpc_sync"], of_size["a plain socket"])
        rows.append((size, *cells, f"{statistics.median(ratio):.3g}"))
    rates = [("calls/s: median (min ... max)", "one after the other", f"{IN_FLIGHT} in flight")]
    for name, one in (("a plain socket", "a plain socket"), ("RPC", "rpc_sync"), ("Ray", "Ray")):
        if f"many, {name}" in found:
            alone = bench.summary([1 / s for s in found[f"8 B, {one}"]])
            many = bench.summary([IN_FLIGHT / s for s in found[f"many, {name}"]])
            rates.append((name, alone, many))
    texts = [
        "## Between two processes of one machine",
        bench.table(rows),
        bench.table(rates),
    ]
    return texts if RAY else [*texts, "Ray is not installed here."]


def nothing() -> None:
    """A rank's part while another rank is measured: it only waits for the next start."""


if __name__ == "__main__":
    main()
