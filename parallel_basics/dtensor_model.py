"""Two lines of a model whose strategy is nothing but the placements of its tensors.

    mean((relu(x @ W1) @ W2 - targets) ** 2)

Used by dtensor.py, and by the tests, which compare it with one process.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from dtensor_costs import PLACEMENTS, bytes_sent, measure, place
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

TOKENS, DIM, HIDDEN = 96, 48, 256


@dataclass(frozen=True)
class Strategy:
    x: str  # how the tokens are placed, and the targets
    weights: tuple[str, str]  # how W1 and W2 are
    gather: bool = False  # use whole weights, whatever a rank keeps
    finish: bool = False  # redistribute what the second layer returns: R


STRATEGIES = {
    "data parallel": Strategy("S0", ("R", "R")),
    "FSDP": Strategy("S0", ("S0", "S0"), gather=True),
    "tensor parallel": Strategy("R", ("S1", "S0"), finish=True),
    "  sum left undone": Strategy("R", ("S1", "S0")),
    "  cut the wrong way": Strategy("R", ("S0", "S1")),
}


def strategy_bytes(name: str, ranks: int) -> int:
    """What a rank sends in one step."""
    weights, hidden, out = ((DIM, HIDDEN), (HIDDEN, DIM)), (TOKENS, HIDDEN), (TOKENS, DIM)
    if name == "FSDP":  # weights gathered, gradients scattered: an all_reduce in two halves
        sent = sum(2 * bytes_sent("all_gather", shape, ranks, "S0") for shape in weights)
    else:
        reduced = {
            "data parallel": weights,  # their gradients
            "tensor parallel": (out,),
            # A square needs the sum. Autograd keeps its input as it was: backward sums it again.
            "  sum left undone": (out, out),
            "  cut the wrong way": (hidden, hidden),  # before the relu, and in its backward
        }
        sent = sum(bytes_sent("all_reduce", shape, ranks) for shape in reduced[name])
    cut = {"data parallel": 0, "FSDP": 0, "  cut the wrong way": 1}.get(name)
    if cut is not None and out[cut] % ranks:  # the mean of means is the mean of equal parts only
        sent += bytes_sent("all_gather", out, ranks, f"S{cut}")
    return sent


def train(mesh: DeviceMesh | None, strategy: Strategy, optimizer: str, steps: int = 5):
    """Returns ([per step {name: whole tensor}], {phase: traffic of the last step}).

    mesh: None is one process that has everything.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, DIM), (TOKENS, DIM), (DIM, HIDDEN), (HIDDEN, DIM)
    x, targets, *weights = (torch.randn(shape, generator=generator) for shape in shapes)
    weights = [weight / len(weight) ** 0.5 for weight in weights]
    if mesh is not None:
        x, targets = (place(t, strategy.x, mesh) for t in (x, targets))
        weights = [place(w, at, mesh) for w, at in zip(weights, strategy.weights, strict=True)]
    weights = [nn.Parameter(weight) for weight in weights]
    optim = OPTIMIZERS[optimizer](weights)
    whole = [PLACEMENTS["R"]]

    def forward() -> Tensor:
        first, second = weights
        if strategy.gather and mesh is not None:
            first, second = (weight.redistribute(mesh, whole) for weight in weights)
        y = F.relu(x @ first) @ second
        if strategy.finish and mesh is not None:
            y = y.redistribute(mesh, whole)
        return (y - targets).square().mean()

    def finish_gradients() -> None:
        for weight in weights:
            if isinstance(weight, DTensor):  # where it is a sum over ranks, the sum is due now
                weight.grad = weight.grad.redistribute(mesh, weight.placements)

    watch = measure if mesh is not None else lambda mesh, function: (function(), None)
    history, traffic = [], {}
    for _ in range(steps):
        optim.zero_grad()
        loss, traffic["forward"] = watch(mesh, forward)
        _, traffic["backward"] = watch(mesh, loss.backward)
        _, traffic["gradients"] = watch(mesh, finish_gradients)
        step = {"loss": full(loss)}
        step |= {f"gradient {i}": full(weight.grad) for i, weight in enumerate(weights)}
        optim.step()
        step |= {f"parameter {i}": full(weight) for i, weight in enumerate(weights)}
        history.append(step)
    return history, traffic


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def differences(history: list[dict], reference: list[dict]) -> dict[str, float]:
    """Largest difference of the loss, of any gradient, of any parameter, in any step."""
    worst = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    for step, expected in zip(history, reference, strict=True):
        for name, value in expected.items():
            kind = name.split()[0]
            worst[kind] = max(worst[kind], (step[name] - value).abs().max().item())
    return worst


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3),
}
