"""Bytes that a rank sends in one training step under each strategy: counted, and by formula.

    torchrun --standalone --nproc_per_node=2 fsdp_basics/communication.py
    torchrun --standalone --nproc_per_node=4 fsdp_basics/communication.py
    torchrun --standalone --nproc_per_node=3 fsdp_basics/communication.py --dim 132 --depth 3

The script counts every collective as it starts, also those that C++ starts (DDP's). The size of the
tensors gives the bytes that a rank sends in a ring: as long as only ranks add, none sends fewer.
(Switches that add, NVLS and SHARP, nearly halve an all_reduce.)

Look at

1. the calls: one all_gather per unit (block or root) for forward. For backward, ZeRO-3 repeats the
   all_gathers of the blocks; the root stays gathered, because backward needs it first.
2. bytes / P: bytes that a rank sends, divided by the bytes of the model. ZeRO-3 sends half as much
   again as DDP: 3(N-1)/N against 2(N-1)/N. ZeRO-2 sends no more than DDP.
3. the bytes over TCP (Gloo, on Linux): more, because Gloo runs a reduce_scatter as an all_reduce
   and drops most of the result. With Gloo, ZeRO-3 sends 4(N-1)/N.
"""

import os
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from data import load_dataset
from model import VisionTransformer
from runtime import Worker, distributed_worker
from strategies import build, expected_traffic, make_meshes, units_of
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils._python_dispatch import TorchDispatchMode  # sees the collectives of C++ code too
from wire import bytes_sent

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
HEADS = 4


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    images, labels = load_dataset("digits")[0][:]
    images = images[: args.batch_size].to(worker.device)
    labels = labels[: args.batch_size].to(worker.device)
    rows = {
        name: measure(name, args.dim, args.depth, images, labels, mesh, worker.device)
        for name, mesh in make_meshes(worker.device.type, worker.world_size).items()
    }
    # In a broadcast, ranks send different amounts. The formula has their mean, so take the mean.
    tcp = torch.tensor([row["tcp"] for row in rows.values()], dtype=torch.float64)
    tcp = tcp.to(worker.device)
    dist.all_reduce(tcp)
    for row, total in zip(rows.values(), tcp.tolist(), strict=True):
        row["tcp"] = total / worker.world_size
    if worker.is_main:
        report(rows, args, worker)


def measure(name: str, dim: int, depth: int, images, labels, mesh, device) -> dict:
    """Train three steps, and count what the third step sends."""
    torch.manual_seed(0)
    model = VisionTransformer(dim=dim, depth=depth, heads=HEADS).to(device)
    units = units_of(model)
    model, optimizer = build(name, model, mesh)
    if name != "one process":
        local = slice(dist.get_rank(), None, mesh.size())
        images, labels = images[local], labels[local]

    def train_step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    train_step()
    train_step()  # after the first step, DDP rebuilds its buckets
    barrier(mesh)
    bytes_before = bytes_sent()
    with CountTraffic() as count:
        train_step()
    barrier(mesh)  # now no message is in flight
    return {
        "calls": dict(count.calls),
        "sent": {operation: round(sent) for operation, sent in count.sent.items()},
        "formula": expected_traffic(name, units, mesh.size()),
        "tcp": bytes_sent() - bytes_before,
    }


class CountTraffic(TorchDispatchMode):
    """Counts the collectives that start in a `with` block, and the bytes that a ring would send."""

    def __init__(self):
        super().__init__()
        self.calls, self.sent = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            operation = operation_of(function.overloadpacket.__name__)
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            ranks = dist.ProcessGroup.unbox(group).size()
            # The full tensor is an all_gather's output, or a reduce_scatter's input.
            full_size = max(total_bytes(tensors) for tensors in args[:2])
            passes = 2 if operation == "all_reduce" else 1  # a reduce_scatter and an all_gather
            self.calls[operation] += 1
            self.sent[operation] += passes * (ranks - 1) / ranks * full_size
        return function(*args, **(kwargs or {}))


def operation_of(name: str) -> str:
    """The name in OPERATIONS of a collective that C++ calls _allgather_base_, for example."""
    letters = name.replace("_", "")
    for operation in OPERATIONS:
        if letters.startswith(operation.replace("_", "")):
            return operation
    return name


def total_bytes(tensors) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    if isinstance(tensors, list | tuple):
        return sum(total_bytes(item) for item in tensors)
    return 0


def over_tcp(formula: dict[str, tuple[int, int]]) -> int:
    """Bytes that a rank sends with Gloo, which runs a reduce_scatter as an all_reduce."""
    total = 0
    for operation, (_, sent) in formula.items():
        total += 2 * sent if operation == "reduce_scatter" else sent
    return total


def barrier(mesh) -> None:
    dist.barrier(mesh.get_group() if mesh.ndim == 1 else None)


def report(rows: dict[str, dict], args, worker: Worker) -> None:
    model = VisionTransformer(dim=args.dim, depth=args.depth, heads=HEADS)
    size = sum(p.nbytes for p in model.parameters())
    gloo = worker.device.type == "cpu"
    print(f"P = {size:,} bytes of parameters in {args.depth + 1} units; one step, one rank")
    print(f"\n{'calls':15}" + "".join(f"{operation:>16}" for operation in OPERATIONS))
    for name, row in rows.items():
        print(f"{name:15}" + "".join(f"{row['calls'].get(o, 0):16}" for o in OPERATIONS))
    print(f"\n{'bytes sent':15}     counted     formula   ratio   bytes / P", end="")
    print("    over TCP     formula   ratio" if gloo else "")
    for name, row in rows.items():
        counted = sum(row["sent"].values())
        formula = sum(sent for _, sent in row["formula"].values())
        line = f"{name:15}{counted:12,}{formula:12,}{ratio(counted, formula)}{counted / size:12.3f}"
        if gloo:
            with_gloo = over_tcp(row["formula"])
            line += f"{row['tcp']:12,.0f}{with_gloo:12,}{ratio(row['tcp'], with_gloo)}"
        print(line)


def ratio(measured: float, formula: int) -> str:
    return f"{measured / formula:8.4f}" if formula else f"{'-':>8}"


def parse_args():
    parser = ArgumentParser(description="Collectives and bytes of a step, counted and by formula.")
    add = parser.add_argument
    add("--dim", type=at_least(HEADS), default=256, help="width, a multiple of 4")
    add("--depth", type=at_least(1), default=4, help="transformer blocks")
    add("--batch-size", type=at_least(1), default=24, help="images per step, at most 1400")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.dim % HEADS:
        parser.error(f"--dim must be a multiple of {HEADS}, not {args.dim}")
    if args.batch_size > 1400 or args.batch_size % ranks:
        parser.error(
            f"--batch-size must be a multiple of {ranks} rank(s) up to 1400, not {args.batch_size}"
        )
    return args


if __name__ == "__main__":
    main()
