"""Run fsdp_basics/minimal.py as it stands, and save what its optimizer saw (rank 0).

fsdp_minimal.py SCRIPT RESULTS       under torchrun, or as one process
In float64: AdamW divides gradients by their own size, so that in float32 after an epoch the last
digits of a sum, which the processor decides, would have grown to a ten thousandth.
"""

import runpy
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

STEPS = (0, 1, 2, 29)  # of which all is compared; an epoch has 29 steps

if __name__ == "__main__":
    script, results_file = sys.argv[1:]
    results, units, steps_done, end = {}, set(), [0], []
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # of the images
    rank_is_main = [False]

    def before_forward(module, inputs) -> None:
        if isinstance(module, FSDPModule):
            units.add(id(module))

    def before_step(optimizer, args, kwargs) -> None:
        rank_is_main[0] = dist.get_rank() == 0
        if steps_done[0] in STEPS:
            results[steps_done[0]] = {"gradients": [p.grad.full_tensor() for p in held(optimizer)]}

    def after_step(optimizer, args, kwargs) -> None:
        if steps_done[0] in STEPS:
            values = [p.detach().full_tensor().clone() for p in held(optimizer)]
            results[steps_done[0]]["parameters"] = values
        steps_done[0] += 1

    def held(optimizer) -> list[torch.nn.Parameter]:
        return optimizer.param_groups[0]["params"]

    def noting(name: str) -> None:
        function = getattr(dist, name)

        def noted(*args, **kwargs):
            function(*args, **kwargs)
            end.append(name)

        setattr(dist, name, noted)

    noting("barrier")
    noting("destroy_process_group")
    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    runpy.run_path(script, run_name="__main__")
    if rank_is_main[0]:
        torch.save({"steps": results, "units": len(units), "end": end}, results_file)
