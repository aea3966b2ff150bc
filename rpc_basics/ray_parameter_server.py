"""A synchronous parameter server with Ray actors, equal to one process.

    pip install -r requirements-clusters.txt
    python rpc_basics/ray_parameter_server.py
    python rpc_basics/ray_parameter_server.py --trainers 3 --steps 100

No torchrun: Ray starts the processes, here on this machine. Look at the loop, in which no tensor
appears. A call returns a reference; if a reference is an argument, the process that runs the call
fetches its value. So gradients go from the trainers to the server, not through the driver.
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

BATCH = 120  # images of all trainers together


class Server:
    """Owns the parameters. An ordinary class: Ray creates an object of it in a process."""

    def __init__(self):
        model = make_model()
        self.vector = parameters_to_vector(model.parameters()).detach().requires_grad_()
        self.optimizer = torch.optim.SGD([self.vector], lr=0.1, momentum=0.9)

    def pull(self) -> torch.Tensor:
        """All parameters as one vector, (parameters,), fp32."""
        return self.vector.detach()

    def step(self, *gradients: torch.Tensor) -> torch.Tensor:
        """gradients: of the trainers, (parameters,) each; returns the new parameters."""
        self.vector.grad = torch.stack(gradients).mean(dim=0)
        self.optimizer.step()
        return self.pull()


class Trainer:
    def __init__(self, number: int, trainers: int):
        self.number, self.trainers = number, trainers
        self.model = make_model()

    def gradient(self, vector: torch.Tensor, step: int) -> torch.Tensor:
        """The gradient of this trainer's local batch at these parameters."""
        vector_to_parameters(vector, self.model.parameters())
        images, labels = read_batch(step)
        part = slice(self.number, None, self.trainers)
        loss = F.cross_entropy(self.model(images[part]), labels[part])
        return parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))


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
        vector = server.step.remote(*gradients)  # runs when the gradients have arrived
    trained = ray.get(vector, timeout=args.timeout)  # the first line that waits
    print(f"{args.steps} steps of {args.trainers} trainers, {time.perf_counter() - begin:.1f} s")
    return trained


def main() -> None:
    args = parse_args()
    if BATCH % args.trainers:
        fail(f"{BATCH} images do not divide among {args.trainers} trainers")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # 30 s are short on a busy machine
    try:
        import ray
    except ImportError:
        fail("Ray is not installed: pip install -r requirements-clusters.txt")
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}
    with ray.init("local", num_cpus=args.trainers, **options):  # a local cluster, which ends here
        trained = train(args, ray)
    first, alone = Server().pull().clone(), train_alone(args.steps)
    print(f"{len(alone):,} parameters, largest change {(alone - first).abs().max():.1e}")
    print(f"largest difference from one process: {(trained - alone).abs().max():.1e}")


def train_alone(steps: int) -> torch.Tensor:
    """The single-process baseline: plain torch, the full batch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        images, labels = read_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def make_model() -> nn.Module:
    """64 pixels to 10 classes; equal initial values in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def read_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, (BATCH, 64), fp32, and classes, (BATCH,), int64; equal in every process."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    rows = torch.randint(len(labels), (BATCH,), generator=torch.Generator().manual_seed(step))
    return (images[rows] / 16).float(), labels[rows]


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="A synchronous parameter server of Ray actors.")
    parser.add_argument("--trainers", type=at_least(1), default=2, help="processes that train")
    parser.add_argument("--steps", type=at_least(1), default=20, help="optimizer steps")
    parser.add_argument(
        "--timeout", type=above(0), default=120, help="timeout of the training, in seconds"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
