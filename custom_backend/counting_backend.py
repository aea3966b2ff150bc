"""Count every collective of a training script: bytes, time, the line that called it.

    torchrun --standalone --nproc_per_node=2 custom_backend/counting_backend.py your_train.py ...
    torchrun ... custom_backend/counting_backend.py --trace runs/trace your_train.py ...

The script does not change; Gloo and NCCL still move the bytes. At the end rank 0 prints a table,
and --trace writes one timeline of all ranks, which you open in https://ui.perfetto.dev. In your own
script, write instead:

    import counting_backend
    dist.init_process_group("counting")    # COUNT_BACKEND=gloo or nccl, COUNT_TRACE=runs/trace

A script that selects its GPU before that line (torch.cuda.set_device) gets Gloo and NCCL.

Look at the rows with many calls of few bytes, and at the rank with the least time until done: all
other ranks waited for it.
"""

import atexit
import os
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from call_log import CallLog
from run_script import run_script

log = CallLog()
if torch.__version__ < "2.14":  # older versions call other methods of a group
    raise ImportError(f"counting_backend.py needs torch 2.14 or newer, this is {torch.__version__}")


def main() -> None:
    args = parse_args()
    if args.trace:
        os.environ["COUNT_TRACE"] = str(args.trace)
    count_every_group()
    try:
        run_script(args.script, args.arguments)
    except SystemExit as end:  # sys.exit() and sys.exit(0) are no failure
        if end.code:
            raise
    log.report()  # not in a "finally": after an exception, the other ranks may never get here


