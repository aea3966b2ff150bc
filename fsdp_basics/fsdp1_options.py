"""The options of FullyShardedDataParallel, each next to its successor. Run fsdp1_to_fsdp2.py.

`cases()` is to be read like a dictionary: `old` builds a model as older tutorials do, `new` builds
the same with fully_shard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from model import Block, VisionTransformer
from runtime import Worker
from sharding import materialize
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
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

LARGE = 10_000  # parameters, for the policy by size: a block has 12,704


@dataclass
class Case:
    option: str  # of FSDP1
    successor: str
    old: Callable[[], nn.Module] | None  # None: not to be run
    new: Callable[[], nn.Module]
    needs_gpu: bool = False  # FSDP1 has this on GPUs only
    parts: int = 1  # backward passes per step
    clip: bool = False


def cases(worker: Worker) -> list[Case]:
    device, bf16 = worker.device, torch.bfloat16
    flat_mesh = init_device_mesh(device.type, (worker.world_size,))
    rows = 2 if worker.world_size % 2 == 0 and worker.world_size > 2 else 1
    shape = (rows, worker.world_size // rows)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    by_size = partial(size_based_auto_wrap_policy, min_num_params=LARGE)
    blocks, strategy = ModuleWrapPolicy({Block}), ShardingStrategy

    def build(seed: int = 0) -> VisionTransformer:
        torch.manual_seed(seed)
        return VisionTransformer(dim=32, depth=2)

    def fsdp1(model=None, policy=blocks, **options):
        options = {"device_mesh": flat_mesh, "use_orig_params": True} | options
        return FullyShardedDataParallel(
            model or build(), auto_wrap_policy=policy, device_id=device, **options
        )

    def fsdp2(model=None, units=lambda model: model.blocks, **options):
        model = model or build().to(device)
        options = {"mesh": flat_mesh} | options
        for module in units(model):
            fully_shard(module, **options)
        return fully_shard(model, **options)

    def first_kept_old():
        def rule(module):
            keep = {"sharding_strategy": strategy.SHARD_GRAD_OP}
            return keep if module is model.blocks[0] else module is model.blocks[1]

        model = build()
        return fsdp1(model, CustomPolicy(rule))

    def first_kept_new():
        model = build().to(device)
        fully_shard(model.blocks[0], mesh=flat_mesh, reshard_after_forward=False)
        return fsdp2(model, lambda model: model.blocks[1:])

    def meta_old():
        with torch.device("cpu" if worker.is_main else "meta"):
            model = build()
        empty = None if worker.is_main else lambda m: m.to_empty(device=device, recurse=False)
        return fsdp1(model, param_init_fn=empty, sync_module_states=True)

    def meta_new():
        with torch.device("meta"):
            model = build()
        return materialize(fsdp2(model), build, device, worker.is_main)

    def broadcast_new():
        model = fsdp2(build(worker.rank).to(device))
        state = build().state_dict() if worker.is_main else {}
        set_model_state_dict(
            model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        return model

    def prefetch_new(direction):
        model = fsdp2()
        first, second = model.blocks
        if direction == "forward":
            first.set_modules_to_forward_prefetch([second])
        else:
            second.set_modules_to_backward_prefetch([first])
        return model

    def frozen():
        model = build().to(device)
        model.position.requires_grad_(False)
        return model

    def ignored(shard, option):
        model = frozen()
        return shard(model, **{option: {model.position}})

    def ddp():
        gpu = [worker.local_rank] if device.type == "cuda" else None
        return DistributedDataParallel(build().to(device), device_ids=gpu)

    hybrid = f"HYBRID_SHARD, {shape[0]} x {shape[1]}"
    zero2 = strategy._HYBRID_SHARD_ZERO2  # it never got a public name
    found = [
        Case("FULL_SHARD", "reshard_after_forward=True", fsdp1, fsdp2),
        Case(
            "SHARD_GRAD_OP",
            "reshard_after_forward=False",
            lambda: fsdp1(sharding_strategy=strategy.SHARD_GRAD_OP),
            lambda: fsdp2(reshard_after_forward=False),
        ),
        Case("NO_SHARD", "DistributedDataParallel", None, ddp),
        Case(
            hybrid,
            "a mesh (replicate, shard)",
            lambda: fsdp1(sharding_strategy=strategy.HYBRID_SHARD, device_mesh=mesh),
            lambda: fsdp2(mesh=mesh),
        ),
        Case(
            "_HYBRID_SHARD_ZERO2",
            "the same, reshard_after_forward=False",
            lambda: fsdp1(sharding_strategy=zero2, device_mesh=mesh),
            lambda: fsdp2(mesh=mesh, reshard_after_forward=False),
        ),
        Case(
            "auto_wrap_policy=None",
            "fully_shard(model) alone",
            lambda: fsdp1(policy=None),
            lambda: fsdp2(units=lambda model: []),
        ),
        Case("ModuleWrapPolicy({Block})", "a loop over the blocks", fsdp1, fsdp2),
        Case(
            "size_based_auto_wrap_policy",
            "a loop that counts parameters",
            lambda: fsdp1(policy=by_size),
            lambda: fsdp2(units=large_modules),
        ),
        Case("CustomPolicy", "a loop with options", first_kept_old, first_kept_new),
        Case(
            "MixedPrecision(bf16, fp32)",
            "MixedPrecisionPolicy(bf16, fp32)",
            lambda: fsdp1(
                mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=torch.float32)
            ),
            lambda: fsdp2(mp_policy=MixedPrecisionPolicy(bf16, torch.float32)),
        ),
        Case(
            "CPUOffload(True)",
            "CPUOffloadPolicy()",
            lambda: fsdp1(cpu_offload=CPUOffload(True)),
            lambda: fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda")),
            needs_gpu=True,
        ),
        Case(
            "BackwardPrefetch.BACKWARD_PRE",
            "set_modules_to_backward_prefetch",
            lambda: fsdp1(backward_prefetch=BackwardPrefetch.BACKWARD_PRE),
            lambda: prefetch_new("backward"),
        ),
        Case(
            "forward_prefetch=True",
            "set_modules_to_forward_prefetch",
            lambda: fsdp1(forward_prefetch=True),
            lambda: prefetch_new("forward"),
        ),
        Case(
            "sync_module_states=True",
            "set_model_state_dict, from rank 0",
            lambda: fsdp1(build(worker.rank).to(device), sync_module_states=True),
            broadcast_new,
            needs_gpu=True,
        ),
        Case(
            "param_init_fn, meta device",
            "to_empty() after sharding",
            meta_old,
            meta_new,
            needs_gpu=True,
        ),
        Case(
            "ignored_states",
            "ignored_params",
            lambda: ignored(fsdp1, "ignored_states"),
            lambda: ignored(fsdp2, "ignored_params"),
        ),
        Case("a frozen parameter", "the same", lambda: fsdp1(frozen()), lambda: fsdp2(frozen())),
        Case("no_sync()", "set_requires_gradient_sync(False)", fsdp1, fsdp2, parts=2),
        Case("model.clip_grad_norm_()", "torch.nn.utils.clip_grad_norm_", fsdp1, fsdp2, clip=True),
    ]
    for case in found:
        if case.needs_gpu and device.type == "cpu":
            case.old, case.option = fsdp1, f"{case.option} *"
    return found


def large_modules(model: nn.Module) -> list[nn.Module]:
    """What size_based_auto_wrap_policy finds: no lists, and only what has parameters enough."""
    return [
        module
        for module in model.modules()
        if module is not model
        and not isinstance(module, nn.ModuleList)
        and sum(p.numel() for p in module.parameters()) >= LARGE
    ]
