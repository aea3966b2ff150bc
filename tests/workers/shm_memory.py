"""What custom_backend/shm takes of a process's memory, by name of the case.

python shm_memory.py CASE FOLDER: each rank writes what it found to FOLDER/RANK.json. See
test_custom_backend_shm_memory.py.
"""

import json
import os
import random
import resource
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "custom_backend"))

import shm
import torch
import torch.distributed as dist

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MIB = 2**20


def main() -> None:
    if CASE == "limit":  # as `ulimit -v` before the start
        limit = status("VmSize") + 1024 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    dist.init_process_group("shm", timeout=timedelta(seconds=300))
    found = CASES[CASE]()
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def status(name: str) -> int:
    """A size in bytes from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(name + ":"))
    return 1024 * int(kilobytes)


def groups() -> dict:
    """Make 200 groups, use each, destroy every third one."""
    x, y = torch.ones(2), shm.empty(5000)  # 20 KB: large enough to be read in place
    kept, counts = [], []
    for number in range(200):
        group = dist.new_group()
        dist.all_reduce(x.fill_(1), group=group)
        dist.all_reduce(y.fill_(1), group=group)
        assert x[0] == y[0] == y[-1] == SIZE
        if number % 3:
            kept.append(group)
        else:
            dist.destroy_process_group(group)
        del group
        if number in (10, 199):
            maps = Path("/proc/self/maps").read_text()
            counts.append(
                {
                    "groups": len(kept),
                    "addresses": status("VmSize"),
                    "resident": status("VmRSS"),
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "heaps": maps.count("/memfd:torch shm heap"),
                }
            )
    return {"counts": counts}


def returns() -> dict:
    """Fill 192 MiB of the heap, free it, fill it again."""
    fd = shm.backend.compiled().heap_fd()

    def held() -> int:
        return 512 * os.fstat(fd).st_blocks // MIB

    found = {"empty": held(), "size": os.fstat(fd).st_size // MIB}
    for turn in ("first", "second"):
        tensors = [shm.empty(48 * MIB // 4).fill_(1) for _ in range(4)]
        dist.all_reduce(tensors[0])
        found[f"{turn} full"] = held()
        tensors.pop()
        kept = tensors.pop(0)
        found[f"{turn} sum"] = kept.sum().item()
        del tensors, kept
        found[f"{turn} freed"] = held()
    return found


def extents() -> dict:
    """Tensors of random sizes come and go; two groups use them at the same time."""
    other, choose = dist.new_group(), random.Random(7)
    living, wrong, most = {}, [], 0
    for number in range(120):
        count = choose.choice((1, 3000, 10**5, 10**6, 5 * 10**6, 9 * 10**6))
        living[number] = shm.empty(count).fill_(number + RANK)
        if len(living) > 8:
            del living[choose.choice(list(living))]
        a, b = choose.choice(list(living)), number
        works = [dist.all_reduce(living[a], group=other, async_op=True)]
        if b in living and b != a:
            works.append(dist.all_reduce(living[b], async_op=True))
        for work in works:
            work.wait()
        for key in {a, b} & set(living):
            tensor = living[key]
            if tensor.min() != tensor.max() or tensor[0] != SIZE * key + SIZE * (SIZE - 1) // 2:
                wrong.append((number, key))
            tensor.fill_(key + RANK)
        for key, tensor in living.items():  # no two tensors overlap
            if tensor[0] != key + RANK or tensor[-1] != key + RANK:
                wrong.append((number, key))
        maps = Path("/proc/self/maps").read_text()
        most = max(most, maps.count("/memfd:torch shm heap"))
    return {"wrong": wrong, "extents": most}


def limit() -> dict:
    x, y = torch.ones(100_000), shm.empty(100_000).fill_(1)
    dist.all_reduce(x)
    dist.all_reduce(y)
    message = ""
    try:
        shm.empty(500 * MIB)  # 2000 MiB
    except RuntimeError as error:
        message = str(error)
    dist.all_reduce(y)
    return {"x": x[-1].item(), "y": y[-1].item(), "message": message}


CASES = {"groups": groups, "returns": returns, "extents": extents, "limit": limit}

if __name__ == "__main__":
    main()
