"""Train a vision transformer whose parameters are sharded over the ranks: the template to copy.

    python fsdp_basics/train.py                                               # one process
    torchrun --standalone --nproc_per_node=2 fsdp_basics/train.py             # two ranks
    torchrun --standalone --nproc_per_node=2 --max-restarts=3 fsdp_basics/train.py \\
        --output-dir runs/vit                                 # survives a crash, a kill, a reboot
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
        --rdzv-id=vit fsdp_basics/train.py                    # two nodes: the same line on each

Look at the first lines: how much of the model each rank holds. The accuracy at the end is the same
for any number of ranks. The flags and the loop are those of ddp_basics/train.py: a diff of the two
files is the difference between DDP and FSDP.
"""

import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, UserError
from checkpoint import resume, save_checkpoint
from data import DATASETS, download_mnist, load_dataset
from metrics import Metrics
from model import VisionTransformer
from runtime import Worker, distributed_worker
from sharding import materialize, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, DistributedSampler, default_collate
from tqdm import tqdm

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What a run is: a checkpoint continues only under the same values.
RUN_KEYS = (
    "dataset", "batch_size", "epochs", "optimizer", "lr", "warmup", "clip", "precision", "seed",
    "dim", "depth",
)  # fmt: skip


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    args = parse_args()
    if args.dataset == "mnist":
        download_mnist(
            args.data_dir
        )  # one rank per node does; the others wait for it when they join
    with distributed_worker(args.device) as worker:
        finished = train(args, worker)
    sys.exit(0 if finished else 128 + signal.SIGTERM)


