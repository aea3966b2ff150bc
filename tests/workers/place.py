"""Where the ranks of a test compute: on the CPU, or with pytest --device cuda on GPUs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from runtime import Worker, distributed_worker, leave, meeting_point

DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # see conftest.py


@contextmanager
def worker_of_test() -> Iterator[Worker]:
    """This rank's worker: NCCL if each rank has a GPU; Gloo if all ranks share one GPU.

    A world of one process is the reference: it computes on the CPU.
    """
    rank, ranks = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
    if DEVICE == "cpu" or ranks == 0:
        with distributed_worker("cpu") as worker:
            yield worker
    elif torch.accelerator.device_count() >= ranks:
        with distributed_worker(DEVICE) as worker:
            yield worker
    else:  # distributed_worker() refuses to share a GPU
        store = meeting_point(timedelta(minutes=2))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        print(f"{ranks} ranks share one {DEVICE} device, {dist.get_backend()}", flush=True)
        yield Worker(rank, rank, ranks, torch.device(DEVICE, 0), store)
        leave()


def on_cpu(found):
    """The same dicts, lists and tuples, with tensors that any process can unpickle."""
    if isinstance(found, dict):
        return {name: on_cpu(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(on_cpu(value) for value in found)
    return found.cpu() if isinstance(found, torch.Tensor) else found
