"""Gradient compression: DDP communication hooks that send fewer bytes, and what they cost.

    torchrun --standalone --nproc_per_node=2 ddp_basics/gradient_compression.py
    torchrun --standalone --nproc_per_node=2 ddp_basics/gradient_compression.py --hooks none top-k

DDP passes each full bucket of gradients to its communication hook, which returns a future of the
averaged bucket. The script trains the same model once per hook. It counts the bytes of the tensors
that one rank passes to collectives in a step.

Look at the error: top-k omits most of each gradient, yet trains, because it adds the values that it
has not sent to the next gradient (error feedback). Fewer bytes save time only if the network is the
bottleneck: measure on yours.
"""

import json
import math
import os
import statistics
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, above, at_least
from data import load_dataset
from model import SmallCNN
from runtime import Worker, distributed_worker
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        rows = [train(name, args, worker) for name in args.hooks]
    if worker.is_main:
        print_rows(rows, args)
        if args.output_dir:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (args.output_dir / "metrics.jsonl").write_text(lines)


def train(name: str, args, worker: Worker) -> dict:
    train_set, test_set = load_dataset("digits")
    images, labels = (t.to(worker.device) for t in train_set.tensors)
    torch.manual_seed(args.seed)
    module = SmallCNN().to(worker.device)
    model = DistributedDataParallel(module)
    params = list(module.parameters())
    hook, state = make_hook(name, args)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.AdamW(params, lr=args.lr)
    order = torch.Generator().manual_seed(args.seed)  # the same global batches for every hook
    errors = []
    bytes_sent = []  # per step
    for _ in range(args.epochs):
        for batch in torch.randperm(len(images), generator=order).split(args.batch_size):
            if len(batch) < args.batch_size:
                continue  # only a full batch weights all ranks equally
            local_batch = batch[worker.rank :: worker.world_size]
            x, y = images[local_batch], labels[local_batch]
            measure_error = len(bytes_sent) % 20 == 19
            if measure_error:
                exact = exact_gradient(module, x, y)
            optimizer.zero_grad()
            with count_bytes() as calls:
                F.cross_entropy(model(x), y).backward()
            bytes_sent.append(sum(calls))
            if measure_error:
                gradient = torch.cat([p.grad.flatten() for p in params])
                errors.append(((gradient - exact).norm() / exact.norm()).item())
            optimizer.step()
    with torch.no_grad():  # the test set is small, and all ranks hold the same model
        test_images, test_labels = (t.to(worker.device) for t in test_set.tensors)
        accuracy = (module(test_images).argmax(1) == test_labels).float().mean().item()
    return {
        "hook": name,
        "bytes": statistics.mean(bytes_sent[PLAIN_STEPS:]),
        "formula": formula(name, args, [p.shape for p in params]),
        "error": statistics.median(errors),
        "accuracy": accuracy,
    }


def exact_gradient(module, images, labels) -> torch.Tensor:
    """The uncompressed average. autograd.grad does not write .grad or trigger DDP's hooks."""
    loss = F.cross_entropy(module(images), labels)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*module.parameters()])])
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


@contextmanager
def count_bytes():
    """Yield a list to which each collective in the block appends the bytes that it is given.

    Hooks look these functions up in torch.distributed at each call, also in other threads.
    """
    calls = []
    real_all_reduce = dist.all_reduce
    real_all_gather = dist.all_gather

    def all_reduce(tensor, *args, **kwargs):
        calls.append(tensor.nbytes)
        return real_all_reduce(tensor, *args, **kwargs)

    def all_gather(tensors, tensor, *args, **kwargs):
        calls.append(tensor.nbytes)
        return real_all_gather(tensors, tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    dist.all_gather = all_gather
    try:
        yield calls
    finally:
        dist.all_reduce = real_all_reduce
        dist.all_gather = real_all_gather


PLAIN_STEPS = 2  # DDP rearranges its buckets after the first step: PowerSGD starts after the second


def make_hook(name: str, args) -> tuple:
    """Return the hook and the state that DDP passes to it on each call."""
    if name == "powersgd":  # a gradient matrix n x m becomes P (n x rank) times Q (m x rank)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=args.rank, start_powerSGD_iter=PLAIN_STEPS
        )
        return powerSGD_hook.powerSGD_hook, state
    if name == "top-k":
        return top_k_hook, TopK(args.keep)
    hooks = {
        "none": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": bf16_hook,
    }
    return hooks[name], None


