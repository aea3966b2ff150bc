"""Sequence parallelism: shard the activations of norms and residuals by tokens.

    python parallel_basics/sequence_parallel.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/sequence_parallel.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/sequence_parallel.py --layers 4

Tensor parallelism shards attention and MLP. It replicates norms, residuals and their activations:
every rank computes and saves the same numbers. But these layers work on one token at a time. So an
all_reduce is split in two. Its first half, a reduce_scatter, leaves a rank the sums of its own
tokens; the norm works on these. Its second half, an all_gather, comes before the next pair of
layers. (Korthikanti et al., Reducing Activation Recomputation, arXiv 2205.05198.)

Look at

1. the collectives: each all_reduce has become two halves, and a ring sends the same bytes;
2. the norms' gradients: each rank has those of its own tokens, as a Partial DTensor. Each operation
   that needs their value reduces them and does not keep the sum; on a CPU AdamW has three such
   operations. So sum_gradients() reduces them once, after backward;
3. the activations saved for backward. In units of (B, T, C) numbers, a block on one of n ranks
   saves 4 + 12 / n with tensor parallelism alone, and 2 + 14 / n with sequence parallelism.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from arguments import UserError
from compare_tensor_parallel import local, one_process, print_layers, print_sent
from comparing import (
    as_it_is,
    batches,
    differences,
    make_config,
    make_parser,
    norm_of,
    print_differences,
    train,
)
from counting import CountCollectives, print_collectives
from model import GPT, GPTConfig, cross_entropy, initialize
from runtime import Worker, distributed_worker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

KINDS = ("attention_norm", "attention", "mlp_norm", "mlp")  # of layers, in a block


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if args.length % worker.world_size:
            raise UserError(
                f"--length {args.length} does not divide over {worker.world_size} ranks"
            )
        compare(args, worker)


def apply_sequence_parallel(model: GPT, mesh: DeviceMesh, sequence_parallel: bool = True) -> GPT:
    """Shard the layers of `model` over the one axis of `mesh`; change and return `model`.

    sequence_parallel: False is the plan of tensor_parallel.py. The two plans differ in `between`,
        the layout of activations between the pairs, and in a style for the norms.
    Raises ValueError for a Llama, and later for tokens that do not divide by the ranks: pad them.
    """
    if model.config.is_llama or model.config.qk_norm:
        raise ValueError("this is GPT-2's plan: transformer_basics/parallelize.py has a Llama's")
    # A rank has all tokens (B, T, C), or its T / n: dim 1.
    between = Shard(1) if sequence_parallel else Replicate()
    plan = {"token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
    if sequence_parallel:
        # Row-parallel only to shard the output like the tokens, which are dim 0 here: (T, C).
        plan["position_embedding"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0)
        )
        # Each rank normalizes its own tokens. The weights are replicated.
        plan["norm"] = SequenceParallel()
        for i in model.blocks:
            plan[f"blocks.{i}.attention_norm"] = SequenceParallel()
            plan[f"blocks.{i}.mlp_norm"] = SequenceParallel()

    # Sharded tokens are gathered before a pair of layers, and sharded again after it.
    gather = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    for i in model.blocks:
        plan |= {
            f"blocks.{i}.attention": gather,
            f"blocks.{i}.attention.query": ColwiseParallel(),
            f"blocks.{i}.attention.key": ColwiseParallel(),
            f"blocks.{i}.attention.value": ColwiseParallel(),
            f"blocks.{i}.attention.out": RowwiseParallel(output_layouts=between),
            f"blocks.{i}.mlp": gather,
            f"blocks.{i}.mlp.expand": ColwiseParallel(),
            f"blocks.{i}.mlp.contract": RowwiseParallel(output_layouts=between),
        }
    plan["head"] = ColwiseParallel(
        input_layouts=between, output_layouts=Shard(-1), use_local_output=False
    )
    parallelize_module(model, mesh, plan)
    model.tie()  # sharding has turned one tied weight into two parameters

    def check_length(module, inputs) -> None:  # no collective does: a rank would abort, or hang
        if sequence_parallel and inputs[0].shape[1] % mesh.size():
            raise ValueError(f"{inputs[0].shape[1]} tokens do not divide by {mesh.size()} ranks")

    model.register_forward_pre_hook(check_length)
    return model


@torch.no_grad()
def sum_gradients(model: GPT) -> None:
    """Reduce Partial gradients, those of the norms, to the placements of their parameters.

    Raises ValueError for a layer that the plan does not name: its gradient is of this rank's tokens
    only, and it would train differently on each rank.
    """
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        if not isinstance(p, DTensor):
            raise ValueError(f"{name} has no style in the plan: a norm needs SequenceParallel()")
        if any(placement.is_partial() for placement in p.grad.placements):
            p.grad = p.grad.redistribute(placements=p.placements)


def run(
    config: GPTConfig,
    args,
    worker: Worker,
    sequence_parallel: bool = True,
    finish: Callable[[GPT], None] | None = None,
) -> tuple[GPT, list[dict], CountCollectives]:
    """The sharded model, its training steps, and the collectives of the last step.

    finish: called after backward, before the optimizer's step.
    """
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    model = apply_sequence_parallel(GPT(config).to(worker.device), mesh, sequence_parallel)
    initialize(model, args.seed)  # after sharding: each rank draws its shard of the same numbers
    count = CountCollectives(model)
    with loss_parallel():  # the logits are sharded by vocabulary
        steps = train(model, cross_entropy, norm_of, as_it_is, args, worker.device, count, finish)
    return model, steps, count


def compare(args, worker: Worker) -> None:
    ranks = worker.world_size
    config, tokens = make_config(args, ranks), args.batch_size * args.length
    _, expected = one_process(config, args, worker)
    sent, kept, max_diff = {}, {}, {}
    for title, sequence in (("tensor parallel", False), ("sequence parallel", True)):
        finish = sum_gradients if sequence else None
        model, steps, count = run(config, args, worker, sequence, finish)
        sent[title] = count.sent(ranks)
        max_diff[title] = differences(steps, expected)
        kept[title] = measure_kept(model, args, worker)
        kept[f"{title}, formula"] = kept_by_formula(config, tokens, ranks, sequence)
    _, _, lazy_count = run(config, args, worker)  # the optimizer reduces the norms' gradients
    if worker.is_main:
        print_layers(model)
        if ranks > 1:  # on one rank, DTensors send nothing
            print_collectives(count, formula(config, args.batch_size, args.length))
            calls, _ = lazy_count.total("optimizer")
            print(f"without sum_gradients(), {args.optimizer} calls all_reduce {calls} times")
        print_sent(sent)
        print_kept(kept)
        print(f"\n{args.steps} steps with {args.optimizer}, compared with one process")
        print_differences(max_diff)


def formula(config: GPTConfig, batch: int, length: int) -> Iterator[tuple[str, str, str, int, int]]:
    """(phase, kind of layer, operation, calls, bytes of the full tensor of each), for one step."""
    activation = 4 * batch * length * config.dim  # (B, T, C) in float32
    for phase, after in (("forward", "reduce_scatter"), ("backward", "all_gather")):
        yield phase, "token_embedding", after, 1, activation
        yield phase, "position_embedding", after, 1, 4 * length * config.dim
        for kind in ("attention", "mlp"):  # in backward in reverse order
            yield phase, kind, "all_gather", config.layers, activation
            yield phase, kind, "reduce_scatter", config.layers, activation
    yield "forward", "head", "all_gather", 1, activation
    yield "backward", "head", "reduce_scatter", 1, activation
    yield "forward", "outside", "all_reduce", 3, 4 * batch * length  # the loss of sharded logits
    # Weight and bias of two norms per block, and of the last one.
    yield "gradients", "outside", "all_reduce", 4 * config.layers + 2, 4 * config.dim


@contextmanager
def keep_count(model: GPT, count: CountCollectives) -> Iterator[Counter]:
    """Bytes saved for backward, by layer: each storage counts once, parameters do not count."""
    kept = Counter()
    seen = {local(p).untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memory = local(tensor).untyped_storage()
        if memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            kept[count.layer] += memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


def measure_kept(model: GPT, args, worker: Worker) -> dict[str, int]:
    """Bytes saved for backward in the last block, by kind of layer."""
    x_BT, y_BT = batches(args, worker.device)[0]
    count = CountCollectives(model)  # knows the current layer
    with loss_parallel(), keep_count(model, count) as kept, count:
        loss = cross_entropy(model(x_BT), y_BT)
    del loss
    return {kind: kept[f"blocks.{args.layers - 1}.{kind}"] for kind in KINDS}


def kept_by_formula(config: GPTConfig, tokens: int, ranks: int, sequence: bool) -> dict[str, int]:
    """Bytes saved for backward by formula, in float32, without dropout.

    norm: its input, and one mean and one deviation per token. attention: its input, query, key,
    value and result, and one log(sum of exp) per token and head (on a CPU; GPU kernels differ).
    mlp: its input, then 4 C before and after the activation function.
    """
    dim, between = config.dim, tokens // ranks if sequence else tokens
    return {
        "attention_norm": 4 * between * (dim + 2),
        "attention": 4 * tokens * (dim + 4 * dim // ranks + config.heads // ranks),
        "mlp_norm": 4 * between * (dim + 2),
        "mlp": 4 * tokens * (dim + 8 * dim // ranks),
    }


def print_kept(kept: dict[str, dict[str, int]]) -> None:
    print("\nbytes that one block saves for backward, per rank")
    print(" " * 26 + "".join(f"{kind:>15}" for kind in (*KINDS, "all")))
    for title, row in kept.items():
        values = [*row.values(), sum(row.values())]
        print(f"{title:26}" + "".join(f"{value:15,}" for value in values))


def parse_args():
    return make_parser("Sequence parallelism: what it saves, and what it costs.").parse_args()


if __name__ == "__main__":
    main()
