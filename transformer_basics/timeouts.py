"""How long a rank waits for another rank before it ends the job with an error."""

from datetime import timedelta

import torch.distributed as dist
from context_parallel import fsdp_mesh
from torch.distributed.device_mesh import DeviceMesh


def set_timeout(seconds: float, mesh: DeviceMesh) -> None:
    """Set the time-out of the default group and of the groups of `mesh`; each rank calls this.

    Before torch 2.15, groups of a mesh keep 30 minutes, and this does nothing.
    """
    if hasattr(dist, "set_timeout"):
        groups = [*mesh.get_all_groups(), *fsdp_mesh(mesh).get_all_groups()]
        for group in (dist.group.WORLD, *groups):
            dist.set_timeout(timedelta(seconds=seconds), group)


def shorten_timeout(seconds: float, mesh: DeviceMesh) -> None:
    """All ranks call this after their first step, which compiles and allocates: later steps don't.

    The ranks wait for each other first: one that is still in its first step has the longer time.
    """
    dist.barrier()
    set_timeout(seconds, mesh)
