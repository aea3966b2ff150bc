"""A parameter server that makes one update of the gradients of all trainers: async_execution.

    torchrun --standalone --nproc_per_node=4 rpc_basics/batched_server.py
    torchrun --standalone --nproc_per_node=4 rpc_basics/batched_server.py --threads 1
    torchrun --standalone --nproc_per_node=4 rpc_basics/batched_server.py --measure

A trainer's push is answered with the parameters after the update, which the last of the trainers
brings about. Look at the differences to one process, and at --threads 1: the server holds three
unanswered calls with one thread. --measure compares with an update for each push.
"""

import argparse
import os
import threading
from functools import partial

import torch
from arguments import ArgumentParser, above, at_least
from calls_in_flight import as_they_end, is_there
from measuring import rates_in_turn
from rpc_worker import RpcWorker, rpc_worker
from tasks import TASKS, gradient_of, load_task
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SIZES = (1_000, 100_000, 1_000_000)  # parameters of the models that --measure compares


@record
def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the workers are what runs side by side
    threads = args.threads if os.environ.get("RANK") == "0" else 16  # a trainer waits in one
    with rpc_worker(args.timeout, threads, least=2) as worker:
        if worker.rank == 0:  # the server also starts the trainers, which wait for calls
            if args.measure:
                measure(args, worker)
            else:
                compare(args, worker)


class BatchedServer:
    """All parameters in one row, their optimizer, and the pushes that wait for an update."""

    def __init__(self, values: Tensor, trainers: int, keep: bool = False):
        """keep: the gradient of each update, to look at it later."""
        self.values = nn.Parameter(values.clone())
        self.optimizer = torch.optim.AdamW([self.values], lr=3e-3)
        self.trainers = trainers
        self.arrived: dict[int, Tensor] = {}
        self.updated = Future()  # the answer to all pushes that have arrived
        self.lock = threading.Lock()
        self.keep, self.gradients = keep, []

    @rpc.functions.async_execution
    def push(self, rank: int, gradient: Tensor) -> Future:
        """gradient: (parameters,) fp32. Answers with the parameters after the update.

        A function with this decorator returns a Future, and its caller gets the answer when
        somebody sets it. No thread waits here meanwhile.
        """
        with self.lock:
            self.arrived[rank] = gradient
            answer = self.updated
            if len(self.arrived) == self.trainers:
                in_order = [self.arrived[rank] for rank in sorted(self.arrived)]
                self.arrived, self.updated = {}, Future()
                answer.set_result(self.update(sum(in_order) / self.trainers))
        return answer

    def push_alone(self, gradient: Tensor) -> Tensor:
        """An update of one gradient, at once: what --measure compares with."""
        with self.lock:
            return self.update(gradient)

    def update(self, gradient: Tensor) -> Tensor:
        if self.keep:
            self.gradients.append(gradient)
        self.values.grad = gradient
        self.optimizer.step()
        return self.values.detach().clone()  # the next update may come while this is sent

    def result(self) -> tuple[Tensor, list[Tensor]]:
        return self.values.detach(), self.gradients


def train(server: rpc.RRef, args: argparse.Namespace, rank: int, trainers: int) -> None:
    """What a trainer does: its rows of each batch, a push, and on with what it answers."""
    task = load_task(args.data)
    model = task.make_model(args.seed)
    for step in range(args.steps):
        inputs, labels = task.batch(args.batch_size * trainers, args.seed, step)
        rows = slice(rank - 1, None, trainers)
        gradient, _ = gradient_of(model, inputs[rows], labels[rows])
        values = server.rpc_sync().push(rank, gradient)
        vector_to_parameters(values, model.parameters())


def compare(args: argparse.Namespace, worker: RpcWorker) -> None:
    """Train with all trainers, then the same in this process alone."""
    task = load_task(args.data)
    model = task.make_model(args.seed)
    alone = nn.Parameter(parameters_to_vector(model.parameters()).detach())
    first = alone.detach().clone()
    trainers = worker.world_size - 1
    server = rpc.RRef(BatchedServer(first, trainers, keep=True))
    print(f"{trainers} trainers, an update for all of them", flush=True)
    start_all(worker, train, server, args, trainers=trainers)
    values, gradients = server.rpc_sync().result()

    optimizer = torch.optim.AdamW([alone], lr=3e-3)
    largest = 0.0
    for step, mean in enumerate(gradients):
        vector_to_parameters(alone.detach(), model.parameters())
        alone.grad, _ = gradient_of(model, *task.batch(args.batch_size * trainers, args.seed, step))
        largest = max(largest, (mean - alone.grad).abs().max().item())
        optimizer.step()
    moved = (values - first).abs().max().item()
    parameter = (values - alone.detach()).abs().max().item()
    print(f"{args.steps * trainers} pushes of {trainers} trainers, {len(gradients)} updates")
    print(f"{len(values):,} parameters, moved by up to {moved:.1e}")
    print(f"largest difference to one process: gradient {largest:.1e}, parameter {parameter:.1e}")


def measure(args: argparse.Namespace, worker: RpcWorker) -> None:
    """Pushes per second, one update for all and one for each in turn, of several sizes."""
    trainers = worker.world_size - 1
    print(f"{trainers} trainers, pushes per second, median (least to most)")
    print(f"{'parameters':>10}{'an update for all':>24}{'for each':>24}{'ratio':>7}")
    for size in SIZES:
        server = rpc.RRef(BatchedServer(torch.zeros(size), trainers))
        push = partial(start_all, worker, push_only, server, size, args.steps)
        both = partial(push, True), partial(push, False)
        rates = rates_in_turn(*both, args.steps * trainers, args.repeats)
        print(f"{size:10,}{rates}", flush=True)


def push_only(server: rpc.RRef, size: int, steps: int, batched: bool, rank: int) -> None:
    """What a trainer does while it is measured."""
    gradient = torch.ones(size)
    for _ in range(steps):
        if batched:
            server.rpc_sync().push(rank, gradient)
        else:
            server.rpc_sync().push_alone(gradient)


def start_all(worker: RpcWorker, function, *args, **more) -> None:
    """Have each trainer run function(*args, rank=its own); raises what the first to fail raises."""
    calls = {
        rank: rpc.rpc_async(
            worker.name_of(rank), function, args=args, kwargs={"rank": rank, **more}, timeout=0
        )
        for rank in range(1, worker.world_size)
    }
    for rank, call in as_they_end(calls):
        if call is None:  # and perhaps others by now, who have left because one is gone
            gone = [worker.name_of(r) for r in calls if r == rank or not is_there(r, timeout=1)]
            raise RuntimeError(f"no answer from {', '.join(gone)}: the update waits for all")
        call.wait()


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="A server that makes one update of all gradients.")
    add = parser.add_argument
    add("--data", choices=TASKS, default="digits")
    add("--steps", type=at_least(1), default=5, help="pushes of each trainer")
    add("--batch-size", type=at_least(1), default=40, help="of each trainer")
    add("--seed", type=at_least(0), default=0)
    add("--threads", type=at_least(1), default=16, help="of the server, that answer calls")
    add("--measure", action="store_true", help="pushes per second instead of training")
    add("--repeats", type=at_least(1), default=5, help="measurements of each kind")
    add("--timeout", type=above(0), default=60, help="seconds, of each call")
    return parser.parse_args()


if __name__ == "__main__":
    main()
