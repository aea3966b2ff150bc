"""CollectiveCalls: count the collectives inside a `with` block, and the bytes of their tensors.

with CollectiveCalls() as calls:
    loss.backward()
calls.count, calls.bytes      # Counters: name of the collective -> calls, bytes
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # sees the collectives of C++ code too

NAMES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "scatter", "gather", "barrier")


class CollectiveCalls(TorchDispatchMode):
    """The bytes are those of full tensors: an all_gather's output, a reduce_scatter's input."""

    def __init__(self):
        super().__init__()
        self.count, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        # dist and FSDP call c10d; DTensors call c10d_functional.
        if "c10d" in function.namespace and not name.startswith(("wait", "_wrap")):
            name = plain_name(name)
            self.count[name] += 1
            self.bytes[name] += max(total_bytes(tensors) for tensors in (result, *args[:2]))
        return result


def plain_name(name: str) -> str:
    """The name in NAMES: all_gather for _allgather_base_, all_gather_into_tensor, and so on."""
    letters = name.replace("_", "")
    return next((n for n in NAMES if letters.startswith(n.replace("_", ""))), name)


def total_bytes(tensors) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    if isinstance(tensors, list | tuple):
        return sum(total_bytes(item) for item in tensors)
    return 0
