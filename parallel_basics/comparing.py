"""What small comparisons share: a little text, training that notes everything, and differences."""

import argparse
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from arguments import ArgumentParser, UserError
from model import GPT, GPTConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

# To gather what two axes of a mesh have cut takes a collective for each: torch warns of that.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def batches(args, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """For each step inputs and targets, (B, T): bytes of a module of the standard library."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(args.seed)
    found = []
    for _ in range(args.steps):
        starts_B = torch.randint(len(text) - args.length, (args.batch_size,), generator=generator)
        tokens = text[starts_B[:, None] + torch.arange(args.length + 1)].to(device)
        found.append((tokens[:, :-1], tokens[:, 1:]))
    return found


def train(
    model: GPT,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    norm_of: Callable[[GPT], Tensor],
    whole: Callable[[str, Tensor], Tensor],
    args,
    device: torch.device,
    count=None,
    finish: Callable[[GPT], None] | None = None,
) -> list[dict[str, Tensor]]:
    """Per step, whole: loss, norm of all gradients, each gradient; in the last each parameter, too.

    loss_of: (what the model returns, targets) -> mean loss. norm_of: after backward.
    whole: (name, what a rank has of a parameter or gradient) -> all of it, on every rank.
    count: a `CountCollectives` that sees the last step in four phases: "forward", "backward",
        "gradients" (what `finish` does to them) and "optimizer".
    """
    optimizer, steps = OPTIMIZERS[args.optimizer](model.parameters()), []
    for i, (x_BT, y_BT) in enumerate(batches(args, device)):
        counting = count if count and i == args.steps - 1 else None
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
        step = {"loss": whole("", loss.detach()), "norm": norm_of(model)}
        step |= {f"gradient of {name}": whole(name, p.grad) for name, p in named}
        with counting or nullcontext():
            if counting:
                counting.begin("optimizer")
            optimizer.step()
            optimizer.zero_grad()
        if i == args.steps - 1:  # all steps led to them
            step |= {f"parameter {name}": whole(name, p.detach()) for name, p in named}
        steps.append(step)
    return steps


def norm_of(model: GPT) -> Tensor:
    """The norm of all gradients, of the whole model.

    A DTensor knows how it is cut. get_total_norm takes DTensors or plain tensors, but not both: the
    norm of all is the norm of their norms.
    """
    kinds = {}
    for p in model.parameters():
        kinds.setdefault(isinstance(p.grad, DTensor), []).append(p.grad)
    norms = [as_it_is("", torch.nn.utils.get_total_norm(some)) for some in kinds.values()]
    return torch.stack(norms).norm()


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """For a model that every rank has whole, or that knows how it is cut."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def differences(steps: list[dict], expected: list[dict]) -> dict[str, float]:
    """The largest difference of any loss, norm, gradient and parameter, in any step."""
    worst = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "parameter": 0.0}
    for ours, theirs in zip(steps, expected, strict=True):
        if ours.keys() != theirs.keys():
            raise ValueError(f"not the same parameters: {ours.keys() ^ theirs.keys()}")
        for key, value in theirs.items():
            kind = key.split()[0]
            worst[kind] = max(worst[kind], (ours[key] - value).abs().max().item())
    return worst


def print_differences(rows: dict[str, dict[str, float]]) -> None:
    print("largest difference of" + "".join(f"{kind:>11}" for kind in next(iter(rows.values()))))
    for title, row in rows.items():
        print(f"{title:21}" + "".join(f"{value:11.1e}" for value in row.values()))


def make_config(args, ranks: int) -> GPTConfig:
    """Raises `UserError` if the model cannot be cut over so many ranks."""
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
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences: all ranks, the same")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8, help="a multiple of the number of ranks")
    parser.add_argument("--dim", type=int, default=128, help="width: a multiple of --heads")
    parser.add_argument("--vocab-size", type=int, default=256, help="256 or more, one per byte")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def check_arguments(parser: ArgumentParser):
    args = parser.parse_args()
    for name in ("steps", "batch_size", "length", "layers", "heads", "dim", "vocab_size"):
        least = 256 if name == "vocab_size" else 1
        if getattr(args, name) < least:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be at least {least}, not {getattr(args, name)}")
    return args
