"""Ranks with different numbers of batches, and no remedy: the job hangs.

    torchrun --standalone --nproc_per_node=2 ddp_basics/uneven_inputs_hang.py
    torchrun --standalone --nproc_per_node=3 ddp_basics/uneven_inputs_hang.py --timeout 10
    python ddp_basics/uneven_inputs_hang.py                # one process: it cannot hang

Each rank reads its own file, and the files differ in length. Look at where the ranks wait in the
end: at different places of the program, and no error names the missing rank. Here the wait ends
after --timeout seconds; by default a job waits for 30 minutes, 10 with backend nccl.
Remedies are in uneven_inputs_join.py and uneven_inputs_alternatives.py.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, above
from model import SmallCNN
from runtime import Worker, distributed_worker
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from uneven_files import add_data_arguments, read_batches


@record
def main() -> None:
    args = parse_args()
    # Use the CPU and Gloo also on machines with GPUs: after a timeout NCCL raises nothing, and its
    # watchdog thread ends the whole process.
    with distributed_worker("cpu") as worker:
        batches = read_batches(args, worker, worker.device)
        # A group of its own, because a group is dead after a timeout.
        group = dist.new_group(timeout=timedelta(seconds=args.timeout))
        report = train_until_stuck(batches[worker.rank], group)
        reports = [None] * worker.world_size
        dist.all_gather_object(reports, report)
        if worker.is_main:
            print_reports(reports, batches, args, worker)


def train_until_stuck(batches: list, group: dist.ProcessGroup) -> dict:
    """Train until this rank is stuck; report where it waited, how long, and its error."""
    torch.manual_seed(0)
    model = SmallCNN(channels=8)
    ddp_model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    report = {"batches_done": 0, "place": "backward", "error": "none"}
    dist.barrier()  # start together: the timeout is short
    start = time.perf_counter()
    try:
        for images, labels in batches:
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(ddp_model(images), labels).backward()
            optimizer.step()
            report["batches_done"] += 1
        # A rank without data goes on to its next collective. If that is an all_reduce, it pairs
        # with the other ranks' gradients: a crash if the sizes differ, else wrong numbers.
        report["place"] = "final barrier"
        start = time.perf_counter()
        dist.barrier(group=group)
    except RuntimeError as error:
        # Drop Gloo's file name at the start, and its advice at the end.
        report["error"] = str(error).split("] ", 1)[-1].split(". ")[0]
    report["seconds"] = time.perf_counter() - start
    return report


def print_reports(reports: list[dict], batches: list, args, worker: Worker) -> None:
    if worker.world_size == 1:
        print("one rank alone cannot hang: start two or more")
    print(f"timeout {args.timeout:g} s")
    print("rank  batches done  then           after s  error")
    for rank, report in enumerate(reports):
        steps = f"{report['batches_done']} of {len(batches[rank])}"
        print(
            f"{rank:4}  {steps:>12}  {report['place']:13}  {report['seconds']:7.1f}  "
            f"{report['error']}"
        )


def parse_args():
    parser = ArgumentParser(description="Ranks with different amounts of data wait for each other.")
    add_data_arguments(parser)
    parser.add_argument("--timeout", type=above(0), default=5.0, help="timeout in seconds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