def bf16_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Like default_hooks.bf16_compress_hook, which a torch without CUDA and NCCL refuses.

    DDP requires the argument name `bucket`.
    """
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


class TopK:
    """The unsent rest of this rank's gradients, per bucket (error feedback, arXiv:1809.07599)."""

    def __init__(self, keep: float):
        self.keep = keep  # the fraction of each bucket that is sent
        self.rest = {}


def top_k_hook(state: TopK, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send the largest values of a bucket and their indices; keep the rest for the next step.

    Ranks choose different indices, so the hook gathers the pairs instead of summing them: each of N
    ranks receives N - 1 messages. An all_reduce moves twice (N - 1) / N times its buffer.
    """
    world_size = dist.get_world_size()
    layout = tuple(map(id, bucket.parameters()))  # a bucket may be rearranged after the first step
    gradient = bucket.buffer() + state.rest.get(layout, 0)
    places = gradient.abs().topk(math.ceil(state.keep * gradient.numel())).indices
    values = gradient[places]
    gradient[places] = 0
    state.rest[layout] = gradient
    # One message: the bits of the float32 values, and int32 indices.
    message = torch.cat([values.view(torch.int32), places.int()])
    messages = [torch.empty_like(message) for _ in range(world_size)]
    future = dist.all_gather(messages, message, async_op=True).get_future()

    def average(done) -> torch.Tensor:
        done.wait()  # raises what the collective raised
        result = bucket.buffer().zero_()
        for message in messages:
            values, places = message.chunk(2)
            result.index_add_(0, places, values.view(torch.float32) / world_size)
        return result

    return future.then(average)


def formula(name: str, args, shapes: list[torch.Size]) -> int:
    """Bytes that one rank passes to collectives in a step, with all gradients in one bucket."""
    total = sum(shape.numel() for shape in shapes)
    if name == "top-k":
        return math.ceil(args.keep * total) * (4 + 4)  # float32 value, int32 index
    if name == "powersgd":  # (arXiv:1905.13727) vectors and small matrices are sent as they are
        numbers = 0
        for shape in shapes:
            rows, columns = shape[0], shape[1:].numel()
            low_rank = (rows + columns) * min(args.rank, rows, columns)
            is_worth_it = len(shape) > 1 and 2 * low_rank < shape.numel()
            numbers += low_rank if is_worth_it else shape.numel()
        return 4 * numbers
    return total * {"none": 4, "fp16": 2, "bf16": 2}[name]


def print_rows(rows: list[dict], args) -> None:
    print(f"{args.epochs} epochs, global batch {args.batch_size}, AdamW")
    print("hook     bytes per step    formula    ratio   error of a gradient   test accuracy")
    for row in rows:
        print(
            f"{row['hook']:8}   {row['bytes']:12,.0f}   {row['formula']:8,}   "
            f"{rows[0]['bytes'] / row['bytes']:5.1f}x   {row['error']:19.1e}   "
            f"{row['accuracy']:13.2%}"
        )
    print(f"ratio: to {rows[0]['hook']}. error: |g - exact| / |exact|, median over the run")
    print(
        "bytes: given to collectives. With N ranks, all_reduce sends 2 (N - 1) / N times as much,"
    )
    print("and top-k's all_gather N - 1 times: with 2 ranks both send what is shown")


def parse_args():
    parser = ArgumentParser(description="Compress gradients: bytes, error, and test accuracy.")
    hooks = ("none", "fp16", "bf16", "powersgd", "top-k")
    parser.add_argument("--hooks", nargs="+", choices=hooks, default=hooks, help="hooks to compare")
    parser.add_argument("--rank", type=at_least(1), default=2, help="PowerSGD's rank (default: 2)")
    parser.add_argument("--keep", type=above(0), default=0.02, help="fraction that top-k sends")
    parser.add_argument("--epochs", type=at_least(1), default=15, help="passes over the data")
    parser.add_argument("--batch-size", type=at_least(1), default=96, help="images per step")
    parser.add_argument("--lr", type=above(0), default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of weights and data")
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    parser.add_argument("--output-dir", type=Path, help="write metrics.jsonl to this folder")
    args = parser.parse_args()
    if args.keep > 1:
        parser.error(f"--keep must be above 0 and at most 1, not {args.keep}")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size % ranks:
        parser.error(f"--batch-size {args.batch_size} does not divide over {ranks} rank(s)")
    steps = args.epochs * (1437 // args.batch_size)  # of 1,437 images
    if steps < 20:
        parser.error(f"{steps} steps are too few to measure: more --epochs")
    if args.output_dir:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
