r"""Fine-tune a T5 of the Hugging Face hub, or train a small one, with its parameters sharded.

    python t5_finetuning/train.py --dim 64 --epochs 1 --name-epochs 0 --eval-samples 20   # a minute
    torchrun --standalone --nproc_per_node=2 t5_finetuning/train.py       # 15 minutes
    torchrun --standalone --nproc_per_node=2 t5_finetuning/train.py \
        --model google-t5/t5-small --prefix "summarize: " --max-source 512 --max-target 64 \
        --epochs 3 --lr 3e-4 --train-file train.jsonl --eval-file eval.jsonl \
        --output-dir runs/t5                                              # your summaries

Without --model, no network is needed: a small T5 starts from random weights and learns from the
functions of Python's standard library. First it learns to write a function's name, that is, to copy
words of its source; then the first line of its docstring. Look at the table at the end. It scores
functions of modules that T5 has never seen, before and after training, next to a baseline without a
model (the first words of the source). With --output-dir, the same command continues a run that was
stopped, and from_pretrained() loads OUTPUT_DIR/model.
For a model of another kind, replace task.py. minimal.py has only the distributed lines.
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from alone import on_rank_0
from arguments import UserError, fail
from checkpoint import check_shared, resume, save_checkpoint
from config import Settings, parse_args
from data import JsonLines, check_same_files, epoch_batches, make_loader
from evaluate import Before, EarlyStopping, describe, evaluate, generate, report
from library import library_files
from materialize import allocate, build_on_meta, initialize
from metrics import Metrics, Throughput, check_finite, make_profiler, peak_memory
from model import export, from_hub, prepare
from optimizer import make_optimizer, set_learning_rate
from replicas import GradientLog, average_buffers, check_replicas
from runtime import Worker, distributed_worker
from stopping import StopRequests, goodbye
from task import MODEL, collate, compute_loss, units
from tokenizer import vocabulary_sum
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers.utils import logging


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    settings = parse_args()
    if find_spec("rouge_score") is None:  # now, and not when the training is over
        fail("rouge_score is missing, which scores summaries: pip install rouge-score")
    logging.disable_progress_bar()  # transformers shows several per rank
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of tokenizers do not survive a fork
    if settings.train_file:
        files = [settings.train_file, settings.eval_file]
    else:
        files = library_files(settings.data_dir)  # one rank per node writes; all wait below
    timeout = timedelta(seconds=settings.timeout)
    with (
        distributed_worker(settings.device, timeout, settings.backend) as worker,
        tempfile.TemporaryDirectory() as scratch,
    ):
        stopped_by = train(settings, files, settings.output_dir or Path(scratch), worker)
    sys.exit(128 + stopped_by if stopped_by else 0)


def train(settings: Settings, files: list[Path], folder: Path, worker: Worker) -> int:
    """Train to the end and return 0; after a signal to stop, save and return its number."""
    stop = StopRequests(worker)
    # Rank 0 checks the files, asks the hub or trains a tokenizer, and broadcasts the results.
    datasets = [
        on_rank_0(lambda file=file: JsonLines(file), worker, f"reading {file}") for file in files
    ]
    check_same_files(datasets, worker)
    train_set, eval_set, *name_sets = datasets
    config, generation, tokenizer = on_rank_0(
        lambda: prepare(settings, train_set), worker, "loading or learning a tokenizer"
    )
    plan = make_plan(train_set, name_sets, settings)  # the data set of each epoch
    epoch_ends = list(accumulate(len(dataset) // settings.batch_size for dataset in plan))
    total_steps = epoch_ends[-1]
    if settings.batch_size > min(map(len, plan)):
        pairs = min(map(len, plan))
        raise UserError(f"--batch-size {settings.batch_size} exceeds the {pairs} pairs of a file")

    torch.set_float32_matmul_precision("high")  # GPUs: TF32, 10-bit mantissa, in fp32 matmuls
    model = shard(config, settings, worker)
    model.generation_config = generation
    optimizer = make_optimizer(model, settings)
    early_stopping, before = EarlyStopping(settings.patience), Before()
    torch.manual_seed(settings.seed + worker.rank)  # from here on, dropout differs between ranks
    if worker.is_main:
        describe(model, train_set, eval_set, tokenizer, settings)

    best_model = folder / "model"  # in Hugging Face's format
    checkpoints = settings.output_dir / "checkpoints" if settings.output_dir else None
    parts = {"model": model, "optimizer": optimizer}
    parts |= {"early_stopping": early_stopping, "before": before}
    identity = settings.identity() | {
        "name_epochs": len(plan) - plan.count(train_set),
        "checksum of the training file": train_set.checksum,
        "checksum of the evaluation file": eval_set.checksum,
        "checksum of the vocabulary": vocabulary_sum(tokenizer),
    }
    run = identity | {"total_steps": total_steps}
    step, saved_run = 0, {}
    if checkpoints:
        check_shared(checkpoints, worker)
        step, saved_run = resume(checkpoints, parts, identity, worker)
    if step == 0:  # else the save has the values, and no rank builds the full model
        initialize(model, partial(build_whole, config, settings), worker)
        before.loss = evaluate(model, eval_set, tokenizer, settings, worker)
        before.texts = generate(model, eval_set, tokenizer, settings, worker)
    if step > total_steps:
        raise UserError(
            f"{checkpoints} is at step {step}, beyond the {total_steps} steps of --epochs "
            f"{settings.epochs}: choose more epochs, or another --output-dir"
        )
    if worker.is_main and saved_run.get("total_steps", total_steps) != total_steps:
        print(
            f"planned for {saved_run['total_steps']} steps, now for {total_steps}: from here on "
            "the learning rate follows the new schedule"
        )
    metrics = Metrics(settings.output_dir, step, total_steps, worker, settings.tensorboard)
    stopped_by = 0

    def finish_epoch(step: int) -> None:
        epoch = epoch_ends.index(step)
        eval_loss = evaluate(model, eval_set, tokenizer, settings, worker)
        metrics.log(step, epoch, eval_loss=eval_loss)
        # Do not export a model from an epoch on names: it cannot write summaries yet.
        if plan[epoch] is train_set and early_stopping.improved(eval_loss):
            export(model, config, tokenizer, best_model, worker)

    if step in epoch_ends:  # it was stopped between a save and its evaluation
        finish_epoch(step)
    gradients, throughput = GradientLog(model), Throughput(step)
    with make_profiler(settings, step, total_steps, worker) as profiler:
        for epoch, batch in batches(plan, step, early_stopping, tokenizer, settings, worker):
            lr = set_learning_rate(optimizer, step, total_steps, settings)
            loss, grad_norm = train_step(model, batch, optimizer, settings, worker)
            step += 1
            gradients.note(step)
            if profiler:
                profiler.step()

            stopped_by = stop.agreed(step) if step < total_steps else 0
            end_of_epoch = step in epoch_ends
            save_now = settings.checkpoint_every and step % settings.checkpoint_every == 0
            saving = checkpoints and (end_of_epoch or save_now or stopped_by)
            if not (step % settings.log_every == 0 or end_of_epoch or saving or stopped_by):
                continue

            check_finite(step, float(loss), float(grad_norm))
            average_buffers(model)
            check_replicas(model, step, worker)  # replicas can diverge without an error
            gradients.check(worker)  # ranks can use different layers without an error
            metrics.log(
                step,
                epoch,
                loss=float(loss),
                lr=lr,
                grad_norm=float(grad_norm),
                pairs_per_second=throughput.stop(step) * settings.batch_size,
                **peak_memory(worker.device),
            )
            if saving:  # before the evaluation, which may take longer than a scheduler waits
                save_checkpoint(checkpoints, parts, step, run, worker, settings.keep)
            if stopped_by:
                break
            if end_of_epoch:
                finish_epoch(step)
            throughput.start(step)  # leaves out logging, saving, evaluation

    metrics.close()
    if stopped_by:
        goodbye(stopped_by, step, total_steps, checkpoints, worker)
        return stopped_by
    if on_rank_0(lambda: not best_model.is_dir(), worker, "looking for the best model"):
        raise UserError(
            f"there is no {best_model}: it was moved, or no evaluation loss was a number"
        )
    # Evaluate the exported model of the best epoch, which also checks its files.
    initialize(model, lambda: from_hub(MODEL, best_model), worker)
    after = (
        early_stopping.best_loss,
        generate(model, eval_set, tokenizer, settings, worker),
    )
    results = (before.loss, before.texts), after, train_set, eval_set, settings
    on_rank_0(lambda: report(*results), worker, "scoring summaries")
    return 0


def make_plan(
    train_set: JsonLines, name_sets: list[JsonLines], settings: Settings
) -> list[JsonLines]:
    """The data set of each epoch. A new T5 begins with an easier task: it learns to copy words."""
    if settings.model or not name_sets:
        return [train_set] * settings.epochs
    name_epochs = min(settings.name_epochs, settings.epochs - 1)  # the last is on summaries
    return name_sets * name_epochs + [train_set] * (settings.epochs - name_epochs)


def shard(config, settings: Settings, worker: Worker) -> nn.Module:
    """The model of `config`: each rank has memory for its shards, which have no values yet."""
    model = build_on_meta(lambda: MODEL(config))
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    policy = MixedPrecisionPolicy()
    if settings.precision == "bf16":  # shards and gradient reduction stay in float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    for unit in units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the root: all other parameters
    # The views are the position biases that T5's blocks pass on. No code changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

    allocate(model, worker.device)
    # to_empty() turns the shared matrix of an unsharded T5 into four. This line keeps them one.
    model.tie_weights()
    # generate() calls the encoder directly, past the model's forward(), which gathers the root's
    # parameters. With this line FSDP gathers them for generate(), too.
    register_fsdp_forward_method(model, "generate")
    return model


def build_whole(config, settings: Settings) -> nn.Module:
    """An unsharded model on the CPU, with the weights of --model, or with random weights."""
    torch.manual_seed(settings.seed)
    if settings.model:
        return from_hub(MODEL, settings.model, dtype=torch.float32)
    return MODEL(config)


def batches(
    plan: list[JsonLines],
    step: int,
    early_stopping: EarlyStopping,
    tokenizer,
    settings: Settings,
    worker: Worker,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (epoch, local batch on the device), from global batch `step` on."""
    collate_pairs = partial(collate, tokenizer=tokenizer, settings=settings)
    for epoch, dataset in enumerate(plan):
        if early_stopping.over:
            return
        indices = epoch_batches(dataset.lengths, settings.batch_size, settings.seed + epoch)
        done = min(step, len(indices))  # before a restart
        step -= done
        # Rank r takes the pairs r, r + N, r + 2N, ... of each remaining global batch.
        local_indices = indices[done:, worker.rank :: worker.world_size].tolist()
        if local_indices:
            loader = make_loader(
                dataset, local_indices, collate_pairs, settings.workers, worker.device
            )
            for batch in loader:
                for name, tensor in batch.items():
                    batch[name] = tensor.to(worker.device, non_blocking=True)
                yield epoch, batch


