"""Pipeline, data and tensor parallelism at once: eight ranks on a mesh of 2 x 2 x 2.

    torchrun --standalone --nproc_per_node=8 transformer_basics/three_dimensions.py
    torchrun --standalone --nproc_per_node=4 transformer_basics/three_dimensions.py --dp-shard 1

Look at the table: every rank has a coordinate on each axis, and these determine its part of the
model. pp chooses the layers, tp the shard of each layer, dp_shard the rows of that shard. Ranks
with different dp_shard train on different data. Then look at the calls and bytes on each axis. The
last axis communicates most, and its ranks are neighbours. The losses, gradients and parameters are
those of one process.
"""

import torch.distributed as dist
from arguments import UserError, at_least
from comparing import differences, make_config, make_parser, print_differences
from comparing_meshes import one_process, train_on_mesh
from config import Settings
from model import GPT, initialize
from parallelize import spread_model
from runtime import Worker, distributed_worker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record

DIMENSIONS = {
    "pp": "hidden states to the next stage, their gradients back",
    "dp_shard": "parameters gathered, gradients reduced",
    "tp": "sums of activations inside each layer",
}


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    config = make_config(args, args.tp)
    check(args, worker)
    expected = one_process(config, args, worker)
    sizes = {axis: getattr(args, axis) for axis in DIMENSIONS}
    settings = Settings(
        **sizes, dp_replicate=1, loss_parallel=args.tp > 1, accumulate=args.pp, clip=0
    )
    # One mesh: each technique shards the result of the previous one over its own axis.
    mesh, model, pipeline = spread_model(config, settings, worker.device)
    initialize(model, args.seed)
    steps, sent = train_on_mesh(model, pipeline, mesh, settings, args)
    traffic = {axis: sent.over(axis) for axis in DIMENSIONS}
    rows = [None] * worker.world_size
    dist.all_gather_object(rows, (coordinates(mesh), contents(model), traffic))
    if worker.is_main:
        print(f"\nrank   {'   '.join(sizes)}   {'stage':32}{'numbers held':>14}")
        for rank, (coordinate, (layers, held), _) in enumerate(rows):
            cells = [f"{n:>{len(axis)}}" for axis, n in zip(sizes, coordinate, strict=True)]
            print(f"{rank:4}   {'   '.join(cells)}   {layers:32}{held:14,}")
        total = sum(steps[-1][name].numel() for name in steps[-1] if name.startswith("parameter"))
        all_held = sum(held for _, (_, held), _ in rows)
        print(
            f"The model has {total:,}, all ranks hold {all_held:,}: "
            "norms, positions, some biases are whole on all of tp."
        )
        print("\nin one step, rank 0      calls  bytes sent")
        for axis, (calls, nbytes) in rows[0][2].items():
            print(f"{axis:10}group of {sizes[axis]}{calls:10}{nbytes:12,}   {DIMENSIONS[axis]}")
        print(f"\n{args.steps} steps with {args.optimizer}, against one process")
        print_differences({" x ".join(map(str, sizes.values())): differences(steps, expected)})


def check(args, worker: Worker) -> None:
    """Raises `UserError` for a mesh that does not fit, on all ranks before any of them waits."""
    size = args.pp * args.dp_shard * args.tp
    if size != worker.world_size:
        raise UserError(
            f"--pp {args.pp} x --dp-shard {args.dp_shard} x --tp {args.tp} do not multiply to the "
            f"{worker.world_size} rank(s) of this job"
        )
    if args.layers < args.pp:
        raise UserError(f"--layers {args.layers} are too few for --pp {args.pp} stages")
    if args.batch_size % (args.dp_shard * args.pp):
        raise UserError(
            f"--batch-size {args.batch_size} does not divide by {args.dp_shard * args.pp}: "
            "--dp-shard x one micro-batch per stage"
        )


def coordinates(mesh: DeviceMesh) -> list[int]:
    return [mesh[axis].get_local_rank() for axis in DIMENSIONS]


def contents(model: GPT) -> tuple[str, int]:
    """The layers of this rank's stage, and how many of their numbers the rank holds."""
    parts = ["embeddings"] * model.is_first + [f"block {i}" for i in model.blocks]
    parts += ["norm, head"] * model.is_last
    return ", ".join(parts), sum(p.to_local().numel() for p in model.parameters())


def parse_args():
    parser = make_parser("Pipeline, data and tensor parallelism at once.")
    parser.set_defaults(batch_size=8)
    for axis in DIMENSIONS:
        flag = f"--{axis.replace('_', '-')}"
        parser.add_argument(flag, type=at_least(1), default=2, help="ranks along this mesh axis")
    return parser.parse_args()


if __name__ == "__main__":
    main()
