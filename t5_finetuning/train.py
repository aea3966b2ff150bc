"""Fine-tune a T5 of the Hugging Face hub, or train a small one, with its parameters sharded.

    python t5_finetuning/train.py                                         # one process
    torchrun --standalone --nproc_per_node=2 t5_finetuning/train.py       # two ranks
    torchrun --standalone --nproc_per_node=2 t5_finetuning/train.py \\
        --model google-t5/t5-small --prefix "summarize: " --max-source 512 --max-target 64 \\
        --epochs 3 --lr 3e-4 --train-file train.jsonl --eval-file eval.jsonl \\
        --output-dir runs/t5                                              # your summaries

Without --model, no network is needed: a small T5 starts from nothing and learns from the functions
of Python's standard library. First it learns to write a function's name, that is, to copy words of
its source; then the first line of its docstring. Look at the table at the end: functions of modules
that it has never seen, before and after, and next to the summary that costs nothing (the first
words of the source). With --output-dir, the same command continues where the last one stopped, and
OUTPUT_DIR/model is what from_pretrained() loads.
minimal.py has the distributed lines alone; this file adds what a real run needs.
"""

import math
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import UserError
from checkpoint import resume, save_checkpoint
from config import Settings, parse_args
from data import IGNORED, JsonLines, epoch_batches, make_loader
from evaluate import EarlyStopping, all_sum, describe, evaluate, generate, loss_sum, report
from library import library_files
from metrics import Metrics, Throughput, make_profiler, make_tracker, memory_mb
from model import export, from_hub, load_weights, on_rank_0, prepare
from runtime import Worker, distributed_worker
from stopping import StopRequests
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import T5Config, T5ForConditionalGeneration
from transformers.utils import logging


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    settings = parse_args()
    logging.disable_progress_bar()  # transformers' own, several per rank
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    if settings.train_file:
        files = [settings.train_file, settings.eval_file]
    else:
        files = library_files(settings.data_dir)  # one rank per node; the others wait below
    timeout = timedelta(seconds=settings.timeout)
    with (
        tempfile.TemporaryDirectory() as scratch,
        distributed_worker(settings.device, timeout, settings.backend) as worker,
    ):
        finished = train(settings, files, settings.output_dir or Path(scratch), worker)
    sys.exit(0 if finished else 128 + signal.SIGTERM)