def train_step(
    model: nn.Module, batch: dict[str, Tensor], optimizer, settings: Settings, worker: Worker
) -> tuple[Tensor, Tensor]:
    """One optimizer step on this rank's share of the global batch.

    Returns the mean loss of the global batch, and the norm of its gradient before clipping.
    """
    optimizer.zero_grad(set_to_none=True)
    local_batch = settings.batch_size // worker.world_size
    sums = torch.zeros(2, dtype=torch.float64, device=worker.device)  # of losses, their count
    for i in range(settings.accumulate):
        part = {name: t[i :: settings.accumulate].contiguous() for name, t in batch.items()}
        # Each backward reduces its gradients, and a rank adds up shards. --reduce-once reduces only
        # in the last backward: it sends less, and keeps full gradients on every rank until then.
        model.set_requires_gradient_sync(not settings.reduce_once or i == settings.accumulate - 1)
        loss_sum, count = compute_loss(model, part)
        (loss_sum / local_batch).backward()
        sums[0] += loss_sum.detach()
        sums[1] += count
    # Take the mean over the tokens of the global batch: a mean of the ranks' means would give more
    # weight to the tokens of a rank with short summaries. So far the gradient is divided by the
    # pairs: by local_batch above, and by FSDP's mean over the ranks.
    dist.all_reduce(sums)
    loss_sum, count = sums
    count = torch.where(count == 0, 1, count)  # no losses: all labels were masked
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    factor = settings.batch_size / count
    for gradient in gradients:
        gradient.to_local().mul_(factor)
    # The norm of DTensors covers the shards of all ranks.
    grad_norm = torch.nn.utils.get_total_norm(gradients).full_tensor()
    if settings.clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), settings.clip, grad_norm)
    optimizer.step()
    return loss_sum / count, grad_norm


if __name__ == "__main__":
    main()
