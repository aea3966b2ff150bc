"""The table of ddp_with_rpc.py without servers and calls: each rank has a part of its rows.

    torchrun --standalone --nproc_per_node=2 rpc_basics/sharded_embedding.py
    torchrun --standalone --nproc_per_node=4 rpc_basics/sharded_embedding.py --optimizer adamw

Three collectives a step instead of calls: all ranks see all words, the sums of rows are added up
over the ranks, their gradients go to all. Look at the differences to one process.
"""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, UserError, above, at_least
from measuring import difference
from runtime import Worker, distributed_worker
from table_of_words import (
    BATCH,
    OPTIMIZERS,
    build_dense,
    build_optimizer,
    cuts,
    read_digits,
    some_rows,
    whole_table,
    words_here,
)
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    args = parse_args()
    with distributed_worker("cpu", timedelta(seconds=args.timeout)) as worker:
        if BATCH % worker.world_size:
            raise UserError(f"{BATCH} images do not divide among {worker.world_size} ranks")
        train(args, worker)


def train(args: argparse.Namespace, worker: Worker) -> None:
    rank, ranks = worker.rank, worker.world_size
    words, labels = read_digits()
    first, last = cuts(ranks)[rank : rank + 2]
    rows, dense = some_rows(first, last), build_dense()
    ddp_dense = DistributedDataParallel(dense)
    optimizers = [build_optimizer(args.optimizer, part) for part in (rows, dense)]

    alone = nn.Sequential(whole_table(), build_dense())  # the same training in one process
    local_optimizer = build_optimizer(args.optimizer, alone)
    largest = 0.0
    for step in range(args.steps):
        batch = torch.arange(step * BATCH, (step + 1) * BATCH) % len(words)
        mine = batch.chunk(ranks)[rank]
        rows.zero_grad()
        dense.zero_grad()

        all_words = gathered(words[mine])
        sums = rows(*words_here(all_words, first, last))  # of all images, over our rows only
        total = sums.detach().clone()
        dist.all_reduce(total)  # over all rows
        own = total.chunk(ranks)[rank].requires_grad_()  # of our images
        loss = F.cross_entropy(ddp_dense(own), labels[mine])
        loss.backward()  # DDP averages the dense layers' gradients
        sums.backward(gathered(own.grad) / ranks)  # the mean, as DDP takes it; by hand the way back
        for optimizer in optimizers:
            optimizer.step()

        local_optimizer.zero_grad()
        F.cross_entropy(alone(words[batch]), labels[batch]).backward()
        expected = [parameter.grad for parameter in alone.parameters()]
        expected[0] = expected[0][first:last]  # each rank compares its rows
        gradients = [rows.weight.grad, *(p.grad for p in dense.parameters())]
        largest = max(largest, difference(gradients, expected))
        local_optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1}   loss {mean.item():.6f}", flush=True)
    report(rows, dense, alone, largest, first, last)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Those of all ranks, one after the other."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def report(rows, dense, alone, largest: float, first: int, last: int) -> None:
    trained = [rows.weight, *dense.parameters()]
    beginning = [some_rows(first, last).weight, *build_dense().parameters()]
    expected = [parameter.detach() for parameter in alone.parameters()]
    expected[0] = expected[0][first:last]
    each = [difference([a], [b]) for a, b in zip(trained, beginning, strict=True)]
    found = torch.tensor([largest, difference(trained, expected), *each])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print("moved by up to:", *(f"{moved:.1e}" for moved in found[2:]), "(first the table)")
        print(f"largest difference to one process: gradient {found[0]:.1e}", end=", ")
        print(f"parameter {found[1]:.1e}")


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="An embedding table cut by rows over the ranks.")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--steps", type=at_least(1), default=5)
    parser.add_argument("--timeout", type=above(0), default=60, help="seconds, of a collective")
    return parser.parse_args()


if __name__ == "__main__":
    main()