def train(settings: Settings, files: list[Path], folder: Path, worker: Worker) -> bool:
    """Train to the end and return True, or save and return False once SIGTERM has come."""
    stop = StopRequests(worker)
    # Rank 0 checks the files, asks the hub or learns a vocabulary; the others are told.
    datasets = [on_rank_0(lambda file=file: JsonLines(file), worker) for file in files]
    train_set, eval_set, *name_sets = datasets
    config, tokenizer = on_rank_0(lambda: prepare(settings, train_set), worker)
    plan = make_plan(train_set, name_sets, settings)  # the data set of each epoch
    epoch_ends = list(accumulate(len(dataset) // settings.batch_size for dataset in plan))
    total_steps = epoch_ends[-1]
    if epoch_ends[0] == 0:
        raise UserError(f"--batch-size {settings.batch_size} exceeds the {len(train_set)} pairs")

    torch.set_float32_matmul_precision("high")  # GPUs: TF32, 10 bits in fp32's matrix products
    model = make_sharded_model(config, settings, worker)
    optimizer = make_optimizer(model, settings)
    early_stopping = EarlyStopping(settings.patience)
    torch.manual_seed(settings.seed + worker.rank)  # from here on, dropout differs between ranks
    if worker.is_main:
        describe(model, train_set, eval_set, tokenizer, settings)
    before = (
        evaluate(model, eval_set, tokenizer, settings, worker),
        generate(model, eval_set, tokenizer, settings, worker),
    )

    best_model = folder / "model"  # in Hugging Face's format
    checkpoints = settings.output_dir / "checkpoints" if settings.output_dir else None
    parts = {"model": model, "optimizer": optimizer, "early_stopping": early_stopping}
    identity = settings.identity() | {
        "name_epochs": len(plan) - plan.count(train_set),
        "checksum of the training file": train_set.checksum,
        "checksum of the evaluation file": eval_set.checksum,
    }
    run = identity | {"total_steps": total_steps}
    step, saved_run = resume(checkpoints, parts, identity, worker) if checkpoints else (0, {})
    if worker.is_main and step and saved_run["total_steps"] != total_steps:
        print(
            f"planned for {saved_run['total_steps']} steps, now for {total_steps}: from here on "
            "the learning rate follows the new plan"
        )
    tracker = make_tracker(settings.tracker, run, worker)
    metrics = Metrics(settings.output_dir, step, total_steps, worker, settings.tensorboard, tracker)
    stopping, throughput = False, Throughput(step)

    with make_profiler(settings.profile, settings.output_dir, worker) as profiler:
        for epoch, batch in batches(plan, step, early_stopping, tokenizer, settings, worker):
            lr = learning_rate(step, total_steps, settings)
            loss, grad_norm = train_step(model, batch, optimizer, lr, settings, worker)
            step += 1
            if profiler:
                profiler.step()

            stopping = stop.agreed(step) and step < total_steps
            end_of_epoch = step in epoch_ends
            save_now = settings.checkpoint_every and step % settings.checkpoint_every == 0
            saving = checkpoints and (end_of_epoch or save_now or stopping)
            if not (step % settings.log_every == 0 or end_of_epoch or saving or stopping):
                continue

            (loss,) = all_sum([loss], worker)  # the mean of the global batch
            grad_norm = grad_norm.full_tensor().item()  # of all shards: may be a collective
            check_finite(step, loss, grad_norm)
            metrics.log(
                step,
                epoch,
                loss=loss,
                lr=lr,
                grad_norm=grad_norm,
                pairs_per_second=throughput.stop(step) * settings.batch_size,
                memory_mb=memory_mb(worker.device),
            )
            if end_of_epoch:
                eval_loss = evaluate(model, eval_set, tokenizer, settings, worker)
                metrics.log(step, epoch, eval_loss=eval_loss)
                # A model that writes names is not what is wanted, however good it is at that.
                if plan[epoch] is train_set and early_stopping.improved(eval_loss):
                    export(model, config, tokenizer, best_model, worker)
            if saving:
                save_checkpoint(checkpoints, parts, step, run, worker, settings.keep)
            if stopping:
                break
            throughput.start(step)  # what was done since it stopped is no training

    metrics.close()
    if stopping:
        if worker.is_main:
            saved = "not saved"
            if checkpoints:
                saved = f"saved to {checkpoints}, the same command continues"
            print(f"stopped by SIGTERM after step {step} of {total_steps}: {saved}")
        return False
    # What is judged is what was saved, of the best epoch: the files are thereby proven good.
    load_weights(model, lambda: from_hub(T5ForConditionalGeneration, best_model), worker)
    after = (
        early_stopping.best_loss,
        generate(model, eval_set, tokenizer, settings, worker),
    )
    if worker.is_main:
        report(before, after, train_set, eval_set, settings)
    return True


def make_plan(
    train_set: JsonLines, name_sets: list[JsonLines], settings: Settings
) -> list[JsonLines]:
    """The data set of each epoch. A new T5 has an easier task first: it learns to copy words."""
    if settings.model or not name_sets:
        return [train_set] * settings.epochs
    name_epochs = min(settings.name_epochs, settings.epochs - 1)  # the last is on summaries
    return name_sets * name_epochs + [train_set] * (settings.epochs - name_epochs)


def make_sharded_model(
    config: T5Config, settings: Settings, worker: Worker
) -> T5ForConditionalGeneration:
    """A sharded T5 with the weights of --model, or with random ones."""
    with torch.device("meta"):  # shapes without memory
        model = T5ForConditionalGeneration(config)
    if settings.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})

    # Parameters are kept, and gradients added up, in float32, whatever the matrices multiply in.
    compute_dtype = torch.bfloat16 if settings.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    for block in (*model.encoder.block, *model.decoder.block):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # What is left is the root's, with the matrix that is both embeddings and the output. It cannot
    # be a unit of its own, nor part of the encoder's or the decoder's: a unit has its parameters
    # for its own forward pass only, and this one is used in all of them.
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # True of the position biases that T5's blocks hand on. Nobody changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

    model.to_empty(device=worker.device)  # memory for this rank's shards
    # to_empty() makes four matrices of the shared one in a plain model. A sharded one keeps it
    # whole (torch 2.13): this line makes sure.
    model.tie_weights()

    def make_whole_model() -> T5ForConditionalGeneration:
        torch.manual_seed(settings.seed)
        if settings.model:
            return from_hub(T5ForConditionalGeneration, settings.model, dtype=torch.float32)
        return T5ForConditionalGeneration(config)

    load_weights(model, make_whole_model, worker)  # rank 0's, to all
    # generate() calls the encoder, past the model's forward() at which the root's parameters are
    # gathered: told so, FSDP gathers them for generate() too.
    register_fsdp_forward_method(model, "generate")
    return model


