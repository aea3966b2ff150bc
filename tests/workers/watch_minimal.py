"""Run a minimal.py as it stands and save what was seen of it: in FOLDER/rank_R.pt, for each rank.

Started by test_ddp_basics_ideas.py: watch_minimal.py SCRIPT FOLDER, with 1, 2, 3 and 4 ranks.
"""

import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

EPOCHS = 2


def main() -> None:
    script, folder = sys.argv[1:]
    seen = {"calls": [], "gradients": [], "parameters": []}

    def watch(name: str) -> None:
        function = getattr(dist, name)

        def watched(*args, **kwargs):
            seen["calls"].append(name)
            function(*args, **kwargs)

        setattr(dist, name, watched)

    def before_step(optimizer, args, kwargs) -> None:
        params = optimizer.param_groups[0]["params"]
        seen["gradients"].append([p.grad.clone() for p in params])

    def after_step(optimizer, args, kwargs) -> None:
        params = optimizer.param_groups[0]["params"]
        seen["parameters"].append([p.detach().clone() for p in params])

    for name in ("init_process_group", "barrier", "destroy_process_group"):
        watch(name)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    sys.argv = ["minimal.py", "--epochs", str(EPOCHS)]
    runpy.run_path(script, run_name="__main__")
    torch.save(seen, Path(folder) / f"rank_{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
