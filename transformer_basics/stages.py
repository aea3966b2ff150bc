"""Which layers a pipeline stage has, and several stages of one rank as one module."""

import math
from dataclasses import replace

from model import GPT, GPTConfig
from torch import nn


def head_in_blocks(config: GPTConfig) -> float:
    """What the head costs: its floating-point operations, divided by those of a block."""
    length = config.block_size
    head = replace(config, layers=0).flops_per_token(length)
    return head / (replace(config, layers=1).flops_per_token(length) - head)


def stage_layers(config: GPTConfig, stages: int) -> list[range]:
    """The blocks of each stage, so that the slowest stage is as fast as possible.

    All blocks cost the same. The last stage also has the head: its n blocks cost n + h, where h is
    `head_in_blocks`. The other blocks are divided over the other stages; the first ones have one
    more. The embedding looks up rows: it multiplies nothing, and costs nothing. Each stage has at
    least one block. Source of the operations: `GPTConfig.flops_per_token`.
    """
    layers, before, head = config.layers, stages - 1, head_in_blocks(config)
    if not before:
        return [range(layers)]

    def slowest(last: int) -> float:
        return max(math.ceil((layers - last) / before), last + head)

    last = min(range(layers - before, 0, -1), key=slowest)  # of equals the largest
    at_least, one_more = divmod(layers - last, before)
    sizes = [at_least + (stage < one_more) for stage in range(before)] + [last]
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


class StagesOfRank(nn.Module):
    """The stages of one rank as one module, with the parameter names of the full model.

    For the optimizer, checkpoints, initial values and checks. It shares the modules of the stages.
    Forward and backward are those of the single stages: the schedule calls them.
    """

    def __init__(self, stages: list[GPT]):
        super().__init__()
        self.config, self.stages = stages[0].config, tuple(stages)  # a tuple registers no modules
        self.is_first, self.is_last = stages[0].is_first, stages[-1].is_last
        for stage in stages:
            for name, module in stage.named_children():
                self.add_module(name, module)
        self.blocks = nn.ModuleDict({i: b for stage in stages for i, b in stage.blocks.items()})

    def train(self, mode: bool = True) -> "StagesOfRank":
        for stage in self.stages:
            stage.train(mode)
        return self


def second_copy(model: GPT | StagesOfRank) -> nn.Parameter | None:
    """The last stage's copy of a tied weight; None on other stages, and if nothing is tied."""
    is_copy = model.config.tied and model.is_last and not model.is_first
    return model.token_embedding.weight if is_copy else None