class CountingGroup(dist.ProcessGroup):
    """A process group that records each call, and forwards it to a plain process group.

    The loop below adds its operations. torch calls them from Python, and also from C++, which looks
    for overrides in Python: the all_reduce of DDP, and the collectives of DTensor.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        super().__init__(store, rank, size)
        self.store, self.calls = store, 0
        log.join(store, rank, size)  # the first group is the whole job

    @cached_property  # created at the first call, when the group has its backends
    def plain(self) -> dist.ProcessGroup:
        # Why not super()? An inherited method, called from its override, holds the GIL while it is
        # in C++. A thread of Gloo may need the GIL at that moment, and the job hangs.
        return with_backends_of(self, dist.ProcessGroup(self.store, self.rank(), self.size()))

    def split_group(self, *args, **kwargs):
        part = self.plain.split_group(*args, **kwargs)
        if part is None:
            return None  # this rank is in none of the new groups
        return with_backends_of(
            part, CountingGroup(part.get_group_store(), part.rank(), part.size())
        )


def counted(method: str, operation: str, given: int | None, got: int | None):
    """A method of CountingGroup that times and forwards a call to the plain group."""

    def call_and_count(self, *args, **kwargs):
        self.calls += 1
        call = log.begin(operation, f"{self.group_name} {self.calls}")
        work = getattr(self.plain, method)(*args, **kwargs)
        log.launched(call, [*args, *kwargs.values()], given, got, work)
        return work and CountingWork(work, call)

    return call_and_count


class CountingWork(dist.Work):
    """The handle of a running operation; times wait()."""

    def __init__(self, work: dist.Work, call):
        super().__init__()
        self.work, self.call = work, call

    def wait(self, *timeout):
        started = log.clock()
        try:
            return self.work.wait(*timeout)
        finally:
            log.waited(self.call, started)

    def get_future(self):
        return self.work.get_future()


def passed_on(name: str):
    return lambda self, *args: getattr(self.work, name)(*args)


for name, member in vars(dist.Work).items():  # is_completed, result, source_rank ...
    if callable(member) and not name.startswith("__") and name not in vars(CountingWork):
        setattr(CountingWork, name, passed_on(name))


# Method of a process group -> (name in torch.distributed; index of the argument with the input of
# this rank; index of the argument with its output). An all_reduce has one tensor for both.
OPERATIONS = {
    "allreduce": ("all_reduce", 0, 0),
    "allreduce_coalesced": ("all_reduce, coalesced", 0, 0),
    "broadcast": ("broadcast", 0, 0),
    "reduce": ("reduce", 0, 0),
    "allgather": ("all_gather", 1, 0),
    "allgather_coalesced": ("all_gather, coalesced", 1, 0),
    "all_gather_single": ("all_gather_single", 1, 0),
    "all_gather_single_coalesced": ("all_gather_single, coalesced", 1, 0),
    "reduce_scatter": ("reduce_scatter", 1, 0),
    "reduce_scatter_single": ("reduce_scatter_single", 1, 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single, coalesced", 1, 0),
    "alltoall": ("all_to_all", 1, 0),
    "all_to_all_single": ("all_to_all_single", 1, 0),
    "gather": ("gather", 1, 0),
    "gather_single": ("gather_single", 1, 0),
    "scatter": ("scatter", 1, 0),
    "send": ("send", 0, None),
    "recv": ("recv", None, 0),
    "recv_anysource": ("recv from any", None, 0),
    "barrier": ("barrier", None, None),
    "monitored_barrier": ("monitored_barrier", None, None),
}
for method, (operation, given, got) in OPERATIONS.items():
    if hasattr(dist.ProcessGroup, method):
        setattr(CountingGroup, method, counted(method, operation, given, got))

# Two ways to get a CountingGroup. The first: a backend named "counting".


def make_group(store, rank: int, size: int, timeout: timedelta) -> CountingGroup:
    """init_process_group("counting") calls this, and each new_group() after it."""
    atexit.register(log.report)  # report() prints once
    group = CountingGroup(store, rank, size)
    # Not is_available(): a CPU job on a machine with GPUs would send its barriers by NCCL.
    on_gpu = torch.cuda.is_initialized()
    for name in os.environ.get("COUNT_BACKEND", "gloo,nccl" if on_gpu else "gloo").split(","):
        if name == "gloo":
            backend = dist.ProcessGroupGloo(store, rank, size, timeout)
            serve(group, torch.device("cpu"), backend)
        elif name == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout  # private
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
            serve(group, torch.device("cuda"), backend)
        else:
            raise ValueError(f"COUNT_BACKEND must be gloo, nccl or gloo,nccl, not {name}")
    return group


dist.Backend.register_backend("counting", make_group, devices=["cpu", "cuda"])

# The second: replace all groups of a script that does not know this file.


def count_every_group() -> None:
    """From now on torch makes a CountingGroup wherever it would make a ProcessGroup.

    The group has the backends that the script names, so get_backend() still returns "gloo".
    """
    dist.distributed_c10d.ProcessGroup = CountingGroup


def with_backends_of(group: dist.ProcessGroup, other: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return `other` with the name and the backends of `group`."""
    # Private names, here and below: new_group() does this, and torch has no public way.
    other._set_group_name(group.group_name)
    other._set_group_desc(group.group_desc)  # private
    other.bound_device_id = group.bound_device_id
    for device in group._device_types:  # private
        serve(other, device, group._get_backend(device))  # torch 2.15 has get_backend
    other._set_default_backend(kind_of(group.name()))  # private; it runs barriers
    return other


def serve(group: dist.ProcessGroup, device: torch.device, backend) -> None:
    """Let `backend` run the operations of `group` on tensors of `device`."""
    group._register_backend(device, kind_of(backend.name()), backend)  # private
    group._set_default_backend(kind_of(backend.name()))  # private


def kind_of(backend: str) -> dist.ProcessGroup.BackendType:
    return dist.Backend.backend_type_map.get(backend, dist.ProcessGroup.BackendType.CUSTOM)


def parse_args():
    from arguments import ArgumentParser  # a script that imports this file does not need it

    parser = ArgumentParser(description="Run a script, and count its collectives.")
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        metavar="DIR",
        help="write a timeline for Perfetto to DIR/timeline.json",
    )
    add("script", type=Path, help="script that calls init_process_group")
    add("arguments", nargs="...", help="arguments of the script")
    args = parser.parse_args()
    if not args.script.is_file():
        parser.error(f"there is no script {args.script}")
    parser.make_folder("--trace", args.trace)
    return args


if __name__ == "__main__":
    main()
