"""Shared code of the benchmarks: parts in separate processes, alternating repeats, reports."""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results"
MARK = "SAMPLES "  # begins the line in which a part prints its measurements


def torchrun(ranks: int) -> list[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
    return [sys.executable, *launcher]


def measure(*command, timeout: float = 3600) -> dict:
    """Run one part of a benchmark in its own processes; return the samples it printed by `say`."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise RuntimeError(f"{command} failed:\n{done.stdout}\n{done.stderr}")


def say(samples: dict) -> None:
    """Pass the samples, as JSON, to the process that called `measure`."""
    print(MARK + json.dumps(samples), flush=True)


def report(worker, rows: dict[str, dict]) -> None:
    """Print rows, on rank 0, for the process that started this one: see gpu_runner.Process.rows.

    rows: name -> {column: text, number, or a list of samples}.
    """
    if worker.is_main:
        say(rows)


def device_name(device: torch.device) -> str:
    return processor() if device.type == "cpu" else torch.cuda.get_device_name(device)


def main(
    name: str, title: str, description: str, texts: dict[str, Callable], part: Callable
) -> None:
    """The command line of a benchmark whose parts can be selected by name.

    texts: by name, a function of the number of repeats that measures and returns sections.
    part: what a process of `measure_part` runs, with (name of the part, repeats).
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="repeats of each measurement")
    parser.add_argument("--parts", nargs="+", choices=texts, default=list(texts))
    parser.add_argument("--no-write", action="store_true", help="only print the results")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # what a child measures
    args = parser.parse_args()
    if args.part:
        part(args.part, args.repeats)
        return
    sections = [section for name in args.parts for section in texts[name](args.repeats)]
    if args.no_write:
        print("\n\n".join(sections))
    else:
        write(name, title, sections)


def measure_part(script: Path, part: str, ranks: int, repeats: int) -> dict:
    """What rank 0 measured of one part of a script that calls `main`, run on `ranks` ranks."""
    return measure(*torchrun(ranks), script, "--repeats", repeats, "--part", part)


def seconds_per_call(call: Callable[[], None], count: int) -> float:
    """This rank's mean over `count` calls, from a common start of all ranks."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def alternate(repeats: int, sides: dict[str, Callable]) -> dict[str, list]:
    """One warm-up of each side, then `repeats` rounds in which the sides take turns."""
    for side in sides.values():
        side()
    samples = {name: [] for name in sides}
    for i in range(repeats):
        for name in list(sides) if i % 2 == 0 else list(sides)[::-1]:
            samples[name].append(sides[name]())
    return samples


def summary(samples: list[float]) -> str:
    """Median (minimum ... maximum) of the repeats."""
    middle, least, most = map(number, (statistics.median(samples), min(samples), max(samples)))
    return f"{middle} ({least} ... {most})"


def number(value: float) -> str:
    """The value with four digits, or all digits before the point: 0.6312, 42.1, 15,130."""
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def ratio_of_pairs(a: list[float], b: list[float]) -> list[float]:
    """a / b for each repeat: both sides of a pair ran in turn, so load slows both alike."""
    return [x / y for x, y in zip(a, b, strict=True)]


def machine() -> str:
    """CPU, number of cores, GPU if there is one, and versions."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return (
        f"{processor()}, {cores()} cores{gpu}; Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def cores() -> int:
    """The cores that this process may use: a container or Slurm may allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def pin_to_a_core() -> None:
    """Pin this rank, and every thread that it will start, to a core of its own. Linux only."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})


def processor() -> str:
    """The CPU's name, family and model (clouds hide the product), vector instructions, caches."""
    found = {}
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as info:
            found = dict(re.findall(r"^([^\t\n]+?)\t*: (.*)$", info.read(), re.M))
    if "model name" not in found:  # not x86, or not Linux
        return platform.processor() or platform.machine()
    model = f"family {found['cpu family']} model {found['model']}"
    sets = [name for name in VECTORS if name in found["flags"].split()]
    caches = ", ".join(f"{name} {size}" for name, size in cache_sizes())
    return f"{found['model name']} ({model}; {' '.join(sets)}; {caches})"


VECTORS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # a matrix product's speed depends on them


def cache_sizes() -> list[tuple[str, str]]:
    """("L2", "2048K") for each level of data cache of the first core."""
    levels = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (index / "type").read_text().strip() != "Instruction":
            levels["L" + (index / "level").read_text().strip()] = (index / "size").read_text()
    return [(name, size.strip()) for name, size in levels.items()]


def table(rows: list[tuple]) -> str:
    """A Markdown table; the first row is the heading."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines)


def write(name: str, title: str, sections: list[str]) -> None:
    """Write benchmarks/results/NAME.md and print it."""
    text = page(title, sections)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)


def page(title: str, sections: list[str]) -> str:
    command = " ".join(["python", *sys.argv])
    header = f"# {title}\n\nMachine: {machine()}\n\nDate: {date.today()}\n\nCommand: `{command}`"
    return "\n\n".join([header, *sections]) + "\n"
