"""The agent that clusters/preflight.py runs on each host: each line of JSON is one request.

    echo '{"do": "clock"}' | python clusters/preflight_agent.py

It needs only Python and the PyTorch that the training will use. It ends at the end of its input:
when preflight.py or the connection has ended, no process is left on the host.
"""

import json
import os
import platform
import resource
import shutil
import socket
import sys
import time
from pathlib import Path

from preflight_gpus import (
    asked_of_the_driver,
    gpus,
    matmul_on_gpus,
    slowed_down,
    unseen_gpus,
)
from preflight_ranks import all_reduce, one_rank

SYS = Path("/sys/class")
listening = []  # the listening socket of this host, once there is one
stores = []


def clock() -> float:
    """Seconds since 1970 on this host's clock."""
    return time.time()


def facts(hosts: list[str], directory: str) -> dict:
    """Versions, devices, limits, free space; and what is wrong on this host alone, in words."""
    import torch  # takes seconds: only when requested

    wrong = [sentence for host in hosts if (sentence := name_error(host))]
    same = {"python": platform.python_version(), "torch": torch.__version__}
    # Those that this process may use; macOS has no sched_getaffinity.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    same |= {"CUDA": torch.version.cuda, "processors": cores, "GPUs": gpus(torch)}
    if torch.cuda.is_available():
        same["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        same["driver"] = asked_of_the_driver("driver_version")
    same |= {"network cards": network_cards(), "ulimit -l": memory_lock()}
    wrong += unseen_gpus(len(same["GPUs"]))
    wrong += limits(shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None)
    place = Path(directory)
    if not place.is_dir():
        wrong.append(f"the directory {directory} is missing")
    elif not os.access(place, os.W_OK):
        wrong.append(f"the directory {directory} cannot be written")
    free = shutil.disk_usage(directory).free if place.is_dir() else None
    return {"same": same, "wrong": wrong, "free": free}


def network_cards() -> list[str]:
    """Each port of InfiniBand or RoCE; each Ethernet card with a link: kind, speed, state."""
    cards = []
    for port in sorted(SYS.glob("infiniband/*/ports/*")):
        kind, rate, state = (content(port / name) for name in ("link_layer", "rate", "state"))
        cards.append(f"{kind} {rate}, {state.partition(': ')[2]}")
    for card in sorted(SYS.glob("net/*/device")):  # virtual ones have no device
        if content(card.parent / "operstate") == "up":
            speed, size = (content(card.parent / name) for name in ("speed", "mtu"))
            cards.append(f"Ethernet {speed} Mbit/s, MTU {size}")
    return cards


def content(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # a card without a link has no speed
        return "?"


def memory_lock() -> str:
    """What RDMA may pin: `ulimit -l`, kB."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft // 1024)


def limits(shared_memory: int | None) -> list[str]:
    """shared_memory: bytes of /dev/shm, which loaders and NCCL use."""
    found = []
    if shared_memory is not None and shared_memory < 2**30:
        found.append(f"/dev/shm has {shared_memory / 2**20:.0f} MB, which is a container's default")
    if any(SYS.glob("infiniband/*")) and memory_lock() != "unlimited":
        found.append(f"ulimit -l is {memory_lock()} kB, and RDMA needs to pin more: unlimited")
    return found


def name_error(host: str) -> str | None:
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return f"the name {host} is not known here: {error.strerror}"
    local = [address for address in found if address.startswith("127.") or address == "::1"]
    return f"the name {host} is {local[0]} here: other hosts cannot reach it" if local else None


def write(directory: str, name: str) -> None:
    Path(directory, name).touch()


def listing(directory: str, prefix: str) -> list[str]:
    """Names of the files that hosts have written into a shared directory."""
    return [path.name for path in Path(directory).glob(f"{prefix}*")]


def remove(directory: str, prefix: str) -> None:
    for path in Path(directory).glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def listen() -> int:
    """Open the port to which partners will connect, by IPv4 or by IPv6."""
    both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    listening.append(socket.create_server(("", 0), **(both if socket.has_dualstack_ipv6() else {})))
    listening[0].settimeout(5)
    return listening[0].getsockname()[1]


def serve(seconds: float) -> float:
    """The partner's half of `measure`; returns the bytes per second that came in."""
    connection, _ = listening[0].accept()
    with connection:
        connection.settimeout(5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1) == b"p":
            connection.sendall(b"p")
        rate = receive(connection)
        send(connection, seconds)
        connection.recv(1)  # the partner has received everything
        return rate


def measure(host: str, port: int, seconds: float) -> dict:
    """To a partner and back: seconds for one byte, and the bytes per second that came in here."""
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(50):
            start = time.perf_counter()
            connection.sendall(b"p")
            connection.recv(1)
            times.append(time.perf_counter() - start)
        connection.sendall(b"b")
        send(connection, seconds)
        return {"latency": min(times), "rate": receive(connection)}


def send(connection: socket.socket, seconds: float) -> None:
    """Send as much as possible in that time, then an end mark: a byte that is not 0."""
    block, until = bytes(2**16), time.perf_counter() + seconds
    while time.perf_counter() < until:
        connection.sendall(block)
    connection.sendall(b"e")


def receive(connection: socket.socket) -> float:
    """Bytes per second, without the first bytes: a switch may let some pass at any speed."""
    count, start, warm = 0, None, 2**18
    while True:
        data = connection.recv(2**18)
        if start is None and count >= warm:
            start, first = time.perf_counter(), count
        count += len(data)
        if not data or data[-1]:
            break
    if start is None:
        raise OSError("too slow to be measured")
    return (count - first) / (time.perf_counter() - start)


def products(seconds: float) -> float:
    """FLOP per second of one core, in its fastest product: other programs may use this core."""
    import torch

    torch.set_num_threads(1)  # other jobs may use the other cores; facts() has their number
    size, times, until = 256, [], time.perf_counter() + seconds
    x = torch.randn(size, size)
    while len(times) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def gpu_products(seconds: float) -> dict:
    """Median FLOP per second of each GPU while all GPUs compute. The numbers are random: with
    constant ones a GPU needs less power, and its clock would not drop."""
    import torch

    if not (count := torch.cuda.device_count()):
        return {"speeds": [], "wrong": []}
    speeds, reasons = matmul_on_gpus(torch, count, seconds)
    return {"speeds": speeds, "wrong": slowed_down(reasons)}


def store() -> int:
    """Open the meeting point for a pair's all_reduce; returns its port."""
    import torch.distributed as dist

    served = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    stores.append(served)
    return served.port


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library's prints must not mix with the answers
    known = (clock, facts, write, listing, remove, listen, serve, measure, store)
    known += (products, gpu_products, all_reduce, one_rank)
    commands = {command.__name__: command for command in known}
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = {"is": commands[told.pop("do")](**told)}
        except Exception as error:  # preflight.py reports it with this host's name
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            answer = {"error": first_line}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # a normal exit could wait for a store or a group that never met
