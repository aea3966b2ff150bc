"""Check with checksums that replicas are still equal, and average their buffers.

Replicas can drift apart without an error, because of a loss computed past the DDP wrapper, a layer
unfrozen after wrapping, or different seeds. The losses still look right. A checksum at each logged
step finds the difference.
"""

import zlib

import torch
import torch.distributed as dist
from arguments import UserError
from runtime import Worker
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def check_replicas(model: nn.Module, step: int, worker: Worker) -> None:
    """All ranks call this. Raise `UserError` if copies of a parameter or buffer are not equal.

    A plain tensor must be equal on all ranks that have one of its name, a DTensor's local tensor on
    all ranks that hold the same shard. Each rank sends one checksum per kind of shard and outermost
    module, about 64 bytes, and only if these differ one checksum per tensor. (By module, because
    two stages of a pipeline can have copies of one module, a tied embedding.)
    All ranks raise the error. It names the step, a rank and the first tensor that differs.
    """
    own = checksums(model)  # {shard: {name: checksum}}
    modules = {}
    for shard, values in own.items():
        for name, value in values.items():
            modules.setdefault((shard, name.partition(".")[0]), {})[name] = value
    digests = {
        (*place, digest(values.keys())): digest(values.values())
        for place, values in modules.items()
    }
    if not differing(gather(digests, worker)):
        return
    named = {(shard, name): value for shard, names in own.items() for name, value in names.items()}
    rank, other, (_, name) = differing(gather(named, worker))
    why = (
        "a parameter that takes no part (DDP: --find-unused-parameters), a loss computed past the "
        "wrapper, a parameter changed or unfrozen after wrapping, or a seed"
    )
    if name in dict(model.named_buffers()):
        why = "a buffer that follows a rank's own batches: all-reduce it where it changes"
    raise UserError(
        f"step {step}: ranks {other} and {rank} hold different numbers, first in {name}: {why}; "
        "checkpoints from before are as they were"
    )


class GradientLog:
    """Which parameters had a gradient in each step: these must be the same on all ranks.

    Else FSDP adds up gradients of different parameters. Shards are no replicas, so no later
    checksum shows it. `note` waits neither for the device nor for another rank; `check` compares
    all steps since the last check. A step is seen when it is over: micro-batches of --accumulate
    that differ are not noticed if all of them together have used the same parameters.
    """

    def __init__(self, model: nn.Module):
        self.model, self.steps = model, {}

    def note(self, step: int) -> None:
        """Call this after each step, before gradients are set to None."""
        self.steps[step] = bytes(p.grad is not None for p in self.model.parameters())

    def check(self, worker: Worker) -> None:
        """All ranks call this. Raise `UserError` with the first step and parameter that differ."""
        names = [name for name, _ in self.model.named_parameters()]
        place = digest(names)  # the stages of a pipeline have other parameters
        if differing(gather({place: digest(self.steps.items())}, worker)):
            by_step = {(place, step): digest(have) for step, have in self.steps.items()}
            _, _, (_, step) = differing(gather(by_step, worker))
            have = dict(zip(names, self.steps[step], strict=True))
            rank, other, name = differing(gather(have, worker))
            raise UserError(
                f"step {step}: ranks {other} and {rank} have gradients for different parameters, "
                f"first {name}: FSDP then adds up gradients of different parameters. Use all of "
                "them on all ranks: for one that a batch leaves out, add 0 * parameter.sum() to "
                "the output of its unit, in forward"
            )
        self.steps = {}


def checksums(model: nn.Module) -> dict[tuple, dict[str, int]]:
    """{shard: {name: checksum}} of this rank; see `shard_of`."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    # One transfer from the device for all checksums.
    values = [checksum(t) for t in tensors.values()]
    # (Offloaded parameters are on the CPU, and buffers are not.)
    values = torch.stack([v.to(values[-1].device) for v in values]).tolist() if values else []
    found = {}
    for (name, tensor), value in zip(tensors.items(), values, strict=True):
        found.setdefault(shard_of(tensor), {})[name] = value
    return found


def checksum(tensor: Tensor) -> Tensor:
    """The sum of the bit patterns of this rank's shard of `tensor`: a 0-d int64 that wraps around.

    It takes any strides, dtype and size; two NaNs with the same bits are equal.
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
    """(rank, a lower rank that it differs from, the first key that differs); None if none does."""
    first = {}  # key -> (the lowest rank that has it, its value)
    found = []
    for rank, values in enumerate(by_rank):
        for place, (key, value) in enumerate(values.items()):
            other, expected = first.setdefault(key, (rank, value))
            if value != expected:
                found.append((place, rank, other, key))
    return min(found)[1:] if found else None


def average_buffers(model: nn.Module) -> None:
    """All ranks call this before they evaluate or save the model.

    BatchNorm's running statistics, for example, differ between ranks; afterwards every rank has
    their mean. Their update is linear, so it does not matter how often you average them.
    Integer buffers are not averaged, and none if one has grown on some ranks only: `check_replicas`
    names one that differs.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if not buffers or dist.get_world_size() == 1:
        return
    shapes = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, [b.shape for b in buffers])
    if shapes != shapes[:1] * len(shapes):
        return
    # In float64 the mean of equal float32 numbers is exactly that number; of equal float64 numbers
    # it may be off by one rounding. One message for all buffers.
    flat = torch.cat([b.detach().flatten().double() for b in buffers])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.detach().copy_(values.view(buffer.shape))
