"""Record one dist.all_reduce in every layer that it passes.

the interpreter's profiling hook   the calls of Python functions, and of C++ from Python
a TorchDispatchMode                the operators that pass the dispatcher of torch
torch's profiler                   the backend's own event
the future of the Work             which thread completes the operation
the kernel's counters              bytes per TCP connection
"""

import inspect
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from sequence import Message, now
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode  # sees the operators, also C++'s calls
from traffic import by_peer, traffic

ALL_REDUCE = inspect.unwrap(dist.all_reduce).__code__  # without its decorator, which logs errors
FILE = Path(ALL_REDUCE.co_filename).name
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no warnings of the profiler that there is no GPU


def watch_all_reduce(tensor: torch.Tensor, store: dist.Store) -> list[Message]:
    """All-reduce `tensor`, and return the recorded messages between the layers. A collective.

    All other ranks wait at `store` until rank 0 has set its callback: a callback that is added to a
    completed future does not run in the thread that completed it. So pass a new store, or a new
    PrefixStore, to each call.
    """
    messages: list[Message] = []
    owners, before = owners_of_connections(), traffic()
    done = threading.Event()
    pid = os.getpid()

    def on_done(_) -> None:  # runs in the thread that completes the operation
        thread = Path(f"/proc/{pid}/task/{threading.get_native_id()}/comm").read_text().strip()
        messages.append(now(f"thread {thread}", "Future", "done"))
        done.set()

    with profile(activities=[ProfilerActivity.CPU]) as profiler, Operators(messages):
        mark = time.perf_counter()
        with record_function("mark"):
            pass
        if dist.get_rank() != 0:
            store.wait(["rank 0 listens"])
        sys.setprofile(calls_into(messages))
        work = dist.all_reduce(tensor, async_op=True)
        work.get_future().add_done_callback(on_done)
        if dist.get_rank() == 0:
            store.set("rank 0 listens", "")
        work.wait()
        sys.setprofile(None)
        done.wait(60)
    after = traffic()
    # The clock of the profiler is off by up to 50 us; the operator calls the backend.
    begin, back = (m.at for m in messages if "dispatcher" in (m.sender, m.receiver))
    for message in seen_by_profiler(profiler, mark, tensor.device):
        messages.append(replace(message, at=min(max(message.at, begin), back)))
    end = max(messages, key=lambda message: message.at)
    thread = next(message.sender for message in messages if message.receiver == "Future")
    for peer, (sent, received) in sorted(by_peer(before, after, owners).items()):
        # The counters tell how many bytes were sent, not when: list them last.
        messages.append(Message(end.at, thread, peer, f"{sent:,} bytes, in total"))
        messages.append(Message(end.at, peer, thread, f"{received:,} bytes, in total"))
    return messages


def calls_into(messages: list[Message]):
    """A function for sys.setprofile, which reports calls in Python, and from Python to C++."""

    def on_event(frame, event: str, builtin) -> None:
        if frame.f_code is ALL_REDUCE and event == "call":
            messages.append(now("script", FILE, f"all_reduce(), line {frame.f_lineno}"))
        elif frame.f_code is ALL_REDUCE and event == "return":
            messages.append(now(FILE, "script", "Work"))
        elif event == "c_call" and builtin.__name__ == "allreduce":
            messages.append(now(FILE, "ProcessGroup", "allreduce()"))
        elif event == "c_call" and builtin.__name__ == "get_future":
            messages.append(now("script", "Work", "get_future()"))
        elif event == "c_call" and builtin.__name__ == "wait":
            messages.append(now("script", "Work", "wait()"))
        elif event == "c_return" and builtin.__name__ == "wait":
            messages.append(now("Work", "script", "wait() returns"))

    return on_event


class Operators(TorchDispatchMode):
    """Records the calls and returns of c10d operators in the dispatcher."""

    def __init__(self, messages: list[Message]):
        super().__init__()
        self.messages = messages

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "c10d":
            return function(*args, **(kwargs or {}))
        self.messages.append(now("ProcessGroup", "dispatcher", str(function)))
        result = function(*args, **(kwargs or {}))
        self.messages.append(now("dispatcher", "ProcessGroup", "tensors, Work"))
        return result


def seen_by_profiler(profiler, mark: float, device: torch.device) -> list[Message]:
    """The backend's event, from its call to its completion. `mark` was read from both clocks."""
    events = list(profiler.events())
    zero = next(event for event in events if event.name == "mark").time_range.start
    return [
        Message(
            mark + 1e-6 * (event.time_range.start - zero),
            "dispatcher",
            type(backend_of(device)).__name__,
            event.name,
            1e-6 * (event.time_range.end - event.time_range.start),
        )
        for event in events
        if event.name.startswith(("gloo:", "nccl:"))
    ]


def owners_of_connections() -> dict[tuple, str]:
    """Address of one end of a TCP connection -> the rank that owns it. A collective."""
    ends = [None] * dist.get_world_size()
    dist.all_gather_object(ends, [mine for mine, _ in traffic()])
    return {end: f"rank {rank}" for rank, all_ends in enumerate(ends) for end in all_ends}


def backend_of(device: torch.device):
    return dist.group.WORLD._get_backend(device)  # private; torch 2.15 has get_backend


def print_objects(device: torch.device) -> None:
    """Print the objects and the kernel that took part."""
    group, operator = dist.group.WORLD, "c10d::allreduce_"
    key = device.type.upper()
    # Private, but only the dispatcher knows the kernel of a key.
    table = torch._C._dispatch_dump_table(operator).splitlines()
    kernel = next(line for line in table if line.startswith(f"{key}:"))
    place = kernel.partition(" at ")[2].partition(" ")[0]
    rows = {
        "the group": f"{type(group).__name__} {group.group_name!r} of {group.size()} rank(s)",
        "the operator": operator,
        "its kernel": f"for the key {key}, from {Path(place).name}",
        f"the backend for {device.type}": type(backend_of(device)).__name__,
    }
    print()
    for name, value in rows.items():
        print(f"{name:24}{value}")
