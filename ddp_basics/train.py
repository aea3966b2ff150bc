r"""Train with DistributedDataParallel on any number of ranks: the template to copy.

    python ddp_basics/train.py                                                # one process
    torchrun --standalone --nproc_per_node=2 ddp_basics/train.py              # two ranks
    torchrun --standalone --nproc_per_node=2 --max-restarts=3 ddp_basics/train.py \
        --output-dir runs/digits                              # survives a crash, a kill, a reboot
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
        --rdzv-id=digits ddp_basics/train.py                  # two nodes: the same line on each

task.py is all you replace for a model of your own. minimal.py is the idea in one screen, without
checkpoints. Look at the last line: the test accuracy does not depend on the number of ranks (which
must divide --batch-size), because the global batch does not. With --output-dir, the same command
continues where the last one stopped.
"""

import sys
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from arguments import UserError
from checkpoint import resume, save_checkpoint
from config import PRECISIONS, Settings, parse_args
from evaluation import evaluate
from loading import batches, check_same_data, check_same_order, make_loader, split
from metrics import Metrics, Throughput, check_finite, make_profiler, peak_memory
from optimizer import make_optimizer, set_learning_rate
from replicas import GradientLog, average_buffers, check_replicas
from runtime import Worker, distributed_worker
from stopping import StopRequests, goodbye
from task import build_model, collate, compute_loss, download, load_data
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    settings = parse_args()
    download(settings)
    timeout = timedelta(seconds=settings.timeout)
    with distributed_worker(settings.device, timeout, settings.backend) as worker:
        stopped_by = train(settings, worker)
    sys.exit(128 + stopped_by if stopped_by else 0)


def train(settings: Settings, worker: Worker) -> int:
    """Train to the end and return 0; after a signal to stop, save and return its number."""
    stop = StopRequests(worker)
    train_set, test_set = load_data(settings)
    data = check_same_data([train_set, test_set], settings.workers, worker)
    local_batch = settings.batch_size // worker.world_size  # the global batch is split
    loader = make_loader(train_set, collate, local_batch, settings.seed, settings.workers, worker)
    check_same_order(loader, worker)
    steps_per_epoch, total_steps = len(loader), len(loader) * settings.epochs
    if steps_per_epoch == 0:
        raise UserError(
            f"--batch-size {settings.batch_size} exceeds the {len(train_set)} training samples: "
            "choose a smaller one"
        )

    torch.set_float32_matmul_precision("high")  # GPUs: TF32, 10-bit mantissa, in fp32 matmuls
    torch.manual_seed(settings.seed)  # the same initial weights on all ranks
    model = build_model(settings).to(worker.device)
    optimizer = make_optimizer(model, settings)
    # fp16 gradients underflow unless the loss is scaled; bf16 has the range of fp32.
    scaler = torch.amp.GradScaler(worker.device.type, enabled=settings.precision == "fp16")
    torch.manual_seed(settings.seed + worker.rank)  # from here on, ranks draw different numbers

    folder = settings.output_dir / "checkpoints" if settings.output_dir else None
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    run = settings.identity() | {"data": data}
    step, saved_run = resume(folder, parts, run, worker) if folder else (0, {})
    run["total_steps"] = total_steps
    if step > total_steps:
        raise UserError(
            f"{folder} is at step {step}, beyond the {total_steps} steps of --epochs "
            f"{settings.epochs}: choose more epochs, or another --output-dir"
        )
    if worker.is_main and saved_run.get("total_steps", total_steps) != total_steps:
        print(
            f"planned for {saved_run['total_steps']} steps, now for {total_steps}: from here on "
            "the learning rate follows the new schedule"
        )
    # Broadcasts rank 0's parameters and buffers now, and averages the gradients of all ranks in
    # every backward. Freeze and resume the model before this line.
    ddp_model = DistributedDataParallel(
        torch.compile(model) if settings.compile else model,
        device_ids=None if worker.device.type == "cpu" else [worker.device.index],
        gradient_as_bucket_view=True,  # .grad is a view of the bucket: held once
        find_unused_parameters=settings.find_unused_parameters,
    )
    ddp_model.broadcast_buffers = False  # average_buffers() below is enough

    metrics = Metrics(settings.output_dir, step, total_steps, worker, settings.tensorboard)
    first_step, result, stopped_by = step, None, 0
    if step and step % steps_per_epoch == 0:  # stopped between a save and its evaluation
        result = evaluate_as_trained(model, test_set, settings, worker)
        metrics.log(step, step // steps_per_epoch - 1, **result)
    throughput = Throughput(step)
    gradients = GradientLog(model)
    with make_profiler(settings, step, total_steps, worker) as profiler:
        for epoch, batch in batches(loader, step, steps_per_epoch, settings.epochs, worker.device):
            lr = set_learning_rate(optimizer, step, total_steps, settings)
            loss, grad_norm = train_step(ddp_model, batch, optimizer, scaler, settings, worker)
            step += 1
            gradients.note(step)
            if profiler:
                profiler.step()

            stopped_by = stop.agreed(step) if step < total_steps else 0
            end_of_epoch = step % steps_per_epoch == 0
            save_every = settings.checkpoint_every or steps_per_epoch
            saving = folder and (step % save_every == 0 or step == total_steps or stopped_by)
            if not (step % settings.log_every == 0 or end_of_epoch or saving or stopped_by):
                continue

            check_finite(step, float(loss), float(grad_norm), scaler)
            average_buffers(model)  # BatchNorm's statistics are those of a rank's own batches
            check_replicas(model, step, worker)  # replicas can diverge without an error
            gradients.check(worker)  # ranks can use different layers without an error
            metrics.log(
                step,
                epoch,
                loss=float(loss),
                lr=lr,
                grad_norm=float(grad_norm),
                samples_per_second=throughput.stop(step) * settings.batch_size,
                **peak_memory(worker.device),
            )
            if saving:  # before the evaluation, which may take longer than a scheduler waits
                save_checkpoint(folder, parts, step, run, worker, settings.keep)
            if stopped_by:
                break
            if end_of_epoch:
                result = evaluate_as_trained(model, test_set, settings, worker)
                metrics.log(step, epoch, **result)
            throughput.start(step)  # leaves out logging, saving, evaluation

    metrics.close()
    if stopped_by:
        goodbye(stopped_by, step, total_steps, folder, worker)
        return stopped_by
    result = result or evaluate_as_trained(model, test_set, settings, worker)
    if worker.is_main:
        rate = throughput.steps_per_second * settings.batch_size
        print(f"steps {step - first_step} of {total_steps}   samples/s {rate:,.0f}")
        words = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.items()]
        print("   ".join(words) + f"   of {len(test_set)} samples")
    return 0