def train(args, worker: Worker) -> bool:
    """Train to the end and return True, or save and return False once SIGTERM has come."""
    stop_requests = []  # a cluster sends SIGTERM before it takes the machine: the loop looks here
    signal.signal(signal.SIGTERM, lambda *_: stop_requests.append(1))
    train_set, test_set = load_dataset(args.dataset, args.data_dir)

    # Rank r takes the samples r, r + N, r + 2N, ... of one shuffled order that all ranks share, so
    # that the k-th batches of all ranks together are the k-th batch of one process. drop_last keeps
    # every global batch full: each rank's mean then has the same weight in the average.
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(
        train_set,
        batch_size=args.batch_size // worker.world_size,  # the global batch is split over the ranks
        sampler=sampler,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=worker.device.type == "cuda",
        generator=torch.Generator(),  # its own: the global one is left to the model
    )
    steps_per_epoch, total_steps = len(loader), len(loader) * args.epochs
    if steps_per_epoch == 0:
        size, have = args.batch_size, len(train_set)
        raise UserError(f"--batch-size {size} exceeds the {have} training images")

    model = build_model(args, train_set[0][0].shape[-1], worker)
    optimizer = make_optimizer(args, model)  # of the shards: its state is sharded like them
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_with_warmup(args, total_steps))
    # fp16 gradients underflow unless the loss is scaled; bf16 has the range of fp32.
    scaler = torch.amp.GradScaler(worker.device.type, enabled=args.precision == "fp16")
    torch.manual_seed(args.seed + worker.rank)  # from here on, ranks may draw different numbers

    path = args.output_dir / "checkpoint" if args.output_dir else None
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    run = {key: getattr(args, key) for key in RUN_KEYS}
    step = first_step = resume(path, parts, run, worker) if path else 0  # optimizer steps done
    metrics = Metrics(args.output_dir, step, worker, args.tensorboard)
    progress = tqdm(total=total_steps, initial=step, disable=None if worker.is_main else True)
    started = time.perf_counter()

    for epoch in range(step // steps_per_epoch, args.epochs):
        sampler.set_epoch(epoch)  # a new order per epoch, the same on all ranks
        loader.generator.manual_seed(args.seed + epoch)  # seeds its workers; resuming is exact
        for batch, (images, labels) in enumerate(loader):
            if epoch * steps_per_epoch + batch < step:
                continue  # trained on before the restart
            images = images.to(worker.device, non_blocking=True)
            labels = labels.to(worker.device, non_blocking=True)
            loss = train_step(model, images, labels, optimizer, scaler, args)
            schedule.step()
            step += 1
            progress.update()

            end_of_epoch, stops = step % steps_per_epoch == 0, 0
            if step % args.log_every == 0 or end_of_epoch:
                # One small collective tells every rank the mean loss, and whether any of them was
                # asked to stop: they must all leave the loop at the same step.
                loss_sum, stops = all_sum([loss, len(stop_requests)], worker)
                loss, lr = loss_sum / worker.world_size, schedule.get_last_lr()[0]
                metrics.write(step, epoch, loss=loss, lr=lr)
                progress.set_postfix(loss=f"{loss:.4f}", refresh=False)
            if end_of_epoch:
                test_loss, accuracy = evaluate(model, test_set, worker)
                metrics.write(step, epoch, test_loss=test_loss, test_accuracy=accuracy)
            if path and (stops or step % (args.checkpoint_every or steps_per_epoch) == 0):
                save_checkpoint(path, parts, step, run, worker)
            if stops and step < total_steps:
                progress.close()
                metrics.close()
                if worker.is_main:
                    saved = f"saved to {path}, the same command continues" if path else "not saved"
                    print(f"stopped by SIGTERM after step {step} of {total_steps}: {saved}")
                return False

    progress.close()
    metrics.close()
    seconds = time.perf_counter() - started
    test_loss, accuracy = evaluate(model, test_set, worker)
    if worker.is_main:
        done = step - first_step
        rate = done * args.batch_size / seconds
        print(f"steps {done} of {total_steps}   images/s {rate:,.0f}   s {seconds:.1f}")
        print(f"test loss {test_loss:.4f}   test accuracy {accuracy:.2%} of {len(test_set)} images")
    return True


def build_model(args, image_size: int, worker: Worker) -> torch.nn.Module:
    """The sharded model on this rank's device, with the first values that one process has."""
    if args.offload and args.clip and worker.device.type == "cuda":
        raise UserError("--offload leaves gradients where NCCL cannot add norms: use --clip 0")

    def build():
        torch.manual_seed(args.seed)
        return VisionTransformer(image_size, 2 if image_size == 8 else 4, args.dim, args.depth)

    with torch.device("meta"):  # shapes without memory: no rank needs room for the whole model
        model = build()
    for block in model.blocks:
        block.recompute = args.activation_checkpointing
        if args.compile:
            block.compile()  # one block, compiled once for all of them
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    dtype = PRECISIONS[args.precision]
    shard(model, mesh, not args.keep_gathered, dtype, args.offload, args.prefetch)
    place = torch.device("cpu") if args.offload else worker.device
    materialize(model, build, place, worker.is_main)
    if worker.is_main:
        whole = sum(p.numel() for p in model.parameters())
        held = sum(p.to_local().numel() for p in model.parameters())
        print(f"{whole:,} parameters in {args.depth + 1} units, {held:,} of them on this rank")
    return model


def train_step(model, images, labels, optimizer, scaler, args) -> torch.Tensor:
    """One optimizer step on this rank's share of the global batch; returns its mean loss."""
    optimizer.zero_grad(set_to_none=True)
    total_loss = torch.zeros((), device=images.device)
    for i in range(args.accumulate):
        # Gradients travel in the last backward only. The earlier ones add up on each rank, and are
        # whole until then, not sharded: accumulation costs FSDP the memory that it saved.
        model.set_requires_gradient_sync(i == args.accumulate - 1)
        x, y = images.chunk(args.accumulate)[i], labels.chunk(args.accumulate)[i]
        # Divided, because backward() adds: the sum over parts is the mean over the batch.
        loss = F.cross_entropy(model(x), y) / args.accumulate
        scaler.scale(loss).backward()
        total_loss += loss.detach()
    if args.clip:
        scaler.unscale_(optimizer)  # or the threshold would apply to the scaled gradients
        # A rank holds shards of the gradients. As they are DTensors, the norm is that of the whole
        # gradient: the ranks add the squares of their parts.
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    scaler.step(optimizer)
    scaler.update()
    return total_loss


@torch.no_grad()
def evaluate(model, test_set, worker: Worker) -> tuple[float, float]:
    """Mean loss and accuracy over the whole test set, each image counted once.

    A forward pass gathers parameters, so that every rank must run equally many of them. Each global
    batch is dealt out; a rank that gets nothing of the last one runs an image that is not counted.
    """
    rank, ranks = worker.rank, worker.world_size
    loss_sum = correct = count = 0
    model.eval()
    for first in range(0, len(test_set), 256 * ranks):
        share = range(first + rank, min(first + 256 * ranks, len(test_set)), ranks)
        images, labels = default_collate([test_set[i] for i in share or [0]])
        images, labels = images.to(worker.device), labels.to(worker.device)
        logits, labels = model(images)[: len(share)], labels[: len(share)]
        loss_sum += F.cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
        count += len(share)
    model.train()
    loss_sum, correct, count = all_sum([loss_sum, correct, count], worker)
    return loss_sum / count, correct / count


def all_sum(values: list, worker: Worker) -> list[float]:
    """Each value summed over all ranks."""
    total = torch.tensor([float(v) for v in values], dtype=torch.float64, device=worker.device)
    dist.all_reduce(total)
    return total.tolist()


def make_optimizer(args, model) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # fused: one call for all shards. On CPUs, a call costs a DTensor more than the sum it computes.
    return torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)


