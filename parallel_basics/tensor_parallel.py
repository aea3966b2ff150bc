"""Tensor parallelism with torch's parallelize_module: one style per layer, collectives counted.

    python parallel_basics/tensor_parallel.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/tensor_parallel.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/tensor_parallel.py --optimizer sgd

A style does three things to a layer: it shards the parameters into DTensors, it redistributes the
input to the layout that the layer needs, and the output to the layout that the next layer needs.
Most changes of layout are collectives. tensor_parallel_from_scratch.py does this with plain
tensors.

Look at

1. the placements: Shard(0) of a weight is column-parallel, Shard(1) is row-parallel;
2. the collectives: one at the end of each pair of layers in forward, one at its start in backward;
3. the cost of gathering the logits, which loss_parallel avoids;
4. the bytes sent: they grow with the tokens. Those of data parallelism grow with the parameters.
"""

from collections.abc import Iterator
from contextlib import nullcontext

from compare_tensor_parallel import (
    numbers_held,
    one_process,
    print_held,
    print_layers,
    print_sent,
)
from comparing import (
    as_it_is,
    differences,
    make_config,
    make_parser,
    norm_of,
    print_differences,
    train,
)
from counting import CountCollectives, print_collectives, ring_bytes
from model import GPT, GPTConfig, cross_entropy, initialize
from runtime import Worker, distributed_worker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def apply_tensor_parallel(model: GPT, mesh: DeviceMesh, cut_logits: bool = True) -> GPT:
    """Shard the layers of `model` over the one axis of `mesh`; change and return `model`.

    Layers are sharded in pairs: the first is column-parallel, so each rank computes some of the
    features; the second is row-parallel, so each rank uses just its own features and returns a
    summand (Shoeybi et al., Megatron-LM, arXiv 1909.08053). So a block costs two all_reduces in
    forward, and two in backward.

    cut_logits: leave the logits sharded by vocabulary, as a DTensor. Compute the loss, and call its
        backward, inside `torch.distributed.tensor.parallel.loss_parallel()`.
    Raises ValueError for a Llama, and for query and key norms.
    """
    if model.config.is_llama or model.config.qk_norm:
        raise ValueError("this is GPT-2's plan: transformer_basics/parallelize.py has a Llama's")
    # The rows of the table are words. A rank looks up the words that it has, and takes 0 for all
    # other words. The sum over the ranks is the embedding.
    plan = {"token_embedding": RowwiseParallel(input_layouts=Replicate())}

    # Every rank has the same input. This style is on the module, not on query, key and value: in
    # backward a rank adds their three gradients, and one all_reduce sums them over the ranks.
    same_input = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    for i in model.blocks:
        plan |= {
            f"blocks.{i}.attention": same_input,
            f"blocks.{i}.attention.query": ColwiseParallel(),  # some of the heads
            f"blocks.{i}.attention.key": ColwiseParallel(),
            f"blocks.{i}.attention.value": ColwiseParallel(),
            f"blocks.{i}.attention.out": RowwiseParallel(),  # takes those heads; all_reduce
            f"blocks.{i}.mlp": same_input,
            f"blocks.{i}.mlp.expand": ColwiseParallel(),  # some of the features
            f"blocks.{i}.mlp.contract": RowwiseParallel(),  # takes those features; all_reduce
        }
    # Each rank computes the logits of some of the words.
    plan["head"] = ColwiseParallel(
        output_layouts=Shard(-1) if cut_logits else Replicate(), use_local_output=not cut_logits
    )
    parallelize_module(model, mesh, plan)
    model.tie()  # sharding has turned one tied weight into two parameters
    return model


def run(
    config: GPTConfig, args, worker: Worker, cut_logits: bool
) -> tuple[GPT, list[dict], CountCollectives]:
    """The sharded model, its training steps, and the collectives of the last step."""
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    model = apply_tensor_parallel(GPT(config).to(worker.device), mesh, cut_logits)
    initialize(model, args.seed)  # after sharding: each rank draws its shard of the same numbers
    count = CountCollectives(model)
    # In this context cross_entropy and its backward work on logits that are sharded by vocabulary.
    with loss_parallel() if cut_logits else nullcontext():
        steps = train(model, cross_entropy, norm_of, as_it_is, args, worker.device, count)
    return model, steps, count


def compare(args, worker: Worker) -> None:
    ranks = worker.world_size
    config = make_config(args, ranks)
    full_model, expected = one_process(config, args, worker)
    sent, max_diff = {}, {}
    for title, cut_logits in (("logits gathered", False), ("loss_parallel", True)):
        model, steps, count = run(config, args, worker, cut_logits)
        sent[title] = count.sent(ranks)
        max_diff[title] = differences(steps, expected)
    held = numbers_held(model)
    if worker.is_main:
        print_layers(model)
        print_held(full_model, held)
        if ranks > 1:  # on one rank, DTensors send nothing
            tokens = args.batch_size * args.length
            print_collectives(count, formula(config, tokens, cut_logits=True))
        # Data parallelism sends the gradients, which do not depend on the number of tokens.
        gradients = 4 * sum(p.numel() for p in full_model.parameters())
        sent["data parallelism"] = round(ring_bytes("all_reduce", gradients, ranks))
        print_sent(sent)
        print(f"\n{args.steps} steps with {args.optimizer}, compared with one process")
        print_differences(max_diff)


def formula(
    config: GPTConfig, tokens: int, cut_logits: bool
) -> Iterator[tuple[str, str, str, int, int]]:
    """(phase, kind of layer, operation, calls, bytes of the full tensor of each), for one step."""
    activation = 4 * tokens * config.dim  # (B, T, C) in float32
    yield "forward", "token_embedding", "all_reduce", 1, activation
    for phase in ("forward", "backward"):
        for kind in ("attention", "mlp"):
            yield phase, kind, "all_reduce", config.layers, activation
    yield "backward", "head", "all_reduce", 1, activation
    if cut_logits:  # the loss: the largest logit, the sum of exp, the target's log p of each token
        yield "forward", "outside", "all_reduce", 3, 4 * tokens
    else:
        yield "forward", "head", "all_gather", 1, 4 * tokens * config.vocab_size


def parse_args():
    return make_parser("Tensor parallelism with torch's styles, layer by layer.").parse_args()


if __name__ == "__main__":
    main()
