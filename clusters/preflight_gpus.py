"""What preflight_agent.py finds out about the GPUs of its host: names, speed, lowered clocks.

It imports torch nowhere: the agent imports it when it is asked for, and passes it on.
"""

import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# A folder per GPU of the host, also of GPUs that this job may not use.
DRIVER = Path("/proc/driver/nvidia/gpus")


def gpus(torch) -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def unseen_gpus(seen: int) -> list[str]:
    """One sentence if torch sees fewer GPUs than the host has: they are not checked."""
    there = len([*DRIVER.glob("*")])
    short = f"torch sees {seen} of the {there} GPUs here: the other GPUs are not checked"
    return [short] if seen < there else []


def asked_of_the_driver(field: str) -> list[str]:
    """A field of nvidia-smi for each GPU; nothing where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def matmul_on_gpus(torch, count: int, seconds: float) -> tuple[list[float], list[str]]:
    """FLOP per second of each GPU, and the driver's reasons for a lower clock during the run."""
    size, products = 8192, 10
    devices = [torch.device("cuda", i) for i in range(count)]
    data = [torch.randn(size, size, dtype=torch.bfloat16, device=device) for device in devices]
    times, reasons, begin = [[] for _ in devices], None, time.perf_counter()
    driver = ThreadPoolExecutor(1)  # it takes a second to answer, while the GPUs go on computing
    while (
        len(times[0]) < 3
        or time.perf_counter() < begin + seconds
        or (reasons and not reasons.done())
    ):
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in devices]
        for x, (start, end) in zip(data, marks, strict=True):
            with torch.cuda.device(x.device):
                start.record()
                for _ in range(products):
                    x @ x
                end.record()
        if not reasons and time.perf_counter() > begin + seconds / 2:
            reasons = driver.submit(asked_of_the_driver, "clocks_event_reasons.active")
        for (start, end), its in zip(marks, times, strict=True):
            end.synchronize()
            its.append(start.elapsed_time(end) / 1e3 / products)
    speeds = [2 * size**3 / statistics.median(its[1:]) for its in times]
    return speeds, reasons.result() if reasons else []


def slowed_down(reasons: list[str]) -> list[str]:
    """Name the GPUs with a lower clock. reasons: for each GPU the bits of NVML's
    nvmlClocksEventReasons, such as 0x0000000000000040. A software power limit (0x4) is usual."""
    bits = {0x8: "hardware", 0x20: "heat (software)", 0x40: "heat", 0x80: "its power supply"}
    found = []
    for gpu, text in enumerate(reasons):
        value = int(text, 16) if text.startswith("0x") else 0
        names = [name for bit, name in bits.items() if value & bit]
        if names:
            found.append(f"GPU {gpu}: its clock is slowed down by {' and '.join(names)}")
    return found