def cosine_with_warmup(args, total_steps: int):
    """The factor of --lr at a step: linear over the warm-up, then half a cosine down to zero."""
    warmup = round(args.warmup * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))

    return factor


def parse_args():
    parser = ArgumentParser(
        description="Train a vision transformer on handwritten digits with FSDP."
    )
    add = parser.add_argument
    add("--dataset", choices=DATASETS, default="digits")
    add("--data-dir", default="data", help="where MNIST is, or is to be downloaded to")
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=64, help="images per optimizer step, over all ranks")
    add("--accumulate", type=int, default=1, help="parts in which a rank works through its share")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.1, help="fraction of all steps until the peak")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--precision", choices=PRECISIONS, default="fp32")
    add("--compile", action="store_true", help="torch.compile each block")
    add("--dim", type=int, default=96, help="width of the model, a multiple of 4")
    add("--depth", type=int, default=3, help="blocks")
    add("--keep-gathered", action="store_true", help="no second gathering in backward (ZeRO-2)")
    add("--activation-checkpointing", action="store_true", help="compute activations twice")
    add("--offload", action="store_true", help="shards and optimizer in CPU memory")
    add("--prefetch", type=int, default=0, help="blocks to gather ahead; 0: FSDP's choice")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--workers", type=int, default=0, help="processes per rank that load data")
    add("--seed", type=int, default=0)
    add("--output-dir", type=Path, help="checkpoint and metrics; continues a run that is there")
    add("--checkpoint-every", type=int, default=0, help="steps; 0: at the end of each epoch")
    add("--log-every", type=int, default=10, help="steps between losses, and looks at SIGTERM")
    add("--tensorboard", action="store_true", help="also write OUTPUT_DIR/tensorboard")
    args = parser.parse_args()

    for names, holds, limit in (
        ("epochs batch_size accumulate log_every dim depth", lambda x: x >= 1, "at least 1"),
        ("clip workers checkpoint_every prefetch", lambda x: x >= 0, "at least 0"),
        ("lr", lambda x: 0 < x < math.inf, "above 0"),
        ("warmup", lambda x: 0 <= x <= 1, "from 0 to 1"),
    ):
        for name in names.split():
            value, flag = getattr(args, name), "--" + name.replace("_", "-")
            if not holds(value):
                parser.error(f"{flag} must be {limit}, not {value}")
    parts = int(os.environ.get("WORLD_SIZE", 1)) * args.accumulate
    if args.batch_size % parts:
        parser.error(
            f"--batch-size {args.batch_size} does not divide into {parts} equal parts "
            f"({parts // args.accumulate} rank(s) x --accumulate {args.accumulate})"
        )
    if args.dim % 4:
        parser.error(f"--dim {args.dim} does not divide into 4 attention heads")
    if args.tensorboard and not args.output_dir:
        parser.error("--tensorboard needs an --output-dir to write to")
    if args.output_dir:
        try:
            args.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output-dir {args.output_dir} cannot be made: {error.strerror}")
    return args


if __name__ == "__main__":
    main()
