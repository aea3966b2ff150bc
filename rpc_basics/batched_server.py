"""A synchronous parameter server with rpc async_execution: one update per push of all trainers.

    torchrun --standalone --nproc_per_node=4 rpc_basics/batched_server.py
    torchrun --standalone --nproc_per_node=4 rpc_basics/batched_server.py --threads 1

Each trainer pushes its gradient. The last push triggers the update, and the server answers every
push with the new parameters. Look at the differences from one process, and at --threads 1: one
thread of the server holds the unanswered calls of all trainers. parameter_server.py is the
asynchronous kind.
"""

import argparse
import os
import threading
from concurrent import futures

import torch
import torch.nn.functional as F
from arguments import ArgumentParser, UserError, above, at_least
from rpc_worker import RpcWorker, rpc_worker
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.utils import parameters_to_vector, vector_to_parameters

BATCH = 120  # images of all trainers together


@record
def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the workers run in parallel, not the operators
    threads = args.threads if os.environ.get("RANK") == "0" else 16
    with rpc_worker(args.timeout, threads, least=2) as worker:
        trainers = worker.world_size - 1
        if BATCH % trainers:
            raise UserError(f"{BATCH} images do not divide among {trainers} trainers")
        if worker.rank == 0:
            SERVER.set_result(BatchedServer(trainers))
            print(f"{trainers} trainers", flush=True)
        else:
            train(rpc.remote(worker.name_of(0), the_server), args, worker)
        # Worker 0 has nothing more to do: its threads answer calls until all trainers are done.
    if worker.rank == 0:
        compare(SERVER.result(), trainers)


class BatchedServer:
    """All parameters as one vector, their optimizer, and the pushes that wait for an update."""

    def __init__(self, trainers: int):
        self.values = nn.Parameter(parameters_to_vector(make_model().parameters()).detach())
        self.optimizer = torch.optim.AdamW([self.values], lr=3e-3)
        self.trainers = trainers
        self.arrived: dict[int, Tensor] = {}  # rank -> its gradient for the next update
        self.updated = Future()  # the answer to all pushes that have arrived
        self.gradients = []  # the mean gradient of each update, for `compare`
        self.lock = threading.Lock()  # several threads answer calls

    def pull(self) -> Tensor:
        """(parameters,), fp32."""
        return self.values.detach().clone()

    @rpc.functions.async_execution
    def push(self, rank: int, gradient: Tensor) -> Future:
        """gradient: (parameters,), fp32. Answers with the parameters after the update.

        A function with this decorator returns a Future. Its caller gets the answer when any thread
        completes the Future; no thread of the server waits for that.
        """
        with self.lock:
            self.arrived[rank] = gradient
            answer = self.updated
            if len(self.arrived) == self.trainers:
                in_order = [self.arrived[rank] for rank in sorted(self.arrived)]  # the same bits
                self.values.grad = sum(in_order) / self.trainers
                self.gradients.append(self.values.grad)
                self.optimizer.step()
                self.arrived, self.updated = {}, Future()
                answer.set_result(self.pull())
        return answer


SERVER = futures.Future()  # in worker 0: its server, when it exists


def the_server() -> BatchedServer:
    """Called by rpc.remote: the result stays in worker 0, and the caller gets a reference to it."""
    return SERVER.result()


def train(server: rpc.RRef, args: argparse.Namespace, worker: RpcWorker) -> None:
    """A trainer: compute the gradient of its rows of each batch, push it, use the answer."""
    model = make_model()
    values = server.rpc_sync().pull()
    for step in range(args.steps):
        vector_to_parameters(values, model.parameters())
        images, labels = read_batch(step)
        rows = slice(worker.rank - 1, None, worker.world_size - 1)
        values = server.rpc_sync().push(worker.rank, gradient_of(model, images[rows], labels[rows]))


def compare(server: BatchedServer, trainers: int) -> None:
    """Train in this process alone: plain torch, all rows of each batch. Print the differences."""
    model = make_model()
    first = parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    largest = 0.0
    for step, mean in enumerate(server.gradients):
        images, labels = read_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        gradient = parameters_to_vector([p.grad for p in model.parameters()])
        largest = max(largest, (mean - gradient).abs().max().item())
        optimizer.step()
    expected = parameters_to_vector(model.parameters()).detach()
    updates = len(server.gradients)
    print(f"{updates * trainers} pushes, {updates} updates")
    print(f"{len(first):,} parameters, largest change {(expected - first).abs().max():.1e}")
    print(f"largest difference from one process: gradient {largest:.1e}", end=", ")
    print(f"parameter {(server.pull() - expected).abs().max():.1e}")


def make_model() -> nn.Module:
    """64 pixels to 10 classes, 2,410 parameters; equal initial values in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def read_batch(step: int) -> tuple[Tensor, Tensor]:
    """Images, (BATCH, 64), fp32, and classes, (BATCH,), int64; equal on every worker."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    rows = torch.randint(len(labels), (BATCH,), generator=torch.Generator().manual_seed(step))
    return (images[rows] / 16).float(), labels[rows]


def gradient_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the mean loss, as one vector: (parameters,), fp32."""
    loss = F.cross_entropy(model(images), labels)
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="A server that makes one update of all gradients.")
    add = parser.add_argument
    add("--steps", type=at_least(1), default=5, help="pushes per trainer")
    add("--threads", type=at_least(1), default=16, help="threads of the server that answer calls")
    add("--timeout", type=above(0), default=60, help="timeout of each call, in seconds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
