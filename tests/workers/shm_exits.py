"""Check that programs with the backend "shm" exit: python shm_exits.py HOW REPEAT.

This process loads torch and forks two ranks, which exit through the interpreter, as any program. It
prints the exit statuses of each pair, and its time.
"""

import os
import shutil
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "custom_backend"))

import shm
import torch
import torch.distributed as dist


def main() -> None:
    how, repeat = sys.argv[1], int(sys.argv[2])
    folder = tempfile.mkdtemp()
    for turn in range(repeat):
        begin = time.perf_counter()
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                return leave(how, rank, dist.FileStore(f"{folder}/{turn}", 2))
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(how, *statuses, f"{time.perf_counter() - begin:.2f} s", flush=True)
    shutil.rmtree(folder)
    return None


def leave(how: str, rank: int, store: dist.Store) -> None:
    minutes = timedelta(minutes=2)
    dist.init_process_group("shm", store=store, rank=rank, world_size=2, timeout=minutes)
    x, y = torch.ones(1000), shm.empty(100_000)
    dist.all_reduce(x)
    # No rank waits for these; some complete, the last receives a message that is never sent.
    for tensor in (x, y, x):
        dist.all_reduce(tensor, async_op=True)
    dist.irecv(torch.ones(3), 1 - rank, tag=5)
    if how == "ends":  # no rank leaves before the other has made all calls
        store.set(f"rank {rank} has called all", "")
        store.wait([f"rank {1 - rank} has called all"])
    if how == "destroys":
        dist.barrier()
        dist.destroy_process_group()
    elif how == "fails" and rank == 0:
        dist.all_reduce(x, async_op=True)  # the other rank never calls it
        raise SystemExit(3)
    elif how == "fails":
        message = ""
        try:
            dist.recv(x, 0)
        except RuntimeError as error:
            message = str(error)
        assert "rank 0" in message


if __name__ == "__main__":
    main()
