"""Join the distributed job and leave it cleanly. Every example directory has a copy of this file.

    with distributed_worker("auto") as worker:
        train(args, worker)

Build the model inside a function, so that it is gone before the process leaves the job.
"""

import gc
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# DistributedDataParallel imports this module. After a group exists, that would be too late: the
# module's default arguments would hold the group for ever. `leave` says why that is bad.
import torch.distributed.nn.functional
from agreement import compare_ranks
from arguments import UserError, fail
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Worker:
    rank: int  # counts over all nodes
    local_rank: int  # counts on this node
    world_size: int
    device: torch.device
    store: dist.Store | None = None  # key-value messages between ranks, without a collective

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
    """Join the job that torchrun describes in the environment, or else a job of one process.

    device: "cpu", the name of an accelerator ("cuda"), or "auto": an accelerator if there is one.
    timeout: how long a collective waits for a missing rank before it raises (Gloo) or ends the
        process (NCCL).
    backend: "nccl", "gloo", ...; None: NCCL on CUDA GPUs, Gloo on CPUs.
    A `UserError` inside the block ends the program with one sentence and its exit status.
    """
    launched = "RANK" in os.environ  # by torchrun or another launcher that sets these variables
    rank = int(os.environ["RANK"]) if launched else 0
    world_size = int(os.environ["WORLD_SIZE"]) if launched else 1
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    store = meeting_point(timeout) if launched else dist.HashStore()
    place = choose_device(device, store, rank, world_size)
    on_cpu = place.type == "cpu"
    if not on_cpu:
        torch.accelerator.set_device_index(place.index)
    dist.init_process_group(
        choose_backend(backend, place.type),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if on_cpu else place,  # NCCL makes its communicator now
    )
    store.set(f"rank {rank} has joined", "")
    if rank == 0:
        where = f"{place.type}, {dist.get_backend()}"
        print(f"{world_size} rank(s) on {where}, torch {torch.__version__}", flush=True)
    try:
        yield Worker(rank, local_rank, world_size, place, store)
    except UserError as error:
        # Leaving closes connections. A rank that is still connecting would fail with a traceback.
        with suppress(RuntimeError):  # a rank that is still missing has its own problem
            everybody = [f"rank {r} has joined" for r in range(world_size)]
            store.wait(everybody, timedelta(seconds=10))
        sys.stdout.flush()
        try:
            fail(str(error))
        finally:
            # At once: when Python exits, NCCL warns of a group that was not destroyed. To destroy
            # the group takes all ranks, and a rank without this mistake would not come.
            os._exit(error.status)
    leave()  # not in a "finally": after an exception, the other ranks may never get here


def meeting_point(timeout: timedelta) -> dist.Store:
    """The store through which the ranks of this attempt exchange addresses."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun --max-restarts keeps its store. Without a prefix per attempt, restarted ranks
        # would read the addresses of dead ranks. (Several nodes: ddp_basics/running.md.)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}", store)
    return store


def choose_device(device: str, store: dist.Store, rank: int, world_size: int) -> torch.device:
    """This rank's device. If the ranks do not fit together, all of them end with one sentence."""
    place, problem = None, ""
    try:
        place = own_device(device)
    except UserError as error:
        problem = str(error)
    compare_ranks(store, rank, world_size, place, problem)
    return place


def own_device(device: str) -> torch.device:
    """This rank's device; raises `UserError` if the node has no such device for it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator else "cpu"
    if device == "auto":
        device = kind if kind in devices_of(DEFAULTS.get(kind)) else "cpu"  # mps has no backend
    if device == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count() if device == kind else 0
    # LOCAL_RANK and the device index both count on this node. If a launcher shows each process only
    # its own device (Slurm: --gpus-per-task=1), the index is 0 in every process.
    index = int(os.environ.get("LOCAL_RANK", 0)) if count > 1 else 0
    if index >= count:
        raise UserError(
            f"needs its own {device} device, but sees {count}: start one rank per device, or "
            "pass --device cpu"
        )
    return torch.device(device, index)


DEFAULTS = dist.Backend.default_device_backend_map  # "cpu" -> "gloo", "cuda" -> "nccl", ...


def devices_of(backend: str | None) -> list[str]:
    """The types of device whose tensors this backend sends."""
    return dist.Backend.backend_capability.get(backend, [])


def choose_backend(name: str | None, kind: str) -> str:
    """The backend: `name` or torch's default, plus one for CPU tensors if it cannot send them."""
    name = name.lower() if name else DEFAULTS[kind]
    if not dist.is_backend_available(name):
        fail(f"--backend {name} is not in this build of torch")
    if ":" in name:  # such as "cpu:gloo,cuda:nccl"
        by_device, devices = name, [part.partition(":")[0] for part in name.split(",")]
    else:
        by_device, devices = f"{kind}:{name}", devices_of(name)
    if kind not in devices:
        fail(f"--backend {name} is for tensors on {' and '.join(devices)}; this job is on {kind}")
    if "cpu" in devices:
        return name
    return f"cpu:{DEFAULTS['cpu']},{by_device}"  # CPU: offloads, objects, short messages


def leave() -> None:
    """Leave the job with all ranks together, and end the group's threads in this process.

    The group's threads end when no object holds the group any more. A thread that still runs when
    Python exits can abort the process: "terminate called without an active exception". With
    torch 2.13 a quarter of the exits under load aborted; with 2.15, which leaves threads, too, none
    of 50 did.
    """
    gc.collect()  # a model is full of reference cycles, and holds the group until they are broken
    for mesh in [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]:
        # DTensor's caches hold meshes for ever, and meshes hold groups. No public call releases
        # them. (If a torch renames this private attribute, vars().get() finds nothing to clear.)
        vars(mesh).get("_pg_registry", {}).clear()
    dist.barrier()  # no rank closes a connection that another rank still reads
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    if group() is not None:
        print(
            "warning: something still holds the process group, which may abort the exit: build the "
            "model in a function that returns before the 'with distributed_worker()' block ends",
            file=sys.stderr,
        )
