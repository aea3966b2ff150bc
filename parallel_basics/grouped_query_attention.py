"""Grouped-query attention under tensor parallelism: fewer key/value heads than ranks.

    python parallel_basics/grouped_query_attention.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/grouped_query_attention.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/grouped_query_attention.py

In Llama, Qwen, Mistral and Gemma several query heads share one key/value head. Tensor parallelism
shards attention by heads. 8 query heads divide over 4 ranks; 2 key/value heads do not, and
ColwiseParallel then gives a rank half a head. Here each rank holds the key/value head that its
query heads need:

    rank                0      1      2      3
    query heads       0 1    2 3    4 5    6 7
    key/value head      0      0      1      1

Ranks 0 and 1 hold the same rows of the key and value matrices. In backward each rank computes only
the gradient of its own query heads, so the ranks that share a head sum these gradients
(`sum_shared`).

Look at the error of ColwiseParallel. Then look at the differences from one process, which are
rounding. Without the sum the first loss is right and the gradients are wrong.

    B, T, C  batch, tokens, width     H  query heads, K  key/value heads on this rank
    D        numbers per head
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from comparing import OPTIMIZERS, batches
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

WORDS = 256  # one per byte


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        for kv_heads in args.kv_heads:
            check(args.heads, kv_heads, worker.world_size)
        compare(args, worker)


class GroupedQueryAttention(nn.Module):
    """(B, T, C) -> (B, T, C), causal. The rows of its weights determine the number of heads."""

    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BKTD, v_BKTD = (
            y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)
            for y in (self.query(x_BTC), self.key(x_BTC), self.value(x_BTC))
        )
        # enable_gqa: query head i uses key/value head i // (H / K).
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True
        )
        return self.out(y_BHTD.transpose(1, 2).flatten(2))


def check(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise `UserError` if the heads do not divide over this number of tensor-parallel ranks."""
    if heads % ranks:
        raise UserError(
            f"{heads} query heads do not divide over {ranks} tensor-parallel ranks: each rank "
            "needs equally many"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise UserError(
            f"{kv_heads} key/value heads do not fit {ranks} tensor-parallel ranks: one number must "
            "divide the other, so that each rank has whole heads, or shares one with equally many"
        )


def shard_attention(attention: GroupedQueryAttention, kv_heads: int) -> None:
    """Keep only this rank's heads. Before, the weights are full and equal on every rank.

    Raises ValueError for a layer with a bias (Qwen2), and for query and key norms (Qwen3). A bias
    of `out` would be added once per rank; the other gradients would be of this rank's heads only.
    """
    for name, linear in attention.named_children():
        if not isinstance(linear, nn.Linear) or linear.bias is not None:
            raise ValueError(f"attention.{name} is not a linear layer without bias")
    for name, linear in attention.named_children():
        linear.weight = nn.Parameter(local_part(f"{name}.weight", linear.weight, kv_heads))
    # Every rank has the same input; the gradient of the input is the sum over all ranks' heads.
    attention.register_forward_pre_hook(
        lambda module, inputs: (CopyToRanks.apply(inputs[0]), *inputs[1:])
    )
    # Each rank's output is a summand, from its own heads.
    attention.register_forward_hook(lambda module, inputs, y: ReduceFromRanks.apply(y))


def local_part(name: str, tensor: Tensor, kv_heads: int) -> Tensor:
    """This rank's shard of a parameter or gradient of the full model."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if name.endswith(("key.weight", "value.weight")):
        # Several heads, or one head, which neighbouring ranks also hold (see `copies_of`).
        heads_D = tensor.detach().chunk(kv_heads)
        first = rank * kv_heads // ranks
        return torch.cat(heads_D[first : first + max(1, kv_heads // ranks)])
    if name.endswith("query.weight"):
        return tensor.detach().chunk(ranks)[rank].clone()
    if name.endswith("out.weight"):  # row-parallel: the inputs that come from this rank's heads
        return tensor.detach().chunk(ranks, dim=1)[rank].clone()
    return tensor.detach()  # replicated


def copies_of(kv_heads: int) -> int:
    """How many ranks hold the same key/value head."""
    return max(1, dist.get_world_size() // kv_heads)


def sum_shared(attention: GroupedQueryAttention, sharers) -> None:
    """After backward: sum the gradients of a key/value head over the ranks that hold it."""
    for linear in (attention.key, attention.value):
        dist.all_reduce(linear.weight.grad, group=sharers)


def gradient_norm(model: nn.Module, kv_heads: int) -> Tensor:
    """The norm of all gradients of the full model, equal on every rank.

    The squares of all ranks are added, so those of a parameter that n ranks hold are divided by n.
    """
    ranks, squares = dist.get_world_size(), torch.zeros((), device=next(model.parameters()).device)
    for name, parameter in model.named_parameters():
        holders = ranks
        if "attention" in name.split("."):
            holders = copies_of(kv_heads) if "key" in name or "value" in name else 1
        squares += parameter.grad.square().sum() / holders
    dist.all_reduce(squares)
    return squares.sqrt()


class CopyToRanks(torch.autograd.Function):
    """f of tensor_parallel_from_scratch.py. Forward: nothing. Backward: all_reduce."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient


class ReduceFromRanks(torch.autograd.Function):
    """g of tensor_parallel_from_scratch.py. Forward: all_reduce. Backward: nothing."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


# ---- the comparison


class Decoder(nn.Module):
    """Tokens (B, T) -> logits (B, T, WORDS): one attention layer; other layers are replicated."""

    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, dim)
        self.norm = nn.RMSNorm(dim)
        self.attention = GroupedQueryAttention(dim, heads, kv_heads)
        self.head = nn.Linear(dim, WORDS, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        return self.head(x_BTC + self.attention(self.norm(x_BTC)))


def build(args, kv_heads: int, device: torch.device) -> Decoder:
    torch.manual_seed(args.seed)  # the same values on every rank
    return Decoder(args.dim, args.heads, kv_heads).to(device)


def train(args, kv_heads: int, device, sharded: bool = True, shared: bool = True) -> list[dict]:
    """Per step: loss, norm, and this rank's gradients and parameters after the step.

    sharded=False: the single-process baseline. shared=False: do not sum gradients of shared heads.
    """
    model = build(args, kv_heads, device)
    if sharded:
        shard_attention(model.attention, kv_heads)
        # One group per key/value head; every rank makes all of them and keeps its own.
        sharers, _ = dist.new_subgroups(copies_of(kv_heads))
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    steps = []
    for x_BT, y_BT in batches(args, device):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())
        loss.backward()
        if sharded and shared:
            sum_shared(model.attention, sharers)
        if sharded:
            norm = gradient_norm(model, kv_heads)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        step = {"loss": loss.detach(), "norm": norm, "gradient": gradients, "parameter": parameters}
        steps.append(step)
    return steps


def compare(args, worker: Worker) -> None:
    rows = []
    for kv_heads in args.kv_heads:
        message = try_colwise(build(args, kv_heads, worker.device), worker)
        if worker.is_main:
            print(f"{kv_heads} key/value heads, ColwiseParallel: {message}", flush=True)
        expected = train(args, kv_heads, worker.device, sharded=False)
        for shared in (True, False):
            if shared or copies_of(kv_heads) > 1:
                steps = train(args, kv_heads, worker.device, shared=shared)
                row = differences(steps, expected, kv_heads, worker.device)
                rows.append((kv_heads, copies_of(kv_heads), shared, row))
    if worker.is_main:
        print(
            f"\n{args.heads} query heads, {args.steps} steps, largest difference from one process"
        )
        print(
            "kv heads  ranks per kv head  gradients     first loss       norm   gradient  parameter"
        )
        for kv_heads, copies, shared, row in rows:
            how = "summed" if shared else "not summed"
            cells = "".join(f"{value:11.1e}" for value in row)
            print(f"{kv_heads:8}{copies:19}  {how:12}{cells}")


def try_colwise(model: Decoder, worker: Worker) -> str:
    """Shard the key and value matrices like any other matrix; return the error, or "works"."""
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    names = ("query", "key", "value")
    parallelize_module(model.attention, mesh, {name: ColwiseParallel() for name in names})
    model.attention.out = nn.Identity()  # so that its size does not matter
    x_BTC = torch.zeros(2, 3, model.norm.weight.numel(), device=worker.device)
    try:
        model.attention(x_BTC)
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "works"


def differences(steps: list[dict], expected: list[dict], kv_heads: int, device) -> list[float]:
    """Largest differences, over all ranks: first loss, all norms, gradients, parameters."""
    worst = torch.zeros(4, device=device)
    worst[0] = (steps[0]["loss"] - expected[0]["loss"]).abs()
    for step, one in zip(steps, expected, strict=True):
        worst[1] = worst[1].maximum((step["norm"] - one["norm"]).abs())
        for i, kind in enumerate(("gradient", "parameter"), start=2):
            for name, tensor in step[kind].items():
                difference = (tensor - local_part(name, one[kind][name], kv_heads)).abs().max()
                worst[i] = worst[i].maximum(difference)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


def parse_args():
    parser = ArgumentParser(description="Grouped-query attention on tensor-parallel ranks.")
    add = parser.add_argument
    add("--heads", type=at_least(1), default=8, help="query heads (default: 8)")
    add(
        "--kv-heads",
        type=at_least(1),
        nargs="+",
        default=[1, 2, 4],
        help="key/value heads, several counts to compare (default: 1 2 4)",
    )
    add("--dim", type=at_least(1), default=64, help="width, a multiple of --heads (default: 64)")
    add("--steps", type=at_least(1), default=4, help="optimizer steps (default: 4)")
    add("--batch-size", type=at_least(1), default=4, help="sequences per step (default: 4)")
    add("--length", type=at_least(1), default=16, help="tokens per sequence (default: 16)")
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="sgd has momentum (default: sgd)")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data (default: 0)")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} does not divide into {args.heads} heads")
    for kv_heads in args.kv_heads:
        if args.heads % kv_heads:
            parser.error(f"--heads {args.heads} do not divide over {kv_heads} key/value heads")
    return args


if __name__ == "__main__":
    main()
