"""Run parallel_basics/minimal.py as it is, and save what its optimizer was given and left.

Started by test_parallel_basics_minimal.py: FILE and then the arguments of minimal.py. torch calls
the two hooks around each step of any optimizer, so that the script knows nothing of this.
"""

import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

MINIMAL = Path(__file__).resolve().parents[2] / "parallel_basics/minimal.py"
STEPS = []


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter or gradient; a collective."""
    return tensor.full_tensor().detach().clone()


def parameters(optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def before(optimizer, args, kwargs) -> None:
    STEPS.append({"gradients": [full(p.grad) for p in parameters(optimizer)]})


def after(optimizer, args, kwargs) -> None:
    STEPS[-1]["parameters"] = [full(p) for p in parameters(optimizer)]
    STEPS[-1]["held"] = [tuple(p.to_local().shape) for p in parameters(optimizer)]


def main() -> None:
    path, *sys.argv[1:] = sys.argv[1:]
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    ranks = []
    original = dist.destroy_process_group

    def destroy(*args) -> None:  # the last moment at which there is a rank
        ranks.append(dist.get_rank())
        original(*args)

    dist.destroy_process_group = destroy
    runpy.run_path(str(MINIMAL), run_name="__main__")
    assert ranks, "minimal.py has not left the job"
    torch.save(STEPS, f"{path}.{ranks[0]}")


if __name__ == "__main__":
    main()
