"""Run transformer_basics/minimal.py as it is, and save what its optimizer sees (rank 0)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import minimal
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

OUTPUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])
gradients, parameters = [], []


def of_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def before_step(optimizer, args, kwargs) -> None:
    gradients.append([of_all_ranks(p.grad) for p in optimizer.param_groups[0]["params"]])


def after_step(optimizer, args, kwargs) -> None:
    parameters.append([of_all_ranks(p) for p in optimizer.param_groups[0]["params"]])


register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
minimal.STEPS = STEPS
dist.init_process_group("gloo")
minimal.train("cpu")
if dist.get_rank() == 0:
    torch.save({"gradients": gradients, "parameters": parameters}, OUTPUT)
dist.barrier()
dist.destroy_process_group()
