"""A small vision transformer: a stack of equal blocks, as in the models that sharding is for."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class VisionTransformer(nn.Module):
    """Images (batch, 1, image_size, image_size), float32 -> logits (batch, classes).

    Each image is cut into patches of patch_size x patch_size pixels; each patch becomes a vector of
    `dim` numbers, and in `depth` blocks the vectors attend to one another.
    LayerNorm normalizes one vector at a time: unlike BatchNorm, its result does not depend on how
    the batch is split over ranks. About 12 x depth x dim^2 parameters.
    """

    def __init__(
        self,
        image_size: int = 8,
        patch_size: int = 2,
        dim: int = 64,
        depth: int = 4,
        heads: int = 4,
        classes: int = 10,
    ):
        super().__init__()
        if image_size % patch_size or dim % heads:
            raise ValueError(
                f"image_size {image_size} must be a multiple of patch_size {patch_size}, and dim "
                f"{dim} of heads {heads}"
            )
        self.patches = nn.Conv2d(1, dim, patch_size, stride=patch_size)
        self.position = nn.Parameter(0.02 * torch.randn((image_size // patch_size) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position  # (batch, patches, dim)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class Block(nn.Module):
    """(batch, patches, dim) -> the same shape: attention, then a network for each vector."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.recompute = False  # True: keep no activations, compute them again in backward
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        # No bias: a key's bias adds one number to all scores of a query, which softmax ignores. Its
        # gradient is zero except for rounding, and AdamW would turn this rounding into full steps.
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim)
        self.expand, self.contract = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        batch, patches, dim = x.shape
        qkv = self.query_key_value(self.norm1(x)).view(batch, patches, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, patches, dim / heads)
        seen = F.scaled_dot_product_attention(query, key, value)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, patches, dim))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))
