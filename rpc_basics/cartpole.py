"""CartPole: a cart that must keep a pole upright, pushed left or right; any number of them at once.

The equations are those of Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve
difficult learning control problems" (1983), without friction, in steps of 0.02 seconds.
"""

import math

import torch
from torch import Tensor

GRAVITY, CART, POLE, HALF_LENGTH = 9.8, 1.0, 0.1, 0.5  # m/s2, kg, kg, m
FORCE, SECONDS = 10.0, 0.02  # N, of one step
FARTHEST, STEEPEST = 2.4, 12 * math.pi / 180  # m, radians: beyond it, it has fallen


def start(number: int, generator: torch.Generator) -> Tensor:
    """(number, 4) fp32: position, its speed, the pole's angle, its speed; all almost 0."""
    return torch.rand(number, 4, generator=generator) * 0.1 - 0.05


def step(states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """actions: (number,) 0 or 1, left or right. Returns the states after it, and which fell."""
    _, speed, angle, turning = states.unbind(1)
    force = FORCE * (2 * actions - 1)
    sine, cosine = angle.sin(), angle.cos()
    push = (force + POLE * HALF_LENGTH * turning**2 * sine) / (CART + POLE)
    inertia = HALF_LENGTH * (4 / 3 - POLE * cosine**2 / (CART + POLE))
    angular = (GRAVITY * sine - cosine * push) / inertia
    acceleration = push - POLE * HALF_LENGTH * angular * cosine / (CART + POLE)
    changes = torch.stack([speed, acceleration, turning, angular], dim=1)
    states = states + SECONDS * changes
    return states, (states[:, 0].abs() > FARTHEST) | (states[:, 2].abs() > STEEPEST)
