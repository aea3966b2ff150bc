"""Context parallelism by hand: a GPT on sequences that are spread over the ranks.

    python parallel_basics/context_parallel_from_scratch.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/context_parallel_from_scratch.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/context_parallel_from_scratch.py \\
        --length 1024 --optimizer adamw

Each of N ranks has T / N tokens of every sequence, and all parameters. Only attention looks from
one token at another: keys and values travel around a ring of the ranks, in forward, and once more
in backward, where their gradients travel with them. That is in ring_attention.py; this file
compares it with one process, for two ways to deal out the tokens: in order, and balanced.

Look at

1. the differences: rounding. (AdamW divides each gradient by its own size: it enlarges the rounding
   of tiny ones, and would hide a gradient that is wrong by a factor. SGD does neither.)
2. the work: with tokens in order, the last rank has up to twice the mean, and the others wait for
   it in every step. Balanced, all have the same.
3. the bytes sent: they grow with T, not with T * T as the work does. So the longer the sequence,
   the better the sending hides behind the computation.
4. the memory: one process that writes all scores down needs T * T of them. PyTorch's fused kernel
   never does so, nor does a ring, which has those of one block at a time. What is kept for
   backward is divided by N: that is why one trains on long sequences this way.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, UserError
from model import GPT, GPTConfig, cross_entropy, initialize
from ring_attention import Ring, apply_context_parallel, own_tokens, ring_attention, sum_gradients
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operation, C++'s too

LAYOUTS = {"in order": False, "balanced": True}


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if args.length % (2 * worker.world_size):
            raise UserError(
                f"--length {args.length} does not divide into {2 * worker.world_size} chunks, "
                f"two for each of {worker.world_size} rank(s)"
            )
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    batches = make_batches(args, worker.device)
    expected = train(build(args, worker), batches, args)
    worst, counts = {}, {}
    for name, balanced in LAYOUTS.items():
        model = apply_context_parallel(build(args, worker), balanced=balanced)
        own = [
            [own_tokens(t, 1, worker.rank, worker.world_size, balanced) for t in batch]
            for batch in batches
        ]
        worst[name] = differences(train(model, own, args, context_parallel=True), expected)
        counts[name] = measure(args, worker, balanced)
    for kind in ("softmax(q k) v", "fused kernel"):
        counts[kind] = measure(args, worker, kind=kind)
    everyone = [None] * worker.world_size
    dist.all_gather_object(everyone, (worst, counts))
    if worker.is_main:
        report(args, everyone)


def build(args, worker: Worker) -> GPT:
    config = GPTConfig(256, args.length, args.layers, args.heads, args.dim)
    model = initialize(GPT(config).to(worker.device), args.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # As it begins, a GPT looks at all tokens about alike: a mistake in attention would
                # hardly show. With larger weights it looks at some.
                parameter.mul_(5)
    return model


def make_batches(args, device) -> list[tuple[Tensor, Tensor]]:
    generator, batches = torch.Generator().manual_seed(args.seed), []
    for _ in range(args.steps):
        shape = (args.batch_size, args.length + 1)
        tokens = torch.randint(256, shape, generator=generator).to(device)
        # Shifted before the tokens are dealt out: the target of a rank's last token is elsewhere.
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    return batches


def train(model: GPT, batches, args, group=None, context_parallel=False) -> list[dict]:
    """Per step, by name: the loss, and every gradient and parameter after it."""
    optimizer, steps = OPTIMIZERS[args.optimizer](model.parameters()), []
    ranks = dist.get_world_size(group) if context_parallel else 1
    for x, y in batches:
        optimizer.zero_grad()
        # A share of the mean over all tokens, since all ranks have equally many.
        loss = cross_entropy(model(x), y) / ranks
        loss.backward()
        loss = loss.detach()
        if context_parallel:
            sum_gradients(model, group)
            dist.all_reduce(loss, group=group)
        named = list(model.named_parameters())
        steps.append({"loss": loss} | {f"gradient of {n}": p.grad.clone() for n, p in named})
        optimizer.step()
        steps[-1] |= {f"value of {n}": p.detach().clone() for n, p in named}
    return steps


def differences(steps: list[dict], expected: list[dict]) -> list[float]:
    """Largest difference, of all steps, of the loss, of a gradient, and of a parameter.

    A gradient's is divided by its largest number: those of query and key are small.
    """
    worst = {"loss": 0.0, "gradient": 0.0, "value": 0.0}
    for step, right in zip(steps, expected, strict=True):
        for key, value in right.items():
            kind = key.split()[0]
            unit = value.abs().max() if kind == "gradient" else 1.0
            worst[kind] = max(worst[kind], ((step[key] - value).abs().max() / unit).item())
    return list(worst.values())


# ---- counting one layer's attention


def measure(args, worker: Worker, balanced: bool = True, kind: str = "ring") -> dict[str, int]:
    """What one forward and backward of attention computes, sends and keeps on this rank."""
    ring = Ring(balanced=balanced)
    share = 1 if kind != "ring" else worker.world_size
    shape = (args.batch_size, args.heads, args.length // share, args.dim // args.heads)
    q, k, v = (torch.randn(shape, device=worker.device, requires_grad=True) for _ in range(3))
    attention = {
        "ring": lambda: ring_attention(q, k, v, ring),
        "softmax(q k) v": lambda: plain_attention(q, k, v),
        "fused kernel": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }[kind]
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Watch() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = attention()
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


class Watch(TorchDispatchMode):
    """Counts, in a `with` block, matrix products' FLOPs, messages and their bytes; and notes the
    size of the largest tensor that an operation returns."""

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
    """7 products of a block: 2 in forward, 5 in backward; blocks on the diagonal are whole."""
    block = args.length // (2 * ranks if balanced else ranks)
    blocks = 2 * ranks + 1 if balanced else rank + 1
    return 7 * 2 * args.batch_size * args.dim * block**2 * blocks


def expected_bytes(args, ranks: int) -> tuple[int, int]:
    """Sent by a rank in forward and backward, in float32.

    Keys and values take N - 1 steps to be everywhere; their gradients one more, to come home.
    """
    kv = 2 * 4 * args.batch_size * args.length // ranks * args.dim
    return kv * (ranks - 1), (kv * (2 * ranks - 1) if ranks > 1 else 0)


def report(args, everyone: list) -> None:
    ranks = len(everyone)
    print(
        f"{args.batch_size} sequences of {args.length} tokens, {args.length // ranks} of each on a "
        f"rank; {args.steps} steps with {args.optimizer}\n"
    )
    print("largest difference to one process       loss   gradient  parameter")
    for name in LAYOUTS:
        rows = (worst[name] for worst, _ in everyone)
        print(f"tokens {name:27}" + "".join(f"{max(c):11.1e}" for c in zip(*rows, strict=True)))

    print("\nattention of one layer, forward and backward: million FLOPs, counted and by formula")
    print(f"{'':12}" + "".join(f"{'tokens ' + name:>20}" for name in LAYOUTS))
    for rank, (_, counts) in enumerate(everyone):
        pairs = (
            (counts[name]["flops"], expected_flops(args, rank, ranks, balanced))
            for name, balanced in LAYOUTS.items()
        )
        print(f"rank {rank:<7}" + "".join(f"{c / 1e6:10.2f}{e / 1e6:10.2f}" for c, e in pairs))
    found = [[counts[name]["flops"] for _, counts in everyone] for name in LAYOUTS]
    ratios = "".join(f"{max(c) * ranks / sum(c):10.2f}{'':10}" for c in found)
    print(f"{'most / mean':12}{ratios}".rstrip())

    print("\nsent by a rank             messages    counted    formula")
    counts = everyone[0][1]
    rows = zip(*(counts["balanced"][key] for key in ("sends", "sent")), strict=True)
    for phase, (sends, sent), formula in zip(
        ("forward", "backward"), rows, expected_bytes(args, ranks), strict=True
    ):
        print(f"{phase:27}{sends:8}{sent:11,}{formula:11,}")

    print("\nmemory, bytes             largest tensor   kept for backward")
    for name in ("softmax(q k) v", "fused kernel", *LAYOUTS):
        title = f"ring, {name}" if name in LAYOUTS else f"1 rank, {name}"
        print(f"{title:26}{counts[name]['largest']:14,}{counts[name]['kept']:20,}")


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def parse_args():
    parser = ArgumentParser(description="Context parallelism by hand, compared with one process.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64, help="width: a multiple of --heads")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    for name in ("steps", "length", "batch_size", "layers", "heads", "dim"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be at least 1, not {getattr(args, name)}")
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} does not divide into {args.heads} heads")
    return args


if __name__ == "__main__":
    main()
