"""Pipeline, data and tensor parallelism at once: eight ranks on a mesh of 2 x 2 x 2.

    torchrun --standalone --nproc_per_node=8 transformer_basics/three_dimensions.py
    torchrun --standalone --nproc_per_node=4 transformer_basics/three_dimensions.py --dp-shard 1

Look at the table: every rank has a coordinate on each axis, and with it a part of the model. The
stage says which layers, tp which part of each, dp_shard which rows of that part. Ranks that differ
in dp_shard only train on different data. Then look at what is sent on each axis, and how often: the
axis that communicates most is the last one, whose ranks are neighbours. The losses, gradients and
parameters are those of one process.
"""

import torch.distributed as dist
from arguments import UserError
from comparing import check_arguments, differences, make_config, make_parser, print_differences
from runtime import Worker, distributed_worker
from torch.distributed.elastic.multiprocessing.errors import record
from tp_fsdp import CountByAxis, one_process, run

AXES = {
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
    axes = {axis: getattr(args, axis) for axis in AXES}
    config = make_config(args, args.tp)
    check(args, worker)
    expected = one_process(config, args, worker)
    model, steps, sent = run(config, args, worker, **axes)
    rows = [None] * worker.world_size
    dist.all_gather_object(rows, (place(sent.mesh), contents(model), traffic(sent)))
    if worker.is_main:
        print(f"\nrank   {'   '.join(axes)}   {'stage':32}{'numbers held':>14}")
        for rank, (where, (layers, held), _) in enumerate(rows):
            cells = "   ".join(f"{n:>{len(axis)}}" for axis, n in zip(axes, where, strict=True))
            print(f"{rank:4}   {cells}   {layers:32}{held:14,}")
        total = sum(steps[-1][name].numel() for name in steps[-1] if name.startswith("parameter"))
        all_held = sum(held for _, (_, held), _ in rows)
        print(
            f"The model has {total:,}, all ranks hold {all_held:,}: norms are whole on all of tp."
        )
        print("\nin one step, rank 0      calls  bytes sent")
        for axis, (calls, nbytes) in rows[0][2].items():
            print(f"{axis:10}group of {axes[axis]}{calls:10}{nbytes:12,}   {AXES[axis]}")
        print(f"\n{args.steps} steps with {args.optimizer}, against one process")
        print_differences({" x ".join(map(str, axes.values())): differences(steps, expected)})


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


def place(mesh) -> list[int]:
    return [mesh[axis].get_local_rank() for axis in AXES]


def contents(model) -> tuple[str, int]:
    """What the stage of this rank computes, and how many numbers of it the rank holds."""
    parts = ["embeddings"] * model.is_first + [f"block {i}" for i in model.blocks]
    parts += ["norm, head"] * model.is_last
    return ", ".join(parts), sum(p.to_local().numel() for p in model.parameters())


def traffic(sent: CountByAxis) -> dict[str, tuple[int, int]]:
    return {axis: sent.over(axis) for axis in AXES}


def parse_args():
    parser = make_parser("Pipeline, data and tensor parallelism at once.")
    parser.set_defaults(batch_size=8)
    for axis in AXES:
        parser.add_argument("--" + axis.replace("_", "-"), type=int, default=2)
    args = check_arguments(parser)
    for axis in AXES:
        if getattr(args, axis) < 1:
            parser.error(
                f"--{axis.replace('_', '-')} must be at least 1, not {getattr(args, axis)}"
            )
    return args


if __name__ == "__main__":
    main()
