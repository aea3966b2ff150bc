"""Ranks with different numbers of batches: the hang, the Join context manager, the alternatives.

    torchrun --standalone --nproc_per_node=2 ddp_basics/uneven_inputs.py
    torchrun --standalone --nproc_per_node=3 ddp_basics/uneven_inputs.py --timeout 10
    python ddp_basics/uneven_inputs.py                            # one process: nobody to wait for

Each rank reads a file of its own, and the files differ in length. Look at

1. the hang: the ranks wait for each other in different places of the program, and no error says who
   is missing. Here it ends after --timeout seconds; by default a job would wait for 30 minutes.
2. Join: a rank without data adds zeros to the others' gradients. All images are used, and every
   gradient equals a plain sum over the batches that are left. But a rank that left early has missed
   optimizer steps: see the momentum.
3. the alternatives: how many images each of them loses or repeats, and how long ranks idle.
"""

import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, UserError
from data import load_dataset
from model import SmallCNN
from runtime import Worker, distributed_worker
from torch.distributed.algorithms.join import Join
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        images, labels = load_dataset("digits")[0][: args.images]
        files = [f.split(args.batch_size) for f in uneven_files(len(images), worker.world_size)]
        if min(len(file[0]) for file in files) == 0:
            raise UserError(f"--images {args.images} leaves some of {worker.world_size} ranks none")
        batches = [[(images[i], labels[i]) for i in file] for file in files]
        provoke_hang(batches, args, worker)
        for divide_by_initial in (True, False):
            train_with_join(batches, divide_by_initial, args, worker)
        compare_alternatives(files, len(images), args, worker)


