"""Train a GPT on source code, spread over a mesh of devices: the template to copy.

    python transformer_basics/train.py                                               # one process
    torchrun --standalone --nproc_per_node=2 transformer_basics/train.py             # data parallel
    torchrun --standalone --nproc_per_node=2 transformer_basics/train.py --tp 2      # tensor
    torchrun --standalone --nproc_per_node=4 transformer_basics/train.py --dp-shard 2 --tp 2
    torchrun --standalone --nproc_per_node=8 transformer_basics/train.py --pp 2 --dp-shard 2 --tp 2
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
        --rdzv-id=gpt transformer_basics/train.py --tp 8     # two nodes: the same line on each

Look at the loss: it is the same for every mesh. Before training you see what a model of pairs of
bytes reaches; afterwards, what the GPT reaches, and what it writes.
"""

import signal
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from arguments import UserError
from build import build_model, make_mesh
from checkpoint import resume, save_checkpoint
from config import AXES, PRECISIONS, parse_args
from data import Batches, bigram_loss, load_corpus, windows
from flops import matmul_peak
from generate import generate
from metrics import Metrics
from model import GPTConfig
from runtime import Worker, distributed_worker
from steps import (
    all_sum,
    data_parallel,
    evaluate,
    learning_rate,
    make_optimizer,
    train_step,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

# What a run is: a checkpoint continues only under the same values. The mesh is not among them.
RUN_KEYS = (
    "steps", "batch_size", "block_size", "layers", "heads", "dim", "tied", "lr", "warmup", "clip",
    "weight_decay", "precision", "seed", "tokenizer",
)  # fmt: skip


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        finished = train(args, worker)
    sys.exit(0 if finished else 128 + signal.SIGTERM)


def train(args, worker: Worker) -> bool:
    """Train to the end and return True, or save and return False once SIGTERM has come."""
    stop_requests = []  # a cluster sends SIGTERM before it takes the machine: the loop looks here
    signal.signal(signal.SIGTERM, lambda *_: stop_requests.append(1))
    corpus = load_corpus(args.data, args.tokenizer, worker)
    batches = Batches(corpus.train, args.block_size, args.batch_size, args.seed)
    config = GPTConfig(
        corpus.vocab_size, args.block_size, args.layers, args.heads, args.dim, args.tied
    )
    mesh = make_mesh(args, worker)
    model, stages = build_model(config, mesh, args, worker)
    optimizer = make_optimizer(model, args)
    held_out = held_out_windows(corpus.validation, args)
    describe(corpus, held_out, model, mesh, worker)

    path = args.output_dir / "checkpoint" if args.output_dir else None
    parts = {"model": model, "optimizer": optimizer}
    run = {key: getattr(args, key) for key in RUN_KEYS} | {"vocab_size": config.vocab_size}
    step = resume(path, parts, run, worker) if path else 0  # optimizer steps done
    metrics = Metrics(args.output_dir, step, worker, args.tensorboard)
    peak = matmul_peak(worker.device, PRECISIONS[args.precision])
    progress = tqdm(total=args.steps, initial=step, disable=None if worker.is_main else True)
    share, shares = data_parallel(mesh)
    started = logged_at = time.perf_counter()
    logged, profiler = step, make_profiler(args, worker)
    with profiler or nullcontext():
        while step < args.steps:
            x_BT, y_BT = (t.to(worker.device) for t in batches.get(step, share, shares))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            loss = train_step(model, stages, x_BT, y_BT, optimizer, mesh, args)
            step += 1
            progress.update()
            if profiler:
                profiler.step()
            at_end, stops, epoch = step == args.steps, 0, step // batches.per_epoch
            if step % args.log_every == 0 or at_end:
                # One small collective tells every rank the mean loss, and whether any of them was
                # asked to stop: they must all leave the loop at the same step.
                loss, stops = all_sum([loss / (shares * args.tp), len(stop_requests)], worker)
                now = time.perf_counter()
                tokens = (step - logged) * args.batch_size * args.block_size
                rate, logged, logged_at = tokens / (now - logged_at), step, now
                mfu = rate * config.flops_per_token(args.block_size) / peak / worker.world_size
                metrics.write(step, epoch, loss=loss, lr=learning_rate(step - 1, args))
                metrics.write(step, epoch, tokens_per_second=rate, mfu=mfu)
                progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if step % args.eval_every == 0 or at_end:
                found = evaluate(model, stages, held_out, mesh, args, worker)
                metrics.write(step, epoch, validation_loss=found)
                if worker.is_main:
                    seconds = time.perf_counter() - started
                    tqdm.write(
                        f"step {step:5}   validation loss {found:.3f}   tokens/s {rate:8,.0f}   "
                        f"MFU {mfu:4.0%}   {seconds:4.0f} s"
                    )
                logged_at += time.perf_counter() - now  # evaluation is not training
            if path and (stops or at_end or step % args.checkpoint_every == 0):
                save_checkpoint(path, parts, step, run, worker)
            if stops and not at_end:
                break
    progress.close()
    metrics.close()
    if step < args.steps:
        if worker.is_main:
            saved = f"saved to {path}, the same command continues" if path else "not saved"
            print(f"stopped by SIGTERM after step {step} of {args.steps}: {saved}")
        return False
    write_sample(model, stages, corpus, args, worker)
    return True


def held_out_windows(tokens, args) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of --eval-batches global batches, spread evenly over the held-out text."""
    available = (len(tokens) - 1) // args.block_size
    count = min(args.eval_batches, available // args.batch_size) * args.batch_size
    if not count:
        raise UserError(
            f"the held-out text is too short: {len(tokens):,} tokens are no batch of "
            f"{args.batch_size} windows of {args.block_size} tokens"
        )
    return windows(tokens, torch.arange(count) * available // count, args.block_size)


def describe(corpus, held_out, model, mesh: DeviceMesh, worker: Worker) -> None:
    """Rank 0 prints the mesh, what it holds, and what the simplest model of the text reaches."""
    counts = [[0, 0] for _ in range(worker.world_size)]
    held = sum(p.to_local().numel() for p in model.parameters())
    of_stage = sum(p.numel() for p in model.parameters())
    dist.all_gather_object(counts, (mesh["pp"].get_local_rank(), of_stage))
    if not worker.is_main:
        return
    axes = "   ".join(f"{axis} {size}" for axis, size in zip(AXES, mesh.shape, strict=True))
    print(f"{axes}   {sum(dict(counts).values()):,} parameters, {held:,} on this rank")
    line = f"{len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out"
    if corpus.vocab_size <= 4096:  # pairs of tokens are counted in a table
        loss = bigram_loss(corpus.train, *held_out, corpus.vocab_size)
        line += f", on which a bigram model has a loss of {loss:.3f}"
    print(line, flush=True)


def make_profiler(args, worker: Worker):
    """Records steps 10 to 12 of this run; the file opens in chrome://tracing or Perfetto."""
    if not args.profile:
        return None

    def write(profiler) -> None:
        profiler.export_chrome_trace(str(args.output_dir / f"trace_{worker.rank}.json"))

    steps = torch.profiler.schedule(skip_first=8, wait=0, warmup=1, active=3, repeat=1)
    return torch.profiler.profile(schedule=steps, on_trace_ready=write)


def write_sample(model, stages, corpus, args, worker: Worker) -> None:
    prompt = torch.tensor([corpus.encode(args.prompt)], device=worker.device)
    multiple = args.tp if args.sequence_parallel else 1
    tokens = generate(model, stages, prompt, args.sample, seed=args.seed, multiple=multiple)
    if worker.is_main and args.sample:
        print(f"---- {args.sample} tokens after {args.prompt!r}:")
        print(corpus.decode(tokens[0].tolist()))


if __name__ == "__main__":
    main()