def train_step(
    ddp_model: DistributedDataParallel,
    batch,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    settings: Settings,
    worker: Worker,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step on this rank's share of the global batch.

    Returns the mean loss of the global batch, and the norm of its gradient before clipping.
    """
    optimizer.zero_grad(set_to_none=True)
    local_batch = settings.batch_size // worker.world_size
    sums = torch.zeros(2, dtype=torch.float64, device=worker.device)  # of losses, their count
    for i, part in enumerate(split(batch, settings.accumulate)):
        last = i == settings.accumulate - 1
        # DDP all-reduces in the last backward only; until then each rank adds up its gradients. The
        # forward pass must also be inside no_sync(): DDP decides there.
        with nullcontext() if last else ddp_model.no_sync():
            with autocast(settings, worker.device):
                loss_sum, count, _ = compute_loss(ddp_model, part)
            scaler.scale(loss_sum / local_batch).backward()
        sums[0] += loss_sum.detach()
        sums[1] += count
    # So far the gradient is divided by the number of samples: by local_batch above, and by the
    # number of ranks in DDP. It must be divided by the number of losses: samples, or tokens.
    dist.all_reduce(sums)
    loss_sum, count = sums
    count = torch.where(count == 0, 1, count)  # no losses: all labels were masked
    scaler.unscale_(optimizer)  # otherwise clipping would see the scaled gradients
    gradients = [p.grad for p in ddp_model.parameters() if p.grad is not None]
    factor = settings.batch_size / count  # 1 if each sample has one loss
    for gradient in gradients:
        gradient.mul_(factor)
    # DDP has left the same gradients on every rank: the norm needs no communication.
    grad_norm = torch.nn.utils.get_total_norm(gradients)
    if settings.clip:
        torch.nn.utils.clip_grads_with_norm_(ddp_model.parameters(), settings.clip, grad_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss_sum / count, grad_norm


def autocast(settings: Settings, device: torch.device) -> torch.autocast:
    """Matrix products and convolutions in --precision; parameters and sums stay in fp32."""
    dtype = PRECISIONS[settings.precision]
    return torch.autocast(device.type, dtype, enabled=settings.precision != "fp32")


def evaluate_as_trained(model, test_set, settings: Settings, worker: Worker) -> dict[str, float]:
    """Evaluate in the training's precision and micro-batches, without DDP: there is no backward."""
    micro_batch = settings.batch_size // worker.world_size // settings.accumulate
    with autocast(settings, worker.device):
        means = evaluate(model, test_set, micro_batch, settings.workers, worker)
    return {f"test_{name}": mean for name, mean in means.items()}


if __name__ == "__main__":
    main()
