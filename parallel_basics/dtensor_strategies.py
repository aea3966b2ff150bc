"""Data parallelism, FSDP and tensor parallelism as DTensor placements of one two-line model.

    python parallel_basics/dtensor_strategies.py
    torchrun --standalone --nproc_per_node=2 parallel_basics/dtensor_strategies.py
    torchrun --standalone --nproc_per_node=4 parallel_basics/dtensor_strategies.py --optimizer sgd

    mean((relu(x @ W1) @ W2 - targets) ** 2)

The model never changes. A strategy is one placement per tensor: R, every rank has the full tensor;
S0 or S1, every rank has some of the rows or columns. DTensor finds the collectives (dtensor.py).

Look at what each strategy sends, counted and by formula; at two bad placements, which send more but
give the right result; and at the differences from one process, which are rounding.
"""

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser
from dtensor_costs import PLACEMENTS, Traffic, bytes_sent, measure, print_table
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

TOKENS, DIM, HIDDEN = 96, 48, 256
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3),
}


@dataclass(frozen=True)
class Strategy:
    x: str  # placement of the tokens and of the targets
    weights: tuple[str, str]  # placements of W1 and W2
    gather: bool = False  # all-gather the weights before use, as FSDP does
    finish: bool = False  # redistribute the output of the second layer to R


STRATEGIES = {
    "data parallel": Strategy("S0", ("R", "R")),
    "FSDP": Strategy("S0", ("S0", "S0"), gather=True),
    "tensor parallel": Strategy("R", ("S1", "S0"), finish=True),
    "  output left Partial": Strategy("R", ("S1", "S0")),
    "  wrong shard dims": Strategy("R", ("S0", "S1")),
}


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(args.optimizer, worker)


class Model:
    """The tensors, placed by `strategy` on `mesh`; without a mesh: the single-process baseline."""

    def __init__(self, strategy: Strategy, mesh: DeviceMesh | None):
        self.strategy, self.mesh = strategy, mesh
        generator = torch.Generator().manual_seed(0)  # the same numbers on every rank
        shapes = (TOKENS, DIM), (TOKENS, DIM), (DIM, HIDDEN), (HIDDEN, DIM)
        x, targets, w1, w2 = (torch.randn(shape, generator=generator) for shape in shapes)
        self.x, self.targets = self.place(x, strategy.x), self.place(targets, strategy.x)
        self.w1 = nn.Parameter(self.place(w1 / DIM**0.5, strategy.weights[0]))
        self.w2 = nn.Parameter(self.place(w2 / HIDDEN**0.5, strategy.weights[1]))

    def place(self, tensor: Tensor, placement: str) -> Tensor:
        if self.mesh is None:
            return tensor
        tensor = tensor.to(self.mesh.device_type)
        return distribute_tensor(tensor, self.mesh, [PLACEMENTS[placement]], src_data_rank=None)

    def replicate(self, tensor: Tensor) -> Tensor:
        return tensor if self.mesh is None else tensor.redistribute(self.mesh, [Replicate()])

    def loss(self) -> Tensor:
        w1, w2 = self.w1, self.w2
        if self.strategy.gather:
            w1, w2 = self.replicate(w1), self.replicate(w2)
        y = F.relu(self.x @ w1) @ w2
        if self.strategy.finish:
            y = self.replicate(y)
        return (y - self.targets).square().mean()

    def finish_gradients(self) -> None:
        """Give each gradient the placement of its weight: this reduces a Partial gradient."""
        if self.mesh is not None:
            for weight in (self.w1, self.w2):
                weight.grad = weight.grad.redistribute(self.mesh, weight.placements)


def train(
    mesh: DeviceMesh | None, strategy: Strategy, optimizer: str, steps: int = 5
) -> tuple[list[dict[str, Tensor]], dict[str, Traffic]]:
    """Returns (per step {name: full tensor}, {phase: traffic of the last step}).

    mesh: None for the single-process baseline.
    """
    model = Model(strategy, mesh)
    optim = OPTIMIZERS[optimizer]([model.w1, model.w2])
    history, traffic = [], {}

    def watch(phase: str, function):
        if mesh is None:
            return function()
        result, traffic[phase] = measure(mesh, function)
        return result

    for _ in range(steps):
        optim.zero_grad()
        loss = watch("forward", model.loss)
        watch("backward", loss.backward)
        watch("gradients", model.finish_gradients)
        step = {"loss": full_tensor(loss)}
        step |= {"gradient 1": full_tensor(model.w1.grad), "gradient 2": full_tensor(model.w2.grad)}
        optim.step()
        step |= {"parameter 1": full_tensor(model.w1), "parameter 2": full_tensor(model.w2)}
        history.append(step)
    return history, traffic


def full_tensor(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def differences(history: list[dict], expected: list[dict]) -> dict[str, float]:
    """Largest difference of the loss, of any gradient, of any parameter, in any step."""
    max_diff = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    for step, expected_step in zip(history, expected, strict=True):
        for name, value in expected_step.items():
            kind = name.split()[0]
            max_diff[kind] = max(max_diff[kind], (step[name] - value).abs().max().item())
    return max_diff


def strategy_bytes(name: str, ranks: int) -> int:
    """Bytes that a rank sends in one step, by formula."""
    w1, w2, hidden, y = (DIM, HIDDEN), (HIDDEN, DIM), (TOKENS, HIDDEN), (TOKENS, DIM)
    if name == "FSDP":  # weights all-gathered, gradients reduce-scattered: an all_reduce's halves
        sent = sum(2 * bytes_sent("all_gather", shape, ranks, "S0") for shape in (w1, w2))
    else:
        reduced = {
            "data parallel": (w1, w2),  # their gradients
            "tensor parallel": (y,),
            # A square needs the sum. Autograd saves its Partial input, so backward sums it again.
            "  output left Partial": (y, y),
            "  wrong shard dims": (hidden, hidden),  # before the relu, and in its backward
        }
        sent = sum(bytes_sent("all_reduce", shape, ranks) for shape in reduced[name])
    shard_dim = {"data parallel": 0, "FSDP": 0, "  wrong shard dims": 1}.get(name)
    if shard_dim is not None and y[shard_dim] % ranks:
        # The mean of means is the mean only of equal shards: unequal ones are all-gathered.
        sent += bytes_sent("all_gather", y, ranks, f"S{shard_dim}")
    return sent


def compare(optimizer: str, worker: Worker) -> None:
    # Each rank would warn that Gloo has no all_to_all for DTensor.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    expected, _ = train(None, STRATEGIES["data parallel"], optimizer)
    table = []
    for name, strategy in STRATEGIES.items():
        history, traffic = train(mesh, strategy, optimizer)
        row = {"strategy": name, "x": strategy.x}
        row |= {"W1": strategy.weights[0], "W2": strategy.weights[1], **traffic}
        row["counted"] = sum(of_phase.bytes for of_phase in traffic.values())
        row["formula"] = strategy_bytes(name, mesh.size())
        for kind, difference in differences(history, expected).items():
            row[kind] = f"{difference:.0e}"
        table.append(row)
    if worker.is_main:
        print(f"mean((relu(x @ W1) @ W2 - targets) ** 2), {TOKENS} tokens; one step of training")
        print("counted, formula: bytes sent per rank; then largest differences from one process")
        print_table(table)


def parse_args():
    parser = ArgumentParser(description="Parallel strategies as DTensor placements.")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer of all runs"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
