"""Join the distributed job, leave it cleanly. Every example directory carries this same file.

    with distributed_worker("auto") as worker:
        train(args, worker)

The model is built inside a function, so that it is gone before the job is left.
"""

import argparse
import gc
import importlib
import importlib.util
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported once a group exists (DistributedDataParallel does that), this module would keep the group
# for ever in its default arguments. What that leads to: see `leave`.
import torch.distributed.nn.functional
from arguments import UserError, fail
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Worker:
    rank: int  # counts over all nodes
    local_rank: int  # counts on this node
    world_size: int
    device: torch.device
    store: dist.Store | None = None  # small notes from rank to rank, in no collective

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.rank == 0


@contextmanager
def distributed_worker(
    device: str = "auto",
    timeout: timedelta = timedelta(minutes=10),
    backend: str | None = None,
) -> Iterator[Worker]:
    """Join the job that torchrun describes in the environment; without torchrun, a job of one.

    device: "cpu", "cuda", or "auto": a GPU if this node has one per local rank, else the CPU.
    timeout: how long a collective waits for a missing rank before it raises.
    backend: None: NCCL on GPUs, Gloo on CPUs; else the name of another, see `choose_backend`.
    A `UserError` inside the block ends the program with one sentence and exit status 2.
    """
    launched = "RANK" in os.environ  # by torchrun, or by whatever sets the same variables
    rank = int(os.environ["RANK"]) if launched else 0
    world_size = int(os.environ["WORLD_SIZE"]) if launched else 1
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    store = meeting_point(timeout) if launched else dist.HashStore()
    place = choose_device(device, store)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        choose_backend(backend, place.type),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=place if place.type == "cuda" else None,  # NCCL connects now, not at first use
    )
    store.set(f"rank {rank} has joined", "")
    if rank == 0:
        where = f"{place.type}, {dist.get_backend()}"
        print(f"{world_size} rank(s) on {where}, torch {torch.__version__}", flush=True)
    try:
        yield Worker(rank, local_rank, world_size, place, store)
    except UserError as error:
        # To leave closes connections, which others may still be making: they would fail, aloud.
        with suppress(RuntimeError):  # whoever is missing by then has another problem
            everybody = [f"rank {r} has joined" for r in range(world_size)]
            store.wait(everybody, timedelta(seconds=10))
        fail(str(error))
    leave()  # not in a "finally": after an exception, the other ranks may never get here


def meeting_point(timeout: timedelta) -> dist.Store:
    """The store in which the ranks of this attempt leave their addresses for each other."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun --max-restarts keeps its store: without a prefix per attempt, restarted ranks
        # would read the dead ones' addresses. (Several nodes: see the README.)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}", store)
    return store


def choose_device(device: str, store: dist.Store) -> torch.device:
    """This rank's device; ends the program where --device cuda cannot be had."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus >= local_world_size:
        return torch.device("cuda", local_rank)  # the global rank is no index: nodes count anew
    if gpus == 1 and sees_its_own_gpu(store):
        return torch.device("cuda", 0)
    if device == "cuda":
        fail(f"--device cuda needs a GPU per rank: {local_world_size} rank(s), {gpus} GPU(s) here")
    return torch.device("cpu")


def sees_its_own_gpu(store: dist.Store) -> bool:
    """True if each rank sees one GPU, and all are different ones (Slurm: --gpus-per-task=1)."""
    rank, world_size = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", 1))
    store.set(f"gpu_of_{rank}", str(torch.cuda.get_device_properties(0).uuid))
    return len({store.get(f"gpu_of_{other}") for other in range(world_size)}) == world_size


def choose_backend(name: str | None, device_type: str) -> str:
    """What the ranks talk through; ends the program where it cannot be had.

    Without a name (--backend, or $DISTRIBUTED_BACKEND for scripts that lack the flag), it follows
    from the device.
    """
    name = name or os.environ.get("DISTRIBUTED_BACKEND")
    if not name:
        # NCCL moves what is on GPUs, Gloo what is on CPUs: offloaded shards, objects, small notes.
        return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    try:
        name = known_backend(name)
    except argparse.ArgumentTypeError as error:
        fail(f"backend {error}")
    devices = dist.Backend.backend_capability.get(name, ["nothing"])
    if device_type not in devices:
        fail(f"backend {name} is for {' and '.join(devices)}, this job is on {device_type}")
    return name


def known_backend(name: str) -> str:
    """A type for add_argument: a backend of torch, or one that a module of ours registers.

    The module NAME_backend, or NAME, is imported from where Python looks (PYTHONPATH).
    """
    modules = (f"{name}_backend", name)
    if name.isidentifier() and not dist.is_backend_available(name):
        module = next(filter(importlib.util.find_spec, modules), None)
        try:
            if module:
                importlib.import_module(module)
        except (ImportError, RuntimeError) as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from None
    if not dist.is_backend_available(name):
        raise argparse.ArgumentTypeError(
            f"{name} is unknown to this torch, and no module {' or '.join(modules)} on PYTHONPATH "
            "registers it"
        )
    return name.lower()  # as torch keeps it


def leave() -> None:
    """Leave the job so that no process is hurt: all ranks together, and with no thread left behind.

    The group's threads end when nothing holds the group any more. One that is still there when the
    interpreter exits can abort the process: "terminate called without an active exception".
    """
    gc.collect()  # a model is full of reference cycles, and holds the group until they are broken
    for mesh in [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]:
        # DTensor's caches hold meshes for ever, and these their groups. A private name: no public
        # one lets go. (With vars().get() nothing happens where a torch has another name for it.)
        vars(mesh).get("_pg_registry", {}).clear()
    dist.barrier()  # nobody closes a connection that another rank still reads from
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    if group() is not None:
        print(
            "warning: something still holds the process group, which may abort the exit: build the "
            "model in a function that returns before the 'with distributed_worker()' block ends",
            file=sys.stderr,
        )
