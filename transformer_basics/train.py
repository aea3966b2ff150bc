r"""Train a GPT on source code, sharded over a mesh of devices: the template to copy.

    python transformer_basics/train.py --steps 100                          # one process
    torchrun --standalone --nproc_per_node=2 transformer_basics/train.py    # data parallel: minutes
    torchrun --standalone --nproc_per_node=4 transformer_basics/train.py --steps 100 \
        --dp-shard 2 --tp 2
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
        --rdzv-id=gpt transformer_basics/train.py --tp 2     # two nodes: the same line on each

Look at the loss: it is the same for every mesh. minimal.py has only the distributed lines.
"""

import gc
import sys
from datetime import timedelta

import torch
from checkpoint import check_shared
from config import Settings
from data import Batches, load_corpus
from evaluation import evaluate, held_out_windows, mean_over_ranks
from flags import parse_args
from metrics import make_profiler
from optimizer import make_optimizer, set_learning_rate
from parallelize import seed_generators, spread_model
from replicas import GradientLog, check_replicas
from report import Report, describe, write_sample
from runtime import Worker, distributed_worker
from saving import CheckpointWriter
from start import model_config, resume_or_initialize
from step import train_step
from stopping import StopRequests, goodbye
from timeouts import shorten_timeout
from torch.distributed.elastic.multiprocessing.errors import record


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    settings = parse_args()
    timeout = timedelta(seconds=settings.timeout)
    with distributed_worker(settings.device, timeout, settings.backend) as worker:
        stopped_by = train(settings, worker)
    sys.exit(128 + stopped_by if stopped_by else 0)


def train(settings: Settings, worker: Worker) -> int:
    """Train to the end and return 0; after a signal to stop, save and return its number."""
    stop = StopRequests(worker)
    torch.set_float32_matmul_precision("high")  # GPUs: TF32, 10-bit mantissa, in fp32 matmuls
    corpus = load_corpus(settings.data, settings.tokenizer, worker)
    corpus.tokenizer.of_prompt(settings.prompt)  # an error now, and not after the last step
    held_out = held_out_windows(corpus.validation, settings)
    sizes = (settings.block_size, settings.batch_size)
    batches = Batches(corpus.train, *sizes, settings.seed, settings.document_masks)
    folder = settings.output_dir / "checkpoints" if settings.output_dir else None
    if folder:
        check_shared(folder, worker)
    config = model_config(settings, corpus, folder)
    # Each rank holds its shards of the parameters, the gradients and the optimizer state.
    mesh, model, pipeline = spread_model(config, settings, worker.device)
    optimizer = make_optimizer(model, settings)
    seed_generators(settings.seed, mesh)
    describe(corpus, held_out, model, mesh, worker)
    parts = {"model": model, "optimizer": optimizer}
    run = settings.identity() | {"vocab_size": config.vocab_size, "token_count": config.token_count}
    run |= {"steps": settings.steps, "data": f"tokens {corpus.checksum}"}
    run |= {"tokenizer": corpus.tokenizer.name, "mesh": list(settings.mesh_shape())}
    first_step, saved_run = resume_or_initialize(folder, parts, run, settings, worker)
    if first_step and saved_run.get("mesh", run["mesh"]) != run["mesh"]:
        # The ranks have other coordinates now: the saved generators are not for them.
        seed_generators(settings.seed + 1_000_003 * first_step, mesh)
    report = Report(settings, config, first_step, saved_run, worker)
    writer = CheckpointWriter(folder, parts, settings, worker)
    step, stopped_by = first_step, 0
    if step and (step % settings.eval_every == 0 or step == settings.steps):
        # It was stopped between a save and its evaluation, or the evaluation is repeated.
        loss = evaluate(model, pipeline, held_out, mesh, settings)
        report.validation(step, (step - 1) // batches.per_epoch, loss)
    if settings.gc_every:
        gc.disable()  # collection on one rank would make all other ranks wait

    gradients = GradientLog(model)
    report.training_goes_on(step)
    with make_profiler(settings, step, settings.steps, worker) as profiler:
        for x_BT, y_BT in batches.from_step(step, settings.steps, mesh, worker.device):
            lr = set_learning_rate(optimizer, step, settings)
            loss, norm = train_step(model, pipeline, x_BT, y_BT, optimizer, mesh, settings, step)
            step += 1
            gradients.note(step)
            if profiler:
                profiler.step()
            if settings.gc_every and step % settings.gc_every == 0:
                gc.collect()  # on all ranks after the same step
            if settings.train_timeout and step == first_step + 1:
                shorten_timeout(settings.train_timeout, mesh)

            at_end = step == settings.steps
            stopped_by = 0 if at_end else stop.agreed(step)
            saving = folder and (step % settings.checkpoint_every == 0 or at_end or stopped_by)
            evaluating = step % settings.eval_every == 0 or at_end
            if not (step % settings.log_every == 0 or evaluating or saving or stopped_by):
                continue

            epoch = (step - 1) // batches.per_epoch
            writer.finish()  # an asynchronous save from before: it counts, whatever follows
            report.training(step, epoch, mean_over_ranks(loss, mesh), lr, float(norm))
            check_replicas(model, step, worker)  # replicas can diverge without an error
            gradients.check(worker)  # ranks can use different layers without an error
            if saving:  # before the evaluation, which may take longer than a scheduler waits
                writer.save(step, run | report.cost())
            if stopped_by:
                break
            if evaluating:
                loss = evaluate(model, pipeline, held_out, mesh, settings)
                report.validation(step, epoch, loss)
            report.training_goes_on(step)

    writer.finish()  # before anything says that the run is saved
    if step > first_step:
        report.summary(step, epoch)
    report.close()
    if stopped_by:
        goodbye(stopped_by, step, settings.steps, folder, worker)
        return stopped_by
    write_sample(model, pipeline, corpus, mesh, settings, worker)
    return 0


if __name__ == "__main__":
    main()
