"""What both pipeline files need: timelines of ranks, stages that only wait, activations counted.

An action is (kind, stage, micro-batch). Kinds: "F" forward, "B" backward; a schedule may cut the
latter into "I", the gradient of the stage's input, which the stage before waits for, and "W", the
gradients of its weights, for which nobody waits. A timeline is a list of (kind, stage, micro-batch,
start, end), in seconds.
"""

import string
import time
import weakref
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import ArgumentParser
from model import GPT, GPTConfig, initialize
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def cut(layers: int, stages: int) -> list[range]:
    """The blocks of each stage: equally many, or one more for the first ones."""
    sizes = [layers // stages + (i < layers % stages) for i in range(stages)]
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def simulate(orders: list[list[tuple]], seconds: Callable[[str, int], float]) -> list[list[tuple]]:
    """The timelines of ranks that start an action once they are free and its input is there.

    orders: the actions of each rank. seconds: (kind, stage) -> how long it takes; sending takes
    nothing. Raises ValueError if the ranks would wait for each other for ever.
    """
    last = max(stage for order in orders for _, stage, _ in order)
    done, timelines = {}, [[] for _ in orders]  # done: ("F" | "gradient", stage, i) -> when
    moved = True
    while moved:
        moved = False
        for order, timeline in zip(orders, timelines, strict=True):
            while len(timeline) < len(order):
                kind, stage, i = order[len(timeline)]
                needs = [("F", stage - 1, i)] if kind == "F" and stage > 0 else []
                if kind in "BI":
                    needs = [("F", stage, i)] + [("gradient", stage + 1, i)] * (stage < last)
                elif kind == "W":
                    needs = [("gradient", stage, i)]
                if not all(need in done for need in needs):
                    break
                free = timeline[-1][4] if timeline else 0.0
                start = max([free, *(done[need] for need in needs)])
                end = start + seconds(kind, stage)
                if kind != "W":
                    done["F" if kind == "F" else "gradient", stage, i] = end
                timeline.append((kind, stage, i, start, end))
                moved = True
    stuck = [
        f"rank {rank} at {order[len(timeline)]}"
        for rank, (order, timeline) in enumerate(zip(orders, timelines, strict=True))
        if len(timeline) < len(order)
    ]
    if stuck:
        raise ValueError(f"the ranks wait for each other for ever: {', '.join(stuck)}")
    return timelines


def span(timelines: list[list[tuple]]) -> float:
    """Seconds from the first start to the last end."""
    return max(line[-1][4] for line in timelines) - min(line[0][3] for line in timelines)


def idle_share(timelines: list[list[tuple]]) -> float:
    """The part of that span in which a rank computes nothing; the mean over the ranks."""
    busy = sum(end - start for line in timelines for *_, start, end in line)
    return 1 - busy / len(timelines) / span(timelines)


def expected_idle(stages: int, microbatches: int, parts: int = 1) -> float:
    """(p - 1) / (m + p - 1) of GPipe and of 1F1B: Huang et al., GPipe, arXiv 1811.06965, section 2.

    With `parts` smaller stages per rank (interleaved), (p - 1) / (v m + p - 1): the first of them
    has its share done, and the pipeline filled, v times as early (Narayanan et al., arXiv
    2104.04473, section 2.2, who divide by the computing time instead of by all of it).
    """
    return (stages - 1) / (parts * microbatches + stages - 1)


def draw(timelines: list[list[tuple]], slot: float) -> str:
    """One line per rank, one character per `slot` seconds, one name per micro-batch.

    Digits: forward. Small letters: backward, or the part of it that gives the input's gradient.
    Capitals: the gradients of the weights. Dots: nothing.
    """
    names = {"F": string.digits, "B": string.ascii_lowercase, "I": string.ascii_lowercase}
    names["W"] = string.ascii_uppercase
    first = min(line[0][3] for line in timelines)
    slots = round(span(timelines) / slot)
    rows = []
    for rank, line in enumerate(timelines):
        row = ["."] * slots
        for kind, _, i, start, end in line:
            a, b = (round((t - first) / slot) for t in (start, end))
            row[a:b] = names[kind][i % len(names[kind])] * (min(b, slots) - a)
        rows.append(f"rank {rank}  " + "".join(row))
    return "\n".join(rows)


class Wait(torch.autograd.Function):
    """The identity, but it takes time: `seconds` in forward, and in backward."""

    @staticmethod
    def forward(ctx, x, in_forward, in_backward):
        time.sleep(in_forward)
        ctx.seconds = in_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


class TimerStage(nn.Module):
    """Stands for a stage of a GPT, but sleeps where that computes, and so needs no core.

    With more ranks than cores, real stages wait for cores as well as for each other. Here every
    rank is as fast as on a machine of its own, and what is idle is the schedule's doing.
    seconds: of a forward. The gradient of the input takes as long, those of the weights too.
    """

    def __init__(self, config: GPTConfig, stage: int, stages: int, seconds: float):
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.config, self.seconds = config, seconds
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:  # tokens become vectors
            x = x.new_zeros(*x.shape, self.config.dim, dtype=torch.float32, requires_grad=True)
        return Wait.apply(x, self.seconds, self.seconds) + Wait.apply(self.weight, 0, self.seconds)


def timer_loss(output_BTC: Tensor, targets_BT: Tensor) -> Tensor:
    return output_BTC.mean()


class Activations:
    """Bytes that autograd keeps for backward, by the hooks it calls for each tensor it saves.

    Used around forwards: `with activations.hooks():`. Call note() when they may be the most. Each
    piece of memory counts once, and parameters do not count.
    """

    def __init__(self, *models: nn.Module):
        self.own = {p.untyped_storage().data_ptr() for m in models for p in m.parameters()}
        self.kept, self.most = weakref.WeakSet(), 0

    def hooks(self):
        return saved_tensors_hooks(self.pack, lambda box: box.tensor)

    def pack(self, tensor: Tensor) -> "Box":
        box = Box(tensor)  # lives as long as autograd needs the tensor
        self.kept.add(box)
        return box

    def note(self) -> None:
        storages = [box.tensor.untyped_storage() for box in self.kept]
        sizes = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in self.own}
        self.most = max(self.most, sum(sizes.values()))


