"""Run transformer_basics/minimal.py as it is, and save what its optimizer sees (rank 0)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import minimal
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

OUTPUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])
gradients, parameters, held, units = [], [], [], set()


def of_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def before_forward(module, inputs) -> None:
    if isinstance(module, FSDPModule):
        units.add(id(module))


def before_step(optimizer, args, kwargs) -> None:
    gradients.append([of_all_ranks(p.grad) for p in optimizer.param_groups[0]["params"]])


def after_step(optimizer, args, kwargs) -> None:
    held.append(sum(p.to_local().numel() for p in optimizer.param_groups[0]["params"]))
    parameters.append([of_all_ranks(p) for p in optimizer.param_groups[0]["params"]])


register_module_forward_pre_hook(before_forward)
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
minimal.STEPS = STEPS
dist.init_process_group("gloo")
minimal.train(torch.device("cpu"), dist.get_rank(), dist.get_world_size())
if dist.get_rank() == 0:
    found = {"gradients": gradients, "parameters": parameters, "held": held, "units": len(units)}
    torch.save(found, OUTPUT)
dist.barrier()
dist.destroy_process_group()
