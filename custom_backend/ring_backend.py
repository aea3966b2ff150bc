"""A custom backend in Python: every collective made of send and receive over sockets.

    torchrun --standalone --nproc_per_node=2 custom_backend/ring_backend.py
    torchrun --standalone --nproc_per_node=3 custom_backend/ring_backend.py --numel 1000003

Read ring/collectives.py first: an all_reduce is two trips around the ring. ring/wire.py moves the
bytes, and PyTorch calls ring/group.py. Look at

1. the operations, each called on every rank and compared with a plain computation.
2. the bytes that each rank sent for one all_reduce, next to the formula 2 (p-1)/p n.
3. DDP on this backend and on Gloo, from the same weights with the same data: gradients and
   parameters. On two ranks they are equal to the last bit, since a + b equals b + a. On more ranks
   the two backends add in different orders.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from arguments import ArgumentParser, at_least
from checks import check_all
from ring.group import new_ring_group
from runtime import Worker, distributed_worker
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

# Now "ring" is a backend like any other: init_process_group("ring") also works.
dist.Backend.register_backend("ring", new_ring_group, extended_api=True, devices=["cpu"])


@record
def main() -> None:
    args = parse_args()
    with distributed_worker("cpu") as worker:
        group = dist.new_group(backend="ring", timeout=timedelta(minutes=1))
        show_operations(group, args.numel, worker)
        show_bytes(group, args.numel, worker)
        show_training(group, args.steps, worker)


def show_operations(group, numel: int, worker: Worker) -> None:
    found = [None] * worker.world_size
    dist.all_gather_object(found, check_all(group, numel))  # over Gloo, not the ring
    if worker.is_main:
        print("\n1. Operations: equal to a computation without communication?")
        for operation in found[0]:
            wrong = [rank for rank, answers in enumerate(found) if not answers[operation]]
            verdict = f"WRONG on ranks {wrong}" if wrong else "yes, on all ranks"
            print(f"   {operation:20} {verdict}")
    if not all(all(answers.values()) for answers in found):
        raise RuntimeError("an operation of the ring is wrong")


def show_bytes(group, numel: int, worker: Worker) -> None:
    x, before = torch.zeros(numel), group.wire.bytes_sent
    dist.all_reduce(x, group=group)
    sent = [None] * worker.world_size
    dist.all_gather_object(sent, group.wire.bytes_sent - before)
    if worker.is_main:
        size = worker.world_size
        print(f"\n2. Bytes that each rank sent for an all_reduce of n = {x.nbytes:,}")
        for rank, nbytes in enumerate(sent):
            print(f"   rank {rank}: {nbytes:,}")
        print(f"   formula 2 (p-1)/p n: {2 * (size - 1) / size * x.nbytes:,.1f}")


def show_training(group, steps: int, worker: Worker) -> None:
    ours, theirs = (train(g, steps, worker) for g in (group, dist.group.WORLD))
    pairs = zip(ours, theirs, strict=True)
    differences = torch.tensor([largest_difference(a, b) for a, b in pairs])
    dist.all_reduce(differences, op=dist.ReduceOp.MAX)
    if worker.is_main:
        print(f"\n3. DDP, {steps} steps: the largest difference from Gloo, over all ranks")
        print(f"   gradients  {differences[0]:.1e}")
        print(f"   parameters {differences[1]:.1e}")


def train(group, steps: int, worker: Worker) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train with DDP on `group`; return the last gradients and the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp_model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(worker.rank)  # different data on each rank
    for _ in range(steps):
        x = torch.randn(32, 64, generator=generator)
        y = torch.randint(0, 10, (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp_model(x), y).backward()
        optimizer.step()
    return [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def largest_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def parse_args():
    parser = ArgumentParser(description="Check a backend in Python, and compare it with Gloo.")
    parser.add_argument("--numel", type=at_least(1), default=100_003, help="elements per tensor")
    parser.add_argument("--steps", type=at_least(1), default=10, help="training steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
