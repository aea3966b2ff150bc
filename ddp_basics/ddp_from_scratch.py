"""DistributedDataParallel written by hand, twice, and compared with torch's and with one process.

    python ddp_basics/ddp_from_scratch.py
    torchrun --standalone --nproc_per_node=2 ddp_basics/ddp_from_scratch.py
    torchrun --standalone --nproc_per_node=3 ddp_basics/ddp_from_scratch.py --optimizer sgd

Both classes are in bucketed_ddp.py: `NaiveDDP` is the idea (after backward, average each gradient),
`BucketedDDP` is what makes it fast (few large messages, sent while backward still computes).

Look at the differences (with 2 ranks all bits agree with torch's DDP), the number of collectives,
and the timeline: the first bucket leaves long before backward ends.
"""

import os
import statistics
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser
from bucketed_ddp import BucketedDDP, NaiveDDP
from data import load_dataset
from model import SmallCNN
from runtime import Worker, distributed_worker
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode  # sees the collectives of C++ code too


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    images, labels = (t.to(worker.device) for t in load_dataset("digits")[0].tensors)
    models = {}
    for name, wrapper in {
        "one process": lambda module: module,  # on every rank, with the whole global batch
        "naive": NaiveDDP,
        "bucketed": lambda module: BucketedDDP(module, args.bucket_cap_mb),
        "torch DDP": lambda module: DistributedDataParallel(
            module, bucket_cap_mb=args.bucket_cap_mb
        ),
    }.items():
        torch.manual_seed(args.seed)
        models[name] = wrapper(SmallCNN(channels=args.channels).to(worker.device))
    optimizers = {name: OPTIMIZERS[args.optimizer](m.parameters()) for name, m in models.items()}
    counts = {name: CountCollectives() for name in models}
    worst = torch.zeros(len(models), 4, dtype=torch.float64, device=worker.device)
    generator = torch.Generator().manual_seed(args.seed)

    for step in range(args.steps):
        batch = torch.randint(len(images), (args.batch_size,), generator=generator)
        share = batch[worker.rank :: worker.world_size]
        for name, model in models.items():
            part = batch if name == "one process" else share
            # Only the last step is counted: torch's DDP arranges its buckets after the first.
            with counts[name] if step == args.steps - 1 else nullcontext():
                start = train_step(model, optimizers[name], images[part], labels[part])
            if name == "bucketed":
                end = model.backward_end - start
                timeline = [(bucket, bucket.start_time - start) for bucket in model.buckets]
        states = [flat_state(model) for model in models.values()]
        for row, state in zip(worst, states, strict=True):
            differences = [(state - other).abs().amax(1) for other in (states[0], states[-1])]
            torch.maximum(row, torch.cat(differences).double(), out=row)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # the rank that is furthest off counts

    times = {name: [] for name in models if name != "one process"}
    for _ in range(args.repeats):
        for name, values in times.items():  # alternating: disturbances hit all of them alike
            dist.barrier()
            start = time.perf_counter()
            train_step(models[name], optimizers[name], images[share], labels[share])
            if worker.device.type == "cuda":
                torch.cuda.synchronize()
            values.append(1000 * (time.perf_counter() - start))
    if worker.is_main:
        print(
            f"{args.steps} steps with {args.optimizer}, global batch {args.batch_size}: the largest"
        )
        print_differences(dict(zip(models, worst.tolist(), strict=True)), counts, worker)
        print(f"\nms for a step      median   middle half of {args.repeats}")
        for name, values in times.items():
            low, median, high = statistics.quantiles(values, n=4)
            print(f"{name:14}   {median:8.2f}   {low:.2f} to {high:.2f}")
        print_timeline(timeline, end)


def train_step(model, optimizer, images, labels) -> float:
    """One optimizer step; returns the time at which backward started."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    start = time.perf_counter()
    loss.backward()
    optimizer.step()
    return start


def flat_state(model: nn.Module) -> torch.Tensor:
    """All gradients in row 0, all parameters in row 1."""
    rows = ([p.grad for p in model.parameters()], list(model.parameters()))
    return torch.stack([torch.cat([t.detach().flatten() for t in row]) for row in rows])


class CountCollectives(TorchDispatchMode):
    """Counts the collectives called inside a `with` block, and the bytes handed to them."""

    calls = bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.calls += 1
            self.bytes += sum(t.nbytes for t in args[0])
        return function(*args, **(kwargs or {}))


def print_differences(worst, counts, worker: Worker) -> None:
    print("                to one process         to torch DDP          in one step")
    print("difference of   gradient   parameter   gradient   parameter  all_reduces     bytes")
    for name, row in worst.items():
        gradient, parameter, torch_gradient, torch_parameter = row
        print(
            f"{name:14}  {gradient:<11.1e}{parameter:<12.1e}{torch_gradient:<11.1e}"
            f"{torch_parameter:<11.1e}{counts[name].calls:11}{counts[name].bytes:10,}"
        )
    same = not any(worst["naive"][2:] + worst["bucketed"][2:])
    print(f"Do all three have the same bits? {'Yes' if same else 'No'}. ", end="")
    if worker.world_size <= 2:
        print("With two ranks they must: a + b is b + a, and halving is exact.")
    else:
        print(
            "With three or more ranks they need not: (a + b) + c\nis not a + (b + c), and where a "
            "number lies in its buffer decides at which rank its sum begins."
        )


def print_timeline(timeline, end: float) -> None:
    print(f"\nrank 0: the last gradient was there {1000 * end:.2f} ms after backward began")
    print("bucket   parameters      bytes   all_reduce started after")
    for i, (bucket, start) in enumerate(timeline):
        bar = "." * round(40 * start / end) + "#"
        print(
            f"{i:6}   {len(bucket.views):10}   {bucket.flat.nbytes:8,}   {1000 * start:6.2f} ms "
            f"{start / end:6.1%} of it  |{bar:41}|"
        )


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3),
}


def parse_args():
    parser = ArgumentParser(description="DDP by hand, next to torch's DDP and to one process.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=96, help="images, over all ranks")
    parser.add_argument("--channels", type=int, default=32, help="width of the network")
    parser.add_argument("--bucket-cap-mb", type=float, default=0.05, help="small: several buckets")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    for name, least in (("steps", 2), ("repeats", 2), ("batch_size", 1)):
        if getattr(args, name) < least:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be at least {least}, not {getattr(args, name)}")
    if args.bucket_cap_mb <= 0:
        parser.error(f"--bucket-cap-mb must be above 0, not {args.bucket_cap_mb}")
    if args.channels < 4 or args.channels % 4:
        parser.error(f"--channels must be a multiple of 4, not {args.channels}")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size % ranks:
        parser.error(f"--batch-size {args.batch_size} does not divide by {ranks} ranks")
    return args


if __name__ == "__main__":
    main()
