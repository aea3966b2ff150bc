"""The one file that you replace for your own model: its flags, data, model, FSDP units, loss.

The training loop, evaluation, log and checkpoints use a task only through the names in this file.
examples/llama.py is another file of this form.
"""

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from arguments import at_least
from data import DATASETS, IMAGE_SIZE, Shifted, download_mnist, load_dataset
from model import VisionTransformer
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass(frozen=True)
class TaskSettings:
    """The defaults of the task's own flags; config.py adds those of the training."""

    dataset: str = "digits"
    data_dir: Path = Path("data")
    augment: bool = False
    dim: int = 96
    depth: int = 3
    activation_checkpointing: bool = False


def add_flags(add: Callable) -> None:
    """add: argparse's add_argument; one call per field of TaskSettings."""
    add("--dataset", choices=DATASETS, help="data set (default: digits)")
    add("--data-dir", type=Path, help="folder of MNIST, downloaded if missing (default: data)")
    add("--augment", action="store_true", help="shift each training image by up to one pixel")
    add("--dim", type=multiple_of_4, help="width of the model, a multiple of 4")
    add("--depth", type=at_least(1), help="blocks of the model")
    add("--activation-checkpointing", action="store_true", help="recompute blocks in backward")


def multiple_of_4(text: str) -> int:
    value = at_least(4)(text)
    if value % 4:
        raise ArgumentTypeError(f"{value} does not divide into 4 attention heads")
    return value


def download(settings: TaskSettings) -> None:
    """Download missing files on one rank per node. Every rank calls this before joining the job.

    The other ranks wait at most --timeout seconds: what takes longer is downloaded beforehand.
    """
    if settings.dataset == "mnist":
        download_mnist(settings.data_dir)


def load_data(settings: TaskSettings) -> tuple[Dataset, Dataset]:
    """The training set and the test set: both have a length and are read by index."""
    train_set, test_set = load_dataset(settings.dataset, settings.data_dir)
    return Shifted(train_set) if settings.augment else train_set, test_set


collate = None  # a list of samples -> a batch; None: torch's default


def build_model(settings: TaskSettings) -> nn.Module:
    """The model on the CPU, with initial values drawn from torch's global generator.

    train.py also builds it on the meta device, where tensors have shapes and no values. Its modules
    train in the mode, train() or eval(), that they have there.
    """
    image_size = IMAGE_SIZE[settings.dataset]
    patch_size = 2 if image_size == 8 else 4
    model = VisionTransformer(image_size, patch_size, settings.dim, settings.depth)
    for block in model.blocks:
        block.recompute = settings.activation_checkpointing
    return model


def units(model: nn.Module) -> list[nn.Module | list[nn.Module]]:
    """The FSDP units, in the order of use: the parameters of a unit are gathered together.

    Here each block is a unit, and the last layers are one unit. The root has all other parameters
    and stays gathered from the first to the last layer, so keep it small. Put tied weights into one
    unit, or leave them to the root.
    """
    return [model.patches, *model.blocks, [model.norm, model.head]]


def compute_loss(model: nn.Module, batch) -> tuple[Tensor, Tensor | int, dict[str, Tensor]]:
    """(sum of the losses, number of losses, other sums by name) of a batch on the model's device.

    Training minimizes the sum over all ranks divided by the number over all ranks. The other sums
    are divided by this number, too: here that gives the fraction of correct images.
    """
    images, labels = batch
    logits = model(images).float()
    loss_sum = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return loss_sum, len(labels), {"accuracy": correct}
