"""Ways to join a process group and to leave it: env://, tcp://, file://, a store of your own.

    torchrun --standalone --nproc_per_node=2 collectives/init_methods.py
    torchrun --standalone --nproc_per_node=4 collectives/init_methods.py --timeout 2
    python collectives/init_methods.py                   # a world of one; rank 1 is missing

Every rank must learn its rank, the number of ranks, and the addresses of the other ranks. A store
(a small key-value table) holds the addresses; the methods differ in how a rank finds the store.
This script joins and leaves several times in one process, without `distributed_worker`. Look at

1. four methods, one group after the other: is_initialized() before and after, get_backend(), and a
   sum that shows that the ranks are connected.
2. a second group after destroy_process_group(), on the same store: why it needs a prefix.
3. the timeout of a group: the default, and a collective that one rank skips.
4. one rank never joins: the error of each method, and a barrier that names the missing rank.
"""

import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # sections 3 and 4 provoke warnings

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, above, fail
from runtime import choose_device
from tables import print_table
from torch.distributed.elastic.multiprocessing.errors import record

HOST = os.environ.get("MASTER_ADDR", "127.0.0.1")  # where rank 0 runs


@record
def main() -> None:
    args = parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size:
        fail("file:// needs a folder that all ranks see: start all of them on one host")
    board = open_board()  # so that the ranks can agree on ports and folders without a group
    device = choose_device(args.device, board, rank, world_size)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    if rank == 0:
        print(f"{world_size} rank(s) on {device.type}, {backend}, torch {torch.__version__}")
    timeout = timedelta(seconds=args.timeout)
    show_methods(board, rank, world_size, backend)
    show_second_group(board, rank, world_size, backend)
    show_timeout(board, rank, world_size, timeout)
    show_missing_rank(board, rank, world_size, timeout)
    meet(board, "end", world_size)  # no rank closes a store that another rank still reads


