"""Hybrid sharding (HSDP): shard inside a node, replicate across nodes, and count both traffics.

    torchrun --standalone --nproc_per_node=4 fsdp_basics/hybrid_sharding.py
    torchrun --standalone --nproc_per_node=4 fsdp_basics/hybrid_sharding.py --replicate 4 --shard 1
    torchrun --nnodes=2 --nproc_per_node=8 ... fsdp_basics/hybrid_sharding.py      # on each node
    python fsdp_basics/hybrid_sharding.py

The ranks form a mesh. A row is a node with fast links (on one machine, it only stands for a node):

                    shard ->
    node 0          rank 0   rank 1       each row holds the full model, one shard per rank
    node 1          rank 2   rank 3       each column holds copies of one shard

Each row all-gathers parameters and reduce-scatters gradients. Then each column averages the
gradients of its shard with an all_reduce. The price is memory: a rank holds 1 / (ranks of a node)
of the model, not 1 / (all ranks).

Look at the groups and bytes of each collective (counted, next to the formula), and at the bytes
that leave a node. The all_gathers, for which the computation waits, stay inside a node.
"""

import math
import os
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from data import load_dataset
from differences import full_tensor, largest_differences, local_tensor
from model import VisionTransformer
from runtime import Worker, distributed_worker
from sharding import shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils._python_dispatch import TorchDispatchMode  # sees what C++ and Python code call


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if args.batch_size % worker.world_size:
            raise UserError(
                f"--batch-size {args.batch_size} does not divide over {worker.world_size} rank(s)"
            )
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    rows, columns = mesh_shape(args.replicate, args.shard, worker.world_size)
    device = worker.device.type
    meshes = {
        "one process": None,  # every rank trains on the full global batch
        "full": init_device_mesh(device, (worker.world_size,)),
        "hybrid": init_device_mesh(device, (rows, columns), mesh_dim_names=("replicate", "shard")),
    }
    images, labels = (t.to(worker.device) for t in load_dataset("digits")[0].tensors)
    steps, traffic, held = {}, {}, {}
    for name, mesh in meshes.items():
        torch.manual_seed(args.seed)
        model = VisionTransformer(dim=args.dim, depth=args.depth).to(worker.device)
        shapes = shapes_of_units(model)
        if mesh is not None:
            shard(model, mesh)
        steps[name], traffic[name] = train(model, images, labels, args, worker, mesh is None)
        held[name] = sum(local_tensor(p).nbytes for p in model.parameters())

    max_diffs = torch.zeros(2, 3, dtype=torch.float64, device=worker.device)
    for i, name in enumerate(("full", "hybrid")):
        for step, expected in zip(steps[name], steps["one process"], strict=True):
            differences = torch.tensor(largest_differences(step, expected), device=worker.device)
            max_diffs[i] = torch.maximum(max_diffs[i], differences)
    dist.all_reduce(max_diffs, op=dist.ReduceOp.MAX)  # the largest difference on any rank
    if worker.is_main:
        for i, row in enumerate(meshes["hybrid"].mesh.tolist()):
            print(f"node {i} (row {i} of the mesh): ranks {' '.join(map(str, row))}")
        print_differences(dict(zip(("full", "hybrid"), max_diffs.tolist(), strict=True)), held)
        formulas = {"full": formula(shapes, worker.world_size), "hybrid": formula(shapes, columns)}
        sent = print_traffic(traffic, formulas, columns)
        print_summary(sent, columns)


def shapes_of_units(model: VisionTransformer) -> list[list[torch.Size]]:
    """The shapes of the parameters of each block, and last those of the full model."""
    return [[p.shape for p in module.parameters()] for module in (*model.blocks, model)]


def print_differences(max_diffs: dict[str, list[float]], held: dict[str, int]) -> None:
    print("\nlargest difference from one process  loss    gradient   parameter", end="")
    print("   bytes held by rank 0")
    for name, row in max_diffs.items():
        print(f"{name:31}" + "".join(f"{x:12.1e}" for x in row) + f"{held[name]:23,}")


