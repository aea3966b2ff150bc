"""What clusters/preflight.py runs on each host: it does what it is told, a line of JSON at a time.

    echo '{"do": "clock"}' | python clusters/preflight_agent.py

It needs nothing but Python and the PyTorch that the training will use. It ends with its input: when
the program that asked has ended, or the connection to it, no process is left here.
"""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever a library prints is no answer
listening = []  # the listening socket of this host, once there is one
stores = []


def clock() -> float:
    """Seconds since 1970, as this host has it."""
    return time.time()


def facts(hosts: list[str], directory: str) -> dict:
    """Versions, devices, free space; and what is wrong with names and the directory, in words."""
    import torch  # seconds: not before somebody asks

    cuda = torch.cuda.is_available()
    wrong = [sentence for host in hosts if (sentence := name_error(host))]
    same = {"python": platform.python_version(), "torch": torch.__version__}
    same |= {"CUDA": torch.version.cuda, "processors": os.cpu_count(), "GPUs": gpus(torch)}
    if cuda:
        same["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    place = Path(directory)
    if not place.is_dir():
        wrong.append(f"the directory {directory} is missing")
    elif not os.access(place, os.W_OK):
        wrong.append(f"the directory {directory} cannot be written")
    free = shutil.disk_usage(directory).free if place.is_dir() else None
    return {"same": same, "wrong": wrong, "free": free}


def gpus(torch) -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def name_error(host: str) -> str | None:
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return f"the name {host} is not known here: {error.strerror}"
    local = [address for address in found if address.startswith("127.") or address == "::1"]
    return (
        f"the name {host} means {local[0]} here, which is no address for others" if local else None
    )


def write(directory: str, name: str) -> None:
    Path(directory, name).touch()


def listing(directory: str, prefix: str) -> list[str]:
    """Names of files: what other hosts have written into a directory that is shared."""
    return [path.name for path in Path(directory).glob(f"{prefix}*")]


def remove(directory: str, prefix: str) -> None:
    for path in Path(directory).glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def listen() -> int:
    """Make the port to which partners will connect."""
    listening.append(socket.create_server(("", 0)))
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
        connection.recv(1)  # it has all
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
    """As much as goes within that time, then an end mark: a byte that is not 0."""
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


def matmul(seconds: float) -> list[float]:
    """FLOP per second of one core, and of each GPU: the best of many products."""
    import torch

    torch.set_num_threads(1)  # the other cores may belong to somebody; how many there are is a fact
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    speeds = []
    for device in devices:
        size, dtype = (256, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)
        x, times = torch.ones(size, size, dtype=dtype, device=device), []
        until = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < until:
            start = time.perf_counter()
            x @ x
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        speeds.append(2 * size**3 / min(times))
    return speeds


def store() -> int:
    """Open the meeting point for a pair's all_reduce; returns its port."""
    import torch.distributed as dist

    served = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    stores.append(served)
    return served.port


def all_reduce(node: int, ranks: int, **where) -> float:
    """Bytes per second of an all_reduce between two hosts, of the slowest rank here.

    node: 0 or 1, this host. ranks: processes on each host, one per GPU, so that every GPU, NVLink
    and network card takes part. where: see `one_rank`.
    """
    told = [
        {"rank": node * ranks + i, "local_rank": i, "world_size": 2 * ranks} for i in range(ranks)
    ]
    if ranks == 1:
        return one_rank(**told[0], **where)
    command, pipes = [sys.executable, __file__], dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    agents = [subprocess.Popen(command, text=True, **pipes) for _ in told]
    for agent, rank in zip(agents, told, strict=True):
        agent.stdin.write(json.dumps({"do": "one_rank", **rank, **where}) + "\n")
        agent.stdin.close()  # it ends once it has answered
    answers = [json.loads(agent.stdout.read() or '{"error": "a rank died"}') for agent in agents]
    for agent in agents:
        agent.wait()
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        raise RuntimeError(errors[0])
    return min(answer["is"] for answer in answers)


def one_rank(
    rank: int, local_rank: int, world_size: int, host: str, port: int, device: str
) -> float:
    """This rank's bytes per second in an all_reduce: NCCL on "cuda" devices, Gloo on the "cpu"."""
    import torch
    import torch.distributed as dist

    place = torch.device(device, local_rank if device == "cuda" else None)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10)),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=15),
        device_id=place if device == "cuda" else None,
    )
    data, times = torch.ones(2**20 if device == "cpu" else 2**26, device=place), []  # float32
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(data)
        if device == "cuda":
            torch.cuda.synchronize(place)
        times.append(time.perf_counter() - start)
    dist.barrier()
    dist.destroy_process_group()
    return data.numel() * 4 / min(times)


def main() -> None:
    known = (
        clock,
        facts,
        write,
        listing,
        remove,
        listen,
        serve,
        measure,
        matmul,
        store,
        all_reduce,
        one_rank,
    )
    commands = {command.__name__: command for command in known}
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = {"is": commands[told.pop("do")](**told)}
        except Exception as error:  # whatever it is, the other side names this host with it
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            answer = {"error": first_line}
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # with a store or a group that never met, an orderly exit could wait
