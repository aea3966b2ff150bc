"""Check and measure this repository on a machine with a GPU: `make gpu`.

It runs these steps in order: the machine, tests on GPUs, every script, losses compared with the
CPU's, checkpoints, speed and memory of two GPTs, masked attention, offload, traces, hidden
synchronizations, and NCCL between ranks. Each step ends at its time limit: 35 minutes in total on
one GPU, 46 on several. After every command it writes runs/gpu/gpu.md (the report), gpu.json, and
the command's output. A complete run in which no step failed also writes benchmarks/results/gpu.md.
With --only, the report keeps the other steps of an earlier run. Exit status 0: no step failed.
Ctrl-C, a signal or a closed terminal ends all processes; what was measured until then stays in the
report.

    python3 benchmarks/gpu.py                        # all steps
    python3 benchmarks/gpu.py --only speed traces    # some of the steps
    python3 benchmarks/gpu.py --minutes 10           # the cheapest steps that fit
    python3 benchmarks/gpu.py --only ranks --nodes 2 --host HOST       # the same line on two nodes
    python3 benchmarks/gpu.py --device cpu --sizes tiny                # a rehearsal

It needs a clone, torch 2.11 or newer, numpy and scikit-learn, and no network.
"""

import argparse
import fcntl
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

import bench
import gpu_steps as steps
import torch
from gpu_runner import Job, LeftOut, guard, section, status_of

ROOT = Path(__file__).resolve().parent.parent
LOCK = "lock"  # a file of --output-dir


def main() -> None:
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            # Job.run_all then ends the running commands
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    # A shell's `&` ignores SIGINT, and a command inherits that: it would not end by Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    day = {**identity(args), "date": str(date.today()), "steps": args.earlier}
    with only_run_in(args.output_dir), guard():
        for name in args.only or STEPS:
            carry_out(name, args, day)
    print(page_of(day))
    failed = any(
        step["status"] == "failed" for step in day["steps"].values() if "earlier" not in step
    )
    is_complete = args.device == "cuda" and args.sizes == "full"
    is_complete = is_complete and not args.only and not args.skipped
    if is_complete and not failed:
        shutil.copy(args.output_dir / "gpu.md", bench.RESULTS)
    sys.exit(failed)


def carry_out(name: str, args, day: dict) -> None:
    """Run one step, record any failure, and keep gpu.json and gpu.md up to date."""

    def save() -> None:
        for name, text in (("gpu.json", json.dumps(day, indent=1)), ("gpu.md", page_of(day))):
            temporary = args.output_dir / f"{name}.tmp"
            try:
                temporary.write_text(text)
                os.replace(temporary, args.output_dir / name)
            except OSError as error:  # a full disk: the next steps may still measure, and print
                print(f"cannot write {name}: {error}", flush=True)

    if name in args.skipped and name in args.earlier:
        return  # what an earlier run measured stays
    step, started = STEPS[name], time.monotonic()
    record = day["steps"][name] = {"title": step.title, "status": "running", "runs": {}}
    try:
        if name in args.skipped:  # what an earlier run left in its folder stays
            raise LeftOut(f"does not fit into {args.minutes:g} minutes")
        step.run(Job(args, name, step.minutes, record, save))
        record["status"] = "passed"
    except LeftOut as reason:
        record |= {"status": "left out", "reason": str(reason)}
    except Exception as error:
        record |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    except BaseException:  # Ctrl-C, or a signal of `main`
        record |= {"status": "failed", "reason": "interrupted"}
        save()
        raise
    record["seconds"] = round(time.monotonic() - started, 1)
    save()
    print(f"{name:12} {status_of(record)}", flush=True)


def page_of(day: dict) -> str:
    steps = [day["steps"][name] for name in STEPS if name in day["steps"]]
    return bench.page("What a GPU showed", [*map(section, steps)])


def identity(args) -> dict[str, str]:
    """The machine, versions and sizes that all numbers of one report share."""
    return {"machine": bench.machine(), "device": args.device, "sizes": args.sizes}


