"""What torch expects of any backend: backend_contract.py BACKEND CASE. Each rank prints its result.

Started by test_custom_backend_contract.py with 2 ranks.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "custom_backend"))

import torch
import torch.distributed as dist

BACKEND, CASE = sys.argv[1:]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LONG, SHORT = timedelta(minutes=5), timedelta(seconds=7)


def register() -> None:
    if BACKEND == "store":
        from minimal import StoreGroup

        dist.Backend.register_backend("store", StoreGroup, devices=["cpu"])
    else:
        module = {"minimal": "minimal_backend", "ring": "ring_backend"}.get(BACKEND, BACKEND)
        __import__(module)


def gradients() -> str:
    """A collective is not a step of the computation: autograd does not see it."""
    weight = torch.nn.Parameter(torch.full((2,), RANK + 1.0))
    dist.all_reduce(weight)  # in place, of a leaf
    loss = (3 * weight).sum()
    dist.all_reduce(loss)
    loss.backward()
    return f"{weight.tolist()} {loss.item()} {weight.grad.tolist()}"


def gaps() -> str:
    """A column of a table: its elements do not follow each other in memory."""
    table = torch.arange(6.0).view(3, 2)
    dist.all_reduce(table[:, 0])
    return str(table.tolist())


def detail() -> str:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares the ranks' calls before it makes them."""
    x = torch.ones(2)
    dist.all_reduce(x)
    return str(x.tolist())


def limits(store: dist.Store) -> str:
    """A group has its own limit of time, and leaves that of the job's store as it was."""
    before = store.timeout
    group = dist.new_group(backend=BACKEND, timeout=SHORT)
    dist.all_reduce(torch.ones(2), group=group)
    return str(store.timeout == before)


def abort(store: dist.Store) -> str:
    """Rank 1 does not come; rank 0 gives up."""
    if RANK == 1:
        store.wait(["rank 0 has given up"], LONG)
        os._exit(0)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    began = time.monotonic()
    dist.distributed_c10d._abort_process_group()  # torchft and elastic loops call it
    seconds = time.monotonic() - began
    try:
        work.wait()
        error = "none"
    except RuntimeError as raised:
        error = str(raised)
    store.set("rank 0 has given up", "")
    return f"{seconds < LONG.total_seconds() / 4} {error}"


def main() -> None:
    register()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=LONG)
    backend = "gloo" if CASE == "limits" else BACKEND
    dist.init_process_group(backend, store=store, rank=RANK, world_size=SIZE, timeout=LONG)
    case = globals()[CASE]
    found = case(store) if CASE in ("limits", "abort") else case()
    os.write(1, f"rank {RANK} saw {found}\n".encode())  # in one piece
    if CASE == "abort":
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
