"""Tensor parallelism with torch's parallelize_module, layer by layer, counted and compared.

    python parallel_basics/tensor_parallel.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/tensor_parallel.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/tensor_parallel.py --optimizer sgd

parallelize.py has the plan: a style for each layer. A style does three things to a layer: it cuts
the parameters into DTensors, it brings the input into the layout that the layer wants, and it gives
the output the layout that the next one wants. Most changes of layout are collectives.
tensor_parallel_from_scratch.py does the same with plain tensors.

Look at

1. the placements: Shard(0) of a weight leaves a rank some outputs, Shard(1) takes some inputs;
2. the collectives: one at the end of each pair in forward, one at its start in backward;
3. what gathering the logits costs, and loss_parallel does not;
4. what a rank sends: it grows with the tokens. Data parallelism's grows with the parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

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
from counting import CountCollectives, layers_of, print_collectives, ring_bytes
from model import GPT, GPTConfig, cross_entropy, initialize
from parallelize import apply_tensor_parallel
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    ranks = worker.world_size
    config = make_config(args, ranks)
    one = initialize(GPT(config).to(worker.device), args.seed)
    expected = train(one, cross_entropy, norm_of, as_it_is, args, worker.device)
    sent, worst = {}, {}
    for title, cut_logits in (("logits gathered", False), ("loss_parallel", True)):
        model, steps, count = run(config, args, worker, cut_logits=cut_logits)
        sent[title], worst[title] = count.sent(ranks), differences(steps, expected)
    held = [None] * ranks
    dist.all_gather_object(held, sum(local(p).numel() for p in model.parameters()))
    if worker.is_main:
        total = sum(p.numel() for p in one.parameters())
        print_layers(model)
        print(f"of {total:,} numbers each rank holds " + ", ".join(f"{n:,}" for n in held))
        if ranks > 1:  # alone, DTensors have nothing to send
            tokens = args.batch_size * args.length
            print_collectives(count, formula(config, tokens, cut_logits=True))
        # Data parallelism sends the gradients, whatever the number of tokens.
        sent["data parallelism"] = round(ring_bytes("all_reduce", 4 * total, ranks))
        print("\nbytes that a rank sends in a step")
        for title, nbytes in sent.items():
            print(f"{title:21}{nbytes:11,}")
        print(f"\n{args.steps} steps with {args.optimizer}, against one process")
        print_differences(worst)


def run(
    config: GPTConfig,
    args,
    worker: Worker,
    sequence_parallel: bool = False,
    cut_logits: bool = True,
    finish: Callable[[GPT], None] | None = None,
) -> tuple[GPT, list[dict], CountCollectives]:
    """The cut model, what its training gave, and the collectives of the last step.

    finish: is called after backward, before the optimizer's step.
    """
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    model = GPT(config).to(worker.device)
    apply_tensor_parallel(model, mesh, sequence_parallel, loss_parallel=cut_logits)
    initialize(model, args.seed)  # after the cut: each rank keeps its part of the same numbers
    count = CountCollectives(model)
    # In this context cross_entropy and its backward work on logits that are cut by words.
    with loss_parallel() if cut_logits else nullcontext():
        steps = train(model, cross_entropy, norm_of, as_it_is, args, worker.device, count, finish)
    return model, steps, count


def formula(
    config: GPTConfig, tokens: int, cut_logits: bool
) -> Iterator[tuple[str, str, str, int, int]]:
    """(phase, kind of layer, operation, calls, bytes of the whole tensor of each), for one step."""
    activation = 4 * tokens * config.dim  # (B, T, C) in float32
    yield "forward", "token_embedding", "all_reduce", 1, activation
    for phase in ("forward", "backward"):
        for kind in ("attention", "mlp"):
            yield phase, kind, "all_reduce", config.layers, activation
    yield "backward", "head", "all_reduce", 1, activation
    if cut_logits:  # the loss: the largest logit, the sum of exp, the target's logit of each token
        yield "forward", "outside", "all_reduce", 3, 4 * tokens
    else:
        yield "forward", "head", "all_gather", 1, 4 * tokens * config.vocab_size


def print_layers(model: GPT) -> None:
    """One line per layer: how its weight lies on the mesh, and what of it is here."""
    print(f"\n{'weight of':28}{'placement':13}{'whole':>12}{'on rank 0':>13}")
    for name, layer in layers_of(model):
        if name.startswith("blocks.") and not name.startswith("blocks.0."):
            continue  # like block 0
        inner = [(f"{name}.{child}", module) for child, module in layer.named_children()]
        for title, module in inner or [(name, layer)]:
            weight, placement = module.weight, "-"
            if isinstance(weight, DTensor):
                (kind,) = weight.placements
                placement = f"Shard({kind.dim})" if kind.is_shard() else type(kind).__name__
            shapes = [str(tuple(t.shape)) for t in (weight, local(weight))]
            print(f"{title:28}{placement:13}{shapes[0]:>12}{shapes[1]:>13}")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parse_args():
    return check_arguments(make_parser("Tensor parallelism with DTensors, layer by layer."))


if __name__ == "__main__":
    main()
