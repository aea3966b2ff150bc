r"""Train a model whose parameters are sharded over the ranks (FSDP): the template to copy.

    python fsdp_basics/train.py                                               # one process
    torchrun --standalone --nproc_per_node=2 fsdp_basics/train.py             # two ranks
    torchrun --standalone --nproc_per_node=2 --max-restarts=3 fsdp_basics/train.py \
        --output-dir runs/vit                                 # survives a crash, a kill, a reboot
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
        --rdzv-id=vit fsdp_basics/train.py --dp-replicate 2   # two nodes: the same line on each

For a model of your own, replace task.py. minimal.py has only the distributed lines. Look at the
first lines of the output: they say how much of the model each rank holds. A diff with
ddp_basics/train.py shows the difference between DDP and FSDP.
"""

import sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from arguments import UserError
from checkpoint import check_shared, resume, start_save
from config import PRECISIONS, Settings, parse_args
from evaluation import evaluate
from loading import batches, check_same_data, check_same_order, make_loader, split
from materialize import allocate, build_on_meta, initialize, move_buffers
from metrics import Metrics, Throughput, check_finite, make_profiler, peak_memory
from optimizer import make_optimizer, set_learning_rate
from replicas import GradientLog, average_buffers, check_replicas
from runtime import Worker, distributed_worker
from sharding import prefetch_blocks, shard_batch_norms, unit_options
from stopping import StopRequests, goodbye
from task import build_model, collate, compute_loss, download, load_data, units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard


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
    build = partial(build_with_seed, settings)
    model = build_on_meta(build)
    place = torch.device("cpu") if settings.offload else worker.device
    shard(model, place, settings, worker)
    optimizer = make_optimizer(model, settings)  # it updates shards: its state is sharded, too
    # fp16 gradients underflow unless the loss is scaled; bf16 has the range of fp32.
    scaler = torch.amp.GradScaler(worker.device.type, enabled=settings.precision == "fp16")
    torch.manual_seed(settings.seed + worker.rank)  # from here on, ranks draw different numbers

    folder = settings.output_dir / "checkpoints" if settings.output_dir else None
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    run = settings.identity() | {"data": data}
    step, saved_run = 0, {}
    if folder:
        check_shared(folder, worker)
        step, saved_run = resume(folder, parts, run, worker)
    run["total_steps"] = total_steps
    if step == 0:  # else the save has the values, and no rank builds the full model
        initialize(model, build, worker)
    move_buffers(model, worker.device)  # with --offload: FSDP moves parameters only
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

    metrics = Metrics(settings.output_dir, step, total_steps, worker, settings.tensorboard)
    first_step, result, stopped_by = step, None, 0
    if step and step % steps_per_epoch == 0:  # stopped between a save and its evaluation
        result = evaluate_as_trained(model, test_set, settings, worker)
        metrics.log(step, step // steps_per_epoch - 1, **result)
    throughput = Throughput(step)
    # An asynchronous save needs a group of its own, or its messages would mix with the training's.
    save_group = dist.new_group(backend="gloo") if settings.async_save else None
    finish_save = None
    gradients = GradientLog(model)
    with make_profiler(settings, step, total_steps, worker) as profiler:
        for epoch, batch in batches(loader, step, steps_per_epoch, settings.epochs, worker.device):
            lr = set_learning_rate(optimizer, step, total_steps, settings)
            loss, grad_norm = train_step(model, batch, optimizer, scaler, settings, worker)
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

            if finish_save:  # the save from before: it counts, whatever follows
                finish_save()
                finish_save = None
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
                finish_save = start_save(
                    folder, parts, step, run, worker, settings.keep, save_group
                )
            if stopped_by:
                break
            if end_of_epoch:
                result = evaluate_as_trained(model, test_set, settings, worker)
                metrics.log(step, epoch, **result)
            throughput.start(step)  # leaves out logging, saving, evaluation

    metrics.close()
    if finish_save:
        finish_save()
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


def build_with_seed(settings: Settings) -> nn.Module:
    torch.manual_seed(settings.seed)  # the same initial values on any number of ranks
    return build_model(settings)


def shard(model: nn.Module, place: torch.device, settings: Settings, worker: Worker) -> None:
    """Make every parameter a DTensor, of which this rank holds its shard, in memory on `place`."""
    shape = (settings.dp_replicate, worker.world_size // settings.dp_replicate)
    mesh = init_device_mesh(worker.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    if hasattr(dist, "set_timeout"):  # new in torch 2.15; before, they wait 30 minutes
        for group in mesh.get_all_groups():
            dist.set_timeout(timedelta(seconds=settings.timeout), group)
    if settings.dp_replicate == 1:
        mesh = mesh["dp_shard"]
    options, root_options = unit_options(mesh, PRECISIONS[settings.precision], settings.offload)
    norms = shard_batch_norms(model, PRECISIONS[settings.precision], options)
    modules = [unit if isinstance(unit, list) else [unit] for unit in units(model)]
    modules = [[module for module in unit if module not in norms] for unit in modules]
    for unit in filter(None, modules):
        if settings.compile:
            for module in unit:
                module.compile()
        # The parameters of a unit are gathered just before it runs, and freed after it. Its
        # gradients are reduce-scattered: each rank keeps the mean of its shard. The last unit stays
        # gathered, because backward needs it first.
        reshard = not settings.keep_gathered and unit is not modules[-1]
        fully_shard(unit, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **root_options)  # other parameters
    prefetch_blocks([unit[0] for unit in modules if unit], settings.prefetch)
    allocate(model, place)
    if worker.is_main:
        total = sum(p.numel() for p in model.parameters())
        held = sum(p.to_local().numel() for p in model.parameters())
        print(
            f"{total:,} parameters in {len(modules) + 1} units, {held:,} on this rank", flush=True
        )


def train_step(
    model: nn.Module, batch, optimizer, scaler, settings: Settings, worker: Worker
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step on this rank's share of the global batch.

    Returns the mean loss of the global batch, and the norm of its gradient before clipping.
    """
    optimizer.zero_grad(set_to_none=True)
    local_batch = settings.batch_size // worker.world_size
    sums = torch.zeros(2, dtype=torch.float64, device=worker.device)  # of losses, their count
    for i, part in enumerate(split(batch, settings.accumulate)):
        # Each backward reduces its gradients, and a rank adds up shards. --reduce-once reduces only
        # in the last backward: it sends less, and keeps full gradients on every rank until then.
        is_last = i == settings.accumulate - 1
        model.set_requires_gradient_sync(not settings.reduce_once or is_last)
        model.set_requires_all_reduce(is_last)  # --dp-replicate: replicas add the sums of shards
        loss_sum, count, _ = compute_loss(model, part)
        scaler.scale(loss_sum / local_batch).backward()
        sums[0] += loss_sum.detach()
        sums[1] += count
    # So far the gradient is divided by the number of samples: by local_batch above, and by the
    # number of ranks in FSDP. It must be divided by the number of losses: samples, or tokens.
    dist.all_reduce(sums)
    loss_sum, count = sums
    count = torch.where(count == 0, 1, count)  # no losses: all labels were masked
    scaler.unscale_(optimizer)  # otherwise clipping would see the scaled gradients
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    factor = settings.batch_size / count  # 1 if each sample has one loss
    factor = factor.to(gradients[0].device)  # with --offload: one copy to the CPU, not one for each
    for gradient in gradients:
        gradient.to_local().mul_(factor)
    # A rank holds shards of the gradients. They are DTensors, so the norm covers the shards of all
    # ranks; full_tensor() makes a plain tensor of the norm.
    grad_norm = torch.nn.utils.get_total_norm(gradients).full_tensor()
    if settings.clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), settings.clip, grad_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss_sum / count, grad_norm


def evaluate_as_trained(model, test_set, settings: Settings, worker: Worker) -> dict[str, float]:
    """Evaluate in micro-batches of the training's size, which are known to fit into memory."""
    micro_batch = settings.batch_size // worker.world_size // settings.accumulate
    means = evaluate(model, test_set, micro_batch, settings.workers, worker)
    return {f"test_{name}": mean for name, mean in means.items()}


if __name__ == "__main__":
    main()
