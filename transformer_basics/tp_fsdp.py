"""Tensor parallelism and FSDP on one two-dimensional mesh: what each axis holds and sends.

    torchrun --standalone --nproc_per_node=4 transformer_basics/tp_fsdp.py
    torchrun --standalone --nproc_per_node=2 transformer_basics/tp_fsdp.py
    torchrun --standalone --nproc_per_node=4 transformer_basics/tp_fsdp.py --batch-size 64

The ranks form meshes of 4 x 1 (FSDP alone), 2 x 2, and 1 x 4 (tensor parallelism alone). All meshes
take the same steps as one process. Look at

1. the bytes that a rank holds: nearly equal on all meshes. The bytes gathered at a time differ:
   FSDP alone gathers full layers; on top of tensor parallelism it gathers shards of layers;
2. the bytes that a rank sends: FSDP's grow with the parameters, tensor parallelism's with the
   tokens. Try --batch-size 64. With a larger tp, an FSDP group has fewer ranks and smaller layers;
3. the calls: tensor parallelism waits for each of them before it continues. So its axis is the last
   axis of the mesh, whose ranks are neighbours: inside a node, where links are fast.
"""

from itertools import pairwise

from arguments import UserError
from comparing import differences, make_config, make_parser, print_differences
from comparing_meshes import one_process, train_on_mesh
from config import Settings
from counting import ring_bytes
from counting_by_axis import CountByAxis
from model import GPT, GPTConfig, initialize
from parallelize import spread_model
from runtime import Worker, distributed_worker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    ranks = worker.world_size
    config = make_config(args, ranks)
    if args.batch_size % ranks:
        raise UserError(f"--batch-size {args.batch_size} does not divide over {ranks} ranks")
    expected = one_process(config, args, worker)
    rows, max_diffs = [], {}
    for tp in [n for n in range(1, ranks + 1) if ranks % n == 0]:
        dp_shard = ranks // tp
        settings = Settings(
            dp_replicate=1, dp_shard=dp_shard, tp=tp, loss_parallel=tp > 1, accumulate=1, clip=0
        )
        # One mesh with two axes: FSDP shards the tensor-parallel shards over its own axis.
        mesh, model, _ = spread_model(config, settings, worker.device)
        initialize(model, args.seed)
        steps, sent = train_on_mesh(model, None, mesh, settings, args)
        name = f"{dp_shard} x {tp}"
        rows.append((name, *row(model, mesh, sent, args)))
        max_diffs[name] = differences(steps, expected)
    if worker.is_main:
        print(f"\n{'':34}{'sent in a step over dp_shard':>30}{'over tp':>30}")
        counted = f"{'calls':>8}{'bytes':>11}{'formula':>11}"
        print(f"dp_shard x tp{'held':>10}{'gathered':>10}{counted}{counted}")
        for name, held, gathered, *both in rows:
            sent = "".join(f"{calls:8}{a:11,}{b:11,}" for calls, a, b in both)
            print(f"{name:13}{held:10,}{gathered:10,}{sent}")
        print(f"\n{args.steps} steps with {args.optimizer}, against one process")
        print_differences(max_diffs)


def row(model: GPT, mesh: DeviceMesh, sent: CountByAxis, args) -> tuple:
    """Bytes held, bytes gathered at a time, and for each axis calls, bytes and formula."""
    shards, tp = mesh["dp_shard"].size(), mesh["tp"].size()
    held = sum(p.to_local().nbytes for p in model.parameters())
    units = [[model.token_embedding, model.position_embedding]]
    units += [[block] for block in model.blocks.values()]
    units += [[model.norm, model.head]]
    sizes = [4 * sum(without_shards(p) for m in unit for p in m.parameters()) for unit in units]
    # Forward gathers all units, backward all but the last unit again; all gradients are reduced.
    dp_formula = ring_bytes("all_gather", 2 * sum(sizes) - sizes[-1], shards)
    dp_formula += ring_bytes("reduce_scatter", sum(sizes), shards)
    tp_formula = tp_bytes(model.config, args.batch_size // shards * args.length, tp)
    # While a unit computes, the next one is gathered: two at a time.
    gathered = max(map(sum, pairwise(sizes))) if shards > 1 else 0
    over_dp = (*sent.over("dp_shard"), round(dp_formula))
    return held, gathered, over_dp, (*sent.over("tp"), round(tp_formula))


def tp_bytes(config: GPTConfig, tokens: int, tp: int) -> float:
    """Bytes that a rank sends over tp in one step on `tokens` tokens of its own, in float32.

    It sums activations: for the embedding in forward, for the head in backward, and for each
    attention and each MLP in both. The loss sums three numbers for each token: the largest logit,
    the sum of the exponentials, the target's log-probability.
    """
    activation = 4 * tokens * config.dim  # (B, T, C)
    sums = (2 + 4 * config.layers) * activation + 3 * 4 * tokens
    return ring_bytes("all_reduce", sums, tp)


def without_shards(parameter: DTensor) -> int:
    """Numbers of a parameter on a rank while FSDP has gathered it: its tensor-parallel shard."""
    mesh = parameter.device_mesh
    for axis, placement in zip(mesh.mesh_dim_names, parameter.placements, strict=True):
        if axis == "tp" and not placement.is_replicate():
            return parameter.numel() // mesh["tp"].size()
    return parameter.numel()


def parse_args():
    parser = make_parser("Tensor parallelism and FSDP on one mesh, counted and compared.")
    parser.set_defaults(batch_size=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