def print_traffic(traffic: dict, formulas: dict, columns: int) -> dict[tuple[str, bool], int]:
    """Returns (sharding, does the group span nodes?) -> bytes that a rank sends."""
    print("\none step, rank 0; bytes of the whole tensors, counted and by formula")
    print("sharding  collective      group               calls", end="")
    print("     counted   formula  sent by a rank")
    sent = Counter()
    for name, expected in formulas.items():
        for (collective, ranks), (calls, full_size) in traffic[name].items():
            spans_nodes = len({rank // columns for rank in ranks}) > 1
            by_rank = round(FACTORS[collective](len(ranks)) * full_size)
            sent[name, spans_nodes] += by_rank
            where = f"{'across' if spans_nodes else 'in node'}: {' '.join(map(str, ranks))}"
            print(
                f"{name:10}{collective:16}{where:19}{calls:6}{full_size:12,}"
                f"{expected[collective]:10,}{by_rank:16,}"
            )
    return sent


def mesh_shape(rows: int | None, columns: int | None, ranks: int) -> tuple[int, int]:
    """(rows, columns) of the mesh; a size that is None follows from the number of ranks.

    If both are None: one row per node; on one node two rows, if each has two ranks or more.
    """
    if rows is None and columns is None:
        rows = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # nodes
        if rows == 1 and ranks > 2 and ranks % 2 == 0:
            rows = 2
    if rows is None:
        rows = ranks // columns
    if columns is None:
        columns = ranks // rows
    if rows * columns != ranks:
        raise UserError(
            f"--replicate {rows} times --shard {columns} is {rows * columns}, but this job "
            f"has {ranks} rank(s)"
        )
    return rows, columns


def train(model, images, labels, args, worker: Worker, takes_all: bool):
    """Returns ([per step {name: tensor}], {(collective, ranks): [calls, bytes]} of the last step).

    takes_all: this rank trains on the full global batch, not on its local batch.
    """
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    generator = torch.Generator().manual_seed(args.seed)
    steps = []
    for _ in range(args.steps):
        batch = torch.randint(len(images), (args.batch_size,), generator=generator)
        indices = batch if takes_all else batch[worker.rank :: worker.world_size]
        with CountByGroup() as counter:
            loss = F.cross_entropy(model(images[indices]), labels[indices])
            loss.backward()
        loss = loss.detach()
        if not takes_all:
            loss /= worker.world_size
            dist.all_reduce(loss)
        step = {"loss": loss}
        for name, p in model.named_parameters():
            step[f"gradient {name}"] = full_tensor(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            step[f"parameter {name}"] = full_tensor(p)
        steps.append(step)
    return steps, counter.traffic


class CountByGroup(TorchDispatchMode):
    """Counts the collectives called inside a `with` block, by name and by the ranks of the group.

    traffic: (name, ranks) -> [calls, bytes]. The bytes are those of the full tensor: the output of
    an all_gather, the input of a reduce_scatter or an all_reduce.
    """

    def __init__(self):
        super().__init__()
        self.traffic = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = NAMES.get(function.overloadpacket.__name__)
        if function.namespace == "c10d" and name:
            group = next(x for x in args if isinstance(x, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            entry = self.traffic.setdefault((name, ranks), [0, 0])
            entry[0] += 1
            entry[1] += max(largest_bytes(argument) for argument in args[:2])
        return function(*args, **(kwargs or {}))


def largest_bytes(argument) -> int:
    """Bytes of a tensor, or of the largest tensor in a list."""
    tensors = argument if isinstance(argument, list) else [argument]
    return max((t.nbytes for t in tensors if isinstance(t, torch.Tensor)), default=0)


NAMES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}
# The least that each of n ranks must send, if only ranks add: a fraction of the full tensor.
FACTORS = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}


def formula(shapes: list[list[torch.Size]], columns: int) -> dict[str, int]:
    """Bytes of the full tensors in one step, float32.

    shapes: see `shapes_of_units`. Each parameter is sharded along its first dim, which is padded
    to a multiple of `columns`, the ranks of a shard group.
    """
    *blocks, everything = (sum(padded_bytes(shape, columns) for shape in unit) for unit in shapes)
    return {
        # Backward gathers the blocks again; the root stays gathered from forward to backward.
        "all_gather": everything + sum(blocks),
        "reduce_scatter": everything,
        "all_reduce": everything // columns,  # the shards of one rank
    }


def padded_bytes(shape: torch.Size, columns: int) -> int:
    rows = math.ceil(shape[0] / columns) * columns
    return 4 * rows * shape[1:].numel()


def print_summary(sent: dict[tuple[str, bool], int], columns: int) -> None:
    """sent: (sharding, does the group span nodes?) -> bytes that a rank sends."""
    full_across, hybrid_across = sent["full", True], sent["hybrid", True]
    print(f"\nfull sharding: a rank sends {full_across:,} bytes in a group that spans the nodes")
    inside = sent["hybrid", False]
    print(f"hybrid:        {hybrid_across:,} bytes in such a group, {inside:,} inside its node")
    # A ring in rank order leaves each node once. Full sharding is one ring over all ranks; hybrid
    # has one ring per column of the mesh, and a node is part of each.
    leaving = columns * hybrid_across
    print(f"with rings, out of a node: {full_across:,} bytes (full), {leaving:,} bytes (hybrid)")


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3),
}


def parse_args():
    parser = ArgumentParser(description="Hybrid sharding: which traffic stays inside the node?")
    add = parser.add_argument
    add("--replicate", type=at_least(1), help="rows of the mesh (default: nodes; on one node 2)")
    add("--shard", type=at_least(1), help="columns of the mesh (default: ranks / rows)")
    add("--steps", type=at_least(1), default=3, help="optimizer steps")
    add("--batch-size", type=at_least(1), default=48, help="images per step, over all ranks")
    add("--dim", type=at_least(4), default=64, help="width of the model, a multiple of 4")
    add("--depth", type=at_least(1), default=4, help="transformer blocks")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer of all runs")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.dim % 4:
        parser.error(f"--dim must be a multiple of 4, not {args.dim}")
    return args


if __name__ == "__main__":
    main()
