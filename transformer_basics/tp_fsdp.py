"""Tensor parallelism and FSDP on one two-dimensional mesh: what each axis holds and sends.

    torchrun --standalone --nproc_per_node=4 transformer_basics/tp_fsdp.py
    torchrun --standalone --nproc_per_node=2 transformer_basics/tp_fsdp.py
    torchrun --standalone --nproc_per_node=4 transformer_basics/tp_fsdp.py --batch-size 64

The same ranks are arranged as 4 x 1 (FSDP alone), 2 x 2, and 1 x 4 (tensor parallelism alone). All
take the same steps as one process. Look at

1. what a rank holds: nearly the same everywhere. What it has gathered at a time is not: FSDP alone
   gathers whole layers, on top of tensor parallelism it gathers whole parts of layers;
2. what a rank sends: FSDP's bytes grow with the parameters, tensor parallelism's with the tokens.
   Try --batch-size 64. Each FSDP group has fewer ranks and smaller layers when tp grows;
3. calls: tensor parallelism waits for each of them before it can go on. So its axis is the last one
   of the mesh, whose ranks are neighbours: inside a node, where links are fast.
"""

from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.distributed as dist
from arguments import UserError
from build import build_model, make_mesh
from comparing import (
    OPTIMIZERS,
    as_it_is,
    batches,
    check_arguments,
    differences,
    make_config,
    make_parser,
    norm_of,
    print_differences,
    train,
)
from counting import operation_of, ring_bytes, total_bytes
from generate import UNUSED
from model import GPT, GPTConfig, cross_entropy, initialize
from runtime import Worker, distributed_worker
from steps import all_sum, clip_gradients, data_parallel, train_step
from tensor_parallel import formula
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # sees the collectives of C++ code too


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
    rows, worst = [], {}
    for tp in [n for n in range(1, ranks + 1) if ranks % n == 0]:
        model, steps, sent = run(config, args, worker, dp_shard=ranks // tp, tp=tp)
        name = f"{ranks // tp} x {tp}"
        rows.append((name, *row(model, sent, args)))
        worst[name] = differences(steps, expected)
    if worker.is_main:
        print(f"\n{'':34}{'sent in a step over dp_shard':>30}{'over tp':>30}")
        counted = f"{'calls':>8}{'bytes':>11}{'formula':>11}"
        print(f"dp_shard x tp{'held':>10}{'gathered':>10}{counted}{counted}")
        for name, held, gathered, *both in rows:
            sent = "".join(f"{calls:8}{a:11,}{b:11,}" for calls, a, b in both)
            print(f"{name:13}{held:10,}{gathered:10,}{sent}")
        print(f"\n{args.steps} steps with {args.optimizer}, against one process")
        print_differences(worst)


def one_process(config: GPTConfig, args, worker: Worker) -> list[dict]:
    """Steps of the bare model on the whole batch, on every rank: what all meshes must equal."""
    model = initialize(GPT(config).to(worker.device), args.seed)
    return train(model, cross_entropy, norm_of, as_it_is, args, worker.device)


def run(config: GPTConfig, args, worker: Worker, **axes: int):
    """The same steps with train.py's own functions on the mesh with these axes.

    Returns this rank's part of the model, what `comparing.train` would return, and the collectives
    of the last step.
    """
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1} | axes
    more = {"loss_parallel": axes["tp"] > 1, "accumulate": axes["pp"], "clip": 0}
    settings = SimpleNamespace(**UNUSED | {"precision": "fp32", "seed": args.seed} | axes | more)
    mesh = make_mesh(settings, worker)
    model, stages = build_model(config, mesh, settings, worker)
    optimizer = make_optimizer(args.optimizer, model)
    (share, shares), steps, sent = data_parallel(mesh), [], CountByAxis(mesh)
    for i, (x_BT, y_BT) in enumerate(batches(args, worker.device)):
        x, y = x_BT[share::shares], y_BT[share::shares]
        with sent if i == args.steps - 1 else nullcontext():
            loss = train_step(model, stages, x, y, optimizer, mesh, settings)
        (loss,) = all_sum([loss / (shares * axes["tp"])], worker)
        step = {"loss": torch.tensor(loss), "norm": clip_gradients(model, torch.inf, mesh)}
        step |= of_all_stages("gradient of ", model, lambda p: p.grad, axes["pp"])
        if i == args.steps - 1:
            step |= of_all_stages("parameter ", model, torch.Tensor.detach, axes["pp"])
        steps.append({name: tensor.to(worker.device) for name, tensor in step.items()})
    return model, steps, sent


