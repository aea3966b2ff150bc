"""One rank's bad sample turns every replica into NaN: skip the step on all ranks, name the rank.

    torchrun --standalone --nproc_per_node=2 ddp_basics/nan_on_one_rank.py
    torchrun --standalone --nproc_per_node=3 ddp_basics/nan_on_one_rank.py --bad-rank 1
    python ddp_basics/nan_on_one_rank.py                   # one process: only that one can be bad

    no check         DDP averages the NaN into every gradient: after the step all replicas are NaN
    one rank skips   `if not loss.isfinite(): continue`: no error at first. From then on this rank
                     is one batch ahead of the other ranks, and at the end these wait
    all ranks skip   the norm of the averaged gradients is one number on all ranks, so all ranks
                     decide alike, without another collective; then they compare their own losses

Look at the losses of the bad step: only the rank with the bad sample has NaN. One step later all
ranks have it, and no log tells where it began. GradScaler (fp16) skips steps in the third way, too.
With BatchNorm check the batch before the forward pass: running statistics keep the NaN.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, UserError, above, at_least
from runtime import Worker, distributed_worker
from small_net import BATCH, accuracy, batches, make_model, make_optimizer
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    args = parse_args()
    # Use the CPU and Gloo also on machines with GPUs: after a timeout NCCL raises nothing, and its
    # watchdog thread ends the whole process.
    with distributed_worker("cpu") as worker:
        if BATCH % worker.world_size:
            raise UserError(
                f"the global batch of {BATCH} images does not divide over "
                f"{worker.world_size} rank(s)"
            )
        args.bad_rank = worker.world_size - 1 if args.bad_rank is None else args.bad_rank
        if args.bad_rank >= worker.world_size or args.bad_step >= args.steps:
            raise UserError(
                f"--bad-rank must be less than the {worker.world_size} rank(s), and --bad-step "
                f"less than --steps"
            )
        ended = {name: train(way, args, worker) for name, way in WAYS.items()}
        if args.output and worker.is_main:
            torch.save({name: result["state"] for name, result in ended.items()}, args.output)


# ---- one step, in three ways


def no_check(model: nn.Module, loss: Tensor, optimizer) -> str:
    loss.backward()
    optimizer.step()
    return "step"


def one_rank_skips(model: nn.Module, loss: Tensor, optimizer) -> str:
    if not loss.isfinite():
        return "skipped"  # the other ranks are in backward(), and average without this rank
    return no_check(model, loss, optimizer)


def all_ranks_skip(model: nn.Module, loss: Tensor, optimizer) -> str:
    loss.backward()  # DDP averages: a NaN of one rank reaches all ranks
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)  # equal on all ranks
    if norm.isfinite():
        optimizer.step()
        return "step"
    losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.detach())  # all ranks are here: each may call a collective
    return f"skipped, rank(s) {[r for r, own in enumerate(losses) if not own.isfinite()]}"


WAYS = {"no check": no_check, "one rank skips": one_rank_skips, "all ranks skip": all_ranks_skip}


# ---- a training with a bad sample


def train(way: Callable, args, worker: Worker) -> dict:
    """Train until the end, or until this rank times out; rank 0 prints what each rank saw."""
    torch.manual_seed(0)
    model = make_model(worker)
    group = dist.new_group(timeout=timedelta(seconds=args.timeout))  # it is dead after a timeout
    ddp_model = DistributedDataParallel(model, process_group=group)
    optimizer = make_optimizer(model)
    losses, did, end = [], [], "trained"
    for step, (images, labels) in enumerate(batches(args.steps, worker), start=1):
        if step == args.bad_step and worker.rank == args.bad_rank:
            images[0, 0] = float("inf")
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp_model(images), labels)
        losses.append(loss.item())
        try:
            did.append(way(model, loss, optimizer))
        except RuntimeError as error:  # Gloo's: without its file name and its advice
            end = str(error).split("] ", 1)[-1].split(". ")[0]
            break
    own = {
        "at": losses[args.bad_step - 1],
        "after": losses[args.bad_step],
        "did": did[args.bad_step - 1],
        "accuracy": accuracy(model, worker),
        "end": f"{end} in step {len(losses)}",
    }
    rows = [None] * worker.world_size
    dist.all_gather_object(rows, own)
    if worker.is_main:
        name = next(name for name in WAYS if WAYS[name] is way)
        print(f"\n{name}\nrank  loss of step {args.bad_step}  of the next  accuracy  end")
        for rank, row in enumerate(rows):
            print(
                f"{rank:4}  {row['at']:14.3f}  {row['after']:11.3f}  {row['accuracy']:8.1%}  "
                f"{row['end']}; step {args.bad_step}: {row['did']}"
            )
    return {"state": model.state_dict()}


def parse_args():
    parser = ArgumentParser(description="A NaN on one rank: what each way of skipping does.")
    add = parser.add_argument
    add("--bad-rank", type=at_least(0), help="rank of the bad sample (default: the last rank)")
    add("--bad-step", type=at_least(1), default=5, help="step of the bad sample (default: 5)")
    add("--steps", type=at_least(2), default=30, help="optimizer steps per way (default: 30)")
    add("--timeout", type=above(0), default=3.0, help="seconds to wait for a rank (default: 3)")
    add("--output", type=Path, help="save the three models to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