def batches(
    plan: list[JsonLines],
    step: int,
    early_stopping: EarlyStopping,
    tokenizer,
    settings: Settings,
    worker: Worker,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (epoch, batch) of this rank, on its device, from global batch `step` on."""
    for epoch, dataset in enumerate(plan):
        if early_stopping.over:
            return
        indices = epoch_batches(dataset.lengths, settings.batch_size, settings.seed + epoch)
        done = min(step, len(indices))  # before a restart
        step -= done
        # Rank r takes the pairs r, r + N, r + 2N, ... of each global batch that is left.
        local_indices = indices[done:, worker.rank :: worker.world_size].tolist()
        if local_indices:
            for batch in make_loader(dataset, local_indices, tokenizer, settings):
                for name, tensor in batch.items():
                    batch[name] = tensor.to(worker.device, non_blocking=True)
                yield epoch, batch


def train_step(
    model, batch: dict[str, Tensor], optimizer, lr: float, settings: Settings, worker: Worker
) -> tuple[Tensor, Tensor]:
    """One optimizer step on this rank's part of the global batch.

    Returns this part of the mean loss (the parts of all ranks add up to it), and the norm of the
    gradients, a DTensor.
    """
    # The mean is taken over the global batch's tokens: a mean of the ranks' means would give the
    # tokens of a rank with short summaries more weight.
    tokens = (batch["labels"] != IGNORED).sum()
    dist.all_reduce(tokens)
    optimizer.zero_grad(set_to_none=True)
    total_loss = torch.zeros((), device=worker.device)
    for i in range(settings.accumulate):
        # Gradients travel in the last backward; until then each rank adds up whole ones.
        model.set_requires_gradient_sync(i == settings.accumulate - 1)
        part = {name: tensor[i :: settings.accumulate] for name, tensor in batch.items()}
        loss = loss_sum(model, part) / tokens
        (loss * worker.world_size).backward()  # FSDP will divide by the number of ranks
        total_loss += loss.detach()
    # DTensors know that their norm is over the shards of all ranks.
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    optimizer.step()
    return total_loss, grad_norm


def check_finite(step: int, loss: float, grad_norm: float) -> None:
    """Raise `UserError` rather than train on, and save, what is no number any more."""
    if not math.isfinite(loss + grad_norm):
        raise UserError(
            f"step {step}: the loss is {loss}, the gradient norm {grad_norm}: try a smaller --lr, "
            "a longer --warmup or a smaller --clip; checkpoints from before are as they were"
        )


def make_optimizer(model, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; its state is sharded as the parameters are."""
    # AdamW moves every number by about lr. A new T5's embeddings are ten times larger than its
    # matrices, and its position biases must grow to several times that: with one rate for all, it
    # takes thousands of steps to begin copying words. (Adafactor, which T5 was made with, takes
    # steps in proportion.) A trained T5 has all that behind it.
    factors = {"shared.weight": 5, "relative_attention_bias.weight": 10}
    groups = {}
    for name, parameter in model.named_parameters():
        factor = 1 if settings.model else factors.get(".".join(name.split(".")[-2:]), 1)
        groups.setdefault(factor, []).append(parameter)
    groups = [{"params": params, "lr_factor": factor} for factor, params in groups.items()]
    # fused is one call for all shards: on CPUs, a call costs a DTensor more than what it computes.
    return torch.optim.AdamW(groups, lr=settings.lr, fused=True)


def learning_rate(step: int, total_steps: int, settings: Settings) -> float:
    """Linear over the warm-up to --lr, then linear down to zero."""
    warmup = round(settings.warmup * total_steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    return settings.lr * (total_steps - step) / max(1, total_steps - warmup)


if __name__ == "__main__":
    main()
