"""Stores (TCPStore, FileStore, ...): key-value tables through which ranks find each other.

    torchrun --standalone --nproc_per_node=2 collectives/stores.py
    torchrun --standalone --nproc_per_node=4 collectives/stores.py --tasks 40
    python collectives/stores.py                       # a world of one

A store maps keys to bytes. It needs no process group; ranks use it to make one. Use it for
addresses and decisions, not for tensors: everything goes through one server. Look at
1. every operation on every kind of store.
2. which rank sees which keys: a HashStore lives in one process, a PrefixStore adds a namespace.
3. counting by get and set loses updates: all ranks read before any rank writes. add and
   compare_set read and write in one step, but compare_set needs values that name the rank. (append
   is one step on a TCPStore, but a get and a set on a FileStore.)
4. a barrier, a leader election and a work queue, each in a few lines, on each kind of store.
"""

import os
import tempfile
import time
from datetime import timedelta
from functools import partial

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # section 1 waits for a missing key

import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from runtime import Worker, distributed_worker
from tables import print_by_rank, print_table
from torch.distributed.elastic.multiprocessing.errors import record

PATIENCE = timedelta(seconds=60)
END = b"no more tasks"


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker, tempfile.TemporaryDirectory() as folder:
        if int(os.environ.get("LOCAL_WORLD_SIZE", worker.world_size)) < worker.world_size:
            raise UserError("the ranks share a folder and 127.0.0.1: start all of them on one host")
        stores = open_stores(folder, worker)
        show_operations(stores, worker)
        show_who_sees_what(stores, worker)
        stores.pop("HashStore")  # not shared: every other rank would wait for ever
        show_lost_updates(stores, worker)
        show_recipes(stores, args.tasks, worker)
        stores.clear()  # the end of a FileStore opens its file again
        dist.barrier()  # before rank 0 removes the folder


# Three recipes. Each works on any store that all ranks share, and takes any number of them.


def barrier(store, world_size: int, name: str = "barrier", timeout: timedelta = PATIENCE) -> None:
    """Return when `world_size` ranks have called this. You can use it again.

    Raises TimeoutError with the number of ranks that arrived; `name` cannot be used after that.
    """
    arrival = store.add(f"{name}/arrived", 1)  # every rank gets a number of its own
    turn = (arrival - 1) // world_size  # how many times this barrier has opened before
    if arrival == (turn + 1) * world_size:  # the last rank opens
        # All ranks have arrived here, so all have left the turn before: no rank waits for its key.
        store.delete_key(f"{name}/open {turn - 1}")
        store.set(f"{name}/open {turn}", "")
    try:
        store.wait([f"{name}/open {turn}"], timeout)
    except RuntimeError:
        arrived = store.add(f"{name}/arrived", 0) - turn * world_size  # add 0: read a counter
        raise TimeoutError(f"{arrived} of {world_size} ranks arrived at {name!r}") from None


def elect(store, rank: int, name: str = "leader") -> int:
    """Agree on the first rank that calls this. Every caller gets the same rank."""
    # "Set it if it is not set": only one caller finds the key unset. Returns the value after that.
    return int(store.compare_set(name, "", str(rank)))


def depose(store, rank: int, old: int, name: str = "leader") -> int:
    """Replace the leader `old`, unless another rank was faster. Returns the current leader."""
    # Returns `old` also if there is no leader at all: compare_set does not tell the two apart.
    return int(store.compare_set(name, str(old), str(rank)))


def put(store, task: bytes, queue: str = "tasks") -> None:
    store.set(f"{queue}/{store.add(f'{queue}/put', 1)}", task)  # no other put gets this place


def take(store, queue: str = "tasks", timeout: timedelta = PATIENCE) -> bytes | None:
    """The next task, which no other rank gets; None when the queue is closed. Waits for a task.

    The task of a rank that dies is lost, as is that of a rank whose wait ends with a timeout: its
    place in the queue was taken. If that matters, record finished tasks and put the rest.
    """
    key = f"{queue}/{store.add(f'{queue}/taken', 1)}"
    store.wait([key], timeout)  # the place may be given out before its task is written
    task = store.get(key)
    store.delete_key(key)
    return None if task == END else task