class Box:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()


def text_batch(step: int, batch_size: int, length: int, device) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T), bytes of this directory's model.py: the same on every rank."""
    text = torch.frombuffer(
        bytearray(Path(__file__).with_name("model.py").read_bytes()), dtype=torch.uint8
    )
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


class Reference:
    """One process that trains the whole model on the whole batch; every rank has it, to compare."""

    def __init__(self, config: GPTConfig, loss_fn, optimizer: str, seed: int, device):
        self.model = initialize(GPT(config).to(device), seed)
        self.loss_fn, self.optimizer = loss_fn, OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(x_BT), y_BT)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def differences(self, models: list[GPT], loss: Tensor, ours: Tensor) -> Tensor:
        """Largest difference over all ranks of loss, gradient and parameter, after the step.

        models: this rank's stages. ours: its loss, 0 where it has not the last stage.
        """
        dist.all_reduce(ours := ours.detach().clone())
        worst = [abs(ours - loss), *torch.zeros(2, device=loss.device)]
        theirs = dict(self.model.named_parameters())
        for name, p in (pair for model in models for pair in model.named_parameters()):
            worst[1] = max(worst[1], (p.grad - theirs[name].grad).abs().max())
            worst[2] = max(worst[2], (p.detach() - theirs[name].detach()).abs().max())
        dist.all_reduce(worst := torch.stack(worst), op=dist.ReduceOp.MAX)
        return worst


def gather(thing) -> list:
    """What each rank passes, in rank order, on all ranks."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, thing)
    return everyone


def read_arguments(description: str, counts: str, steps: int):
    """The flags of both scripts. counts: the default of --microbatches, in words."""
    parser = ArgumentParser(description=description)
    add = parser.add_argument
    add("--microbatches", type=int, nargs="+", help=f"several counts; default: {counts}")
    add("--batch-size", type=int, help="sequences; default: 4 per rank")
    add("--layers", type=int, help="blocks of the GPT; default: 2 per rank")
    add("--dim", type=int, default=64, help="width of the GPT, a multiple of its 4 heads")
    add("--length", type=int, default=64, help="tokens of a sequence")
    add("--steps", type=int, default=steps, help="optimizer steps that are compared")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    for name in ("batch_size", "layers", "dim", "length", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for m in args.microbatches or ():
        if m < 1:
            parser.error(f"--microbatches must be at least 1, not {m}")
    if args.dim % 4:
        parser.error(f"--dim must be a multiple of 4, not {args.dim}")
    return args
