"""Tied embeddings in a pipeline: the first and the last stage hold the same matrix.

    torchrun --standalone --nproc_per_node=2 parallel_basics/tied_stages.py
    torchrun --standalone --nproc_per_node=3 parallel_basics/tied_stages.py --optimizer adamw

In a tied model (GPT-2, Gemma, small Qwen and Llama models) the head multiplies with the token
embedding's matrix. In a pipeline the first stage has the embedding and the last stage has the head,
so each has a copy of the matrix. Five calls in `train` keep the two copies equal:

    new_group        the first and the last stage; Megatron-LM calls it the embedding group
    broadcast        both copies start with the same values
    all_reduce       both copies get the sum of both gradients, before the norm is computed
    gradient_norm    counts the matrix once, although two stages hold it
    named_state      gives both copies one name, under which a checkpoint holds the matrix once

Look at the last column of the two tables. Without the all_reduce the copies drift apart from the
first step on, although the loss falls. With it they keep the same bits, and loss, norm, gradients
and parameters equal those of one process.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from compare_pipelines import OPTIMIZERS, say, text_batch
from model import GPT, GPTConfig, cross_entropy, initialize
from pipeline_stages import gpt_stage
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

CLIP = 1.0  # the largest norm of all gradients


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        check(args, worker.world_size)
        size = f"{args.vocab_size} x {args.dim}"
        say(f"{args.layers} blocks in {worker.world_size} stages; the tied matrix is {size}")
        expected = one_process(args, worker.device)
        for tied in (False, True):
            say("\ntied: gradients are summed" if tied else "\ntwo copies, gradients not summed")
            compare(train(args, worker, tied), expected, worker)


def train(args, worker: Worker, tied: bool = True) -> list[dict]:
    """Train this rank's stage; return the values of each step, for `compare`.

    tied=False: the two copies only start equal. This is the mistake.
    """
    stage, stages, device = worker.rank, worker.world_size, worker.device
    model = gpt_stage(make_config(args), stage, stages, args.seed, device)
    # Every rank must make the group, also a stage in the middle, which is not in it.
    pair = dist.new_group([0, stages - 1])
    matrix = tied_matrix(model)
    if matrix is not None:
        dist.broadcast(matrix.detach(), src=0, group=pair)
    pipeline = Schedule1F1B(
        PipelineStage(model, stage, stages, device), args.microbatches, loss_fn=cross_entropy
    )
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())  # the same settings on both stages
    seen = []
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = run_step(pipeline, stage, stages, *batch(args, step, device))
        if tied and matrix is not None:
            # Each copy has the gradient of its own use. Sum once per step, after all micro-batches.
            dist.all_reduce(matrix.grad, group=pair)
        second_copy = matrix if tied and model.is_last else None
        norm = gradient_norm(model, second_copy)
        note = {"loss": loss, "norm": norm, "gradients": named_gradients(model)}
        # The norm has the same bits on all ranks, so both copies are scaled alike.
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        optimizer.step()
        parameters = {name: tensor.clone() for name, tensor in named_state(model).items()}
        seen.append({**note, "parameters": parameters, "apart": distance(matrix, pair)})
    if tied and args.output_dir:
        dcp.save(named_state(model), checkpoint_id=args.output_dir)
    return seen


def tied_matrix(model: GPT) -> nn.Parameter | None:
    """This stage's copy of the tied matrix, (V, C); None on a stage in the middle."""
    if model.is_first:
        return model.token_embedding.weight
    return model.head.weight if model.is_last else None


def gradient_norm(model: nn.Module, second_copy: nn.Parameter | None) -> Tensor:
    """The norm of the gradients of all stages, equal on every rank.

    second_copy: a parameter of this stage that another stage counts already.
    """
    parameters = [p for p in model.parameters() if p.grad is not None and p is not second_copy]
    squares = torch.zeros((), device=next(model.parameters()).device)
    for parameter in parameters:
        squares += parameter.grad.square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """This stage's tensors, under their names in the full, tied model.

    If two ranks have one name, dcp.save stores it once. dcp.load fills these tensors in place, so
    both copies get the stored values.
    """
    return {full_name(name): tensor for name, tensor in model.state_dict().items()}


def full_name(name: str) -> str:
    return "token_embedding.weight" if name == "head.weight" else name


