"""task.py for a ResNet-18 of torchvision on images that need no download.

    cp -r ddp_basics my_resnet
    cp my_resnet/examples/resnet18.py my_resnet/task.py
    torchrun --standalone --nproc_per_node=2 my_resnet/train.py --epochs 1

Its BatchNorm averages over a rank's own batch; the running statistics are averaged over the ranks
before the model is evaluated or saved. On GPUs, convert_sync_batchnorm() of torch.nn.SyncBatchNorm
makes it average over the batch of all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from arguments import at_least
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.datasets import FakeData
from torchvision.models import resnet18
from torchvision.transforms import Compose, RandomHorizontalFlip, ToTensor


@dataclass(frozen=True)
class TaskSettings:
    images: int = 256
    image_size: int = 32


def add_flags(add: Callable) -> None:
    add("--images", type=at_least(2), help="how many there are to train on")
    add("--image-size", type=at_least(32), help="pixels of a side")


def download(settings: TaskSettings) -> None:
    pass


def load_data(settings: TaskSettings) -> tuple[Dataset, Dataset]:
    size, shape = settings.images, (3, settings.image_size, settings.image_size)
    train_set = FakeData(size, shape, 10, Compose([RandomHorizontalFlip(), ToTensor()]))
    return train_set, FakeData(size // 4, shape, 10, ToTensor(), random_offset=size)


collate = None


def build_model(settings: TaskSettings) -> nn.Module:
    return resnet18(num_classes=10)


def compute_loss(model: nn.Module, batch) -> tuple[Tensor, Tensor | int, dict[str, Tensor]]:
    images, labels = batch
    logits = model(images).float()
    loss_sum = F.cross_entropy(logits, labels, reduction="sum")
    return loss_sum, len(labels), {"accuracy": (logits.argmax(dim=1) == labels).sum()}