def close(store, takers: int, queue: str = "tasks") -> None:
    """Tell `takers` ranks that no task follows. Call it once, after the last put."""
    for _ in range(takers):
        put(store, END, queue)


# Ways to add 1 to a number. `meet` is called between reading and writing.


def count_by_get_and_set(store, key: str, meet=lambda: None) -> None:
    """Wrong: what another rank writes between this get and this set is lost."""
    value = int(store.get(key))
    meet()
    store.set(key, str(value + 1))


def count_by_add(store, key: str, meet=lambda: None) -> None:
    meet()
    store.add(key, 1)  # the server reads and writes in one step


def count_by_compare_set(store, key: str, meet=lambda: None, sign: str = "") -> None:
    """For values of any kind: write only if the value is still the one that was read.

    Wrong without a `sign` that only this caller uses. compare_set returns the value in the store:
    if two callers want to write equal values, both read theirs, and both believe that they wrote.
    """
    value = store.get(key).decode()
    meet()
    while True:
        wanted = f"{int(value.split()[0]) + 1} {sign}".strip()
        found = store.compare_set(key, value, wanted).decode()
        if found == wanted:
            return
        value = found  # another rank was faster: try again


def open_stores(folder: str, worker: Worker) -> dict:
    """One store of each kind, shared by all ranks if its kind can be shared."""
    server = None
    if worker.is_main:  # port 0: any free one
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = [(server.port, folder) if worker.is_main else None]
    dist.broadcast_object_list(where, src=0)
    port, folder = where[0]  # rank 0's, on every rank
    tcp = server or dist.TCPStore("127.0.0.1", port, is_master=False)
    file = dist.FileStore(os.path.join(folder, "store"), worker.world_size)
    return {
        "TCPStore": tcp,  # a server in one process; the other processes are its clients
        "FileStore": file,  # a file that all ranks can see
        "HashStore": dist.HashStore(),  # a dictionary of this process, for its threads
        "PrefixStore": dist.PrefixStore("mine", tcp),  # writes "mine/..." into another store
    }


def show_operations(stores: dict, worker: Worker) -> None:
    if worker.is_main:
        columns = {name: try_operations(store) for name, store in stores.items()}
        rows = [[call, *(said[call] for said in columns.values())] for call in columns["TCPStore"]]
        print("\n1. What the calls return, one after another, on rank 0")
        print_table(["call", *columns], rows)
    dist.barrier()  # before other ranks write into the stores


def try_operations(store) -> dict[str, str]:
    """Every operation; each one shows what the one before has done."""
    soon = timedelta(seconds=0.1)

    def append_and_get() -> bytes:
        store.append("a", "yz")
        return store.get("a")

    calls = {
        "set('a', 'x')": lambda: store.set("a", "x"),
        "get('a')": lambda: store.get("a"),
        "append('a', 'yz'), get('a')": append_and_get,
        "add('n', 5)": lambda: store.add("n", 5),
        "add('n', -2)": lambda: store.add("n", -2),
        "compare_set('c', '', '1')": lambda: store.compare_set("c", "", "1"),
        "compare_set('c', '0', '2')": lambda: store.compare_set("c", "0", "2"),
        "compare_set('c', '1', '2')": lambda: store.compare_set("c", "1", "2"),
        "compare_set('new', '0', '2')": lambda: store.compare_set("new", "0", "2"),
        "check(['a', 'new'])": lambda: store.check(["a", "new"]),
        "wait(['a'])": lambda: store.wait(["a"], soon),
        "wait(['new'], 0.1 s)": lambda: store.wait(["new"], soon),
        "num_keys()": lambda: store.num_keys(),  # whatever the prefix; a FileStore has one more
        "delete_key('a')": lambda: store.delete_key("a"),
        "delete_key('a') again": lambda: store.delete_key("a"),
        "num_keys() now": lambda: store.num_keys(),
        "queue_push('q', 'first')": lambda: store.queue_push("q", "first"),
        "queue_push('q', 'second')": lambda: store.queue_push("q", "second"),
        "queue_len('q')": lambda: store.queue_len("q"),
        "queue_pop('q')": lambda: store.queue_pop("q"),
        "queue_pop('q', False)": lambda: store.queue_pop("q", False),
        "queue_pop('q', False) again": lambda: store.queue_pop("q", False),  # True would wait
    }
    said = {}
    for name, call in calls.items():
        try:
            value = call()
            said[name] = value.decode() if isinstance(value, bytes) else str(value)
        except (RuntimeError, NotImplementedError) as error:
            said[name] = type(error).__name__
    for key in ("n", "c"):
        store.delete_key(key)
    return said


