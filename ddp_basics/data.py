"""The data sets: real digits that need no download, MNIST, and random images for benchmarks."""

import os
from pathlib import Path

import torch
from arguments import UserError, fail
from torch.utils.data import Dataset, TensorDataset

DATASETS = ("digits", "mnist", "synthetic")


def load_dataset(name: str, data_dir: str = "data") -> tuple[Dataset, Dataset]:
    """Return (train, test), each of (image (1, size, size) float32 in [0, 1], label int64) pairs.

    digits: scikit-learn's 1,797 images of 8 x 8 pixels, one fifth of each class kept for the test.
    mnist: torchvision's 60,000 + 10,000 images of 28 x 28 pixels, read from `data_dir`.
    synthetic: 4,096 + 512 random images of 28 x 28 pixels with random labels: for timing only.
    Raises `UserError` for an unknown name and for MNIST files that are missing or broken.
    """
    if name == "digits":
        return load_digits()
    if name == "mnist":
        return load_mnist(data_dir)
    if name == "synthetic":
        return random_images(4096, seed=0), random_images(512, seed=1)
    raise UserError(f"no data set {name!r}: choose one of {', '.join(DATASETS)}")


def load_digits() -> tuple[Dataset, Dataset]:
    from sklearn.datasets import load_digits as read_digits
    from sklearn.model_selection import train_test_split

    images, labels = read_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(labels, dtype=torch.int64)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def load_mnist(data_dir: str) -> tuple[Dataset, Dataset]:
    from torchvision.datasets import MNIST

    try:
        parts = [MNIST(data_dir, train=train) for train in (True, False)]
    except Exception as error:  # torchvision meets a broken file with exceptions of many kinds
        raise UserError(
            f"cannot read MNIST below {Path(data_dir, 'MNIST', 'raw')} ({error or 'broken file'}): "
            "delete that folder to download it again, or use --dataset digits"
        ) from None
    return tuple(TensorDataset(p.data.unsqueeze(1) / 255, p.targets.long()) for p in parts)


def download_mnist(data_dir: str) -> None:
    """Fetch MNIST into `data_dir` unless it is there. Call it before joining the job.

    Local rank 0 does the work, the others return at once: they wait for it when they join. If it
    fails, the job ends with one sentence.
    """
    from torchvision.datasets import MNIST

    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    try:
        MNIST(data_dir, download=True)
    except (RuntimeError, OSError):
        fail(
            f"MNIST is not in {data_dir} and cannot be downloaded: connect to the network, copy "
            f"its four files to {Path(data_dir, 'MNIST', 'raw')}, or use --dataset digits"
        )


def random_images(count: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 28, 28, generator=generator)
    return TensorDataset(images, torch.randint(10, (count,), generator=generator))
