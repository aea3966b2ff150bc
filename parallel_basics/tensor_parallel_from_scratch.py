r"""Tensor parallelism by hand: plain tensors and two autograd functions, equal to one process.

    python parallel_basics/tensor_parallel_from_scratch.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/tensor_parallel_from_scratch.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/tensor_parallel_from_scratch.py \
        --tied --heads 4

All ranks work on the same tokens, each with a shard of every large matrix. Matrices come in pairs:

    the first     column-parallel: each rank computes some heads or features    (query, expand)
    the second    row-parallel: takes just those, returns a summand             (out, contract)

so nothing is sent between the two. Two operators, g and f, enclose a pair:

    g   after it     forward: all_reduce    backward: nothing
    f   before it    forward: nothing       backward: all_reduce

`cut_model` does this to a GPT; `vocab_parallel_cross_entropy` is its loss. Look at the shapes that
a rank holds; at the collectives, two per block and direction; at the loss, which sends two numbers
per token instead of one logit per word.

    B, T, C, V  as in model.py     v  words of the vocabulary on this rank: V / ranks     N = B * T
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare_tensor_parallel import numbers_held, one_process, print_held, print_parameters
from comparing import differences, make_config, make_parser, print_differences, train
from counting import CountCollectives, print_collectives
from model import GPT, GPTConfig, initialize
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

# The second name is that of torch before 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


# Which dim of which parameter is sharded. A weight is (outputs, inputs): dim 0 leaves a rank some
# of the outputs, dim 1 some of the inputs. (Papers write x @ A: dim 0 is the columns of A.) All
# other parameters are replicated: their inputs are equal on all ranks.
CUTS = {
    "token_embedding.weight": 0,  # some words
    "attention.query.weight": 0,  # some heads
    "attention.query.bias": 0,
    "attention.key.weight": 0,
    "attention.key.bias": 0,  # if there is one
    "attention.value.weight": 0,
    "attention.value.bias": 0,
    "attention.out.weight": 1,  # takes just those heads
    "mlp.expand.weight": 0,  # some features
    "mlp.expand.bias": 0,
    "mlp.contract.weight": 1,  # takes just those features
    "head.weight": 0,  # the logits of some words
}


class CopyToRanks(torch.autograd.Function):
    """f: all ranks use the same x, each with its shard of the weights.

    Forward: nothing. Backward: the gradient of x is the sum over all ranks. Shoeybi et al.,
    Megatron-LM, arXiv 1909.08053, section 3, where f and g are called conjugate.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # autograd owns that one
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class ReduceFromRanks(torch.autograd.Function):
    """g: x is one rank's summand; returns the sum over the ranks, in x's own memory.

    Backward: nothing. The gradient of a summand is the gradient of the sum, which every rank has
    already, because all ranks compute the following layers alike.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.mark_dirty(x)  # in place: tells autograd
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


class RowLinear(nn.Module):
    """A row-parallel linear layer: (..., some inputs) -> (..., outputs), a sum over ranks.

    A column-parallel layer needs no class: it is a linear layer with fewer outputs.
    """

    def __init__(self, linear: nn.Linear, group):
        super().__init__()
        self.weight, self.bias, self.group = linear.weight, linear.bias, group

    def forward(self, x: Tensor) -> Tensor:
        y = ReduceFromRanks.apply(F.linear(x, self.weight), self.group)
        # The bias comes after the sum: inside, it would be added once per rank.
        return y if self.bias is None else y + self.bias


class VocabEmbedding(nn.Module):
    """An embedding with some rows of the table: tokens (B, T) -> (B, T, C), a sum over ranks."""

    def __init__(self, weight: nn.Parameter, group):
        super().__init__()
        self.weight, self.group = weight, group

    def forward(self, tokens_BT: Tensor) -> Tensor:
        rows_BT, elsewhere_BT = local_rows(tokens_BT, len(self.weight), self.group)
        x_BTC = F.embedding(rows_BT, self.weight).masked_fill(elsewhere_BT.unsqueeze(-1), 0)
        return ReduceFromRanks.apply(x_BTC, self.group)


def local_rows(tokens: Tensor, words: int, group) -> tuple[Tensor, Tensor]:
    """Each token's row among the `words` of this rank, or 0; and whether another rank has it."""
    rows = tokens - dist.get_rank(group) * words
    elsewhere = (rows < 0) | (rows >= words)
    return rows.masked_fill(elsewhere, 0), elsewhere


