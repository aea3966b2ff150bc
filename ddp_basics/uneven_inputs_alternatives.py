"""Compare remedies for uneven data: samples lost, samples repeated, time idle.

    torchrun --standalone --nproc_per_node=2 ddp_basics/uneven_inputs_alternatives.py
    torchrun --standalone --nproc_per_node=3 ddp_basics/uneven_inputs_alternatives.py

The script distributes one epoch over the ranks, without training. Look at the costs: Join loses
nothing, but ranks that are done wait for the longest file. A stop with the shortest file loses the
rest of the longer files. A DistributedSampler over all files distributes the images evenly, and
repeats or drops a few.
"""

from collections import Counter

import torch
import torch.distributed as dist
from arguments import ArgumentParser
from runtime import Worker, distributed_worker
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, DistributedSampler
from uneven_files import add_data_arguments, uneven_files


@record
def main() -> None:
    args = parse_args()
    with distributed_worker("cpu") as worker:
        file = uneven_files(args.images, worker.world_size)[worker.rank]
        epochs = {
            "Join": file.split(args.batch_size),
            "stop with the shortest file": stop_with_shortest(file.split(args.batch_size)),
            "sampler pads (default)": sampled(args, False, False),
            "sampler drops": sampled(args, True, False),
            "sampler and loader drop": sampled(args, True, True),
        }
        if worker.is_main:
            print(f"one epoch over {args.images} images")
            print("way                        steps  idle  lost  repeated")
        for name, batches in epochs.items():
            print_cost(name, batches, args, worker)


def stop_with_shortest(batches: list) -> list:
    """One all_reduce before the epoch finds the smallest number of batches of a rank."""
    shortest = torch.tensor(len(batches))
    dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
    return batches[: int(shortest)]


def sampled(args, sampler_drops: bool, loader_drops: bool) -> list:
    """This rank's batches if every rank can read every image, and a sampler distributes them.

    The sampler repeats images or drops the last ones until all ranks have equally many. The loader
    can drop a last batch that is not full.
    """
    indices = range(args.images)
    sampler = DistributedSampler(indices, shuffle=True, drop_last=sampler_drops)
    return list(DataLoader(indices, args.batch_size, sampler=sampler, drop_last=loader_drops))


def print_cost(name: str, batches: list, args, worker: Worker) -> None:
    """batches: this rank's batches, tensors of image indices."""
    batches_of_rank = [None] * worker.world_size
    dist.all_gather_object(batches_of_rank, [batch.tolist() for batch in batches])
    if not worker.is_main:
        return
    times_seen = Counter(i for batches in batches_of_rank for batch in batches for i in batch)
    steps_of_rank = [len(batches) for batches in batches_of_rank]
    steps = max(steps_of_rank)
    idle = 1 - sum(steps_of_rank) / (steps * worker.world_size) if steps else 0
    lost = args.images - len(times_seen)
    repeated = times_seen.total() - len(times_seen)
    print(f"{name:27}  {steps:3}  {idle:4.0%}  {lost:4}  {repeated:8}")


def parse_args():
    parser = ArgumentParser(description="What each way to distribute uneven data costs.")
    add_data_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
