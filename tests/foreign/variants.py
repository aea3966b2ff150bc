"""What users do to a model: freeze a part, leave one out, tie two, put adapters into it."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def plain(model: nn.Module, units: list[nn.Module]) -> None:
    pass


def frozen(model: nn.Module, units: list[nn.Module]) -> None:
    """The first unit, and one parameter of the last, so that one is partly frozen."""
    units[0].requires_grad_(False)
    next(units[-1].parameters()).requires_grad_(False)


def unused(model: nn.Module, units: list[nn.Module]) -> None:
    """A part of the root that no step uses, and one of a unit that has a forward of its own."""
    model.unused = nn.Linear(6, 5)
    runs_all_it_has = (nn.Sequential, nn.ModuleDict)
    own = [unit for unit in units if not isinstance(unit, runs_all_it_has)]
    if own:
        own[0].unused = nn.Linear(3, 7)


def tied(model: nn.Module, units: list[nn.Module]) -> None:
    """The embedding's matrix is the output's, too; where there are no words: two units share one."""
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
        return
    seen = {}  # (name, shape) -> the first unit that has one, and the module that holds it
    for unit in units or [model]:
        for module in unit.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                first_unit, holder = seen.setdefault((name, parameter.shape), (unit, module))
                if holder is not module and (first_unit is not unit or len(units) == 1):
                    setattr(module, name, getattr(holder, name))
                    return
    raise LookupError("no two units have a parameter of one shape")


def lora(model: nn.Module, units: list[nn.Module]) -> None:
    """Only adapters learn: one beside each matrix of the units, or of the model if they have none."""
    model.requires_grad_(False)
    places = [module for unit in units for module in unit.modules()]
    if not any(type(module) in ADAPTED for module in places):
        places = list(model.modules())
    for parent in places:
        for name, child in list(parent.named_children()):
            if type(child) in ADAPTED:
                setattr(parent, name, Adapted(child))


ADAPTED = (nn.Linear, Conv1D)  # not subclasses, whose matrix others read past their forward


class Adapted(nn.Module):
    def __init__(self, base: nn.Module, rank: int = 2):
        super().__init__()
        self.base = base
        rows, columns = base.weight.shape if isinstance(base, Conv1D) else base.weight.T.shape
        self.down = nn.Parameter(torch.randn(rows, rank, dtype=base.weight.dtype) / rows)
        self.up = nn.Parameter(torch.randn(rank, columns, dtype=base.weight.dtype))

    @property
    def weight(self) -> torch.Tensor:  # T5 asks for its dtype
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down @ self.up


VARIANTS = {f.__name__: f for f in (plain, frozen, unused, tied, lora)}
