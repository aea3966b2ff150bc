"""The data sets: real digits that need no download, MNIST, and random images for benchmarks."""

import math
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from arguments import UserError, fail
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

IMAGE_SIZE = {"digits": 8, "mnist": 28, "synthetic": 28}  # pixels
DATASETS = tuple(IMAGE_SIZE)


def load_dataset(name: str, data_dir: Path | str = "data") -> tuple[Dataset, Dataset]:
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


def load_mnist(data_dir: Path | str) -> tuple[Dataset, Dataset]:
    raw = Path(data_dir, "MNIST", "raw")
    try:
        return tuple(
            MnistFile(raw / f"{part}-images-idx3-ubyte", raw / f"{part}-labels-idx1-ubyte")
            for part in ("train", "t10k")
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read MNIST below {raw} ({error}): delete that folder to download it again, or "
            "use --dataset digits"
        ) from None


class MnistFile(Dataset):
    """Images and labels in memory-mapped files: the ranks of one node share the pages.

    The IDX format has a big-endian header (magic number, size of each dim), then the bytes. Raises
    ValueError if a file has another magic number or another length than its header says.
    """

    def __init__(self, images: Path, labels: Path):
        self.images, self.labels = map_idx(images, dims=3), map_idx(labels, dims=1)
        if len(self.images) != len(self.labels):
            raise ValueError(f"{images.name} and {labels.name} have different lengths")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.from_numpy(self.images[index].astype(np.float32) / 255)
        return image.unsqueeze(0), torch.tensor(int(self.labels[index]))


def map_idx(path: Path, dims: int) -> np.ndarray:
    content = np.memmap(path, np.uint8, mode="r")
    magic, *shape = content[: 4 * (1 + dims)].view(">u4").tolist()
    if magic != 0x800 + dims or math.prod(shape) != len(content) - 4 * (1 + dims):
        raise ValueError(f"{path.name} is broken")
    return content[4 * (1 + dims) :].reshape(shape)


def download_mnist(data_dir: Path | str) -> None:
    """Download MNIST into `data_dir` unless it is there. Call this before joining the job.

    Local rank 0 downloads. The other ranks return at once, and wait for it when they join. If the
    download fails, the job ends with one sentence.
    """
    from torchvision.datasets import MNIST

    folder = Path(data_dir, "MNIST")
    if os.environ.get("LOCAL_RANK", "0") != "0" or folder.exists():
        return
    try:
        Path(data_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir) as private:
            MNIST(private, download=True)
            # Rename the complete folder: other nodes may be downloading to the same disk.
            if not folder.exists():
                os.rename(Path(private, "MNIST"), folder)
    except (RuntimeError, OSError):
        if not folder.exists():  # else another node was first
            fail(
                f"MNIST is not in {data_dir} and cannot be downloaded: connect to the network, "
                f"copy its four files to {folder / 'raw'}, or use --dataset digits"
            )


def random_images(count: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 28, 28, generator=generator)
    return TensorDataset(images, torch.randint(10, (count,), generator=generator))


class Shifted(Dataset):
    """`dataset` with each image shifted by up to one pixel: a small augmentation.

    The shifts come from torch's global generator, as in torchvision's transforms.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.dataset[index]
        shifts = torch.randint(-1, 2, (2,)).tolist()
        return torch.roll(image, shifts, dims=(1, 2)), label
