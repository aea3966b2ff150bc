"""How far a run is from the one that is right, for each kind of number."""

import math
from dataclasses import dataclass, field

import torch


@dataclass
class Record:
    """What happened in an epoch, by the names of the unchanged model."""

    losses: list[float] = field(default_factory=list)  # of each step
    norms: list[float] = field(default_factory=list)  # of the gradient, before clipping
    test_losses: list[float] = field(default_factory=list)
    gradients: list[dict] = field(default_factory=list)  # of each step, after clipping
    parameters: dict = field(default_factory=dict)  # at the end
    buffers: dict = field(default_factory=dict)


def compare(
    record: Record, expected: Record, with_test: bool = True
) -> dict[str, tuple[float, str]]:
    """For each kind, the largest difference, and where."""
    scalars = [("losses", "loss"), ("norms", "gradient norm")]
    if with_test:
        scalars.append(("test_losses", "test loss"))
    losses = {}
    for kind, word in scalars:
        own, right = getattr(record, kind), getattr(expected, kind)
        losses |= {f"{word} {i}": (a, b) for i, (a, b) in enumerate(zip_all(own, right))}
    gradients = {}
    for step, (own, right) in enumerate(zip_all(record.gradients, expected.gradients)):
        gradients |= {f"step {step}: {name}": pair for name, pair in by_name(own, right).items()}
    return {
        "losses": largest(losses),
        "gradients": largest(gradients),
        "parameters": largest(by_name(record.parameters, expected.parameters)),
        "buffers": largest(by_name(record.buffers, expected.buffers)),
    }


def zip_all(own: list, right: list) -> list[tuple]:
    count = max(len(own), len(right))
    own, right = ([*values, *[None] * (count - len(values))] for values in (own, right))
    return list(zip(own, right, strict=True))


def by_name(own: dict | None, right: dict | None) -> dict[str, tuple]:
    own, right = own or {}, right or {}
    return {name: (own.get(name), right.get(name)) for name in {**right, **own}}


def largest(pairs: dict[str, tuple]) -> tuple[float, str]:
    """The largest difference, relative to the largest number of its tensor.

    inf: one is missing, has another shape or type, or is not a number.

    A tensor of nothing but rounding, as the gradient of a bias before a BatchNorm, is measured by
    a thousandth of the largest number of all.
    """
    pairs = {name: (as_tensor(a), as_tensor(b)) for name, (a, b) in pairs.items()}
    tensors = [b.double().abs() for _, b in pairs.values() if b is not None]
    floor = 1e-3 * max((float(t.max()) for t in tensors if t.numel()), default=1.0)
    worst = (0.0, "")
    for name, (a, b) in pairs.items():
        if a is None or b is None:
            return math.inf, f"{name} is " + ("missing" if a is None else "unexpected")
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf, f"{name} is {a.dtype} {tuple(a.shape)}"
        if not a.numel():
            continue
        a, b = a.double(), b.double()
        distance, scale = float((a - b).abs().max()), max(float(b.abs().max()), floor)
        if math.isnan(distance):
            return math.inf, f"{name} is not a number"
        difference = distance / scale if scale else distance  # nothing but zeros
        if difference > worst[0]:
            worst = difference, name
    return worst


def as_tensor(value: float | torch.Tensor | None) -> torch.Tensor | None:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value
