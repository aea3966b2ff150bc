"""Run the scripts about stores and groups, then try their functions with 4 processes at once.

Started by test_collectives_groups.py under torchrun with 4 ranks, and as one process that only runs
the scripts. Launching ranks takes time, so one job runs several scripts; each joins and leaves its
own process group. Every rank writes FOLDER/<rank>.json. The line "== NAME" precedes what a script
prints.
"""

import json
import os
import random
import runpy
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # timeouts are deliberate here
HERE = Path(__file__).resolve().parents[2] / "collectives"
sys.path.insert(0, str(HERE))

import process_groups  # noqa: E402
import stores  # noqa: E402
import torch.distributed as dist  # noqa: E402
from init_methods import roll_call  # noqa: E402
from runtime import Worker, distributed_worker  # noqa: E402

SCRIPTS = ("hello_world", "backends", "stores", "process_groups")
COUNTS, ROUNDS, TERMS, TASKS = 40, 15, 25, 60
SHORT = timedelta(seconds=0.7)


def run_scripts(names) -> None:
    for attempt, name in enumerate(names):
        # As if torchrun had started us again: runtime.py then takes a new prefix in the store.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        if os.environ.get("RANK", "0") == "0":
            print(f"== {name}", flush=True)
        sys.argv = [f"{name}.py", "--device", "cpu"]
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(names))
    if os.environ.get("RANK", "0") == "0":
        print("== end", flush=True)


def count(store, worker: Worker) -> dict:
    """40 additions by each of 4 processes, as fast as they can."""
    n = worker.world_size
    if worker.is_main:
        store.set("signed", "0")
    stores.barrier(store, n)
    for _ in range(COUNTS):
        store.add("added", 1)
        stores.count_by_compare_set(store, "signed", sign=f"by {worker.rank}")
        store.append("appended", f"{worker.rank},")
    stores.barrier(store, n)
    return {
        "added": int(store.get("added")),
        "signed": int(store.get("signed").split()[0]),
        "appended": sorted(store.get("appended").decode().split(",")[:-1]),
    }


def cross_barriers(store, rank: int, world_size: int) -> list[int]:
    """How many ranks had reached each barrier when this one was let through."""
    seen, shuffle = [], random.Random(rank)
    for turn in range(ROUNDS):
        time.sleep(shuffle.random() * 0.002)
        store.add(f"reached {turn}", 1)
        stores.barrier(store, world_size)
        seen.append(store.add(f"reached {turn}", 0))
    return seen


def elections(store, worker: Worker) -> list[tuple[int, int]]:
    """(leader, leader after all other ranks tried to take its place), as this rank saw them."""
    seen = []
    for term in range(TERMS):
        stores.barrier(store, worker.world_size)  # all at once
        leader = stores.elect(store, worker.rank, f"leader {term}")
        stores.barrier(store, worker.world_size)
        if worker.rank != leader:
            stores.depose(store, worker.rank, leader, f"leader {term}")
        stores.barrier(store, worker.world_size)
        seen.append((leader, int(store.get(f"leader {term}"))))
    return seen


def queue(store, worker: Worker) -> dict:
    """Ranks 0 and 1 put tasks while ranks 2 and 3 take tasks; then they take tasks, too."""
    taken = []
    if worker.rank < 2:
        for task in range(worker.rank, TASKS, 2):
            stores.put(store, str(task).encode())
        stores.barrier(store, 2, "all put")
        if worker.is_main:
            stores.close(store, worker.world_size)
    while (task := stores.take(store)) is not None:
        taken.append(int(task))
    stores.barrier(store, worker.world_size)
    left = [place for place in range(1, TASKS + 5) if store.check([f"tasks/{place}"])]
    return {"taken": taken, "left": left}


def try_stores(worker: Worker) -> dict:
    where = [tempfile.mkdtemp() if worker.is_main else None]
    dist.broadcast_object_list(where, src=0)
    seen = {}
    for kind, store in stores.open_stores(where[0], worker).items():
        if kind == "HashStore":
            continue
        seen[kind] = {
            "count": count(store, worker),
            "elections": elections(store, worker),
            "queue": queue(store, worker),
            "barriers": {},
        }
        for n in range(1, worker.world_size + 1):
            if worker.rank < n:
                part = dist.PrefixStore(f"barriers of {n}", store)
                seen[kind]["barriers"][n] = cross_barriers(part, worker.rank, n)
        dist.barrier()
        if kind == "TCPStore":
            seen["missing"] = miss_a_barrier(store, worker)
            seen["roll call"] = call_the_roll(store, worker)
        dist.barrier()
    return seen


def miss_a_barrier(store, worker: Worker) -> str:
    if worker.rank == 1:
        return "absent"
    try:
        stores.barrier(store, worker.world_size, "lonely", SHORT)
    except TimeoutError as error:
        return str(error)
    return "passed"


def call_the_roll(store, worker: Worker) -> str:
    """First expect exactly the ranks of this job, then two more."""
    roll_call(dist.PrefixStore("complete", store), worker.rank, worker.world_size, stores.PATIENCE)
    try:
        roll_call(dist.PrefixStore("roll", store), worker.rank, worker.world_size + 2, SHORT)
    except TimeoutError as error:
        return str(error)
    return "complete"


def try_groups(worker: Worker) -> dict:
    rank, n, seen = worker.rank, worker.world_size, {}
    for columns in (1, 2, 4):
        grid = process_groups.make_grid(n, columns)
        for axis, lists in (("row", grid.tolist()), ("column", grid.T.tolist())):
            group = process_groups.groups_of(lists)
            seen[f"{axis} of {columns}"] = [
                dist.get_process_group_ranks(group),
                dist.get_rank(group),
                process_groups.sum_in(group, 10**rank, "cpu"),
            ]
    # One rank skips a call, and the call fails on all other ranks. The timeout is long, or the
    # error could also name a rank that a busy machine has made late.
    started = time.perf_counter()
    seen["left out"] = "absent" if rank == 1 else process_groups.try_new_group(3)
    seen["left out, seconds"] = time.perf_counter() - started
    dist.barrier()
    seen["the next one"] = process_groups.try_new_group(0.7)  # all ranks call it; it also fails
    dist.barrier()
    # Last, because these calls also put the ranks out of step. Only the members call: this works
    # only while all ranks have made equally many groups.
    first = process_groups.members_alone([2, 3])
    seen["members alone"] = dist.get_process_group_ranks(first) if first else None
    dist.barrier()
    by_name = {"use_local_synchronization": True}
    seen["unequal counts"] = process_groups.try_new_group(0.7, **by_name)
    dist.barrier()
    seen["world"] = process_groups.sum_in(None, 10**rank, "cpu")
    return seen


def main() -> None:
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["alone"]:
        run_scripts((*SCRIPTS, "init_methods"))
        return
    run_scripts(SCRIPTS)
    with distributed_worker("cpu") as worker:
        seen = {"stores": try_stores(worker), "groups": try_groups(worker)}
        (folder / f"{worker.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
