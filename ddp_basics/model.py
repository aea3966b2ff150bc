"""A small convolutional network for images of handwritten digits."""

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Images (batch, 1, image_size, image_size), float32 -> logits (batch, 10).

    It uses GroupNorm, which normalizes each sample alone. BatchNorm averages over the batch, and
    under DDP each rank sees only its local batch: N ranks would compute another function than one
    process, and each rank would keep other running statistics. (torch.nn.SyncBatchNorm averages
    over all ranks, on GPUs only, and costs two collectives per layer: an all_gather in forward, an
    all_reduce in backward.)
    """

    def __init__(self, image_size: int = 8, channels: int = 32):
        super().__init__()
        if image_size % 4:
            raise ValueError(f"image_size must be a multiple of 4, not {image_size}")
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.GroupNorm(4, 2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * (image_size // 4) ** 2, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)