class CrossEntropy(torch.autograd.Function):
    """The sum of log(sum of exp(logits)) - logit of the target; no rank has all logits.

    A rank sends two numbers per token: log(sum of exp) of its own logits, and the target's logit or
    0. All other work, also in backward, is local.
    """

    @staticmethod
    def forward(ctx, logits_Nv: Tensor, targets_N: Tensor, group) -> Tensor:
        columns_N, elsewhere_N = local_rows(targets_N, logits_Nv.shape[1], group)
        target_N = logits_Nv.gather(1, columns_N.unsqueeze(1)).squeeze(1)
        local_2N = torch.stack([logits_Nv.logsumexp(1), target_N.masked_fill(elsewhere_N, 0)])
        all_n2N = local_2N.new_empty(dist.get_world_size(group), *local_2N.shape)
        all_gather(all_n2N.flatten(0, 1), local_2N, group=group)
        total_N = all_n2N[:, 0].logsumexp(0)
        target_N = all_n2N[:, 1].sum(0)  # one rank has it, every other rank has 0
        counted_N = targets_N >= 0
        ctx.save_for_backward(logits_Nv, total_N, columns_N, elsewhere_N, counted_N)
        return (total_N - target_N).mul(counted_N).sum()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        logits_Nv, total_N, columns_N, elsewhere_N, counted_N = ctx.saved_tensors
        gradient_Nv = (logits_Nv - total_N.unsqueeze(1)).exp_()  # the probabilities
        ones_N = (~elsewhere_N).to(gradient_Nv.dtype)
        gradient_Nv.scatter_add_(1, columns_N.unsqueeze(1), -ones_N.unsqueeze(1))
        return gradient_Nv.mul_(gradient * counted_N.unsqueeze(1)), None, None


def vocab_parallel_cross_entropy(
    logits_BTv: Tensor, targets_BT: Tensor, reduction: str = "mean", group=None
) -> Tensor:
    """The loss of all tokens whose target is not negative: in nats, float32, on every rank."""
    logits_Nv = logits_BTv.flatten(0, 1).float()
    total = CrossEntropy.apply(logits_Nv, targets_BT.flatten(), group)
    return total / (targets_BT >= 0).sum() if reduction == "mean" else total


def cut_model(model: GPT, group=None) -> GPT:
    """Shard `model` over `group`: keep this rank's part; change and return `model`.

    Before, the model is initialized, with equal values on every rank. After, it returns only the
    logits of this rank's words, (B, T, v); the ranks have the vocabulary in order.
    Raises ValueError for a Llama, for query and key norms, and if the ranks do not divide the
    heads, the features of the MLP or the vocabulary.
    """
    ranks, config = dist.get_world_size(group), model.config
    if config.is_llama or config.qk_norm:
        raise ValueError("this is GPT-2's plan: transformer_basics/parallelize.py has a Llama's")
    for name in ("heads", "kv_heads", "mlp_dim", "vocab_size"):
        if (value := getattr(config, name)) % ranks:
            raise ValueError(f"{name} {value} does not divide by {ranks} tensor-parallel ranks")
    for name, parameter in list(model.named_parameters()):
        if (dim := cut_dim(name)) is None:
            continue
        path, _, kind = name.rpartition(".")
        layer = model.get_submodule(path)
        setattr(layer, kind, nn.Parameter(local_part(parameter.detach(), dim, group)))
        if isinstance(layer, nn.Linear):
            layer.out_features, layer.in_features = layer.weight.shape
    model.tie()  # sharding has turned one tied weight into two parameters

    def copy_input(module, inputs):
        return (CopyToRanks.apply(inputs[0], group), *inputs[1:])

    if model.is_first:
        model.token_embedding = VocabEmbedding(model.token_embedding.weight, group)
    for block in model.blocks.values():
        # Once for query, key and value: autograd adds their three gradients before f's backward.
        block.attention.register_forward_pre_hook(copy_input)
        block.attention.out = RowLinear(block.attention.out, group)
        block.mlp.register_forward_pre_hook(copy_input)
        block.mlp.contract = RowLinear(block.mlp.contract, group)
    if model.is_last:
        model.head.register_forward_pre_hook(copy_input)
        model.head.loss = partial(vocab_parallel_cross_entropy, group=group)
        if model.head.padding is not None:
            model.head.padding = local_part(model.head.padding, 0, group)
    return model


