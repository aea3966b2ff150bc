"""For ring_attention.py: compare with single-process training, count FLOPs, bytes and memory."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from attention_ring import TILE
from model import GPT, GPTConfig, cross_entropy, initialize
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operation, C++'s too

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def build(args, device: torch.device) -> GPT:
    config = GPTConfig(256, args.length, args.layers, args.heads, args.dim)
    model = initialize(GPT(config).to(device), args.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # An untrained GPT attends to all tokens about equally, so a mistake in attention
                # would hardly show. With larger weights it attends to some tokens.
                parameter.mul_(5)
    return model


def make_batches(args, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets (B, T) of each step: full sequences."""
    generator = torch.Generator().manual_seed(args.seed)
    batches = []
    for _ in range(args.steps):
        shape = (args.batch_size, args.length + 1)
        tokens = torch.randint(256, shape, generator=generator).to(device)
        # Shift before sharding the tokens: the target of a rank's last token is on another rank.
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    return batches


def train(
    model: GPT,
    batches: list[tuple[Tensor, Tensor]],
    optimizer: str,
    sum_gradients: Callable | None = None,
    group=None,
) -> list[dict]:
    """Per step, by name: the loss, and every gradient and parameter after it.

    sum_gradients: (model, group), called after backward, if the tokens are sharded over `group`;
        None if this rank has all tokens.
    """
    optim = OPTIMIZERS[optimizer](model.parameters())
    ranks = dist.get_world_size(group) if sum_gradients else 1
    steps = []
    for x, y in batches:
        optim.zero_grad()
        # This rank's summand of the mean over all tokens: every rank has equally many tokens.
        loss = cross_entropy(model(x), y) / ranks
        loss.backward()
        loss = loss.detach()
        if sum_gradients:
            sum_gradients(model, group)
            dist.all_reduce(loss, group=group)
        named = list(model.named_parameters())
        step = {"loss": loss} | {f"gradient of {n}": p.grad.clone() for n, p in named}
        optim.step()
        steps.append(step | {f"value of {n}": p.detach().clone() for n, p in named})
    return steps


def differences(steps: list[dict], expected: list[dict]) -> list[float]:
    """The largest difference of a loss, a gradient and a parameter in any step.

    A gradient's difference is divided by its largest number: those of query and key are small.
    """
    max_diff = {"loss": 0.0, "gradient": 0.0, "value": 0.0}
    for step, expected_step in zip(steps, expected, strict=True):
        for key, value in expected_step.items():
            kind = key.split()[0]
            unit = value.abs().max() if kind == "gradient" else 1.0
            difference = ((step[key] - value).abs().max() / unit).item()
            max_diff[kind] = max(max_diff[kind], difference)
    return list(max_diff.values())


# ---- counting one layer's attention


