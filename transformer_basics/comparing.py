"""What small comparisons share: a little text, training that notes everything, and differences."""

import argparse
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from model import GPT, GPTConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

# To gather what two axes of a mesh have cut takes a collective for each: torch warns of that.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(by_mesh(params), lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(by_mesh(params), lr=1e-3),
}


def by_mesh(parameters: Iterable[Tensor]) -> list[dict]:
    """Parameter groups: the DTensors of each mesh, and the plain tensors.

    On GPUs an optimizer updates a whole group with one call (foreach), which refuses a mixture:
    "got mixed torch.Tensor and DTensor". On CPUs it updates one parameter at a time.
    """
    groups = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def batches(args, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """For each step inputs and targets, (B, T): bytes of a module of the standard library."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(args.seed)
    of_steps = []
    for _ in range(args.steps):
        starts_B = torch.randint(len(text) - args.length, (args.batch_size,), generator=generator)
        tokens = text[starts_B[:, None] + torch.arange(args.length + 1)].to(device)
        # Contiguous: the pipelines of torch 2.11 take no windows of other tensors.
        of_steps.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return of_steps


def train(
    model: GPT,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    norm_of: Callable[[GPT], Tensor],
    full_tensor: Callable[[str, Tensor], Tensor],
    args,
    device: torch.device,
    count=None,
    finish: Callable[[GPT], None] | None = None,
) -> list[dict[str, Tensor]]:
    """Per step: loss, norm of all gradients, each gradient; in the last each parameter, too.

    loss_of: (what the model returns, targets) -> mean loss. norm_of: after backward.
    full_tensor: (name, what a rank has of a parameter or gradient) -> all of it, on every rank.
    count: a `CountCollectives` that sees the last step in four phases: "forward", "backward",
        "gradients" (what `finish` does to them) and "optimizer".
    """
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    steps = []
    for i, (x_BT, y_BT) in enumerate(batches(args, device)):
        is_last_step = i == args.steps - 1
        counting = count if is_last_step else None
        with counting or nullcontext():
            loss = loss_of(model(x_BT), y_BT)
            if counting:
                counting.begin("backward")
            loss.backward()
            if counting:
                counting.begin("gradients")
            if finish:
                finish(model)
        named = list(model.named_parameters())
        step = {"loss": full_tensor("", loss.detach()), "norm": norm_of(model)}
        step |= {f"gradient of {name}": full_tensor(name, p.grad) for name, p in named}
        with counting or nullcontext():
            if counting:
                counting.begin("optimizer")
            optimizer.step()
            optimizer.zero_grad()
        if is_last_step:  # all steps led to them
            step |= {f"parameter {name}": full_tensor(name, p.detach()) for name, p in named}
        steps.append(step)
    return steps


def norm_of(model: GPT) -> Tensor:
    """The norm of all gradients, of the whole model.

    A DTensor knows how it is cut. get_total_norm takes DTensors or plain tensors, but not both: the
    norm of all is the norm of their norms.
    """
    gradients = [p.grad for p in model.parameters()]
    plain = [g for g in gradients if not isinstance(g, DTensor)]
    cut = [g for g in gradients if isinstance(g, DTensor)]
    norms = [as_it_is("", torch.nn.utils.get_total_norm(kind)) for kind in (plain, cut) if kind]
    return torch.stack(norms).norm()


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """For a model that every rank has whole, or that knows how it is cut."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def differences(steps: list[dict], expected: list[dict]) -> dict[str, float]:
    """The largest difference of any loss, norm, gradient and parameter, in any step."""
    max_diff = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "parameter": 0.0}
    for step, expected_step in zip(steps, expected, strict=True):
        if step.keys() != expected_step.keys():
            raise ValueError(f"not the same parameters: {step.keys() ^ expected_step.keys()}")
        for key, value in expected_step.items():
            kind = key.split()[0]
            max_diff[kind] = max(max_diff[kind], (step[key] - value).abs().max().item())
    return max_diff


def print_differences(rows: dict[str, dict[str, float]]) -> None:
    print("largest difference of" + "".join(f"{kind:>11}" for kind in next(iter(rows.values()))))
    for title, row in rows.items():
        print(f"{title:21}" + "".join(f"{value:11.1e}" for value in row.values()))


def make_config(args, ranks: int) -> GPTConfig:
    """Raises `UserError` if the model cannot be sharded over this number of ranks."""
    if args.dim % args.heads:
        raise UserError(f"--dim {args.dim} does not divide into {args.heads} heads")
    for flag, value in (("--heads", args.heads), ("--vocab-size", args.vocab_size)):
        if value % ranks:
            raise UserError(f"{flag} {value} does not divide over {ranks} ranks: change {flag}")
    return GPTConfig(
        args.vocab_size,
        args.length,
        args.layers,
        args.heads,
        args.dim,
        getattr(args, "tied", False),
    )


def make_parser(description: str) -> ArgumentParser:
    parser = ArgumentParser(description=description)
    add = parser.add_argument
    add("--steps", type=at_least(1), default=3, help="optimizer steps")
    add("--batch-size", type=at_least(1), default=4, help="sequences per step, equal on all ranks")
    add("--length", type=at_least(1), default=64, help="tokens of a sequence")
    add("--layers", type=at_least(1), default=2, help="transformer blocks")
    add("--heads", type=at_least(1), default=8, help="heads, a multiple of the ranks")
    add("--dim", type=at_least(1), default=128, help="width: a multiple of --heads")
    add("--vocab-size", type=at_least(256), default=256, help="tokens known, at least 256 (bytes)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer of all runs")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser
