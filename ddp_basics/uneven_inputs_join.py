"""Ranks with different numbers of batches under Join: a rank without data left adds zeros.

    torchrun --standalone --nproc_per_node=2 ddp_basics/uneven_inputs_join.py
    torchrun --standalone --nproc_per_node=3 ddp_basics/uneven_inputs_join.py
    python ddp_basics/uneven_inputs_join.py                # one process: no rank leaves early

Each rank reads its own file, and the files differ in length. Join lets a rank without data left
take part in the other ranks' all_reduces, with zeros. (It knows DDP's alone. With SyncBatchNorm,
or an all_reduce of your own in the loop, the remaining ranks wait for ever, unless you pass
throw_on_early_termination=True.) Look at

- the divisor: the sum of gradients is divided by the initial number of ranks, or by the number of
  ranks that still have data. Either way every gradient equals a plain sum over the remaining
  batches, computed by one process.
- the momentum: a rank that left early has missed optimizer steps. Join copies the parameters to it,
  but not the optimizer's state: broadcast this state before you continue to train.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser
from model import SmallCNN
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from uneven_files import add_data_arguments, read_batches


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        batches = read_batches(args, worker, worker.device)
        for divide_by_initial in (True, False):
            result = train_with_join(batches, divide_by_initial, worker)
            results = [None] * worker.world_size
            dist.all_gather_object(results, result)
            if worker.is_main:
                print_results(results, batches, divide_by_initial)


def train_with_join(batches: list, divide_by_initial: bool, worker: Worker) -> dict:
    """Train on this rank's batches; returns the differences to `train_plainly` on all batches."""
    model, optimizer = make_model(worker.device)
    ddp_model = DistributedDataParallel(model)
    gradients = []
    # The same as `with ddp_model.join(divide_by_initial_world_size=...)`. Join also takes several
    # objects, such as a ZeroRedundancyOptimizer, whose step() is a collective as well.
    with Join([ddp_model], divide_by_initial_world_size=divide_by_initial):
        for images, labels in batches[worker.rank]:
            optimizer.zero_grad()
            F.cross_entropy(ddp_model(images), labels).backward()
            gradients.append(flat_gradients(model))
            optimizer.step()
    # Join has now copied the parameters of the rank that left last to all other ranks.

    expected = train_plainly(batches, divide_by_initial, worker.device)
    expected_gradients = expected["gradients"][: len(gradients)]
    result = {
        "images": sum(len(labels) for _, labels in batches[worker.rank]),
        "gradient_diffs": list(map(max_diff, gradients, expected_gradients)),
        "parameter_diff": max_diff(flat(model.parameters()), expected["parameters"]),
        "momentum_diff": max_diff(flat_momentum(optimizer), expected["momentum"]),
    }
    last_rank = worker.world_size - 1  # its file is the longest: it has made all steps
    for state in optimizer.state.values():
        dist.broadcast(state["momentum_buffer"], src=last_rank)
    result["repaired_diff"] = max_diff(flat_momentum(optimizer), expected["momentum"])
    return result


def train_plainly(batches: list, divide_by_initial: bool, device: torch.device) -> dict:
    """What Join should compute, in one process: per step, the sum over the ranks that have data."""
    model, optimizer = make_model(device)
    gradients = []
    for step in range(max(len(file) for file in batches)):
        remaining = [file[step] for file in batches if step < len(file)]
        optimizer.zero_grad()
        for images, labels in remaining:
            F.cross_entropy(model(images), labels).backward()  # gradients of the means add up
        for param in model.parameters():
            param.grad /= len(batches) if divide_by_initial else len(remaining)
        gradients.append(flat_gradients(model))
        optimizer.step()
    return {
        "gradients": gradients,
        "parameters": flat(model.parameters()),
        "momentum": flat_momentum(optimizer),
    }


def make_model(device: torch.device) -> tuple[SmallCNN, torch.optim.SGD]:
    torch.manual_seed(0)
    model = SmallCNN(channels=8).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def flat(tensors) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def flat_gradients(model: SmallCNN) -> Tensor:
    return flat(param.grad for param in model.parameters())


def flat_momentum(optimizer: torch.optim.SGD) -> Tensor:
    return flat(state["momentum_buffer"] for state in optimizer.state.values())


def max_diff(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def print_results(results: list[dict], batches: list, divide_by_initial: bool) -> None:
    world_size = len(results)
    steps_of_rank = [len(file) for file in batches]
    print(f"\ndivide_by_initial_world_size={divide_by_initial}")
    print("ranks with data   steps  sum of gradients divided by  max difference from plain sum")
    first = 0
    for last in sorted(set(steps_of_rank)):  # after these steps some rank has no data left
        ranks_with_data = sum(steps >= last for steps in steps_of_rank)
        divisor = world_size if divide_by_initial else ranks_with_data
        diffs = [diff for result in results for diff in result["gradient_diffs"][first:last]]
        span = f"{first + 1}-{last}"
        print(f"{ranks_with_data:15}  {span:>6}  {divisor:27}  {max(diffs):29.1e}")
        first = last
    parameter_diff, momentum_diff, repaired_diff = (
        max(result[name] for result in results)
        for name in ("parameter_diff", "momentum_diff", "repaired_diff")
    )
    print(f"images trained on: {sum(result['images'] for result in results)}")
    print(
        f"max difference from one process: parameters {parameter_diff:.1e}, "
        f"momentum {momentum_diff:.1e}"
    )
    print(f"momentum after a broadcast from rank {world_size - 1}: {repaired_diff:.1e}")


def parse_args():
    parser = ArgumentParser(description="Train on files of different length with Join.")
    add_data_arguments(parser)
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
