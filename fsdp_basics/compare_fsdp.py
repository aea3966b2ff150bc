"""Compare FSDP by hand with fully_shard and with one process, for fsdp_from_scratch.py."""

import os
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from data import load_dataset
from differences import KINDS, full_tensor, largest_differences, local_tensor
from model import VisionTransformer
from runtime import Worker
from sharding import shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3),
}


@dataclass
class Way:
    """One of the three ways to train the same model."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    is_sharded: bool  # True: it trains on this rank's local batch
    units: list = field(default_factory=list)  # only FSDP by hand has units
    events: list = field(default_factory=list)  # and events

    def step(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Train one step; returns the loss, and full gradients and updated parameters, by name."""
        self.events.clear()
        loss = F.cross_entropy(self.model(images), labels)
        self.events.append(("backward", "", 0))
        loss.backward()
        loss = loss.detach()
        if self.is_sharded:
            loss /= dist.get_world_size()
            dist.all_reduce(loss)
        tensors = {"loss": loss} | self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return tensors | self.parameters()

    def gradients(self) -> dict[str, Tensor]:
        named = {}
        if self.units:
            for unit in self.units:
                named |= unit.full(unit.shard.grad)
        else:
            named = {name: p.grad for name, p in self.model.named_parameters()}
        return {f"gradient {name}": full_tensor(tensor) for name, tensor in named.items()}

    def parameters(self) -> dict[str, Tensor]:
        named = {}
        if self.units:
            for unit in self.units:
                named |= unit.full(unit.shard)
        else:
            named = dict(self.model.named_parameters())
        return {f"parameter {name}": full_tensor(tensor) for name, tensor in named.items()}

    def bytes_held(self) -> tuple[int, int]:
        """Bytes of parameters and of optimizer state on this rank, between two steps."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = [t for entry in self.optimizer.state.values() for t in entry.values()]
        held = sum(local_tensor(p).nbytes for p in params)
        if self.units:  # plus parameters that are still gathered: there should be none
            storages = {p.untyped_storage() for p in self.model.parameters()}
            held += sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        return held, sum(local_tensor(t).nbytes for t in state)


def compare(shard_by_hand: Callable, args, worker: Worker) -> None:
    """shard_by_hand: a function (model, blocks, keep, events=) -> units."""
    images, labels = (t.to(worker.device) for t in load_dataset("digits")[0].tensors)
    ways = build_ways(shard_by_hand, args, worker)
    max_diffs = {name: [0.0] * len(KINDS) for name in ways if name != "by hand"}

    for batch in batches(len(images), args):
        local_batch = batch[worker.rank :: worker.world_size]
        results = {}
        for name, way in ways.items():
            indices = local_batch if way.is_sharded else batch
            results[name] = way.step(images[indices], labels[indices])
        for name, so_far in max_diffs.items():
            of_step = largest_differences(results["by hand"], results[name])
            max_diffs[name] = [max(pair) for pair in zip(so_far, of_step, strict=True)]

    # The largest difference on any rank.
    all_max_diffs = torch.tensor(list(max_diffs.values()), dtype=torch.float64)
    all_max_diffs = all_max_diffs.to(worker.device)
    dist.all_reduce(all_max_diffs, op=dist.ReduceOp.MAX)
    bytes_of_ranks = [None] * worker.world_size
    dist.all_gather_object(bytes_of_ranks, {name: way.bytes_held() for name, way in ways.items()})
    if worker.is_main:
        print(f"{args.steps} steps with {args.optimizer}, global batch {args.batch_size}\n")
        print_differences(dict(zip(max_diffs, all_max_diffs.tolist(), strict=True)))
        print_bytes(bytes_of_ranks)
        print_events(ways["by hand"].events)


def build_ways(shard_by_hand: Callable, args, worker: Worker) -> dict[str, Way]:
    """The same model three times: not sharded, sharded by fully_shard, sharded by hand."""

    def build() -> VisionTransformer:
        torch.manual_seed(args.seed)
        return VisionTransformer(dim=args.dim, depth=args.depth).to(worker.device)

    make_optimizer = OPTIMIZERS[args.optimizer]
    model = build()
    one_process = Way("one process", model, make_optimizer(model.parameters()), is_sharded=False)

    model = build()
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    shard(model, mesh, reshard_after_forward=not args.keep)
    torchs = Way("fully_shard", model, make_optimizer(model.parameters()), is_sharded=True)

    model, events = build(), []
    units = shard_by_hand(model, model.blocks, args.keep, events=events)
    optimizer = make_optimizer([unit.shard for unit in units])
    by_hand = Way("by hand", model, optimizer, True, units, events)
    return {way.name: way for way in (one_process, torchs, by_hand)}


def batches(count: int, args) -> Iterator[Tensor]:
    """The global batches: indices of images, the same on every rank."""
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        yield torch.randint(count, (args.batch_size,), generator=generator)


# ---- the report


def print_differences(max_diffs: dict[str, list[float]]) -> None:
    print("largest difference of       loss   gradient  parameter")
    for name, row in max_diffs.items():
        print(f"by hand to {name:12}" + "".join(f"{value:11.1e}" for value in row))


def print_bytes(bytes_of_ranks: list[dict[str, tuple[int, int]]]) -> None:
    names = list(bytes_of_ranks[0])
    print("\nbytes between steps    parameters                      optimizer state")
    print(" " * 14 + "".join(f"{name:>12}" for name in (*names, *names)))
    for rank, by_way in enumerate(bytes_of_ranks):
        parameters = "".join(f"{by_way[name][0]:12,}" for name in names)
        optimizer_state = "".join(f"{by_way[name][1]:12,}" for name in names)
        print(f"rank {rank:<9}{parameters}{optimizer_state}")


def print_events(events: list[tuple[str, str, int]]) -> None:
    """events: (what, unit, bytes) of one step of FSDP by hand, in order."""
    gathered = peak = 0
    for what, _, size in events:
        if what == "gather":
            gathered += size
        if what == "free":
            gathered -= size
        peak = max(peak, gathered)
    print(f"most that was whole at one time in a step: {peak:,} bytes of parameters")
    print("\norder of events on rank 0, in the last step")
    turn = [what for what, _, _ in events].index("backward")
    for phase, part in (("forward", events[:turn]), ("backward", events[turn + 1 :])):
        words = [f"{what} {unit.replace('blocks.', 'block ')}" for what, unit, _ in part]
        # A line may break after a comma, but not inside "gather block 0".
        text = ", ".join(word.replace(" ", "~") for word in words)
        lines = textwrap.fill(text, 90, subsequent_indent=" " * 10)
        print(f"{phase:10}{lines.replace('~', ' ')}")


def parse_args():
    parser = ArgumentParser(description="FSDP by hand, next to fully_shard and to one process.")
    add = parser.add_argument
    add("--steps", type=at_least(1), default=5, help="optimizer steps")
    add("--batch-size", type=at_least(1), default=48, help="images per step, over all ranks")
    add("--dim", type=at_least(4), default=64, help="width of the model, a multiple of 4")
    add("--depth", type=at_least(1), default=4, help="transformer blocks")
    add("--keep", action="store_true", help="keep parameters gathered after forward (ZeRO-2)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer of all runs")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.dim % 4:
        parser.error(f"--dim must be a multiple of 4, not {args.dim}")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size % ranks:
        parser.error(f"--batch-size {args.batch_size} does not divide over {ranks} rank(s)")
    return args
