"""DDP with RPC: a large embedding table on a server, the dense layers under DDP.

    torchrun --standalone --nproc_per_node=3 rpc_basics/ddp_with_rpc.py
    torchrun --standalone --nproc_per_node=4 rpc_basics/ddp_with_rpc.py --optimizer adamw

The last rank is the server, all other ranks are trainers. Look at what is sent: sums of rows one
way, their gradients the other way, never the table. Then look at the differences from one process:
one backward reaches the local dense layers and the remote rows. Each pixel of a digit is a word,
such as "brightness 7 at place 12": 64 words per image, 1,088 in all.
"""

import argparse
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from arguments import ArgumentParser, UserError, above, at_least
from rpc_worker import RpcWorker, rpc_worker
from runtime import distributed_worker
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
}
PIXELS, WORDS, WIDTH = 64, 64 * 17, 24  # 17 values of brightness
BATCH = 120  # images per step, over all trainers


@record
def main() -> None:
    args = parse_args()
    with (
        distributed_worker("cpu", timedelta(seconds=args.timeout)),  # a Gloo group, for DDP
        rpc_worker(args.timeout, least=3) as worker,
    ):
        trainers = worker.world_size - 1
        if BATCH % trainers:
            raise UserError(f"{BATCH} images do not divide among {trainers} trainers")
        group = dist.new_group(range(trainers))  # all ranks call this, the server too
        if worker.rank == trainers:
            OWN.append(Table(args.optimizer))
        dist.barrier()  # the table exists
        if worker.rank < trainers:
            train(args, worker, group)
        # The server has nothing more to do: its threads answer calls until all workers are done.


def train(args: argparse.Namespace, worker: RpcWorker, group: dist.ProcessGroup) -> None:
    rank, trainers = worker.rank, dist.get_world_size(group)
    words, labels = read_digits()
    table = rpc.remote(worker.name_of(trainers), own_table)
    dense = make_dense()
    ddp_dense = DistributedDataParallel(dense, process_group=group)  # among the trainers only
    optimizer = make_optimizer(args.optimizer, dense)

    alone = nn.Sequential(make_table(), make_dense())  # the single-process baseline
    first = [parameter.detach().clone() for parameter in alone.parameters()]
    local_optimizer = make_optimizer(args.optimizer, alone)
    largest = 0.0
    for step in range(args.steps):
        batch = torch.arange(step * BATCH, (step + 1) * BATCH) % len(words)
        mine = batch.chunk(trainers)[rank]

        # Each trainer has its own context. The dense layers' gradients in it are DDP's means.
        with dist_autograd.context() as context:
            sums = table.rpc_sync().sums(words[mine])
            loss = F.cross_entropy(ddp_dense(sums), labels[mine])
            dist_autograd.backward(context, [loss])  # here and in the server
            found = dist_autograd.get_gradients(context)
            for parameter in dense.parameters():
                parameter.grad = found[parameter]
            optimizer.step()
            # The server has one gradient of the table per context. It takes their mean, as DDP
            # does, when all contexts are complete and while all of them exist.
            contexts = [torch.zeros(1, dtype=torch.int64) for _ in range(trainers)]
            dist.all_gather(contexts, torch.tensor([context]), group=group)
            if rank == 0:
                table.rpc_sync().step([number.item() for number in contexts])
            dist.barrier(group)

        local_optimizer.zero_grad()
        F.cross_entropy(alone(words[batch]), labels[batch]).backward()
        gradients = [table.rpc_sync().gradient(), *(p.grad for p in dense.parameters())]
        expected = [parameter.grad for parameter in alone.parameters()]
        largest = max(largest, difference(gradients, expected))
        local_optimizer.step()
        mean = loss.detach() / trainers
        dist.all_reduce(mean, group=group)
        if rank == 0:
            print(f"step {step + 1}   loss {mean.item():.6f}", flush=True)
        dist.barrier(group)  # no trainer starts the next step before all have read the gradients
    trained = [table.rpc_sync().weight(), *dense.parameters()]
    differences = torch.tensor([largest, difference(trained, list(alone.parameters()))])
    dist.all_reduce(differences, op=dist.ReduceOp.MAX, group=group)
    if rank == 0:
        changes = [difference([a], [b]) for a, b in zip(trained, first, strict=True)]
        changes = " ".join(f"{change:.1e}" for change in changes)
        print(f"largest change of the table, then of each dense parameter: {changes}")
        sent = 4 * table.rpc_sync().numbers_sent() // args.steps
        print(f"per step: {sent:,} bytes of sums and {sent:,} of gradients;", end=" ")
        print(f"the table has {4 * WORDS * WIDTH:,}")
        print(f"largest difference from one process: gradient {differences[0]:.1e}", end=", ")
        print(f"parameter {differences[1]:.1e}")


class Table:
    """The rows of all words at the server, and their optimizer."""

    def __init__(self, optimizer: str):
        self.bag = make_table()
        self.optimizer = make_optimizer(optimizer, self.bag)
        self.sent, self.lock = 0, threading.Lock()  # several threads answer calls

    def sums(self, words_BP: torch.Tensor) -> torch.Tensor:
        """Words, (images, PIXELS), int64 -> sums of their rows, (images, WIDTH), fp32."""
        sums = self.bag(words_BP)
        with self.lock:
            self.sent += sums.numel()
        return sums

    def step(self, contexts: list[int]) -> None:
        found = [dist_autograd.get_gradients(context)[self.bag.weight] for context in contexts]
        self.bag.weight.grad = torch.stack(found).mean(dim=0)
        self.optimizer.step()

    def gradient(self) -> torch.Tensor:
        """The table's gradient in the latest step, (WORDS, WIDTH). For the comparison only."""
        return self.bag.weight.grad

    def weight(self) -> torch.Tensor:
        return self.bag.weight.detach()

    def numbers_sent(self) -> int:
        return self.sent


OWN = []  # the server's table; empty in all other processes


def own_table() -> Table:
    """Called by rpc.remote: the result stays here, and the caller gets a reference to it."""
    return OWN[0]


def make_table() -> nn.EmbeddingBag:
    """Words, (images, PIXELS), int64 -> sums of their rows, (images, WIDTH), fp32."""
    torch.manual_seed(0)
    return nn.EmbeddingBag.from_pretrained(0.1 * torch.randn(WORDS, WIDTH), False, mode="sum")


def make_dense() -> nn.Module:
    """The dense layers: (images, WIDTH), fp32 -> (images, 10), scores of the classes."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 10))


def make_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(module.parameters(), **options)


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Words, (images, PIXELS), and classes, (images,), both int64."""
    images, labels = load_digits(return_X_y=True)
    brightness = torch.tensor(images).long()  # 0 to 16
    return brightness * PIXELS + torch.arange(PIXELS), torch.tensor(labels)


def difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest absolute difference of all elements."""
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="An embedding table on a server, dense layers under DDP.")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="sgd", help="optimizer of table and layers"
    )
    parser.add_argument("--steps", type=at_least(1), default=5, help="optimizer steps")
    parser.add_argument(
        "--timeout", type=above(0), default=60, help="timeout of each call, in seconds"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
