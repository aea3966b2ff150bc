"""Each option of FullyShardedDataParallel (FSDP1), next to its successor in FSDP2.

Look up an option like a word in a dictionary. Each function builds one model twice: `old` with
FSDP1, and `new` with fully_shard. fsdp1_models.py has the code that they share. fsdp1_to_fsdp2.py
runs and compares all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from fsdp1_models import LARGE, Job, frozen_position, fsdp1, fsdp2, large_modules
from materialize import materialize
from model import Block, VisionTransformer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
)
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Option:
    name: str  # in FSDP1
    successor: str
    build: Callable[[Job], tuple[nn.Module | None, nn.Module]]  # (old, new)
    gpu_only: bool  # True: FSDP1 has it on GPUs only; on CPUs its FULL_SHARD is compared
    offloads: bool  # True: parameters and gradients are in CPU memory
    accumulate: int  # backward passes per step
    clip: bool


OPTIONS: list[Option] = []


def option(
    name: str,
    successor: str,
    gpu_only: bool = False,
    offloads: bool = False,
    accumulate: int = 1,
    clip: bool = False,
) -> Callable:
    """Put the function below into OPTIONS."""

    def add(build: Callable) -> Callable:
        OPTIONS.append(Option(name, successor, build, gpu_only, offloads, accumulate, clip))
        return build

    return add


# ---- how much is sharded


@option("FULL_SHARD", "reshard_after_forward=True")
def full_shard(job: Job):
    old = fsdp1(job, job.model(), sharding_strategy=ShardingStrategy.FULL_SHARD)
    new = fsdp2(job, job.model(), reshard_after_forward=True)
    return old, new


@option("SHARD_GRAD_OP", "reshard_after_forward=False")
def shard_grad_op(job: Job):
    old = fsdp1(job, job.model(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    new = fsdp2(job, job.model(), reshard_after_forward=False)
    return old, new


@option("NO_SHARD", "DistributedDataParallel")
def no_shard(job: Job):
    old = None  # not run: FSDP1 never frees such a model, nor the process group that it holds
    new = DistributedDataParallel(job.model(), device_ids=[job.device] if job.on_gpu else None)
    return old, new


@option("HYBRID_SHARD", "a mesh (replicate, shard)")
def hybrid_shard(job: Job):
    strategy = ShardingStrategy.HYBRID_SHARD
    old = fsdp1(job, job.model(), sharding_strategy=strategy, device_mesh=job.hybrid_mesh)
    new = fsdp2(job, job.model(), mesh=job.hybrid_mesh)
    return old, new


@option("_HYBRID_SHARD_ZERO2", "the same, reshard_after_forward=False")
def hybrid_shard_zero2(job: Job):
    strategy = ShardingStrategy._HYBRID_SHARD_ZERO2  # it never got a public name
    old = fsdp1(job, job.model(), sharding_strategy=strategy, device_mesh=job.hybrid_mesh)
    new = fsdp2(job, job.model(), mesh=job.hybrid_mesh, reshard_after_forward=False)
    return old, new


# ---- units: which parameters are gathered together


@option("auto_wrap_policy=None", "fully_shard(model) alone")
def one_unit(job: Job):
    old = fsdp1(job, job.model(), auto_wrap_policy=None)
    new = fully_shard(job.model(), mesh=job.mesh)
    return old, new


@option("ModuleWrapPolicy({Block})", "a loop over the blocks")
def unit_per_block(job: Job):
    old = fsdp1(job, job.model(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    new = job.model()
    for block in new.blocks:
        fully_shard(block, mesh=job.mesh)
    fully_shard(new, mesh=job.mesh)
    return old, new


@option("size_based_auto_wrap_policy", "a loop that counts parameters")
def units_by_size(job: Job):
    policy = partial(size_based_auto_wrap_policy, min_num_params=LARGE)
    old = fsdp1(job, job.model(), auto_wrap_policy=policy)
    new = job.model()
    new = fsdp2(job, new, units=large_modules(new))
    return old, new


@option("CustomPolicy", "a loop with options")
def options_per_unit(job: Job):
    old = job.model()
    first, second = old.blocks

    def policy(module: nn.Module) -> bool | dict:
        if module is first:
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return module is second

    old = fsdp1(job, old, auto_wrap_policy=CustomPolicy(policy))

    new = job.model()
    first, second = new.blocks
    fully_shard(first, mesh=job.mesh, reshard_after_forward=False)
    fully_shard(second, mesh=job.mesh)
    fully_shard(new, mesh=job.mesh)
    return old, new


@option("ignored_states", "ignored_params")
def ignored(job: Job):
    old, new = frozen_position(job), frozen_position(job)
    old = fsdp1(job, old, ignored_states={old.position})
    new = fsdp2(job, new, ignored_params={new.position})
    return old, new


@option("a frozen parameter", "the same")
def frozen(job: Job):
    old = fsdp1(job, frozen_position(job))
    new = fsdp2(job, frozen_position(job))
    return old, new


# ---- precision, offloading, prefetching


@option("MixedPrecision(bf16, fp32)", "MixedPrecisionPolicy(bf16, fp32)")
def mixed_precision(job: Job):
    types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    old = fsdp1(job, job.model(), mixed_precision=MixedPrecision(**types))
    new = fsdp2(job, job.model(), mp_policy=MixedPrecisionPolicy(**types))
    return old, new


@option("CPUOffload(True)", "CPUOffloadPolicy()", gpu_only=True, offloads=True)
def cpu_offload(job: Job):
    if job.on_gpu:
        old = fsdp1(job, job.model(), cpu_offload=CPUOffload(True))
    else:
        old = fsdp1(job, job.model())
    new = fsdp2(job, job.model(), offload_policy=CPUOffloadPolicy(pin_memory=job.on_gpu))
    return old, new


@option("BackwardPrefetch.BACKWARD_PRE", "set_modules_to_backward_prefetch")
def backward_prefetch(job: Job):
    old = fsdp1(job, job.model(), backward_prefetch=BackwardPrefetch.BACKWARD_PRE)
    new = fsdp2(job, job.model())
    first, second = new.blocks
    second.set_modules_to_backward_prefetch([first])
    return old, new


@option("forward_prefetch=True", "set_modules_to_forward_prefetch")
def forward_prefetch(job: Job):
    old = fsdp1(job, job.model(), forward_prefetch=True)
    new = fsdp2(job, job.model())
    first, second = new.blocks
    first.set_modules_to_forward_prefetch([second])
    return old, new


# ---- initial values: rank 0's for all ranks


@option("sync_module_states=True", "set_model_state_dict, from rank 0", gpu_only=True)
def values_of_rank_0(job: Job):
    rank = job.worker.rank  # another seed on each rank, so that only rank 0's values can agree
    if job.on_gpu:
        old = fsdp1(job, job.model(seed=rank), sync_module_states=True)
    else:
        old = fsdp1(job, job.model())
    new = fsdp2(job, job.model(seed=rank))
    values = job.model().state_dict() if job.worker.is_main else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(new, values, options=options)
    return old, new


@option("param_init_fn, meta device", "to_empty() after sharding", gpu_only=True)
def without_memory_at_first(job: Job):
    def build() -> VisionTransformer:
        torch.manual_seed(0)
        return VisionTransformer(dim=32, depth=2)

    def make_memory(module: nn.Module) -> None:
        module.to_empty(device=job.device, recurse=False)

    with torch.device("meta"):
        new = build()
    new = materialize(fsdp2(job, new), build, job.device, job.worker)

    if not job.on_gpu:
        return fsdp1(job, job.model()), new
    if job.worker.is_main:
        return fsdp1(job, build(), sync_module_states=True), new
    with torch.device("meta"):
        old = build()
    return fsdp1(job, old, param_init_fn=make_memory, sync_module_states=True), new


# ---- the training step: see Run in fsdp1_to_fsdp2.py


@option("no_sync()", "set_requires_gradient_sync(False)", accumulate=2)
def accumulation(job: Job):
    return fsdp1(job, job.model()), fsdp2(job, job.model())


@option("model.clip_grad_norm_()", "torch.nn.utils.clip_grad_norm_", clip=True)
def clipping(job: Job):
    return fsdp1(job, job.model()), fsdp2(job, job.model())
