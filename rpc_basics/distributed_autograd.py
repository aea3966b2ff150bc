"""dist_autograd and DistributedOptimizer: one backward and one optimizer over three workers.

    torchrun --standalone --nproc_per_node=3 rpc_basics/distributed_autograd.py
    torchrun --standalone --nproc_per_node=3 rpc_basics/distributed_autograd.py --optimizer adamw

worker1 and worker2 hold one layer each; worker0 holds the last layer, the images and the loss. Look
at the differences from one process: every gradient of every step, and the parameters.
"""

import argparse

import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from arguments import ArgumentParser, above, at_least
from rpc_worker import rpc_worker
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.optim import DistributedOptimizer

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
}
WIDTHS = (64, 48, 32, 10)  # pixels, two hidden layers, classes
BATCH = 120


@record
def main() -> None:
    args = parse_args()
    with rpc_worker(args.timeout, least=3) as worker:
        if worker.rank == 0:  # only worker0 has a training loop; the other workers answer its calls
            train(args)


def train(args: argparse.Namespace) -> None:
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (images / 16).float()

    # Three references: to a layer on worker1, to one on worker2, to a local one.
    layers = [rpc.remote(f"worker{k}", Layer, args=(k - 1,)) for k in (1, 2)]
    layers.append(rpc.RRef(Layer(2)))
    parameters = [reference for layer in layers for reference in layer.rpc_sync().references()]
    kind, options = OPTIMIZERS[args.optimizer]
    optimizer = DistributedOptimizer(kind, parameters, **options)  # one at each owner

    alone = nn.Sequential(*(Layer(k) for k in range(3)))  # the single-process baseline
    local_optimizer = kind(alone.parameters(), **options)
    largest = 0.0
    for step in range(args.steps):
        begin = step * BATCH % (len(images) - BATCH)
        x, y = images[begin : begin + BATCH], labels[begin : begin + BATCH]

        # The context holds the gradients of this backward, on every worker. They are not in .grad,
        # so several workers can train through one layer at the same time.
        with dist_autograd.context() as context:
            hidden = x
            for layer in layers:
                hidden = layer.rpc_sync().forward(hidden)  # records the call for backward
            loss = F.cross_entropy(hidden, y)
            dist_autograd.backward(context, [loss])  # runs on all three workers
            gradients = [g for layer in layers for g in layer.rpc_sync().gradients(context)]
            optimizer.step(context)  # each owner steps with the gradients of this context

        local_optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        expected = [parameter.grad for parameter in alone.parameters()]
        largest = max(largest, difference(gradients, expected))
        local_optimizer.step()
        print(f"step {step + 1}   loss {loss.item():.6f}", flush=True)
    trained = [parameter.to_here() for parameter in parameters]
    moved = difference(trained, [p for k in range(3) for p in Layer(k).parameters()])
    print(f"{len(parameters)} parameter tensors on 3 workers, largest change {moved:.1e}")
    print(f"largest difference from one process: gradient {largest:.1e}", end=", ")
    print(f"parameter {difference(trained, list(alone.parameters())):.1e}")


class Layer(nn.Module):
    """Layer 0, 1 or 2 of the model, with equal initial values in every process."""

    def __init__(self, number: int):
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTHS[number], WIDTHS[number + 1])
        self.activation = nn.Identity() if number == 2 else nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, inputs), fp32; returns (batch, outputs), fp32."""
        return self.activation(self.linear(x))

    def references(self) -> list[rpc.RRef]:
        """References to the parameters, for DistributedOptimizer. The parameters are not sent."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def gradients(self, context: int) -> list[torch.Tensor]:
        """The gradients of the backward in this context, in the order of the parameters."""
        found = dist_autograd.get_gradients(context)
        return [found[parameter] for parameter in self.parameters()]


def difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest absolute difference of all elements."""
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="Gradients and an optimizer over three workers.")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="sgd", help="optimizer on all workers"
    )
    parser.add_argument("--steps", type=at_least(1), default=5, help="optimizer steps")
    parser.add_argument(
        "--timeout", type=above(0), default=60, help="timeout of each call, in seconds"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
