"""Fine-tune a T5 of the Hugging Face hub, or train a small one, with its parameters sharded.

    python t5_finetuning/train.py                                         # one process
    torchrun --standalone --nproc_per_node=2 t5_finetuning/train.py       # two ranks
    torchrun --standalone --nproc_per_node=2 t5_finetuning/train.py \\
        --model google-t5/t5-small --prefix "summarize: " --max-source 512 --max-target 64 \\
        --train-file train.jsonl --eval-file eval.jsonl --output-dir runs/t5  # your summaries

Without --model, no network is needed: a small T5 starts from nothing and learns from the functions
of Python's standard library. First it learns to write a function's name, that is, to copy words of
its source; then the first line of its docstring. Look at the table at the end: functions of modules
that it has never seen, before and after, and next to the summary that costs nothing (the first
words of the source). With --output-dir, the same command continues where the last one stopped, and
OUTPUT_DIR/model is what from_pretrained() loads.
"""

import json
import math
import os
import signal
import sys
import tempfile
import time
import zlib
from itertools import cycle, islice
from pathlib import Path

import torch
from arguments import ArgumentParser, UserError
from checkpoint import resume, save_checkpoint
from data import encode, epoch_batches, python_pairs, read_json_lines
from evaluate import EarlyStopping, all_sum, evaluate, generate, loss_sum, report
from metrics import Metrics
from model import export, fill, from_hub, make_sharded_model, on_rank_0, prepare
from runtime import Worker, distributed_worker
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm
from transformers import T5ForConditionalGeneration
from transformers.utils import logging

# What a run is: a checkpoint continues only under the same values, and on the same data.
RUN_KEYS = (
    "model", "epochs", "batch_size", "lr", "warmup", "clip", "dropout", "precision", "seed", "dim",
    "layers", "vocab_size", "patience", "name_epochs",
)  # fmt: skip


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    args = parse_args()
    logging.disable_progress_bar()  # transformers' own, several per rank
    with tempfile.TemporaryDirectory() as scratch, distributed_worker(args.device) as worker:
        finished = train(args, args.output_dir or Path(scratch), worker)
    sys.exit(0 if finished else 128 + signal.SIGTERM)