def open_board() -> dist.Store:
    """torchrun's own store, which its agent serves; in a world of one, a table in this process."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(minutes=2))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # of torchrun --max-restarts
    return dist.PrefixStore(f"init_methods_{attempt}", store)


def meet(board: dist.Store, name: str, world_size: int) -> None:
    """A barrier without a process group; `stores.py` explains it."""
    if board.add(f"{name}/arrived", 1) == world_size:
        board.set(f"{name}/open", "")
    board.wait([f"{name}/open"], timedelta(minutes=2))


# Each method as a function: what to pass to init_process_group besides the backend and a timeout.
# `keep` holds objects that must live as long as the group.


def by_environment(board, rank, world_size, keep) -> dict:
    # torchrun sets these four, and more. Here the script sets them, to join more than once.
    port = serve(board, rank, keep)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    return {"init_method": "env://"}  # the default


def by_tcp(board, rank, world_size, keep) -> dict:
    url = f"tcp://{HOST}:{serve(board, rank, keep)}"
    return {"init_method": url, "rank": rank, "world_size": world_size}


def by_file(board, rank, world_size, keep) -> dict:
    # A file that all ranks can see and that does not exist yet: an old file holds old addresses.
    if rank == 0:
        keep.append(tempfile.TemporaryDirectory())
        board.set("folder", keep[-1].name)
    url = Path(board.get("folder").decode(), "rendezvous").as_uri()
    return {"init_method": url, "rank": rank, "world_size": world_size}


def by_store(board, rank, world_size, keep) -> dict:
    # Any store that all ranks reach. The prefix separates this group's keys from all other keys.
    return {"store": dist.PrefixStore("group", board), "rank": rank, "world_size": world_size}


METHODS = {"env://": by_environment, "tcp://": by_tcp, "file://": by_file, "store": by_store}


def serve(board: dist.Store, rank: int, keep: list) -> int:
    """The number of a port on which rank 0 serves a store; the same on every rank.

    A port picked in advance may be in use. Port 0 lets the system choose, and the server stays
    open until the ranks leave the group. multi_tenant: init_process_group on rank 0 also opens a
    server at this port, and shares this one.
    """
    if rank == 0:
        keep.append(dist.TCPStore(HOST, 0, None, True, wait_for_workers=False, multi_tenant=True))
        board.set("port", str(keep[-1].port))
    return int(board.get("port"))


def join(method: str, board, rank: int, world_size: int, declared: int, timeout, backend) -> dict:
    """Join a group of `declared` ranks, of which `world_size` join, add up 1 from each, leave.

    Returns what this rank saw. board: a store with a new prefix in every call.
    """
    seen, keep, started = {"before": dist.is_initialized(), "error": ""}, [], time.perf_counter()
    # torchrun sets this variable to True: rank 0 then expects the agent's store at the address that
    # env:// or tcp:// names (in torch 2.15 only at MASTER_ADDR:MASTER_PORT), and opens none.
    # patch.dict undoes all changes, also those of METHODS.
    with patch.dict(os.environ, {"TORCHELASTIC_USE_AGENT_STORE": "False"}):
        where = METHODS[method](board, rank, declared, keep)
        try:
            dist.init_process_group(backend, timeout=timeout, **where)
            seen |= {
                "joined": dist.is_initialized(),
                "backend": dist.get_backend(),
                "sum": add_up(),
            }
        except RuntimeError as error:  # also DistStoreError, the store's timeout
            seen["error"] = reason(error)
    seen["seconds"] = time.perf_counter() - started
    leave(board, world_size)
    return seen | {"after": dist.is_initialized()}


def add_up() -> int:
    on_cpu = dist.get_backend() == "gloo"
    x = torch.ones(1, device="cpu" if on_cpu else torch.accelerator.current_accelerator())
    dist.all_reduce(x)
    return int(x)


def leave(board, world_size: int) -> None:
    meet(board, "leave", world_size)  # on the board, which works even if the group does not
    if dist.is_initialized():
        dist.destroy_process_group()
    # With file://, the end of a group opens its file again. Rank 0 removes the folder after that.
    meet(board, "left", world_size)


def show_methods(board, rank: int, world_size: int, backend: str) -> None:
    rows = []
    for method in METHODS:
        place = dist.PrefixStore(f"1/{method}", board)
        seen = join(method, place, rank, world_size, world_size, timedelta(seconds=60), backend)
        if seen["error"]:
            raise RuntimeError(f"{method}: {seen['error']}")
        initialized = " -> ".join(str(seen[when]) for when in ("before", "joined", "after"))
        rows.append([method, initialized, seen["backend"], seen["sum"], f"{seen['seconds']:.2f}"])
    if rank == 0:
        print("\n1. Join, add up 1 from every rank, leave")
        print_table(["method", "is_initialized", "get_backend", "sum", "seconds"], rows)


def show_second_group(board, rank: int, world_size: int, backend: str) -> None:
    board, keep, lines = dist.PrefixStore("2", board), [], []
    port = serve(board, rank, keep)
    store = dist.TCPStore(HOST, port, None, False)
    for name in ("first", "second"):
        # Without the prefix, a rank may read an address that another rank had in the first group,
        # and fail to connect: this works in some runs only.
        dist.init_process_group(
            backend, store=dist.PrefixStore(name, store), rank=rank, world_size=world_size
        )
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        except ValueError as error:  # one world at a time
            twice = error
        lines.append([name, add_up()])
        leave(dist.PrefixStore(name, board), world_size)
        lines[-1].append(store.num_keys())
    if rank == 0:
        print("\n2. Two groups in one process, on one store")
        print_table(["group", "sum", "keys in the store after destroy"], lines)
        print(f"A second group without destroy: {twice}")
    leave(dist.PrefixStore("end", board), world_size)


def show_timeout(board, rank: int, world_size: int, timeout: timedelta) -> None:
    board = dist.PrefixStore("3", board)
    # Gloo also on GPUs: NCCL's timeout does not raise here, its watchdog ends the process.
    dist.init_process_group("gloo", timeout=timeout, **by_store(board, rank, world_size, []))
    meet(board, "start", world_size)
    started, said = time.perf_counter(), "no error"
    if rank == world_size - 1 > 0:
        said = "skips the all_reduce"
    else:
        try:
            add_up()
        except RuntimeError as error:
            said = reason(error)
    rows = collect(board, rank, world_size, [f"{time.perf_counter() - started:.1f}", said])
    if rank == 0:
        default = dist.default_pg_timeout  # h:mm:ss
        print(f"\n3. A timeout of {timeout.total_seconds():g} s; the default is {default}")
        print_table(["rank", "after s", "said"], [[r, *row] for r, row in enumerate(rows)])
    leave(board, world_size)


def show_missing_rank(board, rank: int, world_size: int, timeout: timedelta) -> None:
    rows = []
    for method in ("tcp://", "file://", "store"):  # env:// is tcp:// with the address elsewhere
        place = dist.PrefixStore(f"4/{method}", board)
        # Gloo again: NCCL before torch 2.15 connects in the first collective.
        seen = join(method, place, rank, world_size, world_size + 1, timeout, "gloo")
        said = collect(place, rank, world_size, [f"{seen['seconds']:.1f}", seen["error"]])
        rows += [[method, r, *said[r]] for r in sorted({0, world_size - 1})]
    place = dist.PrefixStore("4", board)
    try:
        roll_call(place, rank, world_size + 1, timeout)
    except TimeoutError as error:
        rows.append(["roll call", "all", f"{timeout.total_seconds():.1f}", str(error)])
    if rank == 0:
        print(f"\n4. {world_size + 1} ranks are declared, and rank {world_size} never joins")
        print_table(["method", "rank", "after s", "said"], rows)


def roll_call(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """A barrier on a store, before init_process_group: wait until all ranks have arrived.

    Raises TimeoutError with the number of ranks that arrived and the missing ranks. It uses one key
    per rank: a plain counter would say how many ranks are missing, but not which.
    """
    keys = [f"here/{r}" for r in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        missing = [r for r in range(world_size) if not store.check([keys[r]])]
        said = f"{world_size - len(missing)} of {world_size} ranks arrived; missing: rank"
        raise TimeoutError(f"{said} {', '.join(map(str, missing))}") from None


def collect(board, rank: int, world_size: int, row: list) -> list[list]:
    """Every rank's row, in rank order, gathered on the board, without a process group."""
    board.set(f"row/{rank}", json.dumps(row))
    return [json.loads(board.get(f"row/{r}")) for r in range(world_size)]  # get waits for the key


def reason(error: Exception) -> str:
    """The first line of an error, without the C++ file that it comes from."""
    return str(error).splitlines()[0].split("] ", 1)[-1].split(". You ")[0]


def parse_args():
    parser = ArgumentParser(description="Join and leave a process group with every init method.")
    add = parser.add_argument
    add("--timeout", type=above(0), default=0.5, help="wait X seconds for a missing rank")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
