"""Check that ranks which hold the same numbers still hold the same, and average their buffers.

Ranks drift apart without an error: a loss computed past the DDP wrapper, a layer that was unfrozen
after wrapping, a seed. The losses go on looking right. A checksum at each logged step tells.
"""

import zlib

import torch
import torch.distributed as dist
from arguments import UserError
from runtime import Worker
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def check_replicas(model: nn.Module, step: int, worker: Worker) -> None:
    """All ranks call this. Compare parameters and buffers with those of the ranks that hold a copy.

    A plain tensor is the same on every rank that has one of its name; a DTensor's local tensor is
    the same on the ranks that hold the same shard. What is sent is one checksum per kind of shard,
    about 64 bytes; only if they differ, one per tensor.
    Raises `UserError` on all ranks, naming the step, a rank and the first tensor that differs.
    """
    own = checksums(model)  # {shard: {name: checksum}}
    digests = {
        (shard, digest(names.keys())): digest(names.values()) for shard, names in own.items()
    }
    if not differing(gather(digests, worker)):
        return
    named = {(shard, name): value for shard, names in own.items() for name, value in names.items()}
    rank, other, (_, name) = differing(gather(named, worker))
    raise UserError(
        f"step {step}: ranks {other} and {rank} no longer hold the same numbers, first in {name}: "
        "a parameter that takes no part (DDP: --find-unused-parameters), a loss computed past the "
        "wrapper, a parameter changed or unfrozen after wrapping, or a seed; checkpoints from "
        "before are as they were"
    )


def checksums(model: nn.Module) -> dict[tuple, dict[str, int]]:
    """{which shard of a tensor this rank holds; () if all of it: {name: checksum}}."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    # One transfer from the device for all of them.
    values = torch.stack([checksum(t) for t in tensors.values()]).tolist() if tensors else []
    found = {}
    for (name, tensor), value in zip(tensors.items(), values, strict=True):
        found.setdefault(shard_of(tensor), {})[name] = value
    return found


def checksum(tensor: Tensor) -> Tensor:
    """The sum of the bit patterns of what this rank holds of `tensor`: 0-d, int64, it wraps around.

    Any strides, any dtype, any number of elements; two NaNs of the same bits are equal.
    """
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    return local.view(INTEGERS[local.element_size()]).sum(dtype=torch.int64)


def shard_of(tensor: Tensor) -> tuple:
    """This rank's coordinates on the mesh axes over which `tensor` is sharded; () if on none."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    axes = mesh.mesh_dim_names or range(mesh.ndim)
    coordinates = zip(axes, mesh.get_coordinate(), tensor.placements, strict=True)
    return tuple((axis, at) for axis, at, placement in coordinates if not placement.is_replicate())


def digest(values) -> int:
    return zlib.crc32(repr(list(values)).encode())


def gather(own: dict, worker: Worker) -> list[dict]:
    by_rank = [None] * worker.world_size
    dist.all_gather_object(by_rank, own)
    return by_rank


def differing(by_rank: list[dict]) -> tuple | None:
    """(a rank, a lower rank that it differs from, in which key): the first key; None if none."""
    first = {}  # key -> (the lowest rank that has it, its value)
    found = []
    for rank, values in enumerate(by_rank):
        for place, (key, value) in enumerate(values.items()):
            other, expected = first.setdefault(key, (rank, value))
            if value != expected:
                found.append((place, rank, other, key))
    return min(found)[1:] if found else None


def average_buffers(model: nn.Module) -> None:
    """All ranks call this, before the model is evaluated or saved.

    BatchNorm's running statistics, for example, are those of a rank's own batches. Afterwards every
    rank has their mean. As an update of them is linear, it does not matter how often this is done.
    Integer buffers are left alone: `check_replicas` names one that differs.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
    if not buffers or dist.get_world_size() == 1:
        return
    # In float64 the mean of equal numbers is that number. One message for all buffers.
    flat = torch.cat([b.detach().flatten().double() for b in buffers])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.detach().copy_(values.view(buffer.shape))
