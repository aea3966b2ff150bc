"""Gradients in fewer bytes, and error feedback: what one message leaves out, the next one brings.

compressor = Compressor("topk")
message = compressor.compress(gradient)     # a few small tensors
gradient = decompress("topk", message, gradient.numel())
"""

import torch
from torch import Tensor

KINDS = ("none", "fp16", "int8", "topk")
TOP = 20  # "topk" sends one number in so many


class Compressor:
    """The sender's side; remembers what it still owes."""

    def __init__(self, kind: str):
        self.kind = kind
        self.owed: Tensor | float = 0.0

    def compress(self, gradient: Tensor) -> list[Tensor]:
        """gradient: (n,) fp32."""
        wanted = gradient + self.owed
        message = compress(self.kind, wanted)
        self.owed = wanted - decompress(self.kind, message, len(wanted))
        return message


def compress(kind: str, gradient: Tensor) -> list[Tensor]:
    if kind == "fp16":
        return [gradient.half()]
    if kind == "int8":  # 255 steps between the largest and its opposite
        scale = gradient.abs().max().clamp(min=1e-30) / 127
        return [(gradient / scale).round().to(torch.int8), scale]
    if kind == "topk":
        places = gradient.abs().topk(max(1, len(gradient) // TOP)).indices
        return [places.to(torch.int32), gradient[places]]
    return [gradient]


def decompress(kind: str, message: list[Tensor], length: int) -> Tensor:
    """What the receiver makes of the message: (length,) fp32, and 0 where nothing was sent."""
    if kind == "fp16":
        return message[0].float()
    if kind == "int8":
        return message[0] * message[1]
    if kind == "topk":
        return torch.zeros(length).index_copy(0, message[0].long(), message[1])
    return message[0]


def size_of(message: list[Tensor]) -> int:
    """The bytes of its numbers."""
    return sum(tensor.nbytes for tensor in message)
