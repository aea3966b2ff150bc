"""Join the distributed job, leave it cleanly. Every example directory carries this same file.

    with distributed_worker("auto") as worker:
        train(args, worker)

The model is built inside a function, so that it is gone before the job is left.
"""

import argparse
import gc
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

# Imported once a group exists (DistributedDataParallel does that), this module would keep the group
# for ever in its default arguments. Its threads would outlive the interpreter, and one that drops a
# Python object too late aborts the process: "terminate called without an active exception".
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh


class UserError(ValueError):
    """A mistake of the user's: reported as one sentence, without a traceback."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse that speaks once per job, not once per rank."""

    def error(self, message: str) -> NoReturn:
        fail(message)

    def print_help(self, file=None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)


def fail(message: str) -> NoReturn:
    """Print `message` once per node and exit with status 2.

    Every rank meets the same mistake: local rank 0 speaks. The others wait to be stopped by
    torchrun, because the first rank to leave makes it stop the rest, spoken or not.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(30)
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


@dataclass(frozen=True)
class Worker:
    rank: int  # counts over all nodes
    local_rank: int  # counts on this node: the index of this process's GPU
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.rank == 0


@contextmanager
def distributed_worker(
    device: str = "auto", timeout: timedelta = timedelta(minutes=10)
) -> Iterator[Worker]:
    """Join the job that torchrun describes in the environment; without torchrun, a job of one.

    device: "cpu", "cuda", or "auto": a GPU if this node has one per local rank, else the CPU.
    timeout: how long a collective waits for a missing rank before it raises.
    A `UserError` inside the block ends the program with one sentence and exit status 2.
    """
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    local_world_size, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if device == "cuda" and gpus < local_world_size:
        fail(f"--device cuda needs a GPU per rank: {local_world_size} rank(s), {gpus} GPU(s) here")
    if device != "cpu" and gpus >= local_world_size:
        place, backend = torch.device("cuda", local_rank), "nccl"  # the global rank is no index
        torch.cuda.set_device(place)
    else:
        place, backend = torch.device("cpu"), "gloo"

    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun --max-restarts keeps its store: without a prefix per attempt, restarted
            # ranks would read the dead ones' addresses. (Several nodes: see the README.)
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt_{attempt}", store)
    else:
        store, world_size = dist.HashStore(), 1
    device_id = place if backend == "nccl" else None  # binds NCCL to this GPU from the start
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )
    if rank == 0:
        print(
            f"{world_size} rank(s) on {place.type}, {backend}, torch {torch.__version__}",
            flush=True,
        )
    try:
        yield Worker(rank, local_rank, world_size, place)
    except UserError as error:
        fail(str(error))
    # Reached only on a clean way out: after an exception, the other ranks may never come here.
    gc.collect()  # a model is full of reference cycles, and holds the group until they are broken
    for mesh in [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]:
        # DTensor's caches hold meshes for ever, and these their groups: no public name lets go.
        vars(mesh).get("_pg_registry", {}).clear()
    dist.barrier()  # nobody closes a connection that another rank still reads from
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()  # joins the group's threads, if nothing else holds it
    if backend == "gloo" and group() is not None:
        raise RuntimeError(
            "something still holds the process group, which may abort the exit: build the model in "
            "a function that has returned before the 'with distributed_worker()' block ends"
        )
