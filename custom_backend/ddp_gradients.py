"""The gradients of DistributedDataParallel on a new backend, compared with those on Gloo."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def difference_from_gloo() -> float:
    """All ranks call this: the largest difference on this rank; it makes a Gloo group.

    The default group is on the backend to compare.
    """
    own = gradients_of_ddp(dist.group.WORLD)
    on_gloo = gradients_of_ddp(dist.new_group(backend="gloo"))
    return max((a - b).abs().max().item() for a, b in zip(own, on_gloo, strict=True))


def gradients_of_ddp(group: dist.ProcessGroup) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model = DistributedDataParallel(model, process_group=group)
    torch.manual_seed(dist.get_rank())  # different data on each rank
    model(torch.randn(4, 8)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]