def show_who_sees_what(stores: dict, worker: Worker) -> None:
    seen = {}
    for store in stores.values():
        store.set(f"seen/{worker.rank}", "")
    dist.barrier()  # all ranks have written
    for name, store in stores.items():
        seen[name] = sum(store.check([f"seen/{r}"]) for r in range(worker.world_size))
    seen["TCPStore,_key_mine/seen/0"] = stores["TCPStore"].check(["mine/seen/0"])
    print_by_rank(worker, "2. How many ranks' keys does each rank see?", **seen)


def show_lost_updates(stores: dict, worker: Worker) -> None:
    ways = {
        "get, set": count_by_get_and_set,
        "add": count_by_add,
        "compare_set": count_by_compare_set,
        "compare_set with rank": partial(count_by_compare_set, sign=f"by rank {worker.rank}"),
    }
    rows = []
    for way, count in ways.items():
        row = [way]
        for store in stores.values():
            if worker.is_main:
                store.set(f"count/{way}", "0")
            barrier(store, worker.world_size, f"start {way}")
            # A barrier between reading and writing forces the race, which else needs bad luck.
            meet = partial(barrier, store, worker.world_size, f"read {way}")
            count(store, f"count/{way}", meet)
            barrier(store, worker.world_size, f"end {way}")
            row.append(int(store.get(f"count/{way}").split()[0]))
        rows.append(row)
    if worker.is_main:
        print(f"\n3. {worker.world_size} rank(s) add 1 to 0; all ranks read before any rank writes")
        print_table(["by", *stores], rows)


def show_recipes(stores: dict, tasks: int, worker: Worker) -> None:
    for name, store in stores.items():
        started = time.perf_counter()
        for _ in range(20):
            barrier(store, worker.world_size)
        microseconds = (time.perf_counter() - started) / 20 * 1e6
        leader = elect(store, worker.rank)
        barrier(store, worker.world_size)
        # The leader has "died": all other ranks want its place, and one of them gets it.
        second = leader if worker.rank == leader else depose(store, worker.rank, leader)
        if worker.is_main:
            for number in range(tasks):
                put(store, str(number).encode())
            close(store, worker.world_size)
        mine = []
        while (task := take(store)) is not None:
            mine.append(int(task))
            time.sleep(0.001)  # the work
        print_by_rank(
            worker,
            f"4. Barrier, election and work queue on a {name}: {tasks} tasks",
            barrier_us=f"{microseconds:.0f}",
            leader=leader,
            then=second if worker.rank != leader else "deposed",
            tasks=len(mine),
            first=mine[:5],
        )
        done = [None] * worker.world_size
        dist.all_gather_object(done, mine)
        once = sorted(number for taken in done for number in taken) == list(range(tasks))
        if worker.is_main:
            print(f"every task done exactly once: {once}")


def parse_args():
    parser = ArgumentParser(description="The key-value stores of torch.distributed.")
    add = parser.add_argument
    add("--tasks", type=at_least(0), default=20, help="tasks in the work queue")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