def run_step(pipeline, stage: int, stages: int, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    """Forward and backward of all micro-batches; the batch's mean loss, on every rank."""
    loss = torch.zeros((), device=x_BT.device)
    if stage < stages - 1:
        pipeline.step(*[x_BT] * (stage == 0))
    else:
        losses = []
        pipeline.step(target=y_BT, losses=losses)
        loss = torch.stack(losses).detach().mean()
    dist.all_reduce(loss)
    return loss


# ---- the comparison


def one_process(args, device: torch.device) -> list[dict]:
    """The single-process baseline: the full, tied model, trained on every rank."""
    model = initialize(GPT(make_config(args, tied=True)).to(device), args.seed)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    seen = []
    for step in range(args.steps):
        x_BT, y_BT = batch(args, step, device)
        optimizer.zero_grad()
        loss = cross_entropy(model(x_BT), y_BT)
        loss.backward()
        note = {"loss": loss.detach(), "gradients": named_gradients(model)}
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen.append({**note, "norm": norm, "parameters": parameters})
    return seen


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {full_name(name): p.grad.clone() for name, p in model.named_parameters()}


def distance(matrix: Tensor | None, pair) -> Tensor:
    """The largest difference between the two copies; 0 on a stage without a copy."""
    if matrix is None:
        return torch.zeros(())
    copies = [torch.empty_like(matrix) for _ in range(2)]
    dist.all_gather(copies, matrix.detach(), group=pair)
    return (copies[0] - copies[1]).abs().max()


def compare(found: list[dict], expected: list[dict], worker: Worker) -> None:
    """Print, for each step, the largest differences over all ranks."""
    say("                difference from one process of              the two copies")
    say("step    loss       loss       norm   gradient  parameter     differ by")
    for step, (mine, one) in enumerate(zip(found, expected, strict=True), start=1):
        row = [(mine["loss"] - one["loss"]).abs(), (mine["norm"] - one["norm"]).abs()]
        for kind in ("gradients", "parameters"):
            row.append(max((t - one[kind][name]).abs().max() for name, t in mine[kind].items()))
        row = torch.tensor([float(value) for value in (*row, mine["apart"])], device=worker.device)
        dist.all_reduce(row, op=dist.ReduceOp.MAX)
        cells = "".join(f"{value:11.1e}" for value in row[:4].tolist())
        say(f"{step:4}{mine['loss'].item():8.4f}{cells}{row[4].item():14.1e}")


def batch(args, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return text_batch(step, args.batch_size, args.length, device)


def make_config(args, tied: bool = False) -> GPTConfig:
    return GPTConfig(args.vocab_size, args.length, args.layers, 4, args.dim, tied)


def check(args, stages: int) -> None:
    """Raise `UserError` if the sizes do not fit, before any rank waits for another one."""
    if stages == 1:
        raise UserError("one rank holds both uses of the matrix: start at least two with torchrun")
    if args.layers < stages:
        raise UserError(f"--layers {args.layers} are too few for {stages} stages: one each")
    if args.batch_size % args.microbatches:
        raise UserError(
            f"--batch-size {args.batch_size} does not divide into {args.microbatches} micro-batches"
        )
    if args.microbatches < stages:
        raise UserError(f"--microbatches {args.microbatches} do not fill {stages} stages")


def parse_args():
    parser = ArgumentParser(description="A tied embedding on the first and the last stage.")
    add = parser.add_argument
    add("--steps", type=at_least(1), default=4, help="optimizer steps (default: 4)")
    add("--batch-size", type=at_least(1), default=8, help="sequences per step (default: 8)")
    add("--microbatches", type=at_least(1), default=4, help="micro-batches per step (default: 4)")
    add("--length", type=at_least(1), default=16, help="tokens per sequence (default: 16)")
    add("--layers", type=at_least(1), default=3, help="blocks of all stages (default: 3)")
    add("--dim", type=at_least(4), default=32, help="width, a multiple of 4 (default: 32)")
    add("--vocab-size", type=at_least(128), default=128, help="rows of the matrix (default: 128)")
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="sgd has momentum (default: sgd)")
    add("--seed", type=at_least(0), default=0, help="seed of the weights (default: 0)")
    add("--output-dir", type=Path, help="save a checkpoint of the tied model in this folder")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.dim % 4:
        parser.error(f"--dim must be a multiple of 4, not {args.dim}")
    return args


if __name__ == "__main__":
    main()
