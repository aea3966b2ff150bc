"""Train the same model under several versions of DDP, and print how they differ.

ddp_from_scratch.py uses it. Two versions are always added: a single-process baseline on the global
batch, which every rank computes, and torch's DistributedDataParallel.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, above, at_least
from data import load_dataset
from model import SmallCNN
from runtime import Worker
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode  # sees the collectives of C++ code too

ONE_PROCESS, TORCH_DDP = "one process", "torch DDP"


def compare(versions: dict[str, Callable[[nn.Module], nn.Module]], args, worker: Worker) -> None:
    """Print the differences, messages, step times and timelines of these versions of DDP.

    versions: name -> a function that wraps a module, as torch's DistributedDataParallel does.
    """

    def torch_ddp(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, bucket_cap_mb=args.bucket_cap_mb)

    wrappers = {ONE_PROCESS: lambda module: module, **versions, TORCH_DDP: torch_ddp}
    runs = {name: Run(wrap, args, worker.device) for name, wrap in wrappers.items()}
    images, labels = (t.to(worker.device) for t in load_dataset("digits")[0].tensors)

    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        global_batch = torch.randint(len(images), (args.batch_size,), generator=generator)
        local_batch = global_batch[worker.rank :: worker.world_size]
        for name, run in runs.items():
            batch = global_batch if name == ONE_PROCESS else local_batch
            run.train_step(images[batch], labels[batch])
        for run in runs.values():
            run.note_difference(ONE_PROCESS, runs[ONE_PROCESS])
            run.note_difference(TORCH_DDP, runs[TORCH_DDP])
    for run in runs.values():
        run.max_diff = max_over_ranks(run.max_diff, worker.device)

    # Count messages in one more step: torch's DDP has arranged its buckets by now.
    logs = {name: run.logged_step(images[batch], labels[batch]) for name, run in runs.items()}
    parallel = {name: run for name, run in runs.items() if name != ONE_PROCESS}
    for _ in range(args.repeats):
        for run in parallel.values():  # in turn: disturbances hit all versions alike
            run.timed_step(images[local_batch], labels[local_batch])

    if worker.is_main:
        print_differences(runs, logs, args)
        same_bits = all(not any(runs[name].max_diff[TORCH_DDP]) for name in versions)
        print(f"The same bits as torch DDP? {'Yes' if same_bits else 'No'}. ", end="")
        print(why_bits_may_differ(worker.world_size, worker.device.type))
        print_step_times(parallel, args.repeats)
        for name in parallel:
            print_timeline(name, logs[name])


class Run:
    """A model that trains under one version of DDP, and its measurements."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], args, device: torch.device):
        torch.manual_seed(args.seed)
        self.model = wrap(SmallCNN(channels=args.channels).to(device))
        self.optimizer = OPTIMIZERS[args.optimizer](self.model.parameters())
        self.device = device
        # Reference -> (largest difference of a gradient, largest difference of a parameter).
        self.max_diff = {ONE_PROCESS: (0.0, 0.0), TORCH_DDP: (0.0, 0.0)}
        self.step_ms = []

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()

    def note_difference(self, name: str, reference: "Run") -> None:
        gradient_diff, parameter_diff = self.max_diff[name]
        pairs = zip(self.model.parameters(), reference.model.parameters(), strict=True)
        for mine, expected in pairs:
            gradient_diff = max(gradient_diff, (mine.grad - expected.grad).abs().max().item())
            parameter_diff = max(parameter_diff, (mine - expected).abs().max().item())
        self.max_diff[name] = (gradient_diff, parameter_diff)

    def logged_step(self, images: Tensor, labels: Tensor) -> "StepLog":
        """A train_step that logs its collectives and gradients."""
        log = StepLog(self.device)
        params = list(self.model.parameters())
        hooks = [p.register_post_accumulate_grad_hook(log.on_gradient) for p in params]
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        with log:
            log.backward_start = moment(self.device)
            loss.backward()
        self.optimizer.step()
        for hook in hooks:
            hook.remove()
        return log

    def timed_step(self, images: Tensor, labels: Tensor) -> None:
        dist.barrier()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # exclude earlier work of the GPU
        start = time.perf_counter()
        self.train_step(images, labels)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # include all work of this step
        self.step_ms.append(1000 * (time.perf_counter() - start))


