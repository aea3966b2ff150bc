"""Multiply in 8-bit floating point: two of the three products of each linear layer in the blocks.

An H100 multiplies fp8 at twice the rate of bf16. The format is e4m3: 4 bits of exponent, 3 of
mantissa, up to 448; rounding changes a number by at most 1/16 of it, if it is above 2^-6. So each
tensor is divided by a scale first. Here each row has a scale of its own, its largest absolute value
/ 448, computed when it is needed (dynamic row-wise scaling). A layer y = x W^T has three products:

    forward                  y  = x W^T     fp8: a scale per token of x, and per output of W
    gradient of the input    dx = dy W      fp8: a scale per token of dy, and per input of W
    gradient of the weight   dW = dy^T x    the compute dtype, as without fp8

In the first two products every term of a sum has the same scale, so the scale multiplies the sum. A
scale depends on one token or on the weight, never on other tokens: a rank or micro-batch with fewer
tokens computes what one process computes. dW is a sum over tokens, so its scales would depend on
which tokens a rank has. (torchao calls the recipe rowwise_with_gw_hp; there W has one scale in dx.)
With tensor parallelism a rank may have a part of a row: `quantize` takes the largest value of the
full row, over the ranks.

Embeddings, norms, attention and the head stay in the compute dtype, and FSDP gathers and sends the
weights in it. Measure before you use it: on one H200 with torch 2.11 fp8 was slower than bf16.
Torch before 2.13 cannot compile `F.scaled_mm`; the speed of later versions is not measured.
"""

import torch
import torch.nn.functional as F
from arguments import UserError
from lora import AdaptedLinear
from model import GPT
from tiles import local_part
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
ROW_WISE = F.ScalingType.RowWise
# Tensor parallelism: how b is sharded -> how a must be, and how a b^T then is.
SHARDS = {
    Replicate(): (Replicate(), Replicate()),
    Shard(0): (Replicate(), Shard(1)),
    Shard(1): (Shard(1), Partial()),
}


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in fp8. Its weight and bias keep their dtypes and names."""

    def forward(self, x: Tensor) -> Tensor:
        y = Product.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


class AdaptedFloat8Linear(AdaptedLinear, Float8Linear):
    """LoRA: adapters in the compute dtype, next to a frozen weight that multiplies in fp8."""


class Product(torch.autograd.Function):
    """x (M, K), W (N, K) -> x W^T (M, N)."""

    @staticmethod
    def forward(ctx, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        return multiply(x_MK, w_NK)

    @staticmethod
    def backward(ctx, dy_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MK, w_NK = ctx.saved_tensors
        input_needs_it, weight_needs_it = ctx.needs_input_grad
        dx_MK = multiply(dy_MN, w_NK.t()) if input_needs_it else None
        dw_NK = dy_MN.t() @ x_MK if weight_needs_it else None  # LoRA: it is frozen
        return dx_MK, dw_NK


def multiply(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """a b^T (M, N), in the dtype of a; both are rounded to e4m3, with a scale for each row."""
    if not isinstance(b_NK, DTensor):
        return multiply_quantized(*quantize(a_MK), *quantize(b_NK), a_MK.dtype)
    of_a, of_product = SHARDS[b_NK.placements[0]]
    a_MK = a_MK.redistribute(placements=[of_a])  # from Partial, if ranks share a head of keys
    parts = [part.to_local() for part in (*quantize(a_MK), *quantize(b_NK))]
    product_MN = multiply_quantized(*parts, a_MK.dtype)
    return DTensor.from_local(product_MN, b_NK.device_mesh, [of_product])


def quantize(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 (M, K) and scales (M, 1), float32: x is about their product. A row may be zero."""
    scale_M1 = x_MK.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x_MK.float() / scale_M1).to(E4M3).contiguous(), scale_M1


def multiply_quantized(
    a_MK: Tensor, a_scale_M1: Tensor, b_NK: Tensor, b_scale_N1: Tensor, dtype: torch.dtype
) -> Tensor:
    """On GPUs, a has contiguous rows, b^T contiguous columns; K and N are multiples of 16."""
    scales = (a_scale_M1, ROW_WISE, b_scale_N1.t(), ROW_WISE)
    return F.scaled_mm(a_MK, b_NK.t(), *scales, output_dtype=dtype)


def apply_float8(model: GPT, device_type: str, compute_dtype: torch.dtype) -> GPT:
    """Let the linear layers of the blocks multiply in fp8; change and return `model`.

    Call it after tensor parallelism and LoRA, whose layers it changes. Raises `UserError` if the
    device, this torch or the size of a layer (on this rank) does not fit.
    """
    check_device(device_type, compute_dtype)
    for name, linear in model.blocks.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        outputs, inputs = local_part(linear.weight).shape
        if outputs % 16 or inputs % 16:
            raise UserError(
                f"--fp8 needs multiples of 16, but blocks.{name} has {inputs} inputs and "
                f"{outputs} outputs on a rank: change --dim, --head-dim, --mlp-dim or --tp"
            )
        is_adapted = isinstance(linear, AdaptedLinear)
        linear.__class__ = AdaptedFloat8Linear if is_adapted else Float8Linear
    return model


def check_device(device_type: str, compute_dtype: torch.dtype) -> None:
    """Raises `UserError` if torch has no kernel for this device."""
    if device_type == "cpu":
        if torch.__version__ < "2.13":  # knows that 2.9 comes before 2.13
            raise UserError("--fp8 on a CPU needs torch 2.13 or later")
        return
    if device_type != "cuda":
        raise UserError(f"--fp8 does not run on {device_type}")
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        raise UserError(
            "--fp8 needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell): this "
            f"one has {capability[0]}.{capability[1]}; leave out --fp8"
        )
    if capability != (9, 0) and compute_dtype == torch.float32:
        raise UserError("--fp8 with --precision fp32 needs a Hopper GPU: give --precision bf16")
