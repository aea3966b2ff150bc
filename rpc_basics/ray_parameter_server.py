"""The synchronous parameter_server.py again, as Ray actors: the same batches, the same parameters.

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
from arguments import ArgumentParser, above, at_least, fail
from tasks import gradient_of, load_task
from torch.nn.utils import parameters_to_vector, vector_to_parameters

BATCH, SEED = 120, 0  # images of all trainers; of the first values and of the batches


class Server:
    """Owns the parameters. An ordinary class: Ray puts an object of it into a process."""

    def __init__(self):
        model = load_task("digits").make_model(SEED)
        self.vector = parameters_to_vector(model.parameters()).detach().requires_grad_()
        self.optimizer = torch.optim.SGD([self.vector], lr=0.1, momentum=0.9)

    def pull(self) -> torch.Tensor:
        """All parameters in one row, (parameters,), fp32."""
        return self.vector.detach()

    def step(self, *gradients: torch.Tensor) -> torch.Tensor:
        """gradients: of the trainers, (parameters,) each; returns the new parameters."""
        self.vector.grad = torch.stack(gradients).mean(dim=0)
        self.optimizer.step()
        return self.pull()


class Trainer:
    def __init__(self, number: int, trainers: int):
        self.number, self.trainers = number, trainers
        self.task = load_task("digits")
        self.model = self.task.make_model(SEED)

    def gradient(self, vector: torch.Tensor, step: int) -> torch.Tensor:
        """Of this trainer's part of the batch, with these parameters."""
        vector_to_parameters(vector, self.model.parameters())
        images, labels = self.task.batch(BATCH, SEED, step)
        part = slice(self.number, None, self.trainers)
        return gradient_of(self.model, images[part], labels[part])[0]


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
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # 30 are few on a busy machine
    try:
        import ray
    except ImportError:
        fail("Ray is not installed: pip install -r requirements-clusters.txt")
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}
    with ray.init("local", num_cpus=args.trainers, **options):  # a cluster of our own; ends here
        trained = train(args, ray)
    first, alone = Server().pull().clone(), train_alone(args.steps)
    print(f"{len(alone):,} parameters, moved by up to {(alone - first).abs().max():.1e}")
    print(f"largest difference to one process: {(trained - alone).abs().max():.1e}")


def train_alone(steps: int) -> torch.Tensor:
    """The same training in this process: plain torch, the whole batch."""
    task = load_task("digits")
    model = task.make_model(SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        images, labels = task.batch(BATCH, SEED, step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="A synchronous parameter server of Ray actors.")
    parser.add_argument("--trainers", type=at_least(1), default=2)
    parser.add_argument("--steps", type=at_least(1), default=20)
    parser.add_argument("--timeout", type=above(0), default=120, help="seconds, of the training")
    return parser.parse_args()


if __name__ == "__main__":
    main()
