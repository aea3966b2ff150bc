"""What benchmarks share: median and spread of repeats, and a header that makes them readable."""

import os
import platform
import statistics
import sys
from datetime import date
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def summary(samples: list[float]) -> str:
    """Median (minimum ... maximum) of the repeats."""
    return f"{statistics.median(samples):.4g} ({min(samples):.4g} ... {max(samples):.4g})"


def ratio_of_pairs(a: list[float], b: list[float]) -> list[float]:
    """a / b for each repeat: the two of a pair ran one after the other, so load hits both alike."""
    return [x / y for x, y in zip(a, b, strict=True)]


def machine() -> str:
    """Processor, number of cores, GPU if there is one, and versions."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as info:
            names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
        name = names[0] if names else name
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return (
        f"{name}, {os.cpu_count()} cores{gpu}; Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def table(rows: list[tuple]) -> str:
    """Markdown, the first row being the heading."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines)


def write(name: str, title: str, sections: list[str]) -> None:
    """Write benchmarks/results/NAME.md and print it."""
    command = " ".join(["python", *sys.argv])
    header = f"# {title}\n\nMachine: {machine()}\n\nDate: {date.today()}\n\nCommand: `{command}`"
    text = "\n\n".join([header, *sections]) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
