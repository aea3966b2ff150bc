"""List the files of the installed torch that implement torch.distributed, with their lengths."""

from pathlib import Path

import torch

ROOT = Path(torch.__file__).parent
HEADERS = "include/torch/csrc/distributed/c10d"
# torch installs the headers of its C++ code. PyTorch's repository has the .cpp of the same name in
# torch/csrc/distributed/c10d.
FILES = {
    "distributed/distributed_c10d.py": "init_process_group, new_group, every dist.<collective>",
    "distributed/rendezvous.py": "env://, tcp://, file://: how ranks find their first store",
    "distributed/_functional_collectives.py": "collectives that torch.compile and DTensor use",
    "distributed/device_mesh.py": "DeviceMesh: a grid of ranks, one group per row",
    "distributed/run.py": "torchrun's options",
    "distributed/elastic/agent/server/api.py": "torchrun's agent: start, watch, restart ranks",
    f"{HEADERS}/ProcessGroup.hpp": "ProcessGroup: asks the dispatcher for an operation",
    f"{HEADERS}/Backend.hpp": "Backend: what a transport must be able to do",
    f"{HEADERS}/Work.hpp": "Work: wait() and the future of an operation under way",
    f"{HEADERS}/ProcessGroupGloo.hpp": "the backend for CPUs: a queue, and the threads of Gloo",
    f"{HEADERS}/nccl2/ProcessGroupNCCL.hpp": "the backend for GPUs: streams, and a watchdog",
    f"{HEADERS}/ProcessGroupNCCL.hpp": "the same before torch 2.15, now called nccl-legacy",
    f"{HEADERS}/Store.hpp": "Store: set, get, wait; next to it TCPStore, FileStore, PrefixStore",
    f"{HEADERS}/reducer.hpp": "DDP's buckets: when a gradient is ready, all_reduce its bucket",
    "nn/parallel/distributed.py": "DistributedDataParallel, a wrapper of that Reducer",
    "distributed/fsdp/_fully_shard/_fsdp_collectives.py": "the collectives of fully_shard",
    "distributed/tensor/_redistribute.py": "DTensor: change the placement",
}


def source_map() -> list[tuple[str, int | None, str]]:
    """(path, lines, what is in it); lines is None if this torch has no such file."""
    rows = []
    for name, what in FILES.items():
        path = ROOT / name
        lines = path.read_text(encoding="utf-8").count("\n") if path.is_file() else None
        rows.append((name.replace(f"{HEADERS}/", "c10d/"), lines, what))
    return rows


def print_map() -> None:
    rows = [(name, "none" if n is None else f"{n:,}", what) for name, n, what in source_map()]
    rows.insert(0, ("file", "lines", "what is in it"))
    wide, narrow = (max(len(row[i]) for row in rows) for i in range(2))
    print("\n3. Where to read on, in the folder of the installed torch")
    for name, lines, what in rows:
        print(f"{name:{wide}}  {lines:>{narrow}}  {what}")
    print(f"(c10d/ is {HEADERS}/: the headers of the C++ part)")
