"""Train a digit classifier on any number of ranks: the template to copy.

    python ddp_basics/train.py                                                # one process
    torchrun --standalone --nproc_per_node=2 ddp_basics/train.py              # two ranks
    torchrun --standalone --nproc_per_node=2 --max-restarts=3 ddp_basics/train.py \\
        --output-dir runs/digits                              # survives a crash, a kill, a reboot
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
        --rdzv-id=digits ddp_basics/train.py                  # two nodes: the same line on each

Look at the last lines: the test accuracy is the same for any number of ranks, because the global
batch is. With --output-dir, the same command continues where the last one stopped.
minimal.py has the distributed lines alone; this file adds what a real run needs.
"""

import math
import signal
import sys
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import UserError
from checkpoint import resume, save_checkpoint
from config import PRECISIONS, Settings, parse_args
from data import ResumableSampler, Shifted, download_mnist, load_dataset
from metrics import Metrics, Throughput, make_profiler, make_tracker, memory_mb
from model import SmallCNN
from runtime import Worker, distributed_worker
from stopping import StopRequests
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    settings = parse_args()
    if settings.dataset == "mnist":
        download_mnist(settings.data_dir)  # one rank per node; the others wait when they join
    timeout = timedelta(seconds=settings.timeout)
    with distributed_worker(settings.device, timeout, settings.backend) as worker:
        finished = train(settings, worker)
    sys.exit(0 if finished else 128 + signal.SIGTERM)


def train(settings: Settings, worker: Worker) -> bool:
    """Train to the end and return True, or save and return False once SIGTERM has come."""
    stop = StopRequests(worker)
    train_set, test_set = load_dataset(settings.dataset, settings.data_dir)
    if settings.augment:
        train_set = Shifted(train_set, settings.seed)

    # Rank r takes the samples r, r + N, r + 2N, ... of one shuffled order that all ranks share, so
    # that the k-th batches of all ranks together are the k-th batch of one process. drop_last keeps
    # every global batch full: each rank's mean then has the same weight in the average.
    sampler = ResumableSampler(train_set, shuffle=True, seed=settings.seed, drop_last=True)
    loader = DataLoader(
        train_set,
        batch_size=settings.batch_size // worker.world_size,  # the global batch is split
        sampler=sampler,
        drop_last=True,
        num_workers=settings.workers,
        pin_memory=worker.device.type == "cuda",
        generator=torch.Generator(),  # its own: the global one is left to the model
    )
    steps_per_epoch, total_steps = len(loader), len(loader) * settings.epochs
    if steps_per_epoch == 0:
        raise UserError(
            f"--batch-size {settings.batch_size} exceeds the {len(train_set)} training images"
        )

    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")  # GPUs: TF32, 10 bits in fp32's matrix products
    model = SmallCNN(image_size=train_set[0][0].shape[-1]).to(worker.device)
    # Broadcasts rank 0's weights now, and averages the gradients of all ranks in every backward.
    ddp_model = DistributedDataParallel(
        torch.compile(model) if settings.compile else model,
        device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # gradients lie in the buffer that is sent: held once
        static_graph=settings.accumulate == 1,  # no_sync() makes the steps of one batch differ
    )
    optimizer = make_optimizer(settings, model)
    # fp16 gradients underflow unless the loss is scaled; bf16 has the range of fp32.
    scaler = torch.amp.GradScaler(worker.device.type, enabled=settings.precision == "fp16")
    torch.manual_seed(settings.seed + worker.rank)  # from here on, ranks draw different numbers

    folder = settings.output_dir / "checkpoints" if settings.output_dir else None
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    run = settings.identity() | {"total_steps": total_steps}
    step, saved_run = resume(folder, parts, settings.identity(), worker) if folder else (0, {})
    if worker.is_main and step and saved_run["total_steps"] != total_steps:
        print(
            f"planned for {saved_run['total_steps']} steps, now for {total_steps}: from here on "
            "the learning rate follows the new plan"
        )
    tracker = make_tracker(settings.tracker, run, worker)
    metrics = Metrics(settings.output_dir, step, total_steps, worker, settings.tensorboard, tracker)
    first_step, result, stopping = step, None, False
    throughput = Throughput(step)

    with make_profiler(settings.profile, settings.output_dir, worker) as profiler:
        for epoch, images, labels in batches(loader, step, steps_per_epoch, settings, worker):
            lr = learning_rate(step, total_steps, settings)
            loss, grad_norm = train_step(ddp_model, images, labels, optimizer, scaler, lr, settings)
            step += 1
            if profiler:
                profiler.step()

            stopping = stop.agreed(step) and step < total_steps
            end_of_epoch = step % steps_per_epoch == 0
            save_every = settings.checkpoint_every or steps_per_epoch
            saving = folder and (step % save_every == 0 or step == total_steps or stopping)
            if not (step % settings.log_every == 0 or end_of_epoch or saving or stopping):
                continue

            (loss,) = all_sum([loss / worker.world_size], worker)  # the mean of the global batch
            check_finite(step, loss, grad_norm, settings)
            metrics.log(
                step,
                epoch,
                loss=loss,
                lr=lr,
                grad_norm=float(grad_norm),
                images_per_second=throughput.stop(step) * settings.batch_size,
                memory_mb=memory_mb(worker.device),
            )
            if end_of_epoch:
                result = evaluate(model, test_set, settings, worker)
                metrics.log(step, epoch, test_loss=result[0], test_accuracy=result[1])
            if saving:
                save_checkpoint(folder, parts, step, run, worker, settings.keep)
            if stopping:
                break
            throughput.start(step)  # what was done since it stopped is no training

    metrics.close()
    if stopping:
        if worker.is_main:
            saved = f"saved to {folder}, the same command continues" if folder else "not saved"
            print(f"stopped by SIGTERM after step {step} of {total_steps}: {saved}")
        return False
    test_loss, accuracy = result or evaluate(model, test_set, settings, worker)
    if worker.is_main:
        rate = throughput.steps_per_second * settings.batch_size
        print(f"steps {step - first_step} of {total_steps}   images/s {rate:,.0f}")
        print(f"test loss {test_loss:.4f}   test accuracy {accuracy:.2%} of {len(test_set)} images")
    return True


