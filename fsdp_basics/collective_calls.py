"""CollectiveCalls: which collectives start inside a `with` block, and how large their tensors are.

with CollectiveCalls() as calls:
    loss.backward()
calls.count, calls.bytes      # Counters: name of the collective -> calls, bytes
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # sees the collectives of C++ code too

NAMES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "scatter", "gather", "barrier")


class CollectiveCalls(TorchDispatchMode):
    """The bytes are those of the full tensor: what an all_gather gives, a reduce_scatter takes."""

    def __init__(self):
        super().__init__()
        self.count, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        # c10d is what dist and FSDP call, c10d_functional what DTensors do.
        if "c10d" in function.namespace and not name.startswith(("wait", "_wrap")):
            name = plain_name(name)
            self.count[name] += 1
            self.bytes[name] += max(total_bytes(tensors) for tensors in (result, *args[:2]))
        return result


def plain_name(name: str) -> str:
    """_allgather_base_, all_gather_into_tensor and so on are all_gather."""
    letters = name.replace("_", "")
    return next((n for n in NAMES if letters.startswith(n.replace("_", ""))), name)


def total_bytes(tensors) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    if isinstance(tensors, list | tuple):
        return sum(total_bytes(item) for item in tensors)
    return 0
