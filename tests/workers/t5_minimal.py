"""Run t5_finetuning/minimal.py as it is, and note what each optimizer step got and left.

Started by test_t5_finetuning.py with the file for the notes.
"""

import gc
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from transformers import T5ForConditionalGeneration

MINIMAL = Path(__file__).resolve().parents[2] / "t5_finetuning/minimal.py"
notes = {"gradients": [], "parameters": [], "units": [], "end": []}


def whole(values) -> list[torch.Tensor]:
    return [
        (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for value in values
    ]


def parameters_of(optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def before_step(optimizer, *_) -> None:
    notes["gradients"].append(whole(p.grad for p in parameters_of(optimizer)))


def after_step(optimizer, *_) -> None:
    parameters = parameters_of(optimizer)
    notes["parameters"].append(whole(parameters))
    notes["held"] = sum(getattr(p, "_local_tensor", p).numel() for p in parameters)


def noting(name: str, real):
    def call(*args, **kwargs):
        alive = any(
            issubclass(type(thing), T5ForConditionalGeneration) for thing in gc.get_objects()
        )
        notes["end"].append((name, "with a model" if alive else "without a model"))
        return real(*args, **kwargs)

    return call


def noting_unit(module, *, real=torch.distributed.fsdp.fully_shard, **options):
    notes["units"].append(type(module).__name__)
    return real(module, **options)


def note_rows(module, args) -> None:
    if isinstance(module, torch.nn.Embedding):  # the first one looks up the tokens of the texts
        notes.setdefault("rows", len(args[0]))


torch.nn.modules.module.register_module_forward_pre_hook(note_rows)
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
torch.distributed.fsdp.fully_shard = noting_unit
dist.barrier = noting("barrier", dist.barrier)
dist.destroy_process_group = noting("destroy", dist.destroy_process_group)
runpy.run_path(str(MINIMAL), run_name="__main__")
if os.environ.get("RANK") == "0":
    torch.save(notes, sys.argv[1])