def cut_dim(name: str) -> int | None:
    """The dim in which the parameter of this name is sharded; None if it is replicated."""
    return next((dim for end, dim in CUTS.items() if name.endswith(end)), None)


def local_part(tensor: Tensor, dim: int, group=None) -> Tensor:
    """This rank's shard, as a copy: a view would keep all of `tensor` alive."""
    chunk = tensor.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return chunk.clone(memory_format=torch.contiguous_format)


def full_tensor(name: str, tensor: Tensor, group=None) -> Tensor:
    """The full parameter (or gradient) of this name, gathered from each rank's `tensor`."""
    dim = cut_dim(name)
    if dim is None:
        return tensor.clone()
    of_ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, tensor.contiguous(), group=group)
    return torch.cat(of_ranks, dim)


def gradient_norm(model: GPT, group=None) -> Tensor:
    """The norm of all gradients of the full model, as clipping needs it: equal on every rank.

    Squares of sharded parameters are added over the ranks. Squares of replicated parameters are
    equal on all ranks: adding them over the ranks would count each once per rank.
    """
    of_cut, of_copies = torch.zeros(2, device=next(model.parameters()).device)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            total = of_copies if cut_dim(name) is None else of_cut
            total += parameter.grad.square().sum()
    dist.all_reduce(of_cut, group=group)
    return (of_cut + of_copies).sqrt()


# ---- the comparison


def compare(args, worker: Worker) -> None:
    config = make_config(args, worker.world_size)
    full_model, expected = one_process(config, args, worker)

    # Each rank begins with the same full model. (If it is too large: see tensor_parallel.py.)
    model = cut_model(initialize(GPT(config).to(worker.device), args.seed))
    count = CountCollectives(model)
    steps = train(
        model, vocab_parallel_cross_entropy, gradient_norm, full_tensor, args, worker.device, count
    )
    held = numbers_held(model)
    if worker.is_main:
        print_parameters(full_model, model, cut_dim)
        print_held(full_model, held)
        tokens = args.batch_size * args.length
        print(f"\none activation, (B, T, C): {4 * tokens * args.dim:,} bytes")
        print_collectives(count, formula(config, tokens, worker.world_size))
        print(f"no rank ever has all logits, which are {4 * tokens * args.vocab_size:,} bytes")
        print(f"\n{args.steps} steps with {args.optimizer}, compared with one process")
        print_differences({"sharded by hand": differences(steps, expected)})


def formula(config: GPTConfig, tokens: int, ranks: int) -> Iterator[tuple[str, str, str, int, int]]:
    """(phase, kind of layer, operation, calls, bytes of the full tensor of each), for one step."""
    activation = 4 * tokens * config.dim  # (B, T, C) in float32
    yield "forward", "token_embedding", "all_reduce", 1, activation
    for phase in ("forward", "backward"):
        for kind in ("attention", "mlp"):
            yield phase, kind, "all_reduce", config.layers, activation
    yield "backward", "head", "all_reduce", 1, activation
    yield "forward", "outside", "all_gather", 1, ranks * 2 * 4 * tokens  # the loss


def parse_args():
    parser = make_parser("Tensor parallelism by hand, compared with one process.")
    parser.add_argument("--tied", action="store_true", help="the head uses the embedding's weight")
    return parser.parse_args()


if __name__ == "__main__":
    main()
