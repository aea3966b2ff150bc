"""Let a rank fail or make a mistake, by name of the case; see test_custom_backend_shm_faults.py.

python shm_faults.py CASE FOLDER: each rank writes its error messages and times to FOLDER/RANK.json.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "custom_backend"))

import shm
import torch
import torch.distributed as dist

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def main() -> None:
    if CASE in ("hosts", "network", "descriptors"):
        begin, limits = time.perf_counter(), resource.getrlimit(resource.RLIMIT_NOFILE)
        found = {"message": told(join), "seconds": time.perf_counter() - begin}
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return save(found)
    if CASE.startswith("dies") and RANK == SIZE - 1 and os.fork():
        os.wait()  # the killed rank is a child, so that the job outlives it
        return None
    join()
    case, *arguments = CASE.split(":")
    CASES[case](*arguments)
    return None


def join() -> None:
    if CASE == "hosts" and RANK == 1:
        read = Path.read_text
        Path.read_text = lambda path: "another host" if path.name == "boot_id" else read(path)
    limit = timedelta(seconds=60)
    if CASE in ("network", "descriptors"):
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False)  # the test serves it
        restrict_rank_1(store)
        dist.init_process_group("shm", store=store, rank=RANK, world_size=SIZE, timeout=limit)
    else:
        dist.init_process_group("shm", timeout=limit)


def restrict_rank_1(store: dist.Store) -> None:
    """Take from rank 1 the network namespace, or all new descriptors; the store stays connected."""
    shm.backend.compiled()
    if RANK == 1 and CASE == "descriptors":
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    if RANK == 1 and CASE == "network" and ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET
        store.set("refused", "")
    store.set(f"restricted {RANK}", "")
    store.wait([f"restricted {rank}" for rank in range(SIZE)])
    if store.check(["refused"]):
        raise RuntimeError("no new network")


def told(call) -> str:
    """The error that a call raises."""
    try:
        call()
    except (RuntimeError, ValueError, PermissionError) as error:
        return str(error)
    return ""


def save(found) -> None:
    path = FOLDER / f"{RANK}.json"
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)


# ---- a rank dies


CALLS = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(100_000), group=group),
    "zero_copy": lambda group: dist.all_reduce(shm.empty(100_000), group=group),
    "barrier": lambda group: dist.barrier(group),
    "recv": lambda group: dist.recv(torch.ones(3), SIZE - 1, group=group),
    "send": lambda group: dist.send(torch.ones(10**6), SIZE - 1, group=group),
    "future": lambda group: (
        dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()
    ),
}


def dies(name: str) -> None:
    """Kill the last rank while all others wait for it; they then call again."""
    dist.all_reduce(torch.ones(3))
    if RANK == SIZE - 1:
        time.sleep(0.2)  # all other ranks are asleep by now
        (FOLDER / "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    message = told(lambda: CALLS[name](None))
    noticed = time.time()
    again = told(dist.barrier)
    save({"message": message, "noticed": noticed, "again": again})


def dies_any_time(seed: str) -> None:
    """Run random operations until the last rank is killed, at a random moment."""
    if RANK == SIZE - 1:
        after = 0.001 * (int(seed) * 37 % 100)
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    x, y = torch.ones(50_000), shm.empty(50_000)

    def forever() -> None:
        while True:
            dist.all_reduce(x)
            work = dist.all_reduce(y, async_op=True)
            gone = dist.isend(x, (RANK + 1) % SIZE)
            dist.recv(x, (RANK - 1) % SIZE)
            gone.wait()
            work.wait()
            dist.barrier()

    save({"message": told(forever)})


# ---- an operation fails on one rank


def unmapped() -> None:
    """Rank 1 has no addresses left to map the heaps of the other ranks, then has them again."""
    x, y = shm.empty(100_000).fill_(1), torch.ones(100_000)
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    if RANK == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**23, unlimited[1]))
    messages = [told(lambda: dist.all_reduce(x))]
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    messages += [told(lambda: dist.all_reduce(y)), told(dist.barrier)]
    save({"messages": messages, "x": [x[0].item(), x[-1].item()], "y": y[0].item()})


def hasty_group() -> dist.ProcessGroup:
    """Its operations wait for a second; its ranks, which may be slow, have longer to join."""
    group = dist.new_group()
    # Before torch 2.15 it had no public name.
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=1), group)
    return group


def pinned() -> None:
    """Rank 0 gives up a zero-copy all_reduce, frees its tensor, and allocates the next one."""
    store = dist.distributed_c10d._get_default_store()  # no public name
    group, addresses = hasty_group(), []
    if RANK == 0:
        for call in (lambda x: dist.all_reduce(x, group=group), lambda x: x.zero_()):
            x = shm.empty(100_000)
            addresses.append(x.data_ptr())
            told(lambda call=call, x=x: call(x))
            del x, call
        store.set("done", "")
    store.wait(["done"])
    save(addresses)


def inference() -> None:
    """An asynchronous call may write to an inference tensor, which only inference mode allows."""
    with torch.inference_mode():
        x = torch.ones(6, 4).t()  # not contiguous: shm writes the result back
        dist.all_reduce(x, async_op=True).wait()
    save(x.tolist())


def called_back() -> None:
    """Rank 1 waits for the callbacks of rank 0, which waits for rank 1 in a barrier."""
    store = dist.distributed_c10d._get_default_store()  # no public name
    if RANK == 1:
        store.wait(["rank 0 has its callbacks"])  # so none of its futures was complete before
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(9)]
    if RANK == 0:
        for number, work in enumerate(works):
            work.get_future().add_done_callback(lambda _, n=number: store.set(f"called {n}", ""))
        store.set("rank 0 has its callbacks", "")
    else:
        called = [f"called {number}" for number in range(len(works))]
        works[-1].wait()
        save(told(lambda: store.wait(called, timedelta(seconds=20))))
    message = told(dist.barrier)
    if RANK == 0:
        save(message)


def last_reference() -> None:
    """A callback holds the last reference to its group, and frees it in the group's thread."""
    store = dist.distributed_c10d._get_default_store()  # no public name
    group, x = dist.new_group(timeout=timedelta(seconds=50)), torch.ones(3)
    if RANK == 1:
        store.wait(["rank 0 destroys the group"])
        time.sleep(0.2)  # it has dropped its own references by now
    work = dist.all_reduce(x, group=group, async_op=True)
    if RANK == 0:
        work.get_future().add_done_callback(lambda _, group=group: None)
        store.set("rank 0 destroys the group", "")
    else:
        work.wait()
    dist.destroy_process_group(group)
    del group, work
    dist.barrier()
    save(x.tolist())


