"""Linear layers in fp8 in one process, for comparison: float64, and e4m3 by arithmetic."""

import types

import torch
from torch import Tensor

LAYERS = ("query", "key", "value", "out", "expand", "contract", "gate")  # of a block


def e4m3(x: Tensor) -> Tensor:
    """The nearest number with 4 binary digits, of which the last is worth 2^-9 at least.

    x: float64, up to 448. Between two such numbers, the one whose last digit is 0.
    """
    _, exponents = torch.frexp(x)  # 2^(exponent - 1) <= |x| < 2^exponent
    last_digit = torch.exp2(torch.clamp(exponents - 4, min=-9).double())
    return torch.round(x / last_digit) * last_digit


def in_e4m3(x: Tensor, dim: int) -> Tensor:
    """x with 448 as the largest number along `dim`, rounded, and scaled back: float64."""
    scale = x.float().abs().amax(dim, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    return e4m3((x.float() / scale).double()) * scale.double()


class InFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.einsum("...i,oi->...o", in_e4m3(x, -1), in_e4m3(w, 1)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        dx = torch.einsum("...o,oi->...i", in_e4m3(dy, -1), in_e4m3(w, 0))
        dw = torch.einsum("...o,...i->oi", dy.double(), x.double())
        return dx.to(x.dtype), dw.to(w.dtype)


def forward(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    y = InFloat8.apply(x, layer.weight)
    return y if layer.bias is None else y + layer.bias


def use_float8(model: torch.nn.Module) -> None:
    """Let the linear layers of the blocks compute so, by their names; not the head."""
    for name, module in model.named_modules():
        if name.split(".")[-1] in LAYERS:
            module.forward = types.MethodType(forward, module)
