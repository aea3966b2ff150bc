"""Stages of a pipeline: some blocks of the GPT, or a stage that sleeps instead of computing."""

import time
from itertools import accumulate

import torch
from model import GPT, GPTConfig, initialize
from torch import Tensor, nn


def split_layers(layers: int, stages: int) -> list[range]:
    """The blocks of each stage: equally many, or one more for the first ones."""
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def gpt_stage(config: GPTConfig, stage: int, stages: int, seed: int, device: torch.device) -> GPT:
    """One stage of the GPT, with the initial values that its layers have in the full model."""
    layers = split_layers(config.layers, stages)[stage]
    return initialize(GPT(config, layers).to(device), seed)


class TimerStage(nn.Module):
    """Stands for a stage of a GPT, but sleeps instead of computing, so it needs no core.

    With more ranks than cores, real stages wait for cores as well as for each other. Sleeping
    stages run as if each rank had its own machine, so all idle time comes from the schedule.
    seconds: of a forward. The gradient of the input takes as long, and so do those of the weights.
    """

    def __init__(
        self, config: GPTConfig, stage: int, stages: int, seconds: float, device: torch.device
    ):
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.config, self.seconds = config, seconds
        self.weight = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:  # tokens become vectors
            x = x.new_zeros(*x.shape, self.config.dim, dtype=torch.float32, requires_grad=True)
        return Wait.apply(x, self.seconds, self.seconds) + Wait.apply(self.weight, 0, self.seconds)


class Wait(torch.autograd.Function):
    """The identity; sleeps `in_forward` seconds in forward, `in_backward` seconds in backward."""

    @staticmethod
    def forward(ctx, x, in_forward, in_backward):
        time.sleep(in_forward)
        ctx.seconds = in_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


def timer_loss(output_BTC: Tensor, targets_BT: Tensor) -> Tensor:
    return output_BTC.mean()
