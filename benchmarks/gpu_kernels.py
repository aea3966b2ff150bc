"""The measurement "kernels" of gpu_measurements.py: masked attention and dropout, each twice."""

from functools import partial

import bench
import torch
import torch.nn.functional as F
from attention import attend
from costs import time_calls
from dropout import drop, token_keys
from runtime import Worker

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 16, 4, 128
DOCUMENT = 700  # tokens of each document


def kernels(worker: Worker, size: str) -> None:
    is_tiny = size == "tiny"  # without what needs Triton
    for batch, length in ((1, 256),) if is_tiny else ((8, 2048), (2, 8192), (1, 32768)):
        for name, row in attention_rows(batch, length, worker.device, is_tiny).items():
            bench.report(worker, {f"attention {batch} x {length}, {name}": row})
    x_BTC = torch.randn(8, 1024, 16 if is_tiny else 2048, device=worker.device, requires_grad=True)
    rows, positions = (torch.arange(n, device=worker.device) for n in (8, 1024))
    keys_BT = token_keys(0, 0, rows, positions)
    masks = {"torch's": lambda: F.dropout(x_BTC, 0.1), "ours": lambda: drop(x_BTC, 0.1, keys_BT)}
    if not is_tiny:
        compiled = torch.compile(drop)
        masks["ours, compiled"] = lambda: compiled(x_BTC, 0.1, keys_BT)
    for name, function in masks.items():
        shape = " x ".join(map(str, x_BTC.shape))
        row = measured(function, [x_BTC], worker.device)
        bench.report(worker, {f"dropout of {shape} fp32, {name}": row})


def attention_rows(batch: int, length: int, device: torch.device, is_tiny: bool) -> dict[str, dict]:
    """Causal attention in bf16, and attention within documents, with masked scores and without."""
    torch.manual_seed(0)
    qkv = [
        torch.randn(batch, heads, length, HEAD_DIM, device=device, dtype=torch.bfloat16)
        for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    ]
    qkv = [x.requires_grad_() for x in qkv]
    starts_T = torch.arange(length, device=device) // DOCUMENT * DOCUMENT
    starts_BT = starts_T.expand(batch, length).contiguous()
    rows = {"one document": measured(partial(attend, *qkv, None), qkv, device)}
    masked = partial(attend, *qkv, None, starts_BT)
    rows["documents, masked scores"] = measured(masked, qkv, device)
    if not is_tiny:
        flex = partial(masked, flex=True)
        rows["documents, FlexAttention"] = measured(flex, qkv, device)
    return rows


def measured(function, inputs: list[torch.Tensor], device: torch.device) -> dict:
    """Milliseconds of forward and backward, and what they need beside the inputs at their peak."""

    def step() -> None:
        function().sum().backward()
        for x in inputs:
            x.grad = None

    step()  # compile
    row = {"ms": [1e3 * seconds for seconds in time_calls(step, 9, 1, device)]}
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        step()
        row["MB"] = (torch.accelerator.max_memory_allocated(device) - before) / 1e6
    return row
