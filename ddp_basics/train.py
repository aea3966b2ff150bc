"""Train a digit classifier on any number of ranks: the template to copy.

    python ddp_basics/train.py                                                # one process
    torchrun --standalone --nproc_per_node=2 ddp_basics/train.py              # two ranks
    torchrun --standalone --nproc_per_node=2 --max-restarts=3 ddp_basics/train.py \\
        --output-dir runs/digits                              # survives a crash, a kill, a reboot
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
        --rdzv-id=digits ddp_basics/train.py                  # two nodes: the same line on each

Look at the last lines: the test accuracy is the same for any number of ranks, because the global
batch is. With --output-dir, the same command continues where the last one stopped.
"""

import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, UserError
from checkpoint import resume, save_checkpoint
from data import DATASETS, download_mnist, load_dataset
from metrics import Metrics
from model import SmallCNN
from runtime import Worker, distributed_worker
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from tqdm import tqdm

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What a run is: a checkpoint continues only under the same values.
RUN_KEYS = (
    "dataset", "batch_size", "epochs", "optimizer", "lr", "warmup", "clip", "precision", "seed",
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

    torch.manual_seed(args.seed)
    model = SmallCNN(image_size=train_set[0][0].shape[-1]).to(worker.device)
    # Broadcasts rank 0's weights now, and averages the gradients of all ranks in every backward.
    ddp_model = DistributedDataParallel(
        torch.compile(model) if args.compile else model,
        device_ids=[worker.local_rank] if worker.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # .grad points into the communication buffer: no copy
        static_graph=args.accumulate == 1,  # same graph each step; no_sync() makes steps differ
    )
    optimizer = make_optimizer(args, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_with_warmup(args, total_steps))
    # fp16 gradients underflow unless the loss is scaled; bf16 has the range of fp32.
    scaler = torch.amp.GradScaler(worker.device.type, enabled=args.precision == "fp16")
    torch.manual_seed(args.seed + worker.rank)  # from here on, ranks may draw different numbers

    path = args.output_dir / "checkpoint.pt" if args.output_dir else None
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
            loss = train_step(ddp_model, images, labels, optimizer, scaler, args)
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
                test_loss, accuracy = evaluate(model, test_set, args, worker)
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
    test_loss, accuracy = evaluate(model, test_set, args, worker)
    if worker.is_main:
        done = step - first_step
        rate = done * args.batch_size / seconds
        print(f"steps {done} of {total_steps}   images/s {rate:,.0f}   s {seconds:.1f}")
        print(f"test loss {test_loss:.4f}   test accuracy {accuracy:.2%} of {len(test_set)} images")
    return True


def train_step(ddp_model, images, labels, optimizer, scaler, args) -> torch.Tensor:
    """One optimizer step on this rank's share of the global batch; returns its mean loss."""
    optimizer.zero_grad(set_to_none=True)
    total_loss = torch.zeros((), device=images.device)
    for i in range(args.accumulate):
        last = i == args.accumulate - 1
        # Gradients travel in the last backward only; the earlier ones add up on each rank. The
        # forward pass must be inside no_sync() too: it is where DDP decides.
        with nullcontext() if last else ddp_model.no_sync():
            x, y = images.chunk(args.accumulate)[i], labels.chunk(args.accumulate)[i]
            with autocast(args, images.device):
                logits = ddp_model(x)
            # Divided, because backward() adds: the sum over parts is the mean over the batch.
            loss = F.cross_entropy(logits.float(), y) / args.accumulate
            scaler.scale(loss).backward()
        total_loss += loss.detach()
    if args.clip:
        scaler.unscale_(optimizer)  # or the threshold would apply to the scaled gradients
        # DDP has left the same gradients on every rank: the norm needs no communication.
        torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), args.clip)
    scaler.step(optimizer)
    scaler.update()
    return total_loss


def autocast(args, device: torch.device) -> torch.autocast:
    """Matrix products and convolutions in --precision; parameters and sums stay in fp32."""
    return torch.autocast(device.type, PRECISIONS[args.precision], args.precision != "fp32")


@torch.no_grad()
def evaluate(model, test_set, args, worker: Worker) -> tuple[float, float]:
    """Mean loss and accuracy over the whole test set, each image counted once.

    A DistributedSampler would repeat images until all ranks have equally many. A strided subset
    does not, so ranks may run different numbers of batches: hence the bare model, whose forward
    (unlike DDP's) never talks to other ranks, and sums that are added at the end.
    """
    share = Subset(test_set, range(worker.rank, len(test_set), worker.world_size))
    loss_sum = correct = count = 0
    model.eval()
    for images, labels in DataLoader(share, batch_size=256):
        images, labels = images.to(worker.device), labels.to(worker.device)
        with autocast(args, worker.device):
            logits = model(images)
        loss_sum += F.cross_entropy(logits.float(), labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
        count += len(labels)
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
    return torch.optim.AdamW(model.parameters(), lr=args.lr)


def cosine_with_warmup(args, total_steps: int):
    """The factor of --lr at a step: linear over the warm-up, then half a cosine down to zero."""
    warmup = round(args.warmup * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))

    return factor


def parse_args():
    parser = ArgumentParser(description="Train a small CNN on handwritten digits with DDP.")
    add = parser.add_argument
    add("--dataset", choices=DATASETS, default="digits")
    add("--data-dir", default="data", help="where MNIST is, or is to be downloaded to")
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=64, help="images per optimizer step, over all ranks")
    add("--accumulate", type=int, default=1, help="parts in which a rank works through its share")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.1, help="fraction of all steps until the peak")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--precision", choices=PRECISIONS, default="fp32")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--workers", type=int, default=0, help="processes per rank that load data")
    add("--seed", type=int, default=0)
    add("--output-dir", type=Path, help="checkpoint and metrics; continues a run that is there")
    add("--checkpoint-every", type=int, default=0, help="steps; 0: at the end of each epoch")
    add("--log-every", type=int, default=10, help="steps between losses, and looks at SIGTERM")
    add("--tensorboard", action="store_true", help="also write OUTPUT_DIR/tensorboard")
    args = parser.parse_args()

    for names, holds, limit in (
        ("epochs batch_size accumulate log_every", lambda x: x >= 1, "at least 1"),
        ("clip workers checkpoint_every", lambda x: x >= 0, "at least 0"),
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
