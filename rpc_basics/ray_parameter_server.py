"""The synchronous parameter server again, as Ray actors: the same final parameters.

    pip install -r requirements-clusters.txt
    python rpc_basics/ray_parameter_server.py
    python rpc_basics/ray_parameter_server.py --trainers 3 --steps 100

No torchrun: Ray starts the processes, here on this machine. Look at the loop, in which no tensor
appears: what a call returns is a reference, and a reference as an argument is fetched by the
process that runs the call. The gradients go from the trainers to the server, not through here.
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from arguments import ArgumentParser, above, at_least, fail
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

BATCH = 120  # of all trainers


class Server:
    """Owns the parameters. An ordinary class: Ray puts an object of it into a process."""

    def __init__(self):
        self.model = build_model()
        self.optimizer = build_optimizer(self.model)

    def pull(self) -> torch.Tensor:
        """All parameters as one row, (parameters,), fp32."""
        return parameters_to_vector(self.model.parameters()).detach()

    def step(self, *gradients: torch.Tensor) -> torch.Tensor:
        """gradients: of the trainers, (parameters,) each; returns the new parameters."""
        mean = torch.stack(gradients).mean(dim=0)
        vector_to_gradients(mean, self.model)
        self.optimizer.step()
        return self.pull()


class Trainer:
    def __init__(self, number: int, trainers: int):
        self.number, self.trainers = number, trainers
        self.model = build_model()
        self.images, self.labels = read_digits()

    def gradient(self, vector: torch.Tensor, step: int) -> torch.Tensor:
        """Of this trainer's part of the batch, with these parameters."""
        vector_to_parameters(vector, self.model.parameters())
        rows = batch(step)[self.number :: self.trainers]
        return gradient(self.model, self.images[rows], self.labels[rows])


def train(args: argparse.Namespace, ray) -> torch.Tensor:
    server = ray.remote(num_cpus=0)(Server).remote()
    trainers = [
        ray.remote(num_cpus=1)(Trainer).remote(number, args.trainers)
        for number in range(args.trainers)
    ]
    vector = server.pull.remote()
    begin = time.perf_counter()
    for step in range(args.steps):
        gradients = [trainer.gradient.remote(vector, step) for trainer in trainers]
        vector = server.step.remote(*gradients)  # begins when the gradients are there
    trained = ray.get(vector, timeout=args.timeout)  # until now nothing has been waited for
    print(f"{args.steps} steps of {args.trainers} trainers, {time.perf_counter() - begin:.1f} s")
    return trained


def main() -> None:
    args = parse_args()
    if BATCH % args.trainers:
        fail(f"{BATCH} images do not divide among {args.trainers} trainers")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else it reports home
    try:
        import ray
    except ImportError:
        fail("Ray is not installed: pip install -r requirements-clusters.txt")
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}
    with ray.init("local", num_cpus=args.trainers, **options):  # a cluster of our own; ends here
        trained = train(args, ray)
    alone = train_alone(args.steps)
    moved = (alone - parameters_to_vector(build_model().parameters())).abs().max().item()
    difference = (trained - alone).abs().max().item()
    print(f"{len(alone):,} parameters, moved by up to {moved:.1e}")
    print(f"largest difference to one process: {difference:.1e}")


def train_alone(steps: int) -> torch.Tensor:
    """The same training in this process."""
    model, (images, labels) = build_model(), read_digits()
    optimizer = build_optimizer(model)
    for step in range(steps):
        rows = batch(step)
        vector_to_gradients(gradient(model, images[rows], labels[rows]), model)
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def build_model() -> nn.Module:
    """With the same first values wherever it is made."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def gradient(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(images), labels)
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def vector_to_gradients(vector: torch.Tensor, model: nn.Module) -> None:
    parameters = list(model.parameters())
    pieces = vector.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def batch(step: int) -> torch.Tensor:
    """The rows of this step's batch, (BATCH,), int64: the same in every process."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1437, (BATCH,), generator=generator)


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    return (images / 16).float(), labels


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="A synchronous parameter server of Ray actors.")
    parser.add_argument("--trainers", type=at_least(1), default=2)
    parser.add_argument("--steps", type=at_least(1), default=20)
    parser.add_argument("--timeout", type=above(0), default=120, help="seconds, of the training")
    return parser.parse_args()


if __name__ == "__main__":
    main()