def uneven_files(count: int, world_size: int) -> list[torch.Tensor]:
    """The indices 0 ... count - 1, cut into one part per rank in the proportion 3 : 4 : 5 : ..."""
    ends = torch.arange(3, 3 + world_size).cumsum(0)
    ends = (count * ends // ends[-1]).tolist()
    return [torch.arange(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def build(device):
    torch.manual_seed(0)
    model = SmallCNN(channels=8).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(model, images, labels, device) -> None:
    F.cross_entropy(model(images.to(device)), labels.to(device)).backward()


def provoke_hang(batches: list, args, worker: Worker) -> None:
    # A group of its own, because a group is dead after a time-out. Gloo and the CPU on a GPU node
    # too: NCCL raises nothing here, its watchdog thread ends the whole process.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout))
    reports = [None] * worker.world_size
    dist.all_gather_object(reports, run_until_stuck(batches[worker.rank], group))
    if worker.is_main:
        print(f"\n1. Without Join, time-out {args.timeout:g} s")
        print("rank  batches done  then           after s  error")
        for rank, (done, place, seconds, error) in enumerate(reports):
            steps = f"{done} of {len(batches[rank])}"
            print(f"{rank:4}  {steps:>12}  {place:13}  {seconds:7.1f}  {error}")


def run_until_stuck(batches: list, group) -> tuple[int, str, float, str]:
    """Returns batches done, where the rank was then, for how many seconds, and its error."""
    model, optimizer = build("cpu")
    ddp_model = DistributedDataParallel(model, process_group=group)
    dist.barrier()  # start together: the time-out is short
    done, place, started = 0, "backward", time.perf_counter()
    try:
        for batch in batches:
            started = time.perf_counter()
            optimizer.zero_grad()
            backward(ddp_model, *batch, "cpu")
            optimizer.step()
            done += 1
        # A rank without data goes on to what comes next in the program. If that is an all_reduce,
        # it pairs with the others' gradients: a crash where the sizes differ, else wrong numbers.
        place, started = "final barrier", time.perf_counter()
        dist.barrier(group=group)
        error = "none"
    except RuntimeError as failure:
        # Without Gloo's file name and advice.
        error = str(failure).split("] ", 1)[-1].split(". ")[0]
    return done, place, time.perf_counter() - started, error


def train_with_join(batches: list, divide_by_initial: bool, args, worker: Worker) -> None:
    model, optimizer = build(worker.device)
    ddp_model = DistributedDataParallel(model)
    expected = train_plainly(batches, divide_by_initial, worker.device)
    worst, count = [0.0] * len(expected["gradients"]), 0
    # The same as `with ddp_model.join(divide_by_initial_world_size=...)`. Join also takes several
    # objects, such as a ZeroRedundancyOptimizer, whose step() is a collective as well.
    with Join([ddp_model], divide_by_initial_world_size=divide_by_initial):
        for step, batch in enumerate(batches[worker.rank]):
            optimizer.zero_grad()
            backward(ddp_model, *batch, worker.device)
            worst[step] = difference(gradients_of(model), expected["gradients"][step])
            optimizer.step()
            count += len(batch[0])
    # Here Join has copied the parameters from the last rank that left. Not the optimizer's state:
    parameters = difference(flat(model.parameters()), expected["parameters"])
    momentum = difference(momentum_of(optimizer), expected["momentum"])
    last = worker.world_size - 1  # has the longest file
    for state in optimizer.state.values():
        dist.broadcast(state["momentum_buffer"], src=last)
    repaired = difference(momentum_of(optimizer), expected["momentum"])

    largest = torch.tensor([*worst, parameters, momentum, repaired], device=worker.device)
    count = torch.tensor(count, device=worker.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(count)
    if not worker.is_main:
        return
    *worst, parameters, momentum, repaired = largest.tolist()
    print(f"\n2. Join, divide_by_initial_world_size={divide_by_initial}")
    print("ranks with data   steps  sum of gradients divided by  max difference to plain sum")
    for ranks in range(worker.world_size, 0, -1):
        steps = [s for s in range(len(worst)) if sum(s < len(b) for b in batches) == ranks]
        if steps:
            divisor = worker.world_size if divide_by_initial else ranks
            span = f"{steps[0] + 1}-{steps[-1] + 1}"
            print(f"{ranks:15}  {span:>6}  {divisor:27}  {max(worst[s] for s in steps):27.1e}")
    print(f"images trained on: {count} of {args.images}")
    print(f"max difference to one process: parameters {parameters:.1e}, momentum {momentum:.1e}")
    print(f"momentum after a broadcast from rank {last}: {repaired:.1e}")


def train_plainly(batches: list, divide_by_initial: bool, device) -> dict:
    """What Join is to compute, in one process: per step, the sum over the ranks that have data."""
    model, optimizer = build(device)
    gradients = []
    for step in range(max(map(len, batches))):
        left = [b[step] for b in batches if step < len(b)]
        optimizer.zero_grad()
        for batch in left:
            backward(model, *batch, device)  # gradients of the ranks' mean losses add up
        for p in model.parameters():
            p.grad /= len(batches) if divide_by_initial else len(left)
        gradients.append(gradients_of(model))
        optimizer.step()
    momentum = momentum_of(optimizer)
    return {"gradients": gradients, "parameters": flat(model.parameters()), "momentum": momentum}


def compare_alternatives(files: list, count: int, args, worker: Worker) -> None:
    def sampled(sampler_drops: bool, loader_drops: bool) -> list:
        sampler = DistributedSampler(range(count), shuffle=True, drop_last=sampler_drops)
        return list(
            DataLoader(range(count), args.batch_size, False, sampler, drop_last=loader_drops)
        )

    mine = files[worker.rank]
    shortest = torch.tensor(len(mine), device=worker.device)
    dist.all_reduce(shortest, op=dist.ReduceOp.MIN)  # one collective before the epoch
    ways = {
        "Join": mine,
        "stop with the shortest file": mine[: int(shortest)],
        "sampler pads (default)": sampled(False, False),
        "sampler drops": sampled(True, False),
        "sampler and loader drop": sampled(True, True),
    }
    if worker.is_main:
        print(f"\n3. One epoch over {count} images\nway{'steps':>29}  idle  lost  repeated")
    for name, batches in ways.items():
        everyone = [None] * worker.world_size
        dist.all_gather_object(everyone, [batch.tolist() for batch in batches])
        seen = Counter(i for rank in everyone for batch in rank for i in batch)
        steps = [len(rank) for rank in everyone]
        idle = sum(max(steps) - s for s in steps) / (max(steps) * len(steps))
        if worker.is_main:
            lost, repeated = count - len(seen), seen.total() - len(seen)
            print(f"{name:27}  {max(steps):3}  {idle:4.0%}  {lost:4}  {repeated:8}")


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def gradients_of(model) -> torch.Tensor:
    return flat(p.grad for p in model.parameters())


def momentum_of(optimizer) -> torch.Tensor:
    return flat(state["momentum_buffer"] for state in optimizer.state.values())


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def parse_args():
    parser = ArgumentParser(description="What happens when ranks have different amounts of data.")
    add = parser.add_argument
    add("--images", type=int, default=997, help="all ranks' files together, at most 1437")
    add("--batch-size", type=int, default=32, help="images per rank and step")
    add("--timeout", type=float, default=5.0, help="seconds until the hang is given up")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    if not 1 <= args.images <= 1437:
        parser.error(f"--images must be from 1 to 1437, not {args.images}")
    if args.batch_size < 1:
        parser.error(f"--batch-size must be at least 1, not {args.batch_size}")
    if not 0 < args.timeout < 3600:
        parser.error(f"--timeout must be above 0 and below 3600, not {args.timeout}")
    return args


if __name__ == "__main__":
    main()