class StepLog(TorchDispatchMode):
    """Logs each collective in a `with` block: its bytes, and when it could start."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.bytes = []  # that this rank passes to each collective
        self.starts = []  # one moment per collective
        self.backward_start = self.last_gradient = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.bytes.append(sum(tensor.nbytes for tensor in args[0]))
            self.starts.append(moment(self.device))
        return function(*args, **(kwargs or {}))

    def on_gradient(self, param: nn.Parameter) -> None:
        self.last_gradient = moment(self.device)


def moment(device: torch.device) -> float | torch.Event:
    """The current time. A GPU runs behind the CPU, so its time is an event that it records when all
    earlier work is done."""
    if device.type != "cpu":
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def milliseconds(start, end) -> float:
    """The time from one `moment` to another."""
    if isinstance(start, float):
        return 1000 * (end - start)
    torch.accelerator.synchronize()
    return start.elapsed_time(end)


def max_over_ranks(max_diff: dict, device: torch.device) -> dict:
    """`max_diff` with each number replaced by the largest of all ranks."""
    rows = torch.tensor(list(max_diff.values()), dtype=torch.float64, device=device)
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    return dict(zip(max_diff, rows.tolist(), strict=True))


def print_differences(runs: dict[str, Run], logs: dict[str, StepLog], args) -> None:
    print(f"{args.steps} steps with {args.optimizer}, global batch {args.batch_size}: differences")
    print("                to one process         to torch DDP          in one step")
    print("max difference  gradient   parameter   gradient   parameter  all_reduces     bytes")
    for name, run in runs.items():
        gradient, parameter = run.max_diff[ONE_PROCESS]
        torch_gradient, torch_parameter = run.max_diff[TORCH_DDP]
        sent = logs[name].bytes
        print(
            f"{name:14}  {gradient:<11.1e}{parameter:<12.1e}{torch_gradient:<11.1e}"
            f"{torch_parameter:<11.1e}{len(sent):11}{sum(sent):10,}"
        )


def why_bits_may_differ(world_size: int, device_type: str) -> str:
    if device_type != "cpu":
        return (
            "On GPUs they need not: some kernels add in another\norder each time, and convolutions "
            "may use TF32."
        )
    if world_size <= 2:
        return "With two ranks on CPUs they must: a + b is b + a,\nand halving is exact."
    return (
        "With three or more ranks they need not: (a + b) + c\nis not a + (b + c), and where a "
        "number lies in its buffer decides at which rank its sum begins."
    )


def print_step_times(runs: dict[str, Run], repeats: int) -> None:
    print(f"\nms per step        median   middle half of {repeats}")
    for name, run in runs.items():
        low, median, high = statistics.quantiles(run.step_ms, n=4)
        print(f"{name:14}   {median:8.2f}   {low:.2f} to {high:.2f}")


def print_timeline(name: str, log: StepLog) -> None:
    """When each all_reduce of rank 0 could start: long before backward ends, or after it."""
    backward_ms = milliseconds(log.backward_start, log.last_gradient)
    print(f"\n{name}: rank 0 had its last gradient {backward_ms:.2f} ms after backward began")
    print("all_reduce       bytes   started after")
    for i, (start, size) in enumerate(zip(log.starts, log.bytes, strict=True), start=1):
        start_ms = milliseconds(log.backward_start, start)
        fraction = start_ms / backward_ms
        bar = "." * round(40 * min(fraction, 1)) + "#"
        print(f"{i:10}   {size:9,}   {start_ms:6.2f} ms, {fraction:6.1%} of it  |{bar}")


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3),
}


def parse_args(description: str):
    parser = ArgumentParser(description=description)
    add = parser.add_argument
    add("--steps", type=at_least(1), default=5, help="optimizer steps")
    add("--batch-size", type=at_least(1), default=96, help="images per global batch (default: 96)")
    add("--channels", type=at_least(4), default=32, help="width, a multiple of 4 (default: 32)")
    add("--bucket-cap-mb", type=above(0), default=0.05, help="bucket size in MiB (default: 0.05)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer of all runs")
    add("--repeats", type=at_least(2), default=20, help="number of timed steps (default: 20)")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.channels % 4:
        parser.error(f"--channels must be a multiple of 4, not {args.channels}")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size % world_size:
        parser.error(f"--batch-size {args.batch_size} does not divide over {world_size} rank(s)")
    return args
