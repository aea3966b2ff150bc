"""An optimizer with numbers of Python in its state, a small model, and the plain loop of both.

Nothing here imports a template.
"""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, HALF, SAMPLES = 6, 3, 12


class CountingSGD(torch.optim.Optimizer):
    """SGD whose rate falls with numbers that it keeps: one in its group, one for each parameter."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["k"] = state.get("k", 0) + 1
                state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                p.add_(state["sum"], alpha=-group["lr"] / group["k"] / state["k"])


def build() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model.register_buffer("table", torch.rand(4), persistent=False)
    return model


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return x, torch.randint(3, (SAMPLES,), generator=generator)


def plain(frozen_from: int = STEPS) -> dict:
    """The whole run in one process; the first layer is frozen from step `frozen_from` on."""
    torch.manual_seed(0)
    model = build()
    matrices, vectors = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
    optimizers = [torch.optim.AdamW(matrices, lr=0.01), CountingSGD(vectors, lr=0.1)]
    x, y = data()
    losses, gradients = [], []
    for step in range(STEPS):
        model[0].requires_grad_(step < frozen_from)
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    last = [*model.named_parameters(), *model.named_buffers()]
    return {
        "losses": losses,
        "gradients": gradients,
        "last": {name: tensor.detach() for name, tensor in last},
    }