def earlier_steps(args) -> dict[str, dict]:
    """The records of an earlier run in --output-dir, each with its date.

    Raises ValueError if that run had another machine, device or sizes.
    """
    file = args.output_dir / "gpu.json"
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    for name, value in identity(args).items():
        if found.get(name) != value:
            raise ValueError(f"{file} is of a run with {name} {found.get(name)!r}, not {value!r}")
    for step in found["steps"].values():
        step.setdefault("earlier", found["date"])
        if step["status"] == "running":
            step |= {"status": "failed", "reason": "interrupted"}
    return found["steps"]


def holds_files_of_others(folder: Path) -> bool:
    if not folder.exists() or (folder / "gpu.json").exists():
        return False
    return not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir())


def only_run_in(folder: Path):
    """A lock on the folder, or an end with one sentence: each step begins with an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another run writes to {folder}: wait for it, or choose another --output-dir")
    except OSError:  # a file system without locks
        pass
    return lock


class Step(NamedTuple):
    run: Callable[[Job], None]
    minutes: float  # its time limit
    title: str
    needs_two: bool = False  # devices; with one it is left out, and costs nothing


STEPS = {
    "environment": Step(steps.environment, 1, "The machine and its ceilings"),
    "tests": Step(steps.tests, 10, "Tests that need a GPU"),
    "scripts": Step(steps.scripts, 5, "Every script that has --device, one rank"),
    "two-ranks": Step(steps.two_ranks, 5, "The same scripts on two ranks", needs_two=True),
    "numbers": Step(
        steps.numbers, 1, "Losses and gradient norms: relative differences from the CPU's"
    ),
    "checkpoints": Step(steps.checkpoints, 2, "A CPU checkpoint continued on the device and back"),
    "speed": Step(steps.speed, 8, "GPT in bf16"),
    "kernels": Step(steps.kernels, 2, "Masked attention and dropout"),
    "offload": Step(steps.offload, 2, "FSDP with and without --offload"),
    "traces": Step(steps.traces, 2, "Traces of three steps"),
    "syncs": Step(steps.syncs, 2, "Hot steps of each train.py: does a line wait for the GPU?"),
    "ranks": Step(steps.ranks, 6, "All ranks: equivalence, bandwidth, scaling", needs_two=True),
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    says = "run the cheapest steps whose time limits fit into MINUTES (default: all)"
    add("--minutes", type=float, default=math.inf, help=says)
    add("--sizes", choices=("full", "tiny"), default="full", help="full GPTs, or tiny to rehearse")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--output-dir", type=Path, default=ROOT / "runs/gpu", help="directory (default: runs/gpu)")
    add("--nodes", type=int, default=1, help="step ranks: run the same line on each of N nodes")
    add("--host", help="with --nodes: the name or address of one node")
    args = parser.parse_args()
    args.output_dir = args.output_dir.resolve()
    args.count = torch.cuda.device_count() if args.device == "cuda" else 2
    if not args.count:
        parser.error("torch finds no CUDA device here; to rehearse: --device cpu --sizes tiny")
    if (args.nodes > 1) != bool(args.host):
        parser.error("--nodes N and --host NAME go together")
    if args.nodes > 1:  # which may share this disk
        args.output_dir /= socket.gethostname()
    if holds_files_of_others(args.output_dir):
        parser.error(
            f"--output-dir {args.output_dir} has other files, and a step empties its folder in "
            f"there, such as {args.output_dir}/tests: choose a new one"
        )
    args.earlier = {}
    if args.only:
        try:
            args.earlier = earlier_steps(args)
        except ValueError as error:
            parser.error(f"{error}, and --only adds to it: choose another --output-dir")
    left, args.skipped = args.minutes, set()
    for name in sorted(args.only or STEPS, key=lambda name: STEPS[name].minutes):
        needed = 0 if STEPS[name].needs_two and args.count * args.nodes < 2 else STEPS[name].minutes
        if needed <= left:
            left -= needed
        else:
            args.skipped.add(name)
    return args


if __name__ == "__main__":
    main()
