"""Train a vision transformer whose parameters are sharded over the ranks: the template to copy.

    python fsdp_basics/train.py                                               # one process
    torchrun --standalone --nproc_per_node=2 fsdp_basics/train.py             # two ranks
    torchrun --standalone --nproc_per_node=2 --max-restarts=3 fsdp_basics/train.py \\
        --output-dir runs/vit                                 # survives a crash, a kill, a reboot
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
        --rdzv-id=vit fsdp_basics/train.py                    # two nodes: the same line on each

Look at the first lines: how much of the model each rank holds. The accuracy at the end is the same
for any number of ranks. The flags and the loop are those of ddp_basics/train.py: a diff of the two
files is the difference between DDP and FSDP. minimal.py has the distributed lines alone.
"""

import math
import signal
import sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import UserError
from checkpoint import resume, save_checkpoint
from config import PRECISIONS, Settings, parse_args
from data import ResumableSampler, Shifted, download_mnist, load_dataset
from metrics import Metrics, Throughput, make_profiler, make_tracker, memory_mb
from model import VisionTransformer
from runtime import Worker, distributed_worker
from sharding import materialize, prefetch_blocks, unit_options
from stopping import StopRequests
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
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

    torch.set_float32_matmul_precision("high")  # GPUs: TF32, 10 bits in fp32's matrix products
    build = partial(build_whole_model, settings, image_size=train_set[0][0].shape[-1])
    with torch.device("meta"):  # shapes without memory: no rank needs room for the whole model
        model = build()
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    dtype = PRECISIONS[settings.precision]
    block_options, root_options = unit_options(mesh, dtype, settings.offload)
    # From here on a rank holds a part of each parameter. Those of a block are gathered just before
    # it runs, and freed after it. Its gradients are averaged; a rank keeps those of its part.
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=not settings.keep_gathered, **block_options)
    fully_shard(model, reshard_after_forward=False, **root_options)  # what no block holds
    prefetch_blocks(list(model.blocks), settings.prefetch)
    # Rank 0's first values for all: of each parameter a rank receives its part.
    place = torch.device("cpu") if settings.offload else worker.device
    materialize(model, build, place, worker.is_main)
    describe(model, worker)
    optimizer = make_optimizer(settings, model)  # of the shards: its state is sharded like them
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
            loss, grad_norm = train_step(model, images, labels, optimizer, scaler, lr, settings)
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


def build_whole_model(settings: Settings, image_size: int) -> VisionTransformer:
    """With its first values, the same on every call; without memory inside torch.device("meta")."""
    torch.manual_seed(settings.seed)
    patch_size = 2 if image_size == 8 else 4
    model = VisionTransformer(image_size, patch_size, settings.dim, settings.depth)
    for block in model.blocks:
        block.recompute = settings.activation_checkpointing
        if settings.compile:
            block.compile()  # one block, compiled once for all of them
    return model


def describe(model, worker: Worker) -> None:
    if worker.is_main:
        total = sum(p.numel() for p in model.parameters())
        held = sum(p.to_local().numel() for p in model.parameters())
        units = len(model.blocks) + 1
        print(f"{total:,} parameters in {units} units, {held:,} of them on this rank", flush=True)


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
    model, images, labels, optimizer, scaler, lr: float, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step on this rank's part of the global batch.

    Returns the mean loss of this part, and the norm of the gradients (of all ranks' mean).
    """
    optimizer.zero_grad(set_to_none=True)
    total_loss = torch.zeros((), device=images.device)
    for i in range(settings.accumulate):
        last = i == settings.accumulate - 1
        # Gradients travel in the last backward only. The earlier ones add up on each rank, and are
        # whole until then, not sharded: accumulation costs FSDP the memory that it saved.
        model.set_requires_gradient_sync(last)
        x, y = images.chunk(settings.accumulate)[i], labels.chunk(settings.accumulate)[i]
        # Divided, because backward() adds: the sum over parts is the mean over the batch.
        loss = F.cross_entropy(model(x), y) / settings.accumulate
        scaler.scale(loss).backward()
        total_loss += loss.detach()
    scaler.unscale_(optimizer)  # or norm and threshold would be those of the scaled gradients
    # A rank holds shards of the gradients. As they are DTensors, the norm is that of the whole
    # gradient, of all ranks' shards together; full_tensor() makes a plain tensor of it.
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    grad_norm = torch.nn.utils.get_total_norm(gradients).full_tensor()
    if settings.clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), settings.clip, grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler.step(optimizer)
    scaler.update()
    return total_loss, grad_norm


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

    A forward pass gathers parameters, so that every rank must run equally many. Where the images do
    not divide, a rank that would have one less runs one that is not counted.
    """
    own_images = range(worker.rank, len(test_set), worker.world_size)
    per_rank = math.ceil(len(test_set) / worker.world_size)
    padding = [0] * (per_rank - len(own_images))
    loader = DataLoader(
        Subset(test_set, [*own_images, *padding]),
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
        counted = min(len(labels), len(own_images) - count)  # all but the padding
        logits, labels = model(images)[:counted], labels[:counted]
        loss_sum += F.cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
        count += counted
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
    # fused: one call for all shards. On CPUs, a call costs a DTensor more than the sum it computes.
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True)


def learning_rate(step: int, total_steps: int, settings: Settings) -> float:
    """Linear over the warm-up to --lr, then half a cosine down to zero."""
    warmup = round(settings.warmup * total_steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * progress))


if __name__ == "__main__":
    main()
