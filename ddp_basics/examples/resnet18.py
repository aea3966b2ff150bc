"""task.py for torchvision's ResNet-18 on random images, which need no download.

    cp -r ddp_basics my_resnet
    cp my_resnet/examples/resnet18.py my_resnet/task.py
    torchrun --standalone --nproc_per_node=2 my_resnet/train.py --epochs 1

BatchNorm averages over a rank's local batch; train.py averages its running statistics over the
ranks before it evaluates or saves the model. On GPUs, convert_sync_batchnorm() of
torch.nn.SyncBatchNorm makes BatchNorm average over the global batch.
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
    add("--images", type=at_least(2), help="number of training images (default: %(default)s)")
    add("--image-size", type=at_least(32), help="height and width in pixels (default: %(default)s)")


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