def batches(
    loader: DataLoader, step: int, steps_per_epoch: int, settings: Settings, worker: Worker
):
    """Yield (epoch, images, labels) of this rank, on its device, from global batch `step` on."""
    for epoch in range(step // steps_per_epoch, settings.epochs):
        loader.sampler.set_epoch(epoch)  # a new order per epoch, the same on all ranks
        loader.sampler.skip = step % steps_per_epoch * loader.batch_size  # done before a restart
        # The loader's processes draw other random numbers on each rank, and in each epoch.
        loader.generator.manual_seed(settings.seed + epoch * worker.world_size + worker.rank)
        if settings.augment:
            loader.dataset.epoch = epoch
        for images, labels in loader:
            images = images.to(worker.device, non_blocking=True)
            labels = labels.to(worker.device, non_blocking=True)
            yield epoch, images, labels
            step += 1


def train_step(
    ddp_model, images, labels, optimizer, scaler, lr: float, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step on this rank's part of the global batch.

    Returns the mean loss of this part, and the norm of the gradients (of all ranks' mean).
    """
    optimizer.zero_grad(set_to_none=True)
    total_loss = torch.zeros((), device=images.device)
    for i in range(settings.accumulate):
        last = i == settings.accumulate - 1
        # Gradients travel in the last backward only; the earlier ones add up on each rank. The
        # forward pass must be inside no_sync() too: it is where DDP decides.
        with nullcontext() if last else ddp_model.no_sync():
            x, y = images.chunk(settings.accumulate)[i], labels.chunk(settings.accumulate)[i]
            with autocast(settings, images.device):
                logits = ddp_model(x)
            # Divided, because backward() adds: the sum over parts is the mean over the batch.
            loss = F.cross_entropy(logits.float(), y) / settings.accumulate
            scaler.scale(loss).backward()
        total_loss += loss.detach()
    scaler.unscale_(optimizer)  # or norm and threshold would be those of the scaled gradients
    # DDP has left the same gradients on every rank: the norm needs no communication.
    max_norm = settings.clip or math.inf
    grad_norm = torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler.step(optimizer)
    scaler.update()
    return total_loss, grad_norm


def autocast(settings: Settings, device: torch.device) -> torch.autocast:
    """Matrix products and convolutions in --precision; parameters and sums stay in fp32."""
    dtype = PRECISIONS[settings.precision]
    return torch.autocast(device.type, dtype, enabled=settings.precision != "fp32")


def check_finite(step: int, loss: float, grad_norm: torch.Tensor, settings: Settings) -> None:
    """Raise `UserError` rather than train on, and save, what is no number any more."""
    # In fp16 a step with infinite gradients is normal: the scaler leaves it out, and scales less.
    norm = 0.0 if settings.precision == "fp16" else float(grad_norm)
    if not math.isfinite(loss + norm):
        raise UserError(
            f"step {step}: the loss is {loss}, the gradient norm {float(grad_norm)}: try a smaller "
            "--lr, a longer --warmup or a smaller --clip; checkpoints from before are as they were"
        )


@torch.no_grad()
def evaluate(model, test_set, settings: Settings, worker: Worker) -> tuple[float, float]:
    """Mean loss and accuracy over the whole test set, each image counted once.

    A DistributedSampler would repeat images until all ranks have equally many. A strided subset
    does not, so ranks may run different numbers of batches: hence the bare model, whose forward
    (unlike DDP's) never talks to other ranks, and sums that are added at the end.
    """
    local_set = Subset(test_set, range(worker.rank, len(test_set), worker.world_size))
    loader = DataLoader(
        local_set,
        batch_size=256,
        num_workers=settings.workers,
        pin_memory=worker.device.type == "cuda",
        generator=torch.Generator(),  # or it would draw from the global one
    )
    loss_sum = correct = count = 0
    model.eval()
    for images, labels in loader:
        images = images.to(worker.device, non_blocking=True)
        labels = labels.to(worker.device, non_blocking=True)
        with autocast(settings, worker.device):
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


def make_optimizer(settings: Settings, model) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=settings.lr)


def learning_rate(step: int, total_steps: int, settings: Settings) -> float:
    """Linear over the warm-up to --lr, then half a cosine down to zero."""
    warmup = round(settings.warmup * total_steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * progress))


if __name__ == "__main__":
    main()
