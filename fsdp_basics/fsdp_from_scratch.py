"""Fully sharded data parallelism by hand, compared with torch's fully_shard and with one process.

    python fsdp_basics/fsdp_from_scratch.py
    torchrun --standalone --nproc_per_node=2 fsdp_basics/fsdp_from_scratch.py
    torchrun --standalone --nproc_per_node=4 fsdp_basics/fsdp_from_scratch.py --keep --optimizer sgd

The model is cut into units: each block is one, what is left is the root's. Between steps a rank
holds one flat shard of every unit. A unit is whole only around its forward and its backward:

    forward    all_gather the unit's parameters, compute, free them
    backward   all_gather them again, compute, reduce_scatter the gradients, free both
    step       the optimizer updates the shards: it is an ordinary one, and sees nothing else

That is ZeRO-3. With --keep, nothing is freed between forward and backward: ZeRO-2. The sharding is
in sharded_units.py; this file compares.

Look at the differences (with 2 ranks all bits agree with fully_shard's), at the bytes that a rank
holds between steps, at the most that was whole at one time, and at the order of events.
"""

import textwrap

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, UserError
from data import load_dataset
from model import VisionTransformer
from runtime import Worker, distributed_worker
from sharded_units import shard_by_hand, tensors_in
from sharding import shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if args.batch_size % worker.world_size:
            raise UserError(
                f"--batch-size {args.batch_size} does not divide over {worker.world_size} rank(s)"
            )
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    images, labels = (t.to(worker.device) for t in load_dataset("digits")[0].tensors)
    models = {}
    for name in ("one process", "fully_shard", "by hand"):
        torch.manual_seed(args.seed)
        models[name] = VisionTransformer(dim=args.dim, depth=args.depth).to(worker.device)
    one, theirs, ours = models.values()
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    shard(theirs, mesh, reshard_after_forward=not args.keep)
    units = shard_by_hand(ours, ours.blocks, args.keep, events=(events := []))
    held = [list(one.parameters()), list(theirs.parameters()), [unit.shard for unit in units]]
    optimizers = [OPTIMIZERS[args.optimizer](params) for params in held]
    worst = torch.zeros(2, 3, dtype=torch.float64, device=worker.device)
    generator = torch.Generator().manual_seed(args.seed)

    for _ in range(args.steps):
        batch = torch.randint(len(images), (args.batch_size,), generator=generator)
        share = batch[worker.rank :: worker.world_size]
        losses, results = [], []
        for model, optimizer in zip(models.values(), optimizers, strict=True):
            part = batch if model is one else share
            events.clear()
            loss = F.cross_entropy(model(images[part]), labels[part])
            events.append(("backward", "", 0))
            loss.backward()
            losses.append(loss.detach() / (1 if model is one else worker.world_size))
            results.append(everything(model, units if model is ours else None, gradients=True))
            optimizer.step()
            optimizer.zero_grad()
            results[-1] |= everything(model, units if model is ours else None, gradients=False)
        for loss in losses[1:]:
            dist.all_reduce(loss)
        for row, loss, result in zip(worst, losses, results, strict=False):
            row[0] = max(row[0], abs(loss - losses[2]))
            for key, value in results[2].items():
                column = 1 if key.startswith("gradient of") else 2
                row[column] = max(row[column], (value - result[key]).abs().max())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    rows = [[sum(bytes_of(p) for p in params) for params in held]]
    rows.append([sum(map(bytes_of, tensors_in(list(o.state.values())))) for o in optimizers])
    whole = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in ours.parameters()}
    rows[0][2] += sum(storage.nbytes() for storage in whole.values())  # 0: all is freed
    everyone = [None] * worker.world_size
    dist.all_gather_object(everyone, rows)
    if worker.is_main:
        print_report(args, worst.tolist(), everyone, events)


def everything(model: nn.Module, units, gradients: bool) -> dict[str, Tensor]:
    """All parameters, or all gradients, whole and by name, however they are held."""
    if units is not None:
        found = {}
        for unit in units:
            found |= unit.full(unit.shard.grad if gradients else unit.shard)
    else:
        named = {n: p.grad if gradients else p.detach() for n, p in model.named_parameters()}
        found = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in named.items()}
    return {f"{'gradient' if gradients else 'value'} of {n}": t.clone() for n, t in found.items()}


def bytes_of(tensor: Tensor) -> int:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes


def print_report(args, worst, everyone, events) -> None:
    print(f"{args.steps} steps with {args.optimizer}, global batch {args.batch_size}\n")
    print("largest difference of       loss   gradient  parameter")
    for name, row in zip(("one process", "fully_shard"), worst, strict=True):
        print(f"by hand to {name:12}" + "".join(f"{value:11.1e}" for value in row))
    print("\nbytes between steps    parameters                      optimizer state")
    print("               one process fully_shard    by hand   one process fully_shard    by hand")
    for rank, (parameters, state) in enumerate(everyone):
        columns = "".join(f"{b:12,}" for b in (*parameters, *state))
        print(f"rank {rank:<9}{columns}")
    size = peak = 0
    for event, _, nbytes in events:
        size += {"gather": nbytes, "free": -nbytes}.get(event, 0)
        peak = max(peak, size)
    print(f"most that was whole at one time in a step: {peak:,} bytes of parameters")
    print("\norder of events on rank 0, in the last step")
    phase, words = "forward", []
    for event, name, _ in (*events, ("end", "", 0)):
        if event in ("backward", "end"):
            text = ", ".join(words).replace(" ", "~").replace(",~", ", ")  # lines break at commas
            lines = textwrap.fill(text, 90, subsequent_indent=" " * 10).replace("~", " ")
            print(f"{phase:10}{lines}")
            phase, words = event, []
        else:
            words.append(f"{event} {name.replace('blocks.', 'block ')}")


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3),
}


def parse_args():
    parser = ArgumentParser(description="FSDP by hand, next to fully_shard and to one process.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=48, help="images, over all ranks")
    parser.add_argument("--dim", type=int, default=64, help="width of the model: a multiple of 4")
    parser.add_argument("--depth", type=int, default=4, help="blocks")
    parser.add_argument("--keep", action="store_true", help="do not free after forward: ZeRO-2")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    for name in ("steps", "batch_size", "dim", "depth"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be at least 1, not {getattr(args, name)}")
    if args.dim % 4:
        parser.error(f"--dim must be a multiple of 4, not {args.dim}")
    return args


if __name__ == "__main__":
    main()
