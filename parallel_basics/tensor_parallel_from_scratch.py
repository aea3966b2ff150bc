"""Tensor parallelism by hand, compared with one process and with torch's parallelize_module.

    python parallel_basics/tensor_parallel_from_scratch.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/tensor_parallel_from_scratch.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/tensor_parallel_from_scratch.py \\
        --tied --heads 4

All ranks work on the same tokens, each with a part of every large matrix. Matrices come in pairs:

    the first     by outputs: each rank computes some heads, or some features       (query, expand)
    the second    by inputs: takes just those, and gives a part of a sum            (out, contract)

so nothing is sent between the two. Around a pair stand two operators, written g and f:

    g   after it     forward: all_reduce    backward: nothing
    f   before it    forward: nothing       backward: all_reduce

The layers and the loss are in tensor_parallel_layers.py; this file compares and counts.

Look at the shapes that a rank holds; at the collectives, two per block and direction; at the loss,
for which two numbers per token are sent instead of a logit per word.
"""

from collections.abc import Iterator

import torch.distributed as dist
from comparing import (
    as_it_is,
    check_arguments,
    differences,
    make_config,
    make_parser,
    norm_of,
    print_differences,
    train,
)
from counting import CountCollectives, print_collectives
from model import GPT, GPTConfig, cross_entropy, initialize
from parallelize import apply_tensor_parallel
from runtime import Worker, distributed_worker
from tensor_parallel_layers import (
    cut_dim,
    cut_model,
    gradient_norm,
    vocab_parallel_cross_entropy,
    whole,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor.parallel import loss_parallel


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    config = make_config(args, worker.world_size)
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    # Each rank begins with the same whole model. (Too large for that? See parallelize.py.)
    one, ours, theirs = (initialize(GPT(config).to(worker.device), args.seed) for _ in range(3))
    cut_model(ours)
    apply_tensor_parallel(theirs, mesh, loss_parallel=True)

    count = CountCollectives(ours)
    common = (args, worker.device)
    expected = train(one, cross_entropy, norm_of, as_it_is, *common)
    steps = train(ours, vocab_parallel_cross_entropy, gradient_norm, whole, *common, count)
    with loss_parallel():
        torchs = train(theirs, cross_entropy, norm_of, as_it_is, *common)

    held = [None] * worker.world_size
    dist.all_gather_object(held, sum(p.numel() for p in ours.parameters()))
    if worker.is_main:
        print_parameters(one, ours, held)
        tokens = args.batch_size * args.length
        print(f"\none activation, (B, T, C): {4 * tokens * args.dim:,} bytes")
        print_collectives(count, formula(config, tokens, worker.world_size))
        print(f"the logits, {4 * tokens * args.vocab_size:,} bytes, are nowhere whole")
        print(f"\n{args.steps} steps with {args.optimizer}, by hand against the others")
        rows = {"to one process": differences(steps, expected)}
        rows["to parallelize_module"] = differences(steps, torchs)
        print_differences(rows)


def print_parameters(one: GPT, ours: GPT, held: list[int]) -> None:
    print(f"\n{'parameter':30}{'whole':>12}{'on rank 0':>14}   cut")
    small = dict(ours.named_parameters())
    for name, parameter in one.named_parameters():
        if not name.startswith("blocks.") or name.startswith("blocks.0."):  # the others are alike
            cut = {None: "", 0: "dim 0", 1: "dim 1"}[cut_dim(name)]
            shapes = [str(tuple(p.shape)) for p in (parameter, small[name])]
            print(f"{name:30}{shapes[0]:>12}{shapes[1]:>14}   {cut}".rstrip())
    total = sum(p.numel() for p in one.parameters())
    print(f"of {total:,} numbers each rank holds " + ", ".join(f"{n:,}" for n in held))


def formula(config: GPTConfig, tokens: int, ranks: int) -> Iterator[tuple[str, str, str, int, int]]:
    """(phase, kind of layer, operation, calls, bytes of the whole tensor of each), for one step."""
    activation = 4 * tokens * config.dim  # (B, T, C) in float32
    yield "forward", "token_embedding", "all_reduce", 1, activation
    for phase in ("forward", "backward"):
        for kind in ("attention", "mlp"):
            yield phase, kind, "all_reduce", config.layers, activation
    yield "backward", "head", "all_reduce", 1, activation
    yield "forward", "outside", "all_gather", 1, ranks * 2 * 4 * tokens  # the loss


def parse_args():
    parser = make_parser("Tensor parallelism by hand, next to torch's and to one process.")
    parser.add_argument("--tied", action="store_true", help="the head uses the embedding's weight")
    return check_arguments(parser)


if __name__ == "__main__":
    main()
