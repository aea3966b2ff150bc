"""Count the collectives of a step by the axis of the mesh on which they run.

with CountByAxis(mesh) as sent:
    train_step(...)
calls, nbytes = sent.over("tp")
"""

from collections import Counter

import torch
import torch.distributed as dist
from context_parallel import fsdp_mesh
from counting import operation_of, ring_bytes, total_bytes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # sees the collectives of C++ code too


class CountByAxis(TorchDispatchMode):
    """(axis, operation) -> this rank's calls in the axis' group, and bytes of the full tensors.

    With context parallelism, FSDP's axis is "dp_shard_cp": dp_shard and cp flattened.
    """

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.calls, self.nbytes = Counter(), Counter()
        meshes = [mesh, fsdp_mesh(mesh)] if "cp" in mesh.mesh_dim_names else [mesh]
        groups = {axis: each.get_group(axis) for each in meshes for axis in each.mesh_dim_names}
        self.axes = {group.group_name: axis for axis, group in groups.items()}
        self.sizes = {axis: group.size() for axis, group in groups.items()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor run first: it calls the collectives that it needs
        result = function(*args, **(kwargs or {}))
        is_send = function.namespace == "c10d" and function.overloadpacket.__name__ == "send"
        if operation := "send" if is_send else operation_of(function):
            axis = self.axes.get(group_name(args), "all ranks")
            if axis == "dp_shard_cp" and operation == "send":
                axis = "cp"  # one group, if cp has all ranks; FSDP sends no messages
            key = axis, operation
            nbytes = max(map(total_bytes, (*args[:2], result)))
            if nbytes > 8:  # leave out the gradient norm: a sum of one number over all ranks
                self.calls[key] += 1
                self.nbytes[key] += nbytes
        return result

    def over(self, axis: str) -> tuple[int, int]:
        """Calls on this axis, and bytes that a rank sends if the collectives are rings."""
        ranks, calls, sent = self.sizes[axis], 0, 0.0
        for (where, operation), nbytes in self.nbytes.items():
            if where == axis and ranks > 1:
                calls += self.calls[where, operation]
                sent += nbytes if operation == "send" else ring_bytes(operation, nbytes, ranks)
        return calls, round(sent)


def group_name(args) -> str:
    """The name of the group: DTensor's collectives get the name, dist's get the group itself."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value).group_name
    return next(value for value in reversed(args) if isinstance(value, str))
