"""For the pipeline scripts: compare with single-process training, measure time and memory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from activations import Activations
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from model import GPT, GPTConfig, cross_entropy, initialize
from pipeline_timelines import Recorder, span
from runtime import Worker
from torch import Tensor, nn

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


@dataclass(frozen=True)
class Run:
    """A schedule on this rank."""

    models: list[nn.Module]  # this rank's stages
    step: Callable[..., Tensor]  # (inputs, targets, recorder=None) -> loss; 0 but on the last stage


def text_batch(step: int, batch_size: int, length: int, device) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T): bytes of this directory's model.py, equal on every rank."""
    text = torch.tensor(list(Path(__file__).with_name("model.py").read_bytes()))
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].to(device)
    # Contiguous: the pipelines of torch 2.11 refuse micro-batches that are views of longer rows.
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def compare_with_one_process(
    runs: dict[tuple[str, int], Run], config: GPTConfig, args, batch_size: int, worker: Worker
) -> None:
    """Train all runs and the single-process baseline on the same batches; print the differences."""
    one = OneProcess(config, args.optimizer, args.seed, worker.device)
    optimizers = []
    for run in runs.values():
        parameters = [p for model in run.models for p in model.parameters()]
        optimizers.append(OPTIMIZERS[args.optimizer](parameters))
    max_diff = torch.zeros(len(runs), 3, device=worker.device)
    for step in range(args.steps):
        x_BT, y_BT = text_batch(step, batch_size, args.length, worker.device)
        one.step(x_BT, y_BT)
        for row, run, optimizer in zip(max_diff, runs.values(), optimizers, strict=True):
            optimizer.zero_grad()
            loss = run.step(x_BT, y_BT)
            optimizer.step()
            row.copy_(row.maximum(one.differences(run.models, loss)))
    say(f"\nlargest difference from one process, in {args.steps} steps with {args.optimizer}")
    say(f"{'schedule':22} micro-batches       loss   gradient  parameter")
    for (name, microbatches), row in zip(runs, max_diff.tolist(), strict=True):
        say(f"{name:22} {microbatches:13}" + "".join(f"{value:11.1e}" for value in row))


class OneProcess:
    """The single-process baseline: the full model, trained on the full batch, on every rank."""

    def __init__(self, config: GPTConfig, optimizer: str, seed: int, device: torch.device):
        self.model = initialize(GPT(config).to(device), seed)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, x_BT: Tensor, y_BT: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x_BT), y_BT)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def differences(self, models: list[nn.Module], loss: Tensor) -> Tensor:
        """Largest difference over all ranks of loss, gradient and parameter, after the step.

        models: this rank's stages. loss: what they returned, 0 without the last stage.
        """
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        max_diff = torch.zeros(3, device=loss.device)
        max_diff[0] = (loss - self.loss).abs()
        expected = dict(self.model.named_parameters())
        for model in models:
            for name, p in model.named_parameters():
                gradient = (p.grad - expected[name].grad).abs().max()
                value = (p.detach() - expected[name].detach()).abs().max()
                max_diff[1] = max_diff[1].maximum(gradient)
                max_diff[2] = max_diff[2].maximum(value)
        dist.all_reduce(max_diff, op=dist.ReduceOp.MAX)
        return max_diff


def kept_at_most(run: Run, x_BT: Tensor, y_BT: Tensor) -> int:
    """Peak of the bytes that autograd saves for backward on this rank in a step."""
    activations = Activations(*run.models)
    run.step(x_BT, y_BT, Recorder(x_BT.device, activations))
    return activations.most


def quickest(run: Run, x_BT: Tensor, y_BT: Tensor, steps: int = 3) -> list[list[tuple]]:
    """The timelines of all ranks in the fastest of `steps` steps.

    Other programs on the machine make a step longer, never shorter.
    """
    run.step(x_BT, y_BT)  # in the first step torch's stages send each other shapes
    of_steps = []
    for _ in range(steps):
        dist.barrier()
        recorder = Recorder(x_BT.device)
        run.step(x_BT, y_BT, recorder)
        of_steps.append(gather(recorder.timeline))
    return min(of_steps, key=span)


def gather(thing) -> list:
    """What each rank passed, in rank order, on every rank."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, thing)
    return of_ranks


def say(text: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(text)


def read_arguments(description: str, counts: str, steps: int):
    """The flags of both scripts. counts: the default of --microbatches, as text."""
    parser = ArgumentParser(description=description)
    add = parser.add_argument
    add(
        "--microbatches",
        type=at_least(1),
        nargs="+",
        help=f"numbers to compare (default: {counts})",
    )
    add("--batch-size", type=at_least(1), help="sequences per step (default: 4 per rank)")
    add("--layers", type=at_least(1), help="blocks of the GPT (default: 2 per rank)")
    add("--dim", type=at_least(1), default=64, help="width of the GPT, a multiple of its 4 heads")
    add("--length", type=at_least(1), default=64, help="tokens per sequence")
    add("--steps", type=at_least(1), default=steps, help="optimizer steps to compare")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer of all runs")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.dim % 4:
        parser.error(f"--dim must be a multiple of 4, not {args.dim}")
    return args
