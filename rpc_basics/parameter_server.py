r"""An asynchronous parameter server: trainers pull parameters, push gradients, and never wait.

    torchrun --standalone --nproc_per_node=4 rpc_basics/parameter_server.py
    torchrun --standalone --nproc_per_node=4 rpc_basics/parameter_server.py --pull-every 16
    torchrun --standalone --nproc_per_node=4 rpc_basics/parameter_server.py --pull-every 16 \
        --max-staleness 4

Worker 0 has the parameters, the other workers train. Look at the staleness (the number of updates
between a trainer's pull and its push) and at its effect on the accuracy. batched_server.py is the
synchronous kind, in which all trainers wait for each other.
"""

import argparse
import threading
from collections import Counter
from concurrent.futures import Future

import torch
import torch.nn.functional as F
from arguments import ArgumentParser, above, at_least, between
from rpc_worker import RpcWorker, rpc_worker
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.utils import parameters_to_vector, vector_to_parameters

TRAINED = 1437  # images; the other 360 are for the accuracy


@record
def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the workers run in parallel, not the operators
    # A trainer that dies is not required: the server goes on with the remaining trainers.
    with rpc_worker(args.timeout, least=2, required=[0]) as worker:
        if worker.rank == 0:
            SERVER.set_result(Server(args, worker.world_size - 1))
            print(f"{worker.world_size - 1} trainers", flush=True)
        else:
            train(rpc.remote(worker.name_of(0), the_server), args, worker)
        # Worker 0 has nothing more to do: its threads answer calls until all trainers are done.
    if worker.rank == 0:
        report(SERVER.result())


class Server:
    """The parameters and their optimizer. The lock is needed: several threads answer calls."""

    def __init__(self, args: argparse.Namespace, trainers: int):
        first = parameters_to_vector(make_model(args.seed).parameters()).detach()
        self.values = nn.Parameter(first)
        # Divide the learning rate by N trainers: N updates then move as far as one would.
        self.optimizer = torch.optim.SGD([self.values], args.lr / trainers, args.momentum)
        self.updates, self.max_staleness = args.steps * trainers, args.max_staleness
        self.version = self.refused = 0  # updates made; gradients that were too old
        self.pushes = []  # (trainer, staleness) of each update
        self.lock = threading.Lock()

    def pull(self) -> tuple[int, Tensor] | None:
        """The version and the parameters, (parameters,), fp32; None after the last update."""
        with self.lock:
            if self.version == self.updates:
                return None
            return self.version, self.values.detach().clone()  # sent when the lock is free again

    def push(self, trainer: int, version: int, gradient: Tensor) -> bool:
        """gradient: (parameters,), fp32, of the parameters of `version`; False: pull again."""
        with self.lock:
            staleness = self.version - version
            if self.version == self.updates:
                return False
            if self.max_staleness is not None and staleness > self.max_staleness:
                self.refused += 1
                return False
            self.values.grad = gradient
            self.optimizer.step()
            self.version += 1
            self.pushes.append((trainer, staleness))
            return True


SERVER = Future()  # in worker 0: its server, when it exists


def the_server() -> Server:
    """Called by rpc.remote: the result stays in worker 0, and the caller gets a reference to it."""
    return SERVER.result()


def train(server: rpc.RRef, args: argparse.Namespace, worker: RpcWorker) -> None:
    """Pull, compute a gradient, push, until the server has made all updates."""
    images, labels = read_digits()
    model = make_model(args.seed)
    own_rows = torch.Generator().manual_seed(1000 * args.seed + worker.rank)
    while pulled := server.rpc_sync().pull():
        version, values = pulled
        vector_to_parameters(values, model.parameters())
        for _ in range(args.pull_every):  # only the first gradient is not stale by itself
            rows = torch.randint(TRAINED, (args.batch_size,), generator=own_rows)
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
            if not server.rpc_sync().push(worker.rank, version, gradient):
                break


def report(server: Server) -> None:
    images, labels = read_digits()
    model = make_model(seed=0)
    vector_to_parameters(server.values.detach(), model.parameters())
    right = model(images[TRAINED:]).argmax(1) == labels[TRAINED:]
    by_trainer = Counter(trainer for trainer, _ in server.pushes)
    counts = ", ".join(f"worker{rank} {by_trainer[rank]}" for rank in sorted(by_trainer))
    print(f"{server.version} of {server.updates} updates: {counts}; refused {server.refused}")
    if server.version < server.updates:
        raise RuntimeError("all trainers have left before the last update")
    stalenesses = [staleness for _, staleness in server.pushes]
    print(f"staleness: mean {sum(stalenesses) / len(stalenesses):.1f}, largest {max(stalenesses)}")
    print(f"accuracy: {right.float().mean():.3f}")


def make_model(seed: int) -> nn.Module:
    """64 pixels to 10 classes, 2,410 parameters; equal initial values in every process."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def read_digits() -> tuple[Tensor, Tensor]:
    """Images, (1797, 64), fp32, and classes, (1797,), int64."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    return (images / 16).float(), labels


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="A parameter server that applies gradients as they come.")
    add = parser.add_argument
    add("--steps", type=at_least(1), default=100, help="updates per trainer")
    add("--batch-size", type=at_least(1), default=40, help="images per gradient")
    add("--lr", type=above(0), default=0.1, help="learning rate, divided by the number of trainers")
    add("--momentum", type=between(0, 1), default=0.9, help="momentum of SGD")
    add("--pull-every", type=at_least(1), default=1, help="pull parameters every N gradients")
    add("--max-staleness", type=at_least(0), help="refuse gradients older than N updates")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data")
    add("--timeout", type=above(0), default=60, help="timeout of each call, in seconds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