def make_optimizer(name: str, model: GPT) -> torch.optim.Optimizer:
    """One group of parameters for each mesh on which some of them lie."""
    by_mesh = {}
    for p in model.parameters():
        by_mesh.setdefault(p.device_mesh, []).append(p)
    return OPTIMIZERS[name]([{"params": ps} for ps in by_mesh.values()])


def of_all_stages(prefix: str, model: GPT, get, stages: int) -> dict[str, torch.Tensor]:
    """What `get` returns for each parameter of the whole model, whole."""
    found = {prefix + name: as_it_is("", get(p)) for name, p in model.named_parameters()}
    if stages > 1:
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, {name: t.cpu() for name, t in found.items()})
        found = {name: tensor for stage in everywhere for name, tensor in stage.items()}
    return found


class CountByAxis(TorchDispatchMode):
    """(axis, operation) -> calls of this rank in that group, bytes of the whole tensors."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.calls, self.nbytes, self.mesh = Counter(), Counter(), mesh
        self.axes = {mesh[axis].get_group().group_name: axis for axis in mesh.mesh_dim_names}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first: then come the collectives that it needs
        result = function(*args, **(kwargs or {}))
        is_send = function.namespace == "c10d" and function.overloadpacket.__name__ == "send"
        if operation := "send" if is_send else operation_of(function):
            key = self.axes.get(group_name(args), "all ranks"), operation
            self.calls[key] += 1
            self.nbytes[key] += max(map(total_bytes, (*args[:2], result)))
        return result

    def over(self, axis: str) -> tuple[int, int]:
        """Calls on this axis, and bytes that a rank sends if collectives go round in rings."""
        ranks, calls, sent = self.mesh[axis].size(), 0, 0.0
        for (where, operation), nbytes in self.nbytes.items():
            if where == axis and ranks > 1:
                calls += self.calls[where, operation]
                sent += nbytes if operation == "send" else ring_bytes(operation, nbytes, ranks)
        return calls, round(sent)


def group_name(args) -> str:
    """DTensor's collectives are given the group's name, dist's the group itself."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value).group_name
    return next(value for value in reversed(args) if isinstance(value, str))


def row(model: GPT, sent: CountByAxis, args) -> tuple:
    """Bytes held, bytes gathered at once, and for both axes what was counted and the formula."""
    mesh = sent.mesh
    shards, tp = mesh["dp_shard"].size(), mesh["tp"].size()
    held = sum(p.to_local().nbytes for p in model.parameters())
    units = [4 * sum(map(without_shards, b.parameters())) for b in model.blocks.values()]
    blocks, whole = sum(units), 4 * sum(map(without_shards, model.parameters()))
    root = whole - blocks
    # Blocks are gathered in forward and again in backward, the root once; all gradients reduced.
    dp = ring_bytes("all_gather", 2 * blocks + root, shards) + ring_bytes(
        "reduce_scatter", whole, shards
    )
    tokens = args.batch_size // shards * args.length
    rows = formula(model.config, tokens, cut_logits=True) if tp > 1 else []
    expected = sum(calls * ring_bytes(op, nbytes, tp) for _, _, op, calls, nbytes in rows)
    # While a block computes, the next one is gathered: two at a time.
    two = max(map(sum, pairwise([*units, 0])))
    gathered = root + two if shards > 1 else 0
    return held, gathered, (*sent.over("dp_shard"), round(dp)), (*sent.over("tp"), round(expected))


def without_shards(parameter: DTensor) -> int:
    """Numbers of a parameter on a rank while FSDP has gathered it: its tensor-parallel part."""
    mesh = parameter.device_mesh
    for axis, placement in zip(mesh.mesh_dim_names, parameter.placements, strict=True):
        if axis == "tp" and not placement.is_replicate():
            return parameter.numel() // mesh["tp"].size()
    return parameter.numel()


def parse_args():
    parser = make_parser("Tensor parallelism and FSDP on one mesh, counted and compared.")
    parser.set_defaults(batch_size=8)
    return check_arguments(parser)


if __name__ == "__main__":
    main()
