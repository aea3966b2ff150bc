"""Memory of the whole process: its resident memory (RSS), or on a GPU the allocator's bytes.

RSS shows what sharding saves only if freed memory goes back to the system. By default malloc keeps
much of it for later, so RSS stays high: see `return_freed_memory`.
"""

import ctypes
import re
import sys
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>


def return_freed_memory() -> None:
    """Make malloc return freed pieces of 128 KB or more to the system at once (Linux).

    MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072 in the environment do the same.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc has it; other C libraries do not
        library.mallopt(M_MMAP_THRESHOLD, 128 << 10)
        library.mallopt(M_TRIM_THRESHOLD, 128 << 10)


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return process_status("VmRSS")


def reset_peak(device: torch.device) -> None:
    """Restart the measurement of `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to the current VmRSS


def peak_memory(device: torch.device) -> int:
    """The most bytes that were in use since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_status("VmHWM")


def process_status(name: str) -> int:
    """A value of /proc/self/status (Linux), in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", text)[1])
