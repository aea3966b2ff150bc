"""transformer_basics/attention.py: each token sees what its window and its document have.

The oracle computes one document, one head and one query at a time, in float64 on the CPU.
"""

from functools import partial

import attention
import pytest
import torch
from arguments import UserError
from attention import attend, use_flex_attention
from model import GPT, GPTConfig

STARTS = torch.tensor([[0] * 100 + [100] * 156, [0] * 3 + [3] + [4] * 252])  # of two sequences
MASKS = [(None, None), (70, None), (None, STARTS), (70, STARTS), (500, STARTS), (255, None)]


def inputs(head_dim: int, device: str, keys: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, 256, head_dim) for heads in (4, keys, keys)]
    return [torch.randn(*shape, device=device, requires_grad=True) for shape in shapes]


def one_query_at_a_time(q, k, v, window, starts):
    """(B, H, T, D), float64, from what its arguments are on the CPU."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    rows = []
    for b in range(q.shape[0]):
        for t in range(q.shape[2]):
            first = max(0 if starts is None else int(starts[b, t]), t + 1 - (window or t + 1))
            scores = torch.einsum("hd,hsd->hs", q[b, :, t], k[b, :, first : t + 1])
            weights = (scores / q.shape[3] ** 0.5).softmax(-1)
            rows.append(torch.einsum("hs,hsd->hd", weights, v[b, :, first : t + 1]))
    return torch.stack(rows).unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def compare(function, qkv, window, starts, tolerance, backward=True):
    starts_there = starts if starts is None else starts.to(qkv[0].device)
    found = function(*qkv, window, starts_there)
    copies = [x.detach().cpu().double().requires_grad_() for x in qkv]
    expected = one_query_at_a_time(*copies, window, starts)
    assert (found.cpu() - expected).abs().max() < tolerance
    if backward:
        weights = torch.randn(expected.shape)
        (found * weights.to(found)).sum().backward()
        (expected * weights).sum().backward()
        for x, copy in zip(qkv, copies, strict=True):
            assert copy.grad.abs().max() > 1
            assert (x.grad.cpu() - copy.grad).abs().max() < 10 * tolerance


@pytest.mark.parametrize(("window", "starts"), MASKS)
def test_attention_and_its_gradients(window, starts):
    compare(attend, inputs(8, "cpu"), window, starts, 1e-5)


def test_flag_needs_a_gpu():
    model = GPT(GPTConfig(layers=2))
    with pytest.raises(UserError, match="--flex-attention does not run on cpu"):
        use_flex_attention(model, "cpu")
    use_flex_attention(model, "cuda")
    assert all(block.attention.attend.keywords["flex"] for block in model.blocks.values())


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [False, True])
def test_flex_attention_on_the_cpu(monkeypatch, is_whole):
    """Its forward runs here, too, by itself and as part of what --compile compiles."""
    monkeypatch.setattr(attention, "create_mask", None)  # the other way is not taken
    qkv = [x.detach() for x in inputs(16, "cpu")]
    compare(flex_attend(is_whole), qkv, 70, STARTS, 1e-5, backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24, 64])
@pytest.mark.parametrize(("window", "starts"), MASKS[1:4])
def test_flex_attention_on_a_gpu(monkeypatch, window, starts, head_dim, is_whole):
    monkeypatch.setattr(attention, "create_mask", None)
    compare(flex_attend(is_whole), inputs(head_dim, "cuda"), window, starts, 1e-4)


def flex_attend(is_whole: bool):
    torch.compiler.reset()  # a function is compiled for at most 8 kinds of inputs
    function = partial(attend, flex=True)
    return torch.compile(function, fullgraph=True) if is_whole else function
