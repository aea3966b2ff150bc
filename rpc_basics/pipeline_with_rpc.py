"""A pipeline by remote calls, as one was built before torch.distributed.pipelining; and with that.

    torchrun --standalone --nproc_per_node=2 rpc_basics/pipeline_with_rpc.py
    torchrun --standalone --nproc_per_node=2 rpc_basics/pipeline_with_rpc.py --microbatches 8

For comparison only: to write a pipeline today, begin with parallel_basics/pipeline_parallel.py. Two
stages on two workers, the same micro-batches through both. Look at the gradients, which are those
of one process, and at the seconds. By calls, worker0 names every step of the pipeline, and holds a
reference to each result; with pipelining each rank knows its part, and sends what the next needs.
"""

import argparse
import statistics
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from arguments import ArgumentParser, UserError, above, at_least
from measuring import difference
from rpc_worker import RpcWorker, rpc_worker
from runtime import distributed_worker
from torch import nn
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WIDTH, CLASSES, BATCH = 512, 10, 64


@record
def main() -> None:
    args = parse_args()
    with (
        distributed_worker("cpu", timedelta(seconds=args.timeout)),  # for pipelining
        rpc_worker(args.timeout, least=2) as worker,  # for the calls
    ):
        if worker.world_size > 2 or BATCH % args.microbatches:
            raise UserError(f"two workers, and micro-batches that divide {BATCH} images")
        compare(args, worker)


def compare(args: argparse.Namespace, worker: RpcWorker) -> None:
    """Both ways in turn; rank 1 only answers while rank 0 goes through the pipeline by calls."""
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
    by_schedule = PipelineStage(build_stage(worker.rank), worker.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(by_schedule, args.microbatches, loss_fn=F.cross_entropy)
    stages = []
    dist.barrier()  # two threads that build at a time would share one random generator
    if worker.rank == 0:
        stages = [rpc.remote(worker.name_of(k), Stage, args=(k,)) for k in range(2)]
        # From now on the references know what they refer to. Before, rpc_async() would call from
        # another thread: outside the context, so that there would be no gradients.
        print("parameters:", *(f"{stage.rpc_sync().size():,}" for stage in stages))
    seconds = {"calls": [], "pipelining": []}
    for _ in range(args.repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        if worker.rank == 0:
            gradients = step_by_calls(stages, x, y, args.microbatches)
            seconds["calls"].append(time.perf_counter() - begin)
        dist.barrier()
        begin = time.perf_counter()
        by_schedule.submod.zero_grad()
        schedule.step(*([x] if worker.rank == 0 else []), target=y if worker.rank == 1 else None)
        dist.barrier()  # rank 1 is done first; a step is over when the first stage has gradients
        seconds["pipelining"].append(time.perf_counter() - begin)
    own = [parameter.grad for parameter in by_schedule.submod.parameters()]
    if worker.rank == 1:
        for gradient in own:
            dist.send(gradient, 0)
        return
    others = [torch.empty_like(gradient) for gradient in own]  # both stages are alike
    for gradient in others:
        dist.recv(gradient, 1)
    alone = nn.Sequential(build_stage(0), build_stage(1))
    F.cross_entropy(alone(x), y).backward()
    expected = [parameter.grad for parameter in alone.parameters()]
    print(f"{args.microbatches} micro-batches; largest gradient {largest(expected):.1e}")
    found = {"calls": gradients, "pipelining": own + others}
    for name, times in seconds.items():  # without the first step, which opens connections
        times = [1000 * t for t in times[1:]]
        print(
            f"{name:11}{statistics.median(times):7.1f} ms a step ({min(times):.1f} ... "
            f"{max(times):.1f}), difference to one process {difference(found[name], expected):.1e}"
        )


def step_by_calls(stages: list, x: torch.Tensor, y: torch.Tensor, number: int) -> list:
    """Forward and backward of all micro-batches; returns the gradients of both stages."""
    with dist_autograd.context() as context:
        losses = []
        for inputs, labels in zip(x.chunk(number), y.chunk(number), strict=True):
            # remote() does not wait: the first stage begins with the next micro-batch while the
            # second one fetches this one's output, through the reference to it.
            hidden = stages[0].remote().forward(rpc.RRef(inputs))
            losses.append(stages[1].rpc_async().loss(hidden, labels))
        loss = torch.stack([future.wait() for future in losses]).mean()
        dist_autograd.backward(context, [loss])  # of all at once, in whatever order
        return [g for stage in stages for g in stage.rpc_sync().gradients(context)]


class Stage:
    """A stage at its owner. Calls come in several threads; they compute one at a time."""

    def __init__(self, number: int):
        self.module = build_stage(number)
        self.lock = threading.Lock()

    def forward(self, inputs: rpc.RRef) -> torch.Tensor:
        """inputs: a reference to (images, WIDTH), fp32."""
        x = inputs.to_here()  # fetched by this worker from the one that has it
        with self.lock:
            return self.module(x)

    def loss(self, inputs: rpc.RRef, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.forward(inputs), labels)

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def gradients(self, context: int) -> list[torch.Tensor]:
        found = dist_autograd.get_gradients(context)
        return [found[parameter] for parameter in self.module.parameters()]


def build_stage(number: int) -> nn.Module:
    """The same first values wherever it is made."""
    torch.manual_seed(number + 1)
    layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def largest(tensors: list[torch.Tensor]) -> float:
    return max(tensor.abs().max().item() for tensor in tensors)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="A pipeline by remote calls, and by pipelining.")
    parser.add_argument("--microbatches", type=at_least(1), default=4)
    parser.add_argument("--repeats", type=at_least(1), default=10)
    parser.add_argument("--timeout", type=above(0), default=60, help="seconds, of each call")
    return parser.parse_args()


if __name__ == "__main__":
    main()
