"""The one file that you replace for your own model: its flags, its data, the model, its loss.

The training loop, evaluation, log and checkpoints use a task only through the names in this file.
examples/resnet18.py is another file of this form.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from data import DATASETS, IMAGE_SIZE, Shifted, download_mnist, load_dataset
from model import SmallCNN
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass(frozen=True)
class TaskSettings:
    """The defaults of the task's own flags; config.py adds those of the training."""

    dataset: str = "digits"
    data_dir: Path = Path("data")
    augment: bool = False


def add_flags(add: Callable) -> None:
    """add: argparse's add_argument; one call per field of TaskSettings."""
    add("--dataset", choices=DATASETS, help="data set (default: digits)")
    add("--data-dir", type=Path, help="folder of MNIST, downloaded if missing (default: data)")
    add("--augment", action="store_true", help="shift each training image by up to one pixel")


def download(settings: TaskSettings) -> None:
    """Download missing files on one rank per node. Every rank calls this before joining the job.

    The other ranks wait at most --timeout seconds: what takes longer is downloaded beforehand.
    """
    if settings.dataset == "mnist":
        download_mnist(settings.data_dir)


def load_data(settings: TaskSettings) -> tuple[Dataset, Dataset]:
    """The training set and the test set: both have a length and are read by index.

    A `UserError` (of arguments.py) raised here ends the job with its one sentence.
    """
    train_set, test_set = load_dataset(settings.dataset, settings.data_dir)
    return Shifted(train_set) if settings.augment else train_set, test_set


collate = None  # a list of samples -> a batch; None: torch's default


def build_model(settings: TaskSettings) -> nn.Module:
    """The model on the CPU, with initial values drawn from torch's global generator.

    Its modules train in the mode that they have here: a frozen BatchNorm may be in eval mode, and a
    model of from_pretrained() needs train() for dropout.
    """
    return SmallCNN(image_size=IMAGE_SIZE[settings.dataset])


def compute_loss(model: nn.Module, batch) -> tuple[Tensor, Tensor | int, dict[str, Tensor]]:
    """(sum of the losses, number of losses, other sums by name) of a batch on the model's device.

    A sum, not a mean: only then do uneven batches weigh what they should.
    Training minimizes the sum over all ranks divided by the number over all ranks. The other sums
    are divided by this number, too: here that gives the fraction of correct images.
    """
    images, labels = batch
    logits = model(images).float()
    loss_sum = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return loss_sum, len(labels), {"accuracy": correct}
