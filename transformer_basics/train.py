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
minimal.py has the distributed lines alone; this file adds what a real run needs.
"""

import math
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from arguments import UserError
from checkpoint import resume, save_checkpoint
from config import AXES, PRECISIONS, Settings, parse_args
from data import Batches, bigram_loss, load_corpus
from evaluation import evaluate, held_out_windows, mean_over_ranks
from flops import matmul_peak
from metrics import Metrics, Throughput, make_profiler, make_tracker, memory_mb
from model import GPT, GPTConfig, cross_entropy, initialize
from optimizer import learning_rate, make_optimizer
from parallelize import (
    apply_activation_checkpointing,
    apply_compile,
    apply_fsdp,
    apply_tensor_parallel,
)
from pipeline import Pipeline, stage_layers
from pretrained import copy_weights, read_pretrained
from runtime import Worker, distributed_worker
from sampling import generate
from step import train_step
from stopping import StopRequests
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    settings = parse_args()
    timeout = timedelta(seconds=settings.timeout)
    with distributed_worker(settings.device, timeout, settings.backend) as worker:
        finished = train(settings, worker)
    sys.exit(0 if finished else 128 + signal.SIGTERM)


def spread_model(
    config: GPTConfig, settings: Settings, worker: Worker
) -> tuple[DeviceMesh, GPT, Pipeline | None]:
    """The mesh of all ranks, this rank's part of the model on it, and the pipeline, if any."""
    # Every rank gets a coordinate on each axis: pp, dp_replicate, dp_shard, tp. Ranks that differ
    # in one coordinate only are that axis' group. Neighbours on the last axis are neighbours in
    # rank, so on one node: tensor parallelism communicates most.
    mesh = init_device_mesh(worker.device.type, settings.mesh_shape(), mesh_dim_names=AXES)
    compute_dtype = PRECISIONS[settings.precision]

    with torch.device("meta"):  # shapes without memory: no rank needs room for the whole model
        model = GPT(config, stage_layers(config.layers, mesh["pp"]))  # some layers
    if settings.tp > 1:  # some features of each layer
        apply_tensor_parallel(model, mesh["tp"], settings.sequence_parallel, settings.loss_parallel)
    if settings.activation_checkpointing:
        apply_activation_checkpointing(model)
    if settings.compile:
        apply_compile(model)
    # Some rows of what is left by now; each rank's gradients are averaged over all its copies.
    # (A pipeline keeps what is gathered: it would gather again for every micro-batch.)
    apply_fsdp(
        model,
        mesh["dp_replicate", "dp_shard"],
        compute_dtype,
        reshard_after_forward=not settings.keep_gathered and settings.pp == 1,
    )
    initialize(model, settings.seed, worker.device)  # memory for this rank's part only

    pipeline = None
    if settings.pp > 1:
        pipeline = Pipeline(
            model,
            mesh["pp"],
            settings.accumulate,
            cross_entropy,
            worker.device,
            compute_dtype,
            sequence_parts=settings.tp if settings.sequence_parallel else 1,
        )
    return mesh, model, pipeline


