"""An exponential moving average (EMA) of a sharded model: updated, saved, evaluated, exported.

    torchrun --standalone --nproc_per_node=2 fsdp_basics/ema.py
    torchrun --standalone --nproc_per_node=2 fsdp_basics/ema.py --output-dir runs/ema
    torchrun --standalone --nproc_per_node=3 fsdp_basics/ema.py --output-dir runs/ema   # continues
    python fsdp_basics/ema.py

After each step: average = decay * average + (1 - decay) * value. The formula is elementwise, so
each rank averages the shards that it holds, and sends nothing. The checkpoint holds the average as
a third dict of shards, next to the model and the optimizer. For evaluation, the average replaces
the model's values; for export, each tensor is gathered once.

Buffers: running statistics (floating point) are averaged like parameters, counters (integers) are
copied. Under FSDP each rank has running statistics of its own images. Evaluation and saving take
the mean over the ranks. Averages over time and over ranks are both linear, so their order does not
matter.

Look at the collectives of each action (counted), the bytes per rank, and the two test accuracies.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, above, at_least, between
from collective_calls import CollectiveCalls
from data import load_dataset
from differences import local_tensor
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel


class EMA:
    """The average of a model: this rank's shard of each tensor in the state dict.

    Make it after `fully_shard`. It starts as a copy of the model.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        # At least float32: in bfloat16 a change of (1 - decay) would be rounded away.
        self.state = {name: at_least_float32(t).clone() for name, t in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Call it after each step of the optimizer."""
        for name, value in model.state_dict().items():
            average, value = local_tensor(self.state[name]), local_tensor(value)
            if average.is_floating_point() or average.is_complex():
                average.mul_(self.decay).add_(value, alpha=1 - self.decay)  # inf stays inf
            else:
                average.copy_(value)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Inside the block the model has the average's values; afterwards exactly its own again."""
        average_buffers(self.state)
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fill(model, self.state)
        try:
            yield
        finally:
            fill(model, own)


@torch.no_grad()
def fill(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Give the shards of `model` these values."""
    # state_dict() also reshards the model. (The root's parameters stay gathered after a
    # forward pass without a backward: the next pass would compute with them, not with the shards.)
    for name, tensor in model.state_dict().items():
        local_tensor(tensor).copy_(local_tensor(values[name]))


def average_buffers(state: dict[str, Tensor]) -> None:
    """Average the tensors that are not sharded over all ranks; all ranks call this."""
    for tensor in state.values():
        if not isinstance(tensor, DTensor) and tensor.is_floating_point():
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)


def at_least_float32(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if args.batch_size % worker.world_size:
            raise UserError(
                f"--batch-size {args.batch_size} does not divide over {worker.world_size} rank(s)"
            )
        if args.batch_size < 2 * worker.world_size:
            raise UserError("BatchNorm needs two images per rank: choose a larger --batch-size")
        train(args, worker)


def train(args, worker: Worker) -> None:
    torch.manual_seed(args.seed)
    model = build_model().to(worker.device)
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), args.lr)
    ema = EMA(model, args.decay)
    done = resume(args.output_dir, model, optimizer, ema)
    if worker.is_main:
        print(f"after {done} step(s)" if done else "from the start", flush=True)
        print_what_fails(model)

    train_set, test_set = load_dataset("digits")
    counts = {}
    for step in range(done, done + args.steps):
        images, labels = local_batch(train_set, step, args, worker)
        with CollectiveCalls() as counts["a training step"]:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with CollectiveCalls() as counts["an update of the average"]:
            ema.update(model)
    done += args.steps

    average_buffers(model.state_dict())  # a state dict shares the model's tensors
    own_accuracy = accuracy(model, test_set, worker)
    with CollectiveCalls() as counts["evaluating the average"], ema.in_place_of(model):
        ema_accuracy = accuracy(model, test_set, worker)
    with CollectiveCalls() as counts["its export"], ema.in_place_of(model):
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0, in CPU RAM
        exported = get_model_state_dict(model, options=full)
        # Copies: on a CPU some of these tensors are the model's own, whose values change below.
        exported = {name: tensor.clone() for name, tensor in exported.items()}
    if args.output_dir:
        save(args.output_dir / f"step_{done:06}", model, optimizer, ema)
        if worker.is_main:
            torch.save(exported, args.output_dir / "ema.pt")
    if worker.is_main:
        print("\ncollectives that rank 0 took part in")
        for action, calls in counts.items():
            names = ", ".join(f"{count} {name}" for name, count in calls.count.items())
            print(f"{action:28}{names or 'none'}")
        print("\nbytes on rank 0")
        print(f"{'shards and buffers':28}{held(model.state_dict()):8,}")
        print(f"{'their average':28}{held(ema.state):8,}")
        print(f"{'the exported average':28}{held(exported):8,}")
        print(f"\nafter step {done}: loss {loss.item():.4f} on rank 0's images")
        print(f"test accuracy of the model   {own_accuracy:.2%}")
        print(f"test accuracy of the average {ema_accuracy:.2%}")


def build_model() -> nn.Sequential:
    """Blocks with running statistics, and a last layer."""

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU())

    return nn.Sequential(block(), block(), nn.Linear(64, 10))


def print_what_fails(model: nn.Module) -> None:
    """Try the usual ways to start an average, which work on a model that is not sharded."""
    for name, make in (("copy.deepcopy(model)", copy.deepcopy), ("AveragedModel", AveragedModel)):
        try:
            make(model)
            print(f"{name}: works")
        except AssertionError as error:
            print(f"{name}: {error}")


def local_batch(dataset, step: int, args, worker: Worker) -> tuple[Tensor, Tensor]:
    """This rank's images of the step's global batch; any number of ranks shares the same batch."""
    generator = torch.Generator().manual_seed(args.seed + step)
    batch = torch.randint(len(dataset), (args.batch_size,), generator=generator)
    images, labels = dataset[batch[worker.rank :: worker.world_size]]
    return images.flatten(1).to(worker.device), labels.to(worker.device)


@torch.no_grad()
def accuracy(model: nn.Module, dataset, worker: Worker) -> float:
    """Every rank tests all images (they are few): a sharded forward pass is a collective."""
    images, labels = dataset[:]
    model.eval()
    predicted = model(images.flatten(1).to(worker.device)).argmax(dim=1)
    model.train()
    return (predicted == labels.to(worker.device)).float().mean().item()


def state_of(model: nn.Module, optimizer, ema: EMA) -> dict:
    """The three parts of a checkpoint."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "ema": ema.state,
    }


def save(folder: Path, model: nn.Module, optimizer, ema: EMA) -> None:
    """All ranks call this: each writes its shards of all three parts."""
    state = state_of(model, optimizer, ema)
    average_buffers(state["model"])  # dcp writes the buffers of one rank
    average_buffers(state["ema"])
    dcp.save(state, checkpoint_id=folder)


def resume(folder: Path | None, model: nn.Module, optimizer, ema: EMA) -> int:
    """Load the newest save, written by any number of ranks; return its step, or 0."""
    # dcp writes .metadata last: a folder that has one is complete.
    whole = [file.parent for file in folder.glob("step_*/.metadata")] if folder else []
    if not whole:
        return 0
    newest = max(whole, key=step_of)
    state = state_of(model, optimizer, ema)
    dcp.load(state, checkpoint_id=newest)  # fills the shards of the average in place
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return step_of(newest)


def step_of(save: Path) -> int:
    return int(save.name.removeprefix("step_"))


def held(state: dict[str, Tensor]) -> int:
    return sum(local_tensor(tensor).nbytes for tensor in state.values())


OPTIMIZERS = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr / 10),
}


def parse_args():
    parser = ArgumentParser(description="Keep, save, evaluate and export an average of the shards.")
    add = parser.add_argument
    add("--decay", type=between(0, 1), default=0.95, help="weight of the old average in an update")
    add("--steps", type=at_least(1), default=100, help="steps of this run")
    add("--batch-size", type=at_least(1), default=48, help="images per step, over all ranks")
    add("--lr", type=above(0), default=0.1, help="learning rate of SGD; AdamW takes a tenth of it")
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="optimizer of all runs")
    add("--output-dir", type=Path, help="write checkpoints and logs here; resume what is there")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    parser.make_folder("--output-dir", args.output_dir)
    return args


if __name__ == "__main__":
    main()
