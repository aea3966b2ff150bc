"""DDP next to RPC: the rows of a big table live on servers, the dense layers are under DDP.

    torchrun --standalone --nproc_per_node=3 rpc_basics/ddp_with_rpc.py
    torchrun --standalone --nproc_per_node=4 rpc_basics/ddp_with_rpc.py --servers 2

The first ranks are trainers, the last ones servers. With two servers the table is cut by rows. Look
at what travels: sums of rows one way, their gradients the other, never the table. And at the
differences to one process: one backward reaches the dense layers here and the rows over there.
"""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from arguments import ArgumentParser, UserError, above, at_least
from measuring import difference
from rpc_worker import RpcWorker, rpc_worker
from runtime import distributed_worker
from table_of_words import (
    BATCH,
    OPTIMIZERS,
    WIDTH,
    WORDS,
    build_dense,
    build_optimizer,
    cuts,
    read_digits,
    some_rows,
    whole_table,
    words_here,
)
from torch import nn
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    args = parse_args()
    with (
        distributed_worker("cpu", timedelta(seconds=args.timeout)),  # a Gloo group, for DDP
        rpc_worker(args.timeout, least=args.servers + 2) as worker,
    ):
        trainers = worker.world_size - args.servers
        if BATCH % trainers:
            raise UserError(f"{BATCH} images do not divide among {trainers} trainers")
        group = dist.new_group(range(trainers))  # all ranks call this, the servers too
        if worker.rank >= trainers:
            OWN.append(Shard(worker.rank - trainers, args.servers, args.optimizer))
        dist.barrier()  # the shards are there
        if worker.rank < trainers:
            train(args, worker, group)
        # A server has nothing more to do itself: threads of it answer until all are at their end.


def train(args: argparse.Namespace, worker: RpcWorker, group: dist.ProcessGroup) -> None:
    rank, trainers = worker.rank, dist.get_world_size(group)
    words, labels = read_digits()
    table = Table([worker.name_of(trainers + k) for k in range(args.servers)])
    dense = build_dense()
    ddp_dense = DistributedDataParallel(dense, process_group=group)  # among the trainers only
    optimizer = build_optimizer(args.optimizer, dense)

    alone = nn.Sequential(whole_table(), build_dense())  # the same training in one process
    first = [parameter.detach().clone() for parameter in alone.parameters()]
    local_optimizer = build_optimizer(args.optimizer, alone)
    largest = 0.0
    for step in range(args.steps):
        batch = torch.arange(step * BATCH, (step + 1) * BATCH) % len(words)
        mine = batch.chunk(trainers)[rank]

        # Each trainer has a context of its own. The dense layers' gradients in it are DDP's means.
        with dist_autograd.context() as context:
            loss = F.cross_entropy(ddp_dense(table(words[mine])), labels[mine])
            dist_autograd.backward(context, [loss])  # here, and in the servers
            found = dist_autograd.get_gradients(context)
            for parameter in dense.parameters():
                parameter.grad = found[parameter]
            optimizer.step()
            # The table's gradients are still apart, on the servers, one for each context. A server
            # takes their mean as DDP does, once all contexts are complete, and while all exist.
            contexts = [torch.zeros(1, dtype=torch.int64) for _ in range(trainers)]
            dist.all_gather(contexts, torch.tensor([context]), group=group)
            if rank == 0:
                table.step([number.item() for number in contexts])
            dist.barrier(group)

        local_optimizer.zero_grad()
        F.cross_entropy(alone(words[batch]), labels[batch]).backward()
        gradients = [table.gradient(), *(p.grad for p in dense.parameters())]
        expected = [parameter.grad for parameter in alone.parameters()]
        largest = max(largest, difference(gradients, expected))
        local_optimizer.step()
        mean = loss.detach() / trainers
        dist.all_reduce(mean, group=group)
        if rank == 0:
            print(f"step {step + 1}   loss {mean.item():.6f}", flush=True)
        dist.barrier(group)  # nobody's next step before all have read the gradients
    trained = [table.weight(), *dense.parameters()]
    differences = torch.tensor([largest, difference(trained, list(alone.parameters()))])
    dist.all_reduce(differences, op=dist.ReduceOp.MAX, group=group)
    if rank == 0:
        each = [difference([a], [b]) for a, b in zip(trained, first, strict=True)]
        print("moved by up to:", *(f"{moved:.1e}" for moved in each), "(first the table)")
        table.show_traffic(args.steps)
        print(f"largest difference to one process: gradient {differences[0]:.1e}", end=", ")
        print(f"parameter {differences[1]:.1e}")


class Table:
    """A trainer's view of the table: it asks the servers, and holds nothing."""

    def __init__(self, servers: list[str]):
        self.shards = [rpc.remote(server, own_shard) for server in servers]
        self.limits = cuts(len(servers))
        for shard in self.shards:
            # Until a reference knows what it refers to, its rpc_async() calls from another thread:
            # outside the context, so that the rows would get no gradients.
            shard.rpc_sync().numbers_sent()

    def __call__(self, words_BP: torch.Tensor) -> torch.Tensor:
        """words_BP: (images, pixels), int64; returns the sums of their rows, (images, WIDTH)."""
        futures = []
        for shard, first, last in zip(self.shards, self.limits, self.limits[1:], strict=False):
            own = words_here(words_BP, first, last)  # each server is sent its own words
            futures.append(shard.rpc_async().sums(*own))  # all are at work
        return torch.stack([future.wait() for future in futures]).sum(dim=0)

    def step(self, contexts: list[int]) -> None:
        torch.futures.wait_all([shard.rpc_async().step(contexts) for shard in self.shards])

    def weight(self) -> torch.Tensor:
        return torch.cat([shard.rpc_sync().weight() for shard in self.shards])

    def gradient(self) -> torch.Tensor:
        """Of the latest step, (WORDS, WIDTH). For the comparison only."""
        return torch.cat([shard.rpc_sync().gradient() for shard in self.shards])

    def show_traffic(self, steps: int) -> None:
        sent = sum(shard.rpc_sync().numbers_sent() for shard in self.shards)
        print(f"a step: {4 * sent / steps:,.0f} bytes of sums, as many of gradients;", end=" ")
        print(f"the table has {4 * WORDS * WIDTH:,}")


class Shard:
    """A server's rows of the table, and their optimizer."""

    def __init__(self, number: int, servers: int, optimizer: str):
        self.bag = some_rows(*cuts(servers)[number : number + 2])
        self.optimizer = build_optimizer(optimizer, self.bag)
        self.sent = 0

    def sums(self, words: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """words: int64, counted from this shard's first row; begins: (images,), int64."""
        sums = self.bag(words, begins)
        self.sent += sums.numel()
        return sums

    def step(self, contexts: list[int]) -> None:
        found = [dist_autograd.get_gradients(context)[self.bag.weight] for context in contexts]
        self.bag.weight.grad = torch.stack(found).mean(dim=0)
        self.optimizer.step()

    def gradient(self) -> torch.Tensor:
        return self.bag.weight.grad

    def weight(self) -> torch.Tensor:
        return self.bag.weight.detach()

    def numbers_sent(self) -> int:
        return self.sent


OWN = []  # in a server: its shard


def own_shard() -> Shard:
    """Called by rpc.remote: what it returns stays here, the caller gets a reference."""
    return OWN[0]


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="An embedding table on servers, dense layers under DDP.")
    parser.add_argument("--servers", type=at_least(1), default=1)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--steps", type=at_least(1), default=5)
    parser.add_argument("--timeout", type=above(0), default=60, help="seconds, of each call")
    return parser.parse_args()


if __name__ == "__main__":
    main()
