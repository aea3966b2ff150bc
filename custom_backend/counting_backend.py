"""A backend that counts: every collective of a training script, who asked for it, how long it took.

    torchrun --standalone --nproc_per_node=2 custom_backend/counting_backend.py your_train.py ...
    torchrun ... custom_backend/counting_backend.py --trace runs/trace your_train.py ...

The script stays as it is; Gloo and NCCL still move the bytes. At the end rank 0 prints a table, and
--trace writes one timeline of all ranks, to be opened in https://ui.perfetto.dev. In a script of
your own, instead:

    import counting_backend
    dist.init_process_group("counting")    # COUNT_BACKEND=gloo or nccl, COUNT_TRACE=runs/trace

A script that has chosen its GPU before that line (torch.cuda.set_device) gets Gloo and NCCL.

Look at the rows with many calls of few bytes, and at the rank that is done first: the others were
waiting for it.
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
if torch.__version__ < "2.14":  # operations have other names there, and a group other duties
    raise ImportError(f"counting_backend.py needs torch 2.14 or newer, this is {torch.__version__}")


def main() -> None:
    args = parse_args()
    if args.trace:
        os.environ["COUNT_TRACE"] = str(args.trace)
    count_every_group()
    run_script(args.script, args.arguments)
    log.report()  # not in a "finally": after an exception, the other ranks may never get here


class CountingGroup(dist.ProcessGroup):
    """A process group that writes down what it is asked to do, and lets a plain one do it.

    Its operations are added below. torch calls them from Python and, because ProcessGroup is made
    to be inherited from, also from C++: DDP's all_reduce, and the collectives of DTensor.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        super().__init__(store, rank, size)
        self.store, self.calls = store, 0
        log.join(store, rank, size)  # the first group is the whole job's

    @cached_property  # made at the first call: by then the group has its backends
    def plain(self) -> dist.ProcessGroup:
        # Why not inherit? An inherited method, called from its override, keeps Python's lock while
        # it is in C++, where Gloo's threads may want it, too: jobs hang.
        return with_backends_of(self, dist.ProcessGroup(self.store, self.rank(), self.size()))

    def split_group(self, *args, **kwargs):
        part = self.plain.split_group(*args, **kwargs)
        if part is None:
            return None  # this rank is in no part
        return with_backends_of(
            part, CountingGroup(part.get_group_store(), part.rank(), part.size())
        )


def counted(method: str, operation: str, given: int | None, got: int | None):
    """A method of CountingGroup: calls that of the plain group, between two looks at the clock."""

    def call_and_count(self, *args, **kwargs):
        self.calls += 1
        call = log.begin(operation, f"{self.group_name} {self.calls}")
        work = getattr(self.plain, method)(*args, **kwargs)
        log.launched(call, [*args, *kwargs.values()], given, got, work)
        return work and CountingWork(work, call)

    return call_and_count


class CountingWork(dist.Work):
    """The handle of an operation under way, with a stop-watch in wait()."""

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


# Methods of a process group -> (what torch.distributed calls the operation; which argument holds
# what this rank gives; which one what it gets). In an all_reduce that is the same tensor.
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
OLD_NAMES = {  # up to torch 2.13
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
for method, (operation, given, got) in OPERATIONS.items():
    if not hasattr(dist.ProcessGroup, method):
        method = OLD_NAMES.get(method, method)
    if hasattr(dist.ProcessGroup, method):
        setattr(CountingGroup, method, counted(method, operation, given, got))

# Two ways to have such a group. The first: a backend with a name of its own.


def make_group(store, rank: int, size: int, timeout: timedelta) -> CountingGroup:
    """What init_process_group("counting") calls, and new_group() after it."""
    atexit.register(log.report)  # it reports once
    group = CountingGroup(store, rank, size)
    # Not is_available(): a job on the CPUs of a machine with GPUs would send barriers by NCCL.
    on_gpu = torch.cuda.is_initialized()
    for name in os.environ.get("COUNT_BACKEND", "gloo,nccl" if on_gpu else "gloo").split(","):
        if name == "gloo":
            backend = dist.ProcessGroupGloo(store, rank, size, timeout)
            serve(group, torch.device("cpu"), backend)
        elif name == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
            serve(group, torch.device("cuda"), backend)
        else:
            raise ValueError(f"COUNT_BACKEND must be gloo, nccl or gloo,nccl, not {name}")
    return group


dist.Backend.register_backend("counting", make_group, devices=["cpu", "cuda"])

# The second: all groups of a script that has never heard of this file.


def count_every_group() -> None:
    """From now on torch makes a CountingGroup wherever it would make a ProcessGroup.

    It gives it the backends that the script has named; so get_backend() says "gloo", as before.
    """
    dist.distributed_c10d.ProcessGroup = CountingGroup


def with_backends_of(group: dist.ProcessGroup, other: dist.ProcessGroup) -> dist.ProcessGroup:
    """`other`, made the same group as `group`: both pass on to the same backends."""
    # Private names, here and below: what torch does in new_group, and offers to nobody else.
    other._set_group_name(group.group_name)
    other._set_group_desc(group.group_desc)  # private
    other.bound_device_id = group.bound_device_id
    for device in group._device_types:  # private
        serve(other, device, group._get_backend(device))  # torch 2.15 has get_backend
    other._set_default_backend(kind_of(group.name()))  # private; it carries barriers
    return other


def serve(group: dist.ProcessGroup, device: torch.device, backend) -> None:
    """Let `backend` carry what `group` is asked to do with tensors on `device`."""
    group._register_backend(device, kind_of(backend.name()), backend)  # private
    group._set_default_backend(kind_of(backend.name()))  # private


def kind_of(backend: str) -> dist.ProcessGroup.BackendType:
    return dist.Backend.backend_type_map.get(backend, dist.ProcessGroup.BackendType.CUSTOM)


def parse_args():
    from arguments import ArgumentParser  # not needed by those who import this file

    parser = ArgumentParser(description="Run a script, and count what it sends.")
    add = parser.add_argument
    add("--trace", type=Path, metavar="DIR", help="write DIR/timeline.json, for Perfetto")
    add("script", type=Path, help="a program that calls init_process_group")
    add("arguments", nargs="...", help="its arguments")
    args = parser.parse_args()
    if not args.script.is_file():
        parser.error(f"there is no script {args.script}")
    parser.make_folder("--trace", args.trace)
    return args


if __name__ == "__main__":
    main()
