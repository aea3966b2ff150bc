"""Build one model and shard it with FSDP1 or FSDP2: the code that all options share."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from model import Block, VisionTransformer
from runtime import Worker
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

LARGE = 10_000  # parameters of a unit, for size_based_auto_wrap_policy; a block has 12,704


@dataclass
class Job:
    """The ranks and meshes for which models are built."""

    worker: Worker
    mesh: DeviceMesh  # one axis with all ranks
    hybrid_mesh: DeviceMesh  # (replicate, shard)

    @property
    def device(self) -> torch.device:
        return self.worker.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def model(self, seed: int = 0) -> VisionTransformer:
        torch.manual_seed(seed)
        return VisionTransformer(dim=32, depth=2).to(self.device)


def make_job(worker: Worker) -> Job:
    """All ranks call this: it makes process groups."""
    has_two_rows = worker.world_size > 2 and worker.world_size % 2 == 0
    rows = 2 if has_two_rows else 1
    shape = (rows, worker.world_size // rows)
    return Job(
        worker,
        init_device_mesh(worker.device.type, (worker.world_size,)),
        init_device_mesh(worker.device.type, shape, mesh_dim_names=("replicate", "shard")),
    )


def fsdp1(job: Job, model: nn.Module, **options) -> FullyShardedDataParallel:
    """Wrap each block and the root with FSDP1; `options` override the defaults."""
    defaults = {
        "auto_wrap_policy": ModuleWrapPolicy({Block}),
        "device_mesh": job.mesh,
        "device_id": job.device,
        "use_orig_params": True,  # parameters keep their names, for the optimizer and for us
    }
    return FullyShardedDataParallel(model, **(defaults | options))


def fsdp2(
    job: Job, model: nn.Module, units: Iterable[nn.Module] | None = None, **options
) -> nn.Module:
    """Shard each block (or each of `units`) and the root; `options` are those of fully_shard."""
    options = {"mesh": job.mesh} | options
    for module in model.blocks if units is None else units:
        fully_shard(module, **options)
    return fully_shard(model, **options)


def frozen_position(job: Job) -> VisionTransformer:
    model = job.model()
    model.position.requires_grad_(False)
    return model


def large_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that size_based_auto_wrap_policy wraps: no lists, at least LARGE parameters."""
    found = []
    for module in model.modules():
        size = sum(p.numel() for p in module.parameters())
        if module is not model and not isinstance(module, nn.ModuleList) and size >= LARGE:
            found.append(module)
    return found
