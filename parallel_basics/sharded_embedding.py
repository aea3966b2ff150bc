"""An embedding table that is too large for a rank: each rank has a part of its rows.

    python parallel_basics/sharded_embedding.py                                      # one process
    torchrun --standalone --nproc_per_node=2 parallel_basics/sharded_embedding.py    # same losses
    torchrun --standalone --nproc_per_node=4 parallel_basics/sharded_embedding.py --optimizer adamw

The table is sharded by rows, the layers above it are under DDP. All ranks get all words, each adds
up the rows that it has, and the sums are added up over the ranks; their gradients go back to all.
Look at the differences to one process, and at what a rank sends: sums of rows, never the table.
Each pixel of a digit is a word, such as "brightness 7 at place 12": 64 words per image.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from runtime import Worker, distributed_worker
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
}
PIXELS, WORDS, WIDTH = 64, 64 * 17, 24  # 17 values of brightness
BATCH = 120  # images, of all ranks


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if BATCH % worker.world_size:
            raise UserError(f"{BATCH} images do not divide among {worker.world_size} ranks")
        train(args, worker)


def train(args: argparse.Namespace, worker: Worker) -> None:
    rank, ranks, device = worker.rank, worker.world_size, worker.device
    words, labels = read_digits(device)
    first, last = WORDS * rank // ranks, WORDS * (rank + 1) // ranks  # this rank's rows
    table, dense = make_table(first, last).to(device), make_dense().to(device)
    ddp_dense = DistributedDataParallel(dense)
    kind, options = OPTIMIZERS[args.optimizer]
    # The rows are this rank's own: DDP does not see them, each rank steps its part.
    optimizer = kind([*table.parameters(), *dense.parameters()], **options)

    alone = nn.Sequential(make_table(0, WORDS), make_dense()).to(device)  # one process
    local_optimizer = kind(alone.parameters(), **options)
    largest = 0.0
    for step in range(args.steps):
        batch = torch.arange(step * BATCH, (step + 1) * BATCH, device=device) % len(words)
        mine = batch.chunk(ranks)[rank]
        optimizer.zero_grad()
        all_words = gathered(words[mine])  # every rank needs the words of all images
        sums = table(*own_words(all_words, first, last))  # of all images, over our rows only
        total = sums.detach().clone()
        dist.all_reduce(total)  # over the rows of all ranks
        own = total.chunk(ranks)[rank].requires_grad_()  # of our images
        loss = F.cross_entropy(ddp_dense(own), labels[mine])
        loss.backward()  # DDP averages the dense layers' gradients
        # By hand the way back through the all_reduce: the gradients of all images, from all ranks.
        # Divided by the ranks they are those of the mean over the batch, as DDP's are.
        sums.backward(gathered(own.grad) / ranks)
        optimizer.step()

        local_optimizer.zero_grad()
        F.cross_entropy(alone(words[batch]), labels[batch]).backward()
        gradients = [table.weight.grad, *(p.grad for p in dense.parameters())]
        expected = [parameter.grad for parameter in alone.parameters()]
        expected[0] = expected[0][first:last]  # each rank compares its rows
        largest = max(largest, difference(gradients, expected))
        local_optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if worker.is_main:
            print(f"step {step + 1}   loss {mean.item():.6f}", flush=True)

    trained = [table.weight, *dense.parameters()]
    untrained = [make_table(first, last).weight, *make_dense().parameters()]
    moved = [difference([a], [b.to(device)]) for a, b in zip(trained, untrained, strict=True)]
    expected = [parameter.detach() for parameter in alone.parameters()]
    expected[0] = expected[0][first:last]
    found = torch.tensor([largest, difference(trained, expected), *moved], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if worker.is_main:
        print("moved by up to:", *(f"{number:.1e}" for number in found[2:]), "(first the table)")
        print(f"rank 0 holds {last - first:,} of {WORDS:,} rows")
        print(f"largest difference to one process: gradient {found[0]:.1e}", end=", ")
        print(f"parameter {found[1]:.1e}")


def gathered(tensor: Tensor) -> Tensor:
    """Those of all ranks, one after the other."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def own_words(words_BP: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Those of the rows from `first` to before `last`, counted from `first`, in one row; and where
    each image's begin, (images,). Both are int64: what an EmbeddingBag takes.
    """
    here = (words_BP >= first) & (words_BP < last)
    counts = here.sum(dim=1)
    return words_BP[here] - first, counts.cumsum(0) - counts


def make_table(first: int, last: int) -> nn.EmbeddingBag:
    """The rows from `first` to before `last` of the table, the same values wherever it is made.

    All rows: (images, PIXELS), int64, to the sums of their rows, (images, WIDTH), fp32.
    """
    torch.manual_seed(0)
    rows = 0.1 * torch.randn(WORDS, WIDTH)
    return nn.EmbeddingBag.from_pretrained(rows[first:last].clone(), freeze=False, mode="sum")


def make_dense() -> nn.Module:
    """(images, WIDTH), fp32, to a score for each of 10 classes."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 10))


def read_digits(device: torch.device) -> tuple[Tensor, Tensor]:
    """Words, (images, PIXELS), and classes, (images,), both int64."""
    images, labels = load_digits(return_X_y=True)
    brightness = torch.tensor(images).long()  # 0 to 16
    words = brightness * PIXELS + torch.arange(PIXELS)
    return words.to(device), torch.tensor(labels).to(device)


def difference(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest of all elements, absolute."""
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="An embedding table sharded by rows over the ranks.")
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="of all runs")
    parser.add_argument("--steps", type=at_least(1), default=5, help="optimizer steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