def train(args, folder: Path, worker: Worker) -> bool:
    """Train to the end and return True, or save and return False once SIGTERM has come."""
    stop_requests = []  # a cluster sends SIGTERM before it takes the machine: the loop looks here
    signal.signal(signal.SIGTERM, lambda *_: stop_requests.append(1))
    if args.train_file:
        train_pairs, eval_pairs = (read_json_lines(f) for f in (args.train_file, args.eval_file))
        name_pairs = []
    else:
        train_pairs, eval_pairs, name_pairs = python_pairs(worker)
    # Rank 0 alone asks the hub or learns a vocabulary; the others are told.
    config, tokenizer = on_rank_0(lambda: prepare(args, train_pairs), worker)
    train_set, eval_set, name_set = (
        encode(tokenizer, pairs, args.max_source, args.max_target, args.prefix)
        for pairs in (train_pairs, eval_pairs, name_pairs)
    )
    steps_per_epoch = len(train_set) // args.batch_size
    if steps_per_epoch == 0:
        raise UserError(f"--batch-size {args.batch_size} exceeds the {len(train_set)} pairs")
    # What each epoch learns from. A new T5 has an easier task first: it learns to copy words.
    name_epochs = 0 if args.model or len(name_set) < args.batch_size else args.name_epochs
    plan = [("names", name_set)] * name_epochs + [("summaries", train_set)] * args.epochs
    total_steps = steps_per_epoch * len(plan)

    model = make_sharded_model(config, args, worker)
    optimizer = make_optimizer(model, args)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_down(args, total_steps))
    stopping = EarlyStopping(args.patience)
    torch.manual_seed(args.seed + worker.rank)  # from here on, ranks draw different dropout masks
    if worker.is_main:
        describe(model, train_set, eval_set, args)
    before = judge(model, eval_set, tokenizer, args, worker)

    best = folder / "model"  # the best so far, in Hugging Face's format
    path = args.output_dir / "checkpoint" if args.output_dir else None
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "stopping": stopping}
    run = {key: getattr(args, key) for key in RUN_KEYS}
    run["train_data"] = zlib.crc32(json.dumps([train_set, name_set]).encode())
    step = resume(path, parts, run, worker) if path else 0  # optimizer steps done
    metrics = Metrics(args.output_dir, step, worker)
    started = time.perf_counter()
    for epoch in range(step // steps_per_epoch, len(plan)):
        if stopping.over:
            break
        task, samples = plan[epoch]
        batches = cycle(epoch_batches(samples, args.batch_size, args.seed + epoch))
        done = step - epoch * steps_per_epoch  # not 0: this epoch was interrupted
        quiet = None if worker.is_main else True
        batches = islice(batches, done, steps_per_epoch)
        for indices in tqdm(batches, f"epoch {epoch}", disable=quiet, leave=False):
            batch = [samples[i] for i in indices]
            loss = train_step(model, optimizer, batch, config.pad_token_id, args, worker)
            schedule.step()
            step += 1
            end_of_epoch, stops = step % steps_per_epoch == 0, 0
            if step % args.log_every == 0 or end_of_epoch:
                # One small collective tells every rank the loss, and whether any of them was asked
                # to stop: they must all leave the loop at the same step.
                loss, stops = all_sum([loss, len(stop_requests)], worker)
                metrics.write(step, epoch, loss=loss, lr=schedule.get_last_lr()[0])
            if end_of_epoch:
                eval_loss = evaluate(model, eval_set, config.pad_token_id, args, worker)
                metrics.write(step, epoch, eval_loss=eval_loss)
                improved = task == "summaries" and stopping.improved(eval_loss)
                if improved:
                    export(model, config, tokenizer, best, worker)
                if worker.is_main:
                    print(
                        f"epoch {epoch:2} ({task})   step {step:5}   loss {loss:.3f}   eval loss "
                        f"{eval_loss:.3f} {'*' if improved else ' '}   "
                        f"{time.perf_counter() - started:.0f} s",
                        flush=True,
                    )
            if path and (stops or end_of_epoch):
                save_checkpoint(path, parts, step, run, worker)
            if stops and step < total_steps:
                metrics.close()
                if worker.is_main:
                    saved = f"saved to {path}, the same command continues" if path else "not saved"
                    print(f"stopped by SIGTERM after step {step} of {total_steps}: {saved}")
                return False
    metrics.close()

    # What is judged is what was saved, of the best epoch: the files are thereby proven good.
    fill(model, lambda: from_hub(T5ForConditionalGeneration, best), worker)
    after = judge(model, eval_set, tokenizer, args, worker)
    if worker.is_main:
        report(before, after, train_pairs, eval_pairs, args)
    return True


def train_step(model, optimizer, batch: list, pad: int, args, worker: Worker) -> torch.Tensor:
    """One optimizer step on a global batch; returns this rank's part of its mean loss."""
    # The mean is taken over the batch's tokens, not over ranks and parts, whose summaries differ in
    # length. Every rank knows all lengths: nothing has to be sent.
    tokens = sum(len(sample.target) for sample in batch)
    share = batch[worker.rank :: worker.world_size]
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=worker.device)
    for i in range(args.accumulate):
        # Gradients travel in the last backward; until then each rank adds up whole ones.
        model.set_requires_gradient_sync(i == args.accumulate - 1)
        loss = loss_sum(model, share[i :: args.accumulate], pad, worker) / tokens
        (loss * worker.world_size).backward()  # FSDP will divide by the number of ranks
        total += loss.detach()
    if args.clip:
        # DTensors know that their norm is over the shards of all ranks.
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    return total


def judge(model, eval_set, tokenizer, args, worker: Worker) -> tuple[float, list[str]]:
    """(eval loss, the summaries of the first --eval-samples)."""
    loss = evaluate(model, eval_set, tokenizer.pad_token_id, args, worker)
    return loss, generate(model, eval_set[: args.eval_samples], tokenizer, args, worker)