# ---- a rank is late, or makes another call


def late() -> None:
    """For each call: the last rank is in a recv that no rank serves, and does not call."""
    messages = {}
    for name, call in CALLS.items():
        group = hasty_group()
        if RANK == SIZE - 1:
            messages[name] = told(lambda g=group: dist.recv(torch.ones(3), 0, group=g, tag=9))
        else:
            messages[name] = told(lambda g=group, call=call: call(g))
    save(messages)


def wait() -> None:
    """Rank 0 waits for half a second; rank 1 calls later. The operation goes on."""
    store = dist.distributed_c10d._get_default_store()  # no public name
    x = torch.full((100_000,), RANK + 1.0)
    found = {}
    if RANK == 0:
        work = dist.all_reduce(x, async_op=True)
        begin = time.perf_counter()
        found["message"] = told(lambda: work.wait(timedelta(seconds=0.5)))
        found["seconds"] = time.perf_counter() - begin
        store.set("timed out", "")
        found["again"] = told(lambda: work.wait(timedelta(seconds=50)))
    else:
        store.wait(["timed out"])
        dist.all_reduce(x)
    found["x"] = [x[0].item(), x[-1].item()]
    dist.barrier()
    save(found)
    dist.destroy_process_group()


def nobody_left() -> None:
    """Rank 0 receives from any rank when all other ranks have left the group, or leave it."""
    group = dist.new_group()
    if RANK > 0:
        dist.destroy_process_group(group)
        del group
    messages = []
    begin = time.perf_counter()
    if RANK == 0:
        work = dist.irecv(torch.ones(3), group=group)
        messages = [told(work.wait), told(lambda: dist.recv(torch.ones(3), group=group))]
    save({"messages": messages, "seconds": time.perf_counter() - begin})
    dist.barrier()


