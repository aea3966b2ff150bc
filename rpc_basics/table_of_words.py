"""What ddp_with_rpc.py and sharded_embedding.py train: a table of words, and layers above it.

Each pixel of a digit is a word, "brightness 7 at place 12": 64 words an image, 1,088 in all. The
first values are the same wherever they are made.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
}
PIXELS, LEVELS, WIDTH = 64, 17, 24
WORDS = PIXELS * LEVELS
BATCH = 120  # images, of all ranks that train


def whole_table() -> nn.EmbeddingBag:
    """(images, PIXELS), int64, to the sums of their rows, (images, WIDTH), fp32."""
    torch.manual_seed(0)
    return nn.EmbeddingBag.from_pretrained(0.1 * torch.randn(WORDS, WIDTH), False, mode="sum")


def some_rows(first: int, last: int) -> nn.EmbeddingBag:
    """The rows of the table from `first` to before `last`."""
    rows = whole_table().weight.detach()[first:last].clone()
    return nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum")


def cuts(parts: int) -> list[int]:
    """Where the parts of the table begin, and where the last one ends."""
    return [WORDS * k // parts for k in range(parts + 1)]


def words_here(words_BP: torch.Tensor, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the rows from `first` to before `last`, counted from `first`, in one row; and where
    each image's begin, (images,). Both are int64: what an EmbeddingBag takes.
    """
    here = (words_BP >= first) & (words_BP < last)
    counts = here.sum(dim=1)
    return words_BP[here] - first, counts.cumsum(0) - counts


def build_dense() -> nn.Module:
    """(images, WIDTH), fp32, to a score for each of 10 classes."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 10))


def build_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(module.parameters(), **options)


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Words, (images, PIXELS), and classes, (images,), both int64."""
    images, labels = load_digits(return_X_y=True)
    brightness = torch.tensor(images).long()  # 0 to 16
    return brightness * PIXELS + torch.arange(PIXELS), torch.tensor(labels)