def make_optimizer(model, args) -> torch.optim.Optimizer:
    """AdamW; its state is sharded as the parameters are."""
    # fused is one call for all shards: on CPUs, a call costs a DTensor more than what it computes.
    # AdamW moves every number by about lr. A new T5's embeddings are ten times larger than its
    # matrices, and its position biases must grow to several times that: with one rate for all, it
    # takes thousands of steps to begin copying words. (Adafactor, which T5 was made with, takes
    # steps in proportion.) A trained T5 has all that behind it.
    factors = {} if args.model else {"shared.weight": 5, "relative_attention_bias.weight": 10}
    groups = {}
    for name, parameter in model.named_parameters():
        factor = max((f for end, f in factors.items() if name.endswith(end)), default=1)
        groups.setdefault(factor, []).append(parameter)
    groups = [{"params": parameters, "lr": args.lr * f} for f, parameters in groups.items()]
    return torch.optim.AdamW(groups, fused=True)


def warmup_then_down(args, total_steps: int):
    """The factor of --lr at a step: up in a line, then down to zero in a line."""
    warmup = round(args.warmup * total_steps)
    rest = max(1, total_steps - warmup)
    return lambda step: min((step + 1) / max(1, warmup), max(0, total_steps - step) / rest)


def describe(model, train_set, eval_set, args) -> None:
    whole = sum(p.numel() for p in model.parameters())
    held = sum(p.to_local().numel() for p in model.parameters())
    print(
        f"{whole:,} parameters, rank 0 holds {held:,} of them   {model.config.vocab_size:,} tokens"
    )
    for name, samples in (("train", train_set), ("eval", eval_set)):
        texts = sum(len(sample.source) == args.max_source for sample in samples)
        summaries = sum(len(sample.target) == args.max_target for sample in samples)
        print(
            f"{name:6}{len(samples):6,} pairs; {texts:,} texts fill all {args.max_source} tokens "
            f"and are cut, {summaries:,} summaries all {args.max_target}",
            flush=True,
        )


def parse_args():
    parser = ArgumentParser(description="Fine-tune a T5 for summaries, sharded by FSDP2.")
    add = parser.add_argument
    add("--model", help="id on the Hugging Face hub or local directory; default: a new small T5")
    add("--train-file", type=Path, help='lines of {"text": ..., "summary": ...}')
    add("--eval-file", type=Path, help="the same; default for both: Python's standard library")
    add("--prefix", default="", help="put before each text, for instance 'summarize: '")
    add("--max-source", type=int, default=48, help="tokens of a text; the rest is cut off")
    add("--max-target", type=int, default=24, help="tokens of a summary")
    add("--dim", type=int, default=128, help="width of the new T5")
    add("--layers", type=int, default=2, help="of its encoder, and of its decoder")
    add("--vocab-size", type=int, default=4096, help="tokens to learn for the new T5, at most")
    add("--epochs", type=int, default=8)
    add("--name-epochs", type=int, default=7, help="before, on names of functions: for a new T5")
    add("--patience", type=int, default=3, help="stop after so many epochs without a better one")
    add("--batch-size", type=int, default=32, help="pairs per optimizer step, over all ranks")
    add("--accumulate", type=int, default=1, help="parts in which a rank works through its share")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.05, help="fraction of all steps until the peak")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--dropout", type=float, default=0.1)
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--activation-checkpointing", action="store_true", help="less memory, a forward more")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    add("--output-dir", type=Path, help="model, checkpoint, metrics; continues a run that is there")
    add("--eval-samples", type=int, default=200, help="texts to generate summaries for")
    add("--show", type=int, default=8, help="summaries to print")
    add("--log-every", type=int, default=10, help="steps between losses, and looks at SIGTERM")
    args = parser.parse_args()

    at_least_1 = "max_source max_target layers epochs patience batch_size accumulate log_every"
    for names, holds, limit in (
        (at_least_1 + " eval_samples", lambda x: x >= 1, "at least 1"),
        ("vocab_size", lambda x: x >= 300, "at least 300"),
        ("clip show name_epochs", lambda x: x >= 0, "at least 0"),
        ("dim", lambda x: x > 0 and x % 32 == 0, "a multiple of 32"),
        ("lr", lambda x: 0 < x < math.inf, "above 0"),
        ("warmup", lambda x: 0 <= x <= 1, "from 0 to 1"),
        ("dropout", lambda x: 0 <= x < 1, "at least 0 and below 1"),
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
    if bool(args.train_file) != bool(args.eval_file):
        parser.error("--train-file and --eval-file go together: one was given")
    if args.output_dir:
        try:
            args.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output-dir {args.output_dir} cannot be made: {error.strerror}")
    return args


if __name__ == "__main__":
    main()
