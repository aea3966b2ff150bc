r"""ZeroRedundancyOptimizer: each rank keeps the optimizer state of its share of the parameters.

    torchrun --standalone --nproc_per_node=2 ddp_basics/zero_optimizer.py
    torchrun --standalone --nproc_per_node=4 ddp_basics/zero_optimizer.py --channels 8

    # save after 6 steps, then continue to step 12 with another number of ranks
    torchrun --standalone --nproc_per_node=2 ddp_basics/zero_optimizer.py \
        --output-dir runs/zero --steps 6
    torchrun --standalone --nproc_per_node=3 ddp_basics/zero_optimizer.py --output-dir runs/zero

DDP leaves the same gradients on all ranks, so all ranks would compute the same update and keep
the same state: two numbers per parameter for Adam. With this optimizer a rank updates its own
parameters only, then broadcasts them (ZeRO stage 1, https://arxiv.org/abs/1910.02054).

Look at the bytes per rank: the state shrinks, but not evenly. The optimizer does not split
parameters, but gives each one, the largest first, to the rank with the fewest numbers so far: with
any number of ranks, one holds the largest parameter. (fully_shard splits every parameter, and
shards gradients and parameters too.) Then look at the last line: the parameters equal AdamW's, also
after a restart.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, above, at_least
from checkpoint import resume, save_checkpoint, saves
from data import load_dataset
from model import SmallCNN
from runtime import Worker, distributed_worker
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if args.batch_size % worker.world_size:
            raise UserError(
                f"--batch-size {args.batch_size} does not divide over {worker.world_size} rank(s)"
            )
        train(args, worker)


def train(args, worker: Worker) -> None:
    data = load_dataset("digits")[0][:]
    model, ddp_model = build(args, worker)
    # The arguments after the class go to the AdamW that each rank makes for its own parameters.
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=args.lr)

    folder = args.output_dir / "checkpoints" if args.output_dir else None
    parts = {"model": model, "optimizer": optimizer}
    run = {"batch_size": args.batch_size, "channels": args.channels, "lr": args.lr}
    # Every rank gets the full state, and load_state_dict keeps this rank's shard.
    first_step, _ = resume(folder, parts, run, worker) if folder else (0, {})
    if first_step >= args.steps:
        raise UserError(f"{folder} is at step {first_step} already: ask for more --steps")

    for step in range(first_step, args.steps):
        train_step(ddp_model, optimizer, data, step, args, worker)
    report_bytes(model, optimizer, worker)
    if folder:
        # All ranks send their shard to rank 0, whose state_dict() then looks like plain AdamW's. If
        # one rank cannot hold the full state, see fully_shard.
        optimizer.consolidate_state_dict(to=0)
        save_checkpoint(folder, parts, args.steps, run, worker)

    # The reference: DDP with AdamW on every rank, from step 0, without a stop.
    plain_model, plain_ddp_model = build(args, worker)
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), lr=args.lr)
    for step in range(args.steps):
        train_step(plain_ddp_model, plain_optimizer, data, step, args, worker)
    pairs = zip(model.parameters(), plain_model.parameters(), strict=True)
    max_diff = torch.stack([(a - b).detach().abs().max() for a, b in pairs]).max()
    dist.all_reduce(max_diff, op=dist.ReduceOp.MAX)  # over all ranks
    if worker.is_main:
        print(f"plain AdamW: {state_bytes(plain_optimizer):,} bytes on every rank")
        if folder:
            file = saves(folder)[-1]
            print(f"saved to {file}: {file.stat().st_size:,} bytes")
        print(
            f"max difference of parameters to AdamW: {max_diff:.1e} "
            f"(steps {first_step + 1}-{args.steps} against 1-{args.steps})"
        )


def build(args, worker: Worker):
    torch.manual_seed(0)
    model = SmallCNN(channels=args.channels).to(worker.device)
    gpu = None if worker.device.type == "cpu" else [worker.device.index]
    return model, DistributedDataParallel(model, device_ids=gpu)


def train_step(ddp_model, optimizer, data, step: int, args, worker: Worker) -> None:
    """Train on this rank's local batch of the step."""
    images, labels = data
    start = step * args.batch_size
    global_batch = torch.arange(start, start + args.batch_size) % len(images)
    local_batch = global_batch[worker.rank :: worker.world_size]
    optimizer.zero_grad()
    logits = ddp_model(images[local_batch].to(worker.device))
    F.cross_entropy(logits, labels[local_batch].to(worker.device)).backward()
    optimizer.step()  # updates this rank's parameters, then broadcasts them


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.nbytes for t in tensors if torch.is_tensor(t))


def report_bytes(model, optimizer: ZeroRedundancyOptimizer, worker: Worker) -> None:
    local_optimizer = optimizer.optim  # the AdamW of this rank's parameters
    sizes = [p.numel() for group in local_optimizer.param_groups for p in group["params"]]
    row = (len(sizes), sum(sizes), max(sizes, default=0), state_bytes(local_optimizer))
    rows = [None] * worker.world_size
    dist.all_gather_object(rows, row)
    if not worker.is_main:
        return
    total = sum(parameters for _, parameters, _, _ in rows)
    even = 8 * total / worker.world_size
    print("rank  tensors  parameters  largest  formula bytes  measured  of an even share")
    for rank, (tensors, parameters, largest, measured) in enumerate(rows):
        # Adam: two fp32 numbers per parameter, and a step count of 4 bytes per tensor.
        formula = 8 * parameters + 4 * tensors
        print(
            f"{rank:4}  {tensors:7}  {parameters:10,}  {largest:7,}  {formula:13,}  {measured:8,}"
            f"  {measured / even:16.2f}"
        )
    print(f"even share: 8 x {total:,} / {worker.world_size} = {even:,.0f} bytes")


def parse_args():
    parser = ArgumentParser(description="Shard AdamW's state over the ranks, save it, continue.")
    add = parser.add_argument
    add("--steps", type=at_least(1), default=12, help="steps, including those before a restart")
    add("--batch-size", type=at_least(1), default=48, help="images per global batch (default: 48)")
    add("--channels", type=at_least(4), default=32, help="width, a multiple of 4 (default: 32)")
    add("--lr", type=above(0), default=2e-3, help="learning rate")
    add("--output-dir", type=Path, help="write checkpoints here; resume the run found there")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.channels % 4:
        parser.error(f"--channels must be a multiple of 4, not {args.channels}")
    parser.make_folder("--output-dir", args.output_dir)
    return args


if __name__ == "__main__":
    main()
