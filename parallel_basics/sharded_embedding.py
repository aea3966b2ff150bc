"""Sharded embedding: a table that is too large for one rank; each rank holds some of its rows.

    python parallel_basics/sharded_embedding.py                                      # one process
    torchrun --standalone --nproc_per_node=2 parallel_basics/sharded_embedding.py    # same losses
    torchrun --standalone --nproc_per_node=4 parallel_basics/sharded_embedding.py --optimizer adamw

The table is sharded by rows; DDP trains the layers above it. Every rank gets all words and adds up
the rows that it holds; an all_reduce adds up these sums. In backward every rank gets the gradients
of all images. Look at the differences from one process. A rank sends sums of rows, never the table.
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
BATCH = 120  # images per step, over all ranks


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
    # DDP does not see the table: each rank updates its own rows.
    optimizer = kind([*table.parameters(), *dense.parameters()], **options)

    alone = nn.Sequential(make_table(0, WORDS), make_dense()).to(device)  # one process
    local_optimizer = kind(alone.parameters(), **options)
    largest = 0.0
    for step in range(args.steps):
        batch = torch.arange(step * BATCH, (step + 1) * BATCH, device=device) % len(words)
        mine = batch.chunk(ranks)[rank]
        optimizer.zero_grad()
        all_words = gathered(words[mine])  # every rank needs the words of all images
        sums = table(*own_words(all_words, first, last))  # all images, this rank's rows only
        total = sums.detach().clone()
        dist.all_reduce(total)  # all images, all rows
        own = total.chunk(ranks)[rank].requires_grad_()  # this rank's images
        loss = F.cross_entropy(ddp_dense(own), labels[mine])
        loss.backward()  # DDP averages the dense layers' gradients
        # The backward of the all_reduce, by hand: gather the gradients of all images. Divide them
        # by the number of ranks, as DDP does: the loss is a mean over the batch.
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
        moved = " ".join(f"{number:.1e}" for number in found[2:])
        print(f"largest change of the table, then of each dense parameter: {moved}")
        print(f"rank 0 holds {last - first:,} of {WORDS:,} rows")
        print(f"largest difference from one process: gradient {found[0]:.1e}", end=", ")
        print(f"parameter {found[1]:.1e}")


def gathered(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, concatenated."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def own_words(words_BP: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """The input of an EmbeddingBag that holds rows `first` to `last` - 1: (indices, offsets).

    indices: the words in these rows, counted from `first`, 1-D. offsets: where the words of each
    image begin, (images,). Both int64.
    """
    here = (words_BP >= first) & (words_BP < last)
    counts = here.sum(dim=1)
    return words_BP[here] - first, counts.cumsum(0) - counts


def make_table(first: int, last: int) -> nn.EmbeddingBag:
    """Rows `first` to `last` - 1 of the table, with values that do not depend on the rank.

    With all rows it maps words, (images, PIXELS), int64, to sums of rows, (images, WIDTH), fp32.
    """
    torch.manual_seed(0)
    rows = 0.1 * torch.randn(WORDS, WIDTH)
    return nn.EmbeddingBag.from_pretrained(rows[first:last].clone(), freeze=False, mode="sum")


def make_dense() -> nn.Module:
    """The layers above the table: (images, WIDTH), fp32 -> (images, 10), scores of the classes."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 10))


def read_digits(device: torch.device) -> tuple[Tensor, Tensor]:
    """Words, (images, PIXELS), and classes, (images,), both int64."""
    images, labels = load_digits(return_X_y=True)
    brightness = torch.tensor(images).long()  # 0 to 16
    words = brightness * PIXELS + torch.arange(PIXELS)
    return words.to(device), torch.tensor(labels).to(device)


def difference(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest absolute difference of all elements."""
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="An embedding table sharded by rows over the ranks.")
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="sgd", help="optimizer of table and layers"
    )
    parser.add_argument("--steps", type=at_least(1), default=5, help="optimizer steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
