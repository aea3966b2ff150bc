"""Measure the matmul peak of this device: FLOP/s of the fastest matrix product."""

import time

import torch


def matmul_peak(
    device: torch.device, dtype: torch.dtype, seconds: float = 0.3, size: int | None = None
) -> float:
    """Floating-point operations per second of one rank, of the best of several products.

    Model FLOP/s utilization (MFU) is the share of it that training reaches. size: rows and columns
    of the matrices; None: 8192 on a GPU, 1024 on a CPU.
    """
    size = size or (1024 if device.type == "cpu" else 8192)
    own = torch.Generator(device)  # the global one is the training's, and goes on from a checkpoint
    a, b = (torch.randn(size, size, device=device, dtype=dtype, generator=own) for _ in range(2))
    best, until = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until or not best:
        started = wait(device)
        a @ b
        best = max(best, 2 * size**3 / (wait(device) - started))
    return best


def wait(device: torch.device) -> float:
    """The time in seconds, after the device has finished its queue."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
