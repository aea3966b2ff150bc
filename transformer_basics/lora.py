"""Low-rank adaptation (LoRA): train small adapters next to the frozen linear layers of the blocks.

A layer with the frozen weight W (outputs, inputs) computes W x + alpha / R * B A x. Only A (R,
inputs) and B (outputs, R) are trained: Hu et al., arXiv 2106.09685. B begins as zeros, so the first
step computes what the base computes. Gradients and optimizer state exist for A and B only.

On a mesh, A is sharded by tensor parallelism where W's columns are, and B where W's rows are:

                            W          A          B          the gradient that needs a sum over tp
    column-parallel layer   rows       full       rows       of A: a rank has its own outputs only
    row-parallel layer      columns    columns    full       of B: a rank has its own inputs only

FSDP then shards W, A and B in the unit of their block. `merged_state` adds the adapters to W.
"""

import zlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from model import GPT, GPTConfig
from tiles import fill_normal, local_part
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

FACTORS = ("lora_a", "lora_b")


class AdaptedLinear(nn.Linear):
    """A linear layer with adapters. Its weight and bias keep their names."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    def merged_weight(self) -> Tensor:
        return self.weight + self.scale * (self.lora_b @ self.lora_a)


def add_adapters(model: GPT, rank: int, alpha: float) -> GPT:
    """Freeze `model` and adapt each linear layer of its blocks; change and return `model`.

    Call it after tensor parallelism, whose shards the adapters follow, and before FSDP. The
    adapters have no memory yet if the base has none: `initialize_adapters` gives them values.
    """
    model.requires_grad_(False)
    for block in model.blocks.values():
        for linear in [module for module in block.modules() if isinstance(module, nn.Linear)]:
            linear.__class__ = AdaptedLinear  # the same module: hooks of tensor parallelism stay
            linear.scale = alpha / rank
            linear.lora_a = factor((rank, linear.in_features), linear.weight, sharded_dim=1)
            linear.lora_b = factor((linear.out_features, rank), linear.weight, sharded_dim=0)
    return model


def factor(shape: tuple[int, int], weight: Tensor, sharded_dim: int) -> nn.Parameter:
    """An adapter without values, sharded as `weight` is if that is sharded in `sharded_dim`."""
    empty = torch.empty(shape, device=weight.device, dtype=weight.dtype)
    if isinstance(weight, DTensor):
        shards = [p if p.is_shard(sharded_dim) else Replicate() for p in weight.placements]
        empty = distribute_tensor(empty, weight.device_mesh, shards, src_data_rank=None)
    return nn.Parameter(empty)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    return ((n, m) for n, m in model.named_modules() if isinstance(m, AdaptedLinear))


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """A: normal, with a deviation of 1 / sqrt(inputs), equal on every mesh. B: zeros.

    A model without adapters stays as it is.
    """
    for name, layer in adapted_layers(model):
        deviation = layer.in_features**-0.5
        fill_normal(layer.lora_a, deviation, seed=zlib.crc32(f"{seed} {name}.lora_a".encode()))
        local_part(layer.lora_b).zero_()


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the plain model with W + alpha / R * B A in place of each adapted W."""
    state = {name: t for name, t in model.state_dict().items() if not name.endswith(FACTORS)}
    weights = {f"{name}.weight": layer.merged_weight() for name, layer in adapted_layers(model)}
    return state | weights


def flops_per_token(config: GPTConfig, length: int, rank: int | None) -> int:
    """Those of `config`; with adapters of this rank, without the gradients of frozen weights.

    A weight costs 2 operations in forward, 2 for the gradient of its input, and 2 for its own:
    a third less if it is frozen. (With a length of 0, the configuration counts weights only.)
    """
    flops = config.flops_per_token(length)
    if rank is None:
        return flops
    queries, keys = (n * config.head_dim for n in (config.heads, config.kv_heads))
    sizes = 2 * (config.dim + queries) + 2 * (config.dim + keys)
    sizes += (3 if config.is_llama else 2) * (config.dim + config.mlp_dim)
    return flops - config.flops_per_token(0) // 3 + 6 * config.layers * rank * sizes