def mismatch() -> None:
    """Rank 1 makes another call than all other ranks, each time in a new group."""
    x, big = torch.ones(12), torch.ones(100_000)
    other = RANK == 1
    sizes = (1, 2, 3) if other else (3, 2, 1)
    total, most = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    factor = dist._make_nccl_premul_sum(3.0 if other else 2.0)  # no public function makes one
    calls = {
        "operation": lambda g: dist.barrier(g) if other else dist.all_reduce(x, group=g),
        "dtype": lambda g: dist.all_reduce(x.int() if other else x, group=g),
        "float8": lambda g: dist.broadcast(
            x.to(torch.float8_e5m2 if other else torch.float8_e4m3fn), 0, group=g
        ),
        "size": lambda g: dist.all_reduce(x[:11] if other else x, group=g),
        "size of large": lambda g: dist.all_reduce(big[1:] if other else big, group=g),
        "small and large": lambda g: dist.broadcast(x if other else big, 0, group=g),
        "root": lambda g: dist.broadcast(x, 1 if other else 0, group=g),
        "ReduceOp": lambda g: dist.all_reduce(x, most if other else total, group=g),
        "factor": lambda g: dist.all_reduce(x, factor, group=g),
        "parts": lambda g: dist.all_gather(
            [torch.ones(n) for n in sizes], torch.ones(sizes[RANK]), group=g
        ),
        "split": lambda g: dist.all_to_all_single(
            x, x.clone(), [2, 4, 6] if other else [4, 4, 4], [4, 4, 4], group=g
        ),
    }
    found = {}
    for name, call in calls.items():
        group = dist.new_group()
        begin = time.perf_counter()
        message = told(lambda g=group, call=call: call(g))
        again = told(lambda g=group: dist.barrier(g))  # the group stays broken
        ms = 1000 * (time.perf_counter() - begin)
        found[name] = {"message": message, "again": again, "ms": ms}
    # Only two ranks know of a message: a third one gets the error at its next call at the latest.
    group = dist.new_group()
    x = torch.ones(3 if RANK == 0 else 4)
    send_or_recv = dist.send if RANK == 0 else dist.recv
    message = told(lambda: send_or_recv(x, 1 - RANK, group=group)) if RANK < 2 else ""
    again = told(lambda: dist.barrier(group))
    found["message"] = {"message": message or again, "again": again, "ms": 0}
    save(found)


# ---- fork, leaving, joining again


def fork() -> None:
    """A forked child gets an error; the parent continues."""
    kept, large = shm.empty(5).fill_(7), shm.empty(20 * 2**20).fill_(7)
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "send": lambda: dist.isend(torch.ones(3), (RANK + 1) % SIZE),
        "empty": lambda: shm.empty((3,)),
        "new group": lambda: dist.init_process_group(
            "shm", store=dist.HashStore(), rank=0, world_size=1
        ),
    }
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        messages = {name: told(call) for name, call in calls.items() if name != "new group"}
        dist.destroy_process_group()
        messages["new group"] = told(calls["new group"])
        messages["kept"] = kept.tolist()
        kept[0] = 9
        del kept, large  # 80 MiB, which a heap gives back to the system
        os.write(writes, json.dumps(messages).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    x = torch.full((100_000,), 1.0)
    dist.all_reduce(x)
    save(
        {
            "child": json.loads(os.read(reads, 10**6)),
            "status": status,
            "sum": x[0].item(),
            "kept": kept.tolist(),
            "large": [large.min().item(), large.max().item()],
        }
    )
    dist.barrier()
    dist.destroy_process_group()


def again() -> None:
    """Create twenty groups one after another, and count what they leave behind."""

    def use(group=None) -> None:
        for x in (torch.ones(100_000), shm.empty(100_000).fill_(1)):
            dist.all_reduce(x, group=group)
            assert x[0] == SIZE
        work = dist.isend(x, (RANK + 1) % SIZE, group=group)
        dist.recv(x.clone(), (RANK - 1) % SIZE, group=group)
        work.wait()

    def count() -> list[int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            sum("torch shm" in line for line in maps),
        ]

    counts = []
    use()
    for _ in range(20):
        group = dist.new_group()
        use(group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        dist.barrier()
        counts.append(count())
    store = dist.distributed_c10d._get_default_store()  # no public name: to join a second time
    dist.barrier()
    dist.destroy_process_group()
    prefix = dist.PrefixStore("again", store)
    dist.init_process_group("shm", store=prefix, rank=RANK, world_size=SIZE)
    use()
    dist.barrier()
    save({"counts": [*counts, count()]})
    dist.barrier()
    dist.destroy_process_group()


def held() -> tuple[list[str], list[str]]:
    """The files in memory that this process has open or mapped; the numbers of its sockets."""
    maps = [line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()]
    names = {name for line in maps for name in line}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder is closed by now
            names.add(os.readlink(f"/proc/self/fd/{number}"))
    files = [name for name in names if name.startswith(("/dev/shm/", "/memfd:"))]
    return files, [name[8:-1] for name in names if name.startswith("socket:")]


def all_die() -> None:
    x = shm.empty(10**6).fill_(1)
    dist.all_reduce(x)
    files, sockets = held()
    save({"sum": x[0].item(), "files": files, "sockets": sockets})
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


CASES = {
    "wait": wait,
    "nobody_left": nobody_left,
    "unmapped": unmapped,
    "inference": inference,
    "pinned": pinned,
    "called_back": called_back,
    "last_reference": last_reference,
    "dies": dies,
    "dies_any_time": dies_any_time,
    "late": late,
    "mismatch": mismatch,
    "fork": fork,
    "again": again,
    "all_die": all_die,
}

if __name__ == "__main__":
    main()
