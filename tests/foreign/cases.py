"""One case of the matrix: a model of the zoo, changed by one of the variants, in 64 bits."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate
from variants import CHANGES
from zoo import ZOO

SAMPLES, TEST_SAMPLES = 60, 7  # five steps of 12; the test samples divide by no number of ranks


class In64Bits(TorchFunctionMode):
    """Where a model turns to 32 bits on its own, as norms and rotary embeddings do, it gets 64.

    Rounding is then harmless: two runs that add in another order differ by 1e-12, also behind
    AdamW, which divides small gradients by themselves. A wrong factor differs by 1e-3 and more.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    name: str
    variant: str = "plain"
    optimizer: str = "adamw"

    @property
    def settings(self) -> dict:
        """What both optimizers leave unseen: SGD has no clipping, AdamW adds micro-batches up."""
        sgd = {"optimizer": "sgd", "lr": 0.02, "clip": 0.0, "accumulate": 1}
        adamw = {"optimizer": "adamw", "lr": 3e-3, "clip": 0.5, "accumulate": 2}
        chosen = {"sgd": sgd, "adamw": adamw}[self.optimizer]
        return chosen | {"batch_size": 12, "warmup": 0.3, "weight_decay": 0.1, "seed": 3}

    @property
    def finds_unused(self) -> bool:
        return ZOO[self.name].unused or self.variant == "unused"

    def build(self) -> nn.Module:
        """With its first values from torch's global generator."""
        model = ZOO[self.name].make()
        CHANGES[self.variant](model, ZOO[self.name].units(model))
        return model.double()

    def units(self, model: nn.Module) -> list:
        """Those that share a parameter are one unit."""
        if self.variant == "tied in two units":
            return [model.get_input_embeddings(), *ZOO[self.name].units(model)]
        groups = []
        for unit in ZOO[self.name].units(model):
            shared = [group for group in groups if share(group, unit)]
            kept = [group for group in groups if group not in shared]
            groups = [*kept, [module for group in shared for module in group] + [unit]]
        return [group if len(group) > 1 else group[0] for group in groups]

    def data(self) -> tuple[list, list]:
        make = ZOO[self.name].samples
        return in_64_bits(make(SAMPLES)), in_64_bits(make(TEST_SAMPLES))

    def collate(self, samples: list):
        return (ZOO[self.name].collate or default_collate)(samples)

    def loss(self, model: nn.Module, batch) -> tuple:
        with In64Bits():
            return ZOO[self.name].loss(model, batch)


def share(group: list[nn.Module], unit: nn.Module) -> bool:
    held = {id(parameter) for module in group for parameter in module.parameters()}
    return any(id(parameter) in held for parameter in unit.parameters())


def in_64_bits(value):
    if isinstance(value, dict):
        return {name: in_64_bits(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_64_bits(item) for item in value)
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_real else value