def measure(attention: Callable, args, ranks: int, device: torch.device) -> dict:
    """What forward and backward of `attention(q, k, v)` compute, send and save on this rank.

    ranks: the number of ranks over which the sequences are sharded.
    """
    shape = (args.batch_size, args.heads, args.length // ranks, args.dim // args.heads)
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Watch() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = attention(q, k, v)
    with Watch() as backward:
        out.sum().backward()
    return {
        "flops": forward.flops + backward.flops,
        "sends": (forward.sends, backward.sends),
        "sent": (forward.sent, backward.sent),
        "largest": max(forward.largest, backward.largest),
        "kept": sum(kept.values()),
    }


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def count_one_process(args, device: torch.device) -> dict[str, dict]:
    """Attention over full sequences, with all scores in memory, and by a fused kernel."""

    def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return {
        "softmax(q k) v": measure(plain_attention, args, 1, device),
        "fused kernel": measure(fused_attention, args, 1, device),
    }


class Watch(TorchDispatchMode):
    """Counts, in a `with` block, the FLOPs of matrix products, messages and their bytes, and finds
    the size of the largest tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.flops = self.sends = self.sent = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.namespace == "c10d" and name == "send":
            self.sends += 1
            self.sent += sum(tensor.nbytes for tensor in args[0])
        elif name == "bmm":
            self.flops += 2 * out.numel() * args[0].shape[-1]  # a product and a sum each
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.nbytes)
        return out


def expected_flops(args, rank: int, ranks: int, balanced: bool) -> int:
    """7 products per pair of chunks: 2 in forward, 5 in backward.

    A pair on the diagonal has no products above its tiles of TILE queries and keys.
    """
    length = args.length // (2 * ranks if balanced else ranks)
    pairs, on_diagonal = (2 * ranks + 1, 2) if balanced else (rank + 1, 1)
    above = sum(start * min(TILE, length - start) for start in range(0, length, TILE))
    return 7 * 2 * args.batch_size * args.dim * (length**2 * pairs - above * on_diagonal)


def expected_bytes(args, ranks: int) -> tuple[int, int]:
    """Bytes that a rank sends in forward and in backward, in float32.

    Keys and values take N - 1 steps around the ring; their gradients take N, to return to their
    own rank.
    """
    kv = 2 * 4 * args.batch_size * args.length // ranks * args.dim
    if ranks == 1:
        return 0, 0
    return kv * (ranks - 1), kv * (2 * ranks - 1)


# ---- output


def report(args, layouts: dict[str, bool], of_ranks: list[tuple[dict, dict]]) -> None:
    """layouts: name -> is it balanced. of_ranks: each rank's differences and counts, by layout."""
    ranks = len(of_ranks)
    print(
        f"{args.batch_size} sequences of {args.length} tokens, {args.length // ranks} of each per "
        f"rank; {args.steps} steps with {args.optimizer}\n"
    )
    print("largest difference from one process     loss   gradient  parameter")
    for name in layouts:
        max_diff = torch.tensor([max_diff[name] for max_diff, _ in of_ranks]).amax(0)
        print(f"tokens {name:27}" + "".join(f"{value:11.1e}" for value in max_diff.tolist()))

    print("\nattention of one layer, forward and backward: million FLOP, counted and by formula")
    print(" " * 12 + "".join(f"{'tokens ' + name:>20}" for name in layouts))
    flops = {name: [counts[name]["flops"] for _, counts in of_ranks] for name in layouts}
    for rank in range(ranks):
        row = f"rank {rank:<7}"
        for name, balanced in layouts.items():
            formula = expected_flops(args, rank, ranks, balanced)
            row += f"{flops[name][rank] / 1e6:10.2f}{formula / 1e6:10.2f}"
        print(row)
    row = f"{'most / mean':12}"
    for counted in flops.values():
        row += f"{max(counted) * ranks / sum(counted):10.2f}" + " " * 10
    print(row.rstrip())

    _, counts = of_ranks[0]
    print("\nbytes sent per rank        messages    counted    formula")
    formulas = expected_bytes(args, ranks)
    for i, phase in enumerate(("forward", "backward")):
        sends, sent = counts["balanced"]["sends"][i], counts["balanced"]["sent"][i]
        print(f"{phase:27}{sends:8}{sent:11,}{formulas[i]:11,}")

    print("\nmemory, bytes             largest tensor  saved for backward")
    for name in ("softmax(q k) v", "fused kernel", *layouts):
        title = f"ring, {name}" if name in layouts else f"1 rank, {name}"
        print(f"{title:26}{counts[name]['largest']:14,}{counts[name]['kept']:20,}")


def read_arguments():
    parser = ArgumentParser(description="Context parallelism by hand, compared with one process.")
    parser.add_argument("--steps", type=at_least(1), default=5, help="optimizer steps")
    parser.add_argument("--length", type=at_least(1), default=512, help="tokens per sequence")
    parser.add_argument("--batch-size", type=at_least(1), default=2, help="sequences per step")
    parser.add_argument("--layers", type=at_least(1), default=2, help="transformer blocks")
    parser.add_argument("--heads", type=at_least(1), default=4, help="attention heads")
    parser.add_argument("--dim", type=at_least(1), default=64, help="width: a multiple of --heads")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="sgd", help="optimizer of all runs"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of weights and data")
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} does not divide into {args.heads} heads")
    return args