def train(settings: Settings, worker: Worker) -> bool:
    """Train to the end and return True, or save and return False once SIGTERM has come."""
    stop = StopRequests(worker)
    torch.set_float32_matmul_precision("high")  # GPUs: TF32, 10 bits in fp32's matrix products
    corpus = load_corpus(settings.data, settings.tokenizer, worker)
    batches = Batches(corpus.train, settings.block_size, settings.batch_size, settings.seed)
    held_out = held_out_windows(corpus.validation, settings)
    config = settings.model(corpus.vocab_size)
    if settings.init_from:
        config, weights = read_pretrained(settings, corpus.token_count)
    mesh, model, pipeline = spread_model(config, settings, worker)
    if settings.init_from:
        copy_weights(model, weights)
        del weights
    optimizer = make_optimizer(model, settings)
    describe(corpus, held_out, model, mesh, worker)

    folder = settings.output_dir / "checkpoints" if settings.output_dir else None
    parts = {"model": model, "optimizer": optimizer}
    identity = settings.identity()
    identity |= {"vocab_size": config.vocab_size, "data": f"text {corpus.checksum}"}
    run = identity | {"steps": settings.steps}
    step, saved_run = resume(folder, parts, identity, worker) if folder else (0, {})
    if worker.is_main and step and saved_run["steps"] != settings.steps:
        print(
            f"planned for {saved_run['steps']} steps, now for {settings.steps}: from here on the "
            "learning rate follows the new plan"
        )
    tracker = make_tracker(settings.tracker, run, worker)
    metrics = Metrics(
        settings.output_dir, step, settings.steps, worker, settings.tensorboard, tracker
    )
    peak = worker.world_size * matmul_peak(worker.device, PRECISIONS[settings.precision])
    tokens_per_step = settings.batch_size * settings.block_size
    stopping, throughput = False, Throughput(step)

    with make_profiler(settings.profile, settings.output_dir, worker) as profiler:
        for x_BT, y_BT in batches.from_step(step, settings.steps, mesh, worker.device):
            lr = learning_rate(step, settings)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss, grad_norm = train_step(model, pipeline, x_BT, y_BT, optimizer, mesh, settings)
            step += 1
            if profiler:
                profiler.step()

            at_end = step == settings.steps
            stopping = stop.agreed(step) and not at_end
            saving = folder and (step % settings.checkpoint_every == 0 or at_end or stopping)
            evaluating = step % settings.eval_every == 0 or at_end
            if not (step % settings.log_every == 0 or evaluating or saving or stopping):
                continue

            epoch = (step - 1) // batches.per_epoch
            loss = mean_over_ranks(loss, mesh)
            check_finite(step, loss, float(grad_norm))
            tokens_per_second = throughput.stop(step) * tokens_per_step
            metrics.log(
                step,
                epoch,
                loss=loss,
                lr=lr,
                grad_norm=float(grad_norm),
                tokens_per_second=tokens_per_second,
                mfu=tokens_per_second * config.flops_per_token(settings.block_size) / peak,
                memory_mb=memory_mb(worker.device),
            )
            if evaluating:
                validation_loss = evaluate(model, pipeline, held_out, mesh, settings)
                metrics.log(step, epoch, validation_loss=validation_loss)
            if saving:
                save_checkpoint(folder, parts, step, run, worker, settings.keep)
            if stopping:
                break
            throughput.start(step)  # what was done since it stopped is no training

    metrics.close()
    if stopping:
        if worker.is_main:
            saved = f"saved to {folder}, the same command continues" if folder else "not saved"
            print(f"stopped by SIGTERM after step {step} of {settings.steps}: {saved}")
        return False
    write_sample(model, pipeline, corpus, settings, worker)
    return True


def describe(corpus, held_out, model: GPT, mesh: DeviceMesh, worker: Worker) -> None:
    """Rank 0 prints the mesh, what it holds, and what the simplest model of the text reaches."""
    numbers_of_stage = sum(p.numel() for p in model.parameters())
    numbers_held = sum(p.to_local().numel() for p in model.parameters())
    stages = [None] * worker.world_size
    dist.all_gather_object(stages, (mesh["pp"].get_local_rank(), numbers_of_stage))
    if not worker.is_main:
        return
    axes = "   ".join(f"{axis} {size}" for axis, size in zip(AXES, mesh.shape, strict=True))
    print(f"{axes}   {sum(dict(stages).values()):,} parameters, {numbers_held:,} on this rank")
    line = f"{len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out"
    if corpus.vocab_size <= 4096:  # pairs of tokens are counted in a table
        loss = bigram_loss(corpus.train, *held_out, corpus.vocab_size)
        line += f", on which a bigram model has a loss of {loss:.3f}"
    print(line, flush=True)


def check_finite(step: int, loss: float, grad_norm: float) -> None:
    """Raise `UserError` rather than train on, and save, what is no number any more."""
    if not math.isfinite(loss + grad_norm):
        raise UserError(
            f"step {step}: the loss is {loss}, the gradient norm {grad_norm}: try a smaller --lr, "
            "a longer --warmup or a smaller --clip; checkpoints from before are as they were"
        )


def write_sample(model, pipeline, corpus, settings: Settings, worker: Worker) -> None:
    """Rank 0 prints how the model continues --prompt; all ranks compute."""
    prompt = torch.tensor([corpus.encode(settings.prompt)], device=worker.device)
    tokens = generate(
        model,
        pipeline,
        prompt,
        settings.sample,
        seed=settings.seed,
        length_multiple=settings.tp if settings.sequence_parallel else 1,
    )
    if worker.is_main and settings.sample:
        print(f"---- {settings.sample} tokens after {settings.prompt!r}:")
        print(corpus.decode(tokens[0].tolist()))


if __name__ == "__main__":
    main()
