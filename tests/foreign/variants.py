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
    """The embedding's matrix is also the output's. Elsewhere two units share a matrix."""
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
        words, output = model.get_input_embeddings(), model.get_output_embeddings()
        if output.weight is not words.weight:
            output.weight = words.weight
            return
    leaves = [module for module in model.modules() if not list(module.children())]
    first, second, name = equal_pair(units) or equal_pair(leaves)
    setattr(second, name, getattr(first, name))
    if isinstance(model, PreTrainedModel):  # save_pretrained() refuses a tie that is not declared
        path = {module: path for path, module in model.named_modules()}
        tie = {f"{path[second]}.{name}": f"{path[first]}.{name}"}
        model._tied_weights_keys = (model._tied_weights_keys or {}) | tie


def equal_pair(parts: list[nn.Module]) -> tuple[nn.Module, nn.Module, str] | None:
    """Two modules of two parts whose parameters of one name have one shape, larger than a row."""
    seen = {}  # (name, shape) -> the first part that has one, and the module that holds it
    for part in parts:
        for module in part.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() < 2:
                    continue
                first, holder = seen.setdefault((name, parameter.shape), (part, module))
                if first is not part and getattr(holder, name) is not parameter:
                    return holder, module, name
    return None


def lora(model: nn.Module, units: list[nn.Module]) -> None:
    """Only adapters learn: one beside each matrix, but for one that is also the embedding's."""
    model.requires_grad_(False)
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in ADAPTED and child.weight not in embeddings:
                setattr(parent, name, Adapted(child))


ADAPTED = (nn.Linear, Conv1D)  # not subclasses, whose matrix others read past their forward


class Adapted(nn.Module):
    def __init__(self, base: nn.Module, rank: int = 2):
        super().__init__()
        self.base = base
        rows, columns = base.weight.shape if isinstance(base, Conv1D) else base.weight.T.shape
        self.down = nn.Parameter(torch.randn(rows, rank, dtype=base.weight.dtype) / rows)
        self.up = nn.Parameter(torch.randn(rank, columns, dtype=base.weight.dtype) / 10)

    @property
    def weight(self) -> torch.Tensor:
        """Some models read it and never call forward: Swin's attention does so."""
        added = self.down @ self.up
        return self.base.weight + (added if isinstance(self.base, Conv1D) else added.T)

    @property
    def bias(self) -> torch.Tensor:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down @ self.up


def stray(model: nn.Module, units: list[nn.Module]) -> None:
    """A tensor that is neither a parameter nor a buffer."""
    units[0].table = torch.ones(3)


VARIANTS = {f.__name__: f for f in (plain, frozen, unused, tied, lora)}

# What cannot work: variant -> (template, part of the sentence that says so, what to do instead).
# One model stands for all of them.
REFUSED = {
    "stray": (
        "fsdp_basics",
        "neither a parameter nor a buffer",
        "register the tensor as a buffer: `register_buffer()`",
    ),
    "tied in two units": (
        "fsdp_basics",
        "shared with a parameter already managed by another FSDP",
        "put both modules into one unit, or into none: `units` in task.py",
    ),
    "unused, no flag": (
        "ddp_basics",
        "takes no part (DDP: --find-unused-parameters)",
        "pass `--find-unused-parameters`",
    ),
}
CHANGES = VARIANTS | {"stray": stray, "tied in two units": tied, "unused, no flag": unused}
