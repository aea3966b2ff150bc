"""A recurrent network over workers, on real text: embedding and decoder are elsewhere.

    torchrun --standalone --nproc_per_node=3 rpc_basics/rnn_over_workers.py
    torchrun --standalone --nproc_per_node=2 rpc_basics/rnn_over_workers.py --steps 200

worker1 has the embedding, the last worker the decoder: the large parts of a model of many words.
worker0 has the LSTM and the text, Python's own textwrap.py, character by character. Look at the
differences to one process: every gradient of every step, and the parameters.
"""

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from arguments import ArgumentParser, above, at_least
from measuring import difference
from rpc_worker import RpcWorker, rpc_worker
from torch import nn
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.optim import DistributedOptimizer

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
}
CHARACTERS, WIDTH = 128, 48  # ASCII
ROWS, LENGTH = 16, 32  # of a batch: 16 places in the text, 32 characters from each


@record
def main() -> None:
    args = parse_args()
    with rpc_worker(args.timeout, least=2) as worker:
        if worker.rank == 0:  # it alone has a training loop; the others answer its calls
            train(args, worker)


def train(args: argparse.Namespace, worker: RpcWorker) -> None:
    embedding = rpc.remote("worker1", Part, args=(build_embedding,))
    # Waits until it is made. With two workers the decoder is made by the same process, and two
    # threads that build at a time would share one random generator.
    parameters = embedding.rpc_sync().references()
    lstm = build_lstm()
    decoder = rpc.remote(worker.name_of(worker.world_size - 1), Part, args=(build_decoder,))
    parameters += [rpc.RRef(parameter) for parameter in lstm.parameters()]
    parameters += decoder.rpc_sync().references()
    kind, options = OPTIMIZERS[args.optimizer]
    optimizer = DistributedOptimizer(kind, parameters, **options)  # one at each owner

    alone = [build_embedding(), build_lstm(), build_decoder()]  # the same training in one process
    alone_parameters = [p for part in alone for p in part.parameters()]
    first = [parameter.detach().clone() for parameter in alone_parameters]
    local_optimizer = kind(alone_parameters, **options)
    hidden = alone_hidden = None
    largest = 0.0
    for step in range(args.steps):
        x, y = read_batch(step)
        with dist_autograd.context() as context:
            embedded = embedding.rpc_sync().forward(x)
            output, hidden = lstm(embedded, hidden)
            scores = decoder.rpc_sync().forward(output)
            loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
            dist_autograd.backward(context, [loss])  # to worker0, to the embedding, and between
            found = dist_autograd.get_gradients(context)
            gradients = embedding.rpc_sync().gradients(context)
            gradients += [found[parameter] for parameter in lstm.parameters()]
            gradients += decoder.rpc_sync().gradients(context)
            optimizer.step(context)
        hidden = [state.detach() for state in hidden]  # goes on in the text, without its past

        local_optimizer.zero_grad()
        output, alone_hidden = alone[1](alone[0](x), alone_hidden)
        F.cross_entropy(alone[2](output).flatten(0, 1), y.flatten()).backward()
        largest = max(largest, difference(gradients, [p.grad for p in alone_parameters]))
        local_optimizer.step()
        alone_hidden = [state.detach() for state in alone_hidden]
        if step < 5 or (step + 1) % 50 == 0:
            print(f"step {step + 1:4}   loss {loss.item():.6f}", flush=True)
    trained = [parameter.to_here() for parameter in parameters]
    each = [difference([a], [b]) for a, b in zip(trained, first, strict=True)]
    print(f"{len(each)} parameter tensors, moved by up to:", *(f"{moved:.1e}" for moved in each))
    print(f"largest difference to one process: gradient {largest:.1e}", end=", ")
    print(f"parameter {difference(trained, alone_parameters):.1e}")


class Part:
    """A part of the model at its owner."""

    def __init__(self, build: Callable[[], nn.Module]):
        self.module = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def references(self) -> list[rpc.RRef]:
        """A parameter is never sent: DistributedOptimizer is told where each one is."""
        return [rpc.RRef(parameter) for parameter in self.module.parameters()]

    def gradients(self, context: int) -> list[torch.Tensor]:
        """Those of the backward in this context, in the order of the parameters."""
        found = dist_autograd.get_gradients(context)
        return [found[parameter] for parameter in self.module.parameters()]


# The parts, with the same first values wherever they are made. Shapes: B rows, T characters.


def build_embedding() -> nn.Module:
    """(B, T), int64, to (B, T, WIDTH), fp32."""
    torch.manual_seed(0)
    return nn.Embedding(CHARACTERS, WIDTH)


def build_lstm() -> nn.Module:
    """(B, T, WIDTH) to (B, T, WIDTH) and the state after the last character."""
    torch.manual_seed(1)
    return nn.LSTM(WIDTH, WIDTH, batch_first=True)


def build_decoder() -> nn.Module:
    """(B, T, WIDTH) to (B, T, CHARACTERS): a score for each next character."""
    torch.manual_seed(2)
    return nn.Linear(WIDTH, CHARACTERS)


def read_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y, (ROWS, LENGTH), int64; y is x one character later.

    Row r reads on in its own 16th of the text, and begins again at its end.
    """
    text = Path(textwrap.__file__).read_bytes()
    codes = torch.tensor(list(text)).clamp(max=CHARACTERS - 1)
    rows = codes[: len(codes) // ROWS * ROWS].view(ROWS, -1)
    begin = step * LENGTH % (rows.shape[1] - LENGTH)
    part = rows[:, begin : begin + LENGTH + 1]
    return part[:, :-1], part[:, 1:]


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="An LSTM here, its embedding and decoder on other workers.")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--steps", type=at_least(1), default=5)
    parser.add_argument("--timeout", type=above(0), default=60, help="seconds, of each call")
    return parser.parse_args()


if __name__ == "__main__":
    main()
