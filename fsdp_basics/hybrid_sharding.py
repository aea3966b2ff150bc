"""Hybrid sharding (HSDP): shard within a node, replicate across nodes. Which traffic goes where?

    torchrun --standalone --nproc_per_node=4 fsdp_basics/hybrid_sharding.py
    torchrun --standalone --nproc_per_node=4 fsdp_basics/hybrid_sharding.py --replicate 4 --shard 1
    torchrun --nnodes=2 --nproc_per_node=8 ... fsdp_basics/hybrid_sharding.py      # on each node
    python fsdp_basics/hybrid_sharding.py

The ranks form a mesh. A row is a node (on one machine we pretend so), with a fast network inside:

                    shard ->
    node 0          rank 0   rank 1       each row holds the whole model, a rank a part of it
    node 1          rank 2   rank 3       each column holds the same part on all of its ranks

Parameters are gathered, and gradients reduce-scattered, along a row. What a rank then has, the
gradient of its part, is averaged along its column by an all_reduce. The price is memory: a rank
holds 1 / (ranks of a node) of the model, not 1 / (all ranks).

Look at the groups and bytes of each collective (counted in the run, next to the formula), and at
what leaves a node. The all_gathers, on which the computation waits, never do.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, UserError
from data import load_dataset
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
    replicate, within = mesh_shape(args.replicate, args.shard, worker.world_size)
    device = worker.device.type
    meshes = {
        "one process": None,  # on every rank, with the whole global batch
        "full": init_device_mesh(device, (worker.world_size,)),
        "hybrid": init_device_mesh(
            device, (replicate, within), mesh_dim_names=("replicate", "shard")
        ),
    }
    images, labels = (t.to(worker.device) for t in load_dataset("digits")[0].tensors)
    results, counts, held = {}, {}, {}
    for name, mesh in meshes.items():
        torch.manual_seed(args.seed)
        model = VisionTransformer(dim=args.dim, depth=args.depth).to(worker.device)
        if mesh is not None:
            shard(model, mesh)
        results[name], counts[name] = train(model, images, labels, args, worker, mesh is None)
        held[name] = sum(local(p).nbytes for p in model.parameters())
        if name == "one process":
            units = [*model.blocks, model]
            sizes = [[tuple(p.shape) for p in unit.parameters()] for unit in units]
    worst = [differences(results[name], results["one process"]) for name in ("full", "hybrid")]
    worst = torch.tensor(worst, dtype=torch.float64, device=worker.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # the rank that is furthest off counts
    if not worker.is_main:
        return

    for i, row in enumerate(meshes["hybrid"].mesh.tolist()):
        print(f"node {i} (row {i} of the mesh): ranks {' '.join(map(str, row))}")
    print(
        "\nlargest difference to one process    loss    gradient   parameter   bytes held by rank 0"
    )
    for name, row in zip(("full", "hybrid"), worst.tolist(), strict=True):
        print(f"{name:31}" + "".join(f"{x:12.1e}" for x in row) + f"{held[name]:23,}")
    print("\none step, rank 0; bytes of the whole tensors, counted and by formula")
    print(
        "sharding  collective      group               calls     counted   formula  sent by a rank"
    )
    sent = {}
    for name, size in (("full", worker.world_size), ("hybrid", within)):
        wanted = formula(sizes, size)
        for (collective, ranks), (calls, whole) in counts[name].items():
            spans = len({rank // within for rank in ranks}) > 1
            part = round(FACTORS[collective](len(ranks)) * whole)
            sent[name, spans] = sent.get((name, spans), 0) + part
            where = f"{'across' if spans else 'in node'}: {' '.join(map(str, ranks))}"
            print(
                f"{name:10}{collective:16}{where:19}{calls:6}{whole:12,}"
                f"{wanted[collective]:10,}{part:16,}"
            )
    print_summary(sent, within)


def mesh_shape(replicate: int | None, within: int | None, ranks: int) -> tuple[int, int]:
    """(rows, columns) of the mesh; what is not asked for follows from the number of ranks.

    Without any wish: a row per node; on one node two rows, if each then has two ranks or more.
    """
    if replicate is None and within is None:
        nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        replicate = nodes if nodes > 1 else 2 if ranks > 2 and ranks % 2 == 0 else 1
    replicate = replicate or ranks // within
    within = within or ranks // replicate
    if replicate * within != ranks:
        raise UserError(
            f"--replicate {replicate} times --shard {within} is {replicate * within}, but this job "
            f"has {ranks} rank(s)"
        )
    return replicate, within


def train(model, images, labels, args, worker: Worker, whole_batch: bool):
    """Returns ([per step {name: tensor}], {(collective, ranks): [calls, bytes]} of the last)."""
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    generator = torch.Generator().manual_seed(args.seed)
    steps = []
    for _ in range(args.steps):
        batch = torch.randint(len(images), (args.batch_size,), generator=generator)
        part = batch if whole_batch else batch[worker.rank :: worker.world_size]
        with CountByGroup() as counter:
            loss = F.cross_entropy(model(images[part]), labels[part])
            loss.backward()
        steps.append({"loss": loss.detach()})
        if not whole_batch:
            dist.all_reduce(steps[-1]["loss"].div_(worker.world_size))
        named = list(model.named_parameters())
        steps[-1] |= {f"gradient of {name}": full(p.grad) for name, p in named}
        optimizer.step()
        optimizer.zero_grad()
        steps[-1] |= {f"parameter {name}": full(p.detach()) for name, p in named}
    return steps, counter.found


class CountByGroup(TorchDispatchMode):
    """Counts the collectives called inside a `with` block, by name and by the ranks of the group.

    found: (name, ranks) -> [calls, bytes]. The bytes are those of the whole tensor: what an
    all_gather returns, what a reduce_scatter or an all_reduce is given.
    """

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = NAMES.get(function.overloadpacket.__name__)
        if function.namespace == "c10d" and name:
            group = next(x for x in args if isinstance(x, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            tensors = [t for x in args[:2] for t in (x if isinstance(x, list) else [x])]
            entry = self.found.setdefault((name, ranks), [0, 0])
            entry[0] += 1
            entry[1] += max(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return function(*args, **(kwargs or {}))


NAMES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}
# What each of n ranks must send at least, as a share of the whole tensor.
FACTORS = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}


def formula(sizes: list[list[tuple]], within: int) -> dict[str, int]:
    """Bytes of the whole tensors in one step, float32.

    sizes: the parameters' shapes of each block, and last of the whole model. Each parameter is cut
    along its first dim, which is padded to a multiple of `within`, the ranks of a shard group.
    """
    *blocks, everything = (
        sum(4 * -(-shape[0] // within) * within * torch.Size(shape[1:]).numel() for shape in shapes)
        for shapes in sizes
    )
    return {
        # The blocks once more for backward; the root is kept from forward to backward.
        "all_gather": everything + sum(blocks),
        "reduce_scatter": everything,
        "all_reduce": everything // within,  # of what a rank holds
    }


def print_summary(sent: dict, within: int) -> None:
    across, hybrid = (sent.get((name, True), 0) for name in ("full", "hybrid"))
    inside = sent.get(("hybrid", False), 0)
    print(f"\nfull sharding: a rank sends {across:,} bytes in a group that spans the nodes")
    print(f"hybrid:        {hybrid:,} bytes in such a group, {inside:,} inside its node")
    # A ring in rank order leaves each node once. Full sharding is one ring over all ranks; hybrid
    # has one ring per column of the mesh, and a node is part of each.
    print(f"with rings, out of a node: {across:,} bytes (full), {within * hybrid:,} bytes (hybrid)")


def differences(steps: list[dict], reference: list[dict]) -> list[float]:
    """Largest difference of the loss, of any gradient, of any parameter, in any step."""
    worst = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    for ours, expected in zip(steps, reference, strict=True):
        for key, value in expected.items():
            kind = key.split()[0]
            worst[kind] = max(worst[kind], (ours[key] - value).abs().max().item())
    return list(worst.values())


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3),
}


def parse_args():
    parser = ArgumentParser(description="Hybrid sharding: which traffic stays inside the node?")
    parser.add_argument(
        "--replicate", type=int, help="rows of the mesh: nodes (default: see above)"
    )
    parser.add_argument("--shard", type=int, help="columns of the mesh: ranks of a node")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48, help="images, over all ranks")
    parser.add_argument("--dim", type=int, default=64, help="width of the model: a multiple of 4")
    parser.add_argument("--depth", type=int, default=4, help="blocks")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    for name in ("replicate", "shard", "steps", "batch_size", "dim", "depth"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if args.dim % 4:
        parser.error(f"--dim must be a multiple of 4, not {args.dim}")
    return args


if __name__ == "__main__":
    main()
