"""Check and measure this repository on a machine with a GPU: `make gpu`.

It runs these steps in order: the machine, tests on GPUs, every script, losses compared with the
CPU's, checkpoints, speed and memory of two GPTs, offload, traces, hidden synchronizations, and NCCL
between ranks. Each step ends at its time limit: 28 minutes in total on one GPU, 39 on several.
After every command it writes runs/gpu/gpu.md (the report), gpu.json, and the command's output. A
complete run in which no step failed also writes benchmarks/results/gpu.md. Exit status 0: no step
failed. Ctrl-C, SIGTERM or a closed terminal ends all processes; what was measured until then stays
in the report.

    python3 benchmarks/gpu.py                        # all steps
    python3 benchmarks/gpu.py --only speed traces    # some of the steps
    python3 benchmarks/gpu.py --minutes 10           # the cheapest steps that fit
    python3 benchmarks/gpu.py --only ranks --nodes 2 --host HOST       # the same line on two nodes
    python3 benchmarks/gpu.py --device cpu --sizes tiny                # a rehearsal

It needs a clone, torch 2.11 or newer, numpy and scikit-learn, and no network.
"""

import argparse
import fcntl
import gzip
import json
import math
import os
import re
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
import torch
from gpu_runner import Failed, Job, LeftOut, section, status_of
from gpu_scripts import flags_of, has, scripts_with_device, why_not

ROOT = Path(__file__).resolve().parent.parent
LOCK = "lock"  # a file of --output-dir


def main() -> None:
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            # Job.run_all then ends the running commands
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    day = {"machine": bench.machine(), "date": str(date.today()), "steps": {}}
    with only_run_in(args.output_dir):
        for name in args.only or STEPS:
            carry_out(name, args, day)
    print(page_of(day))
    failed = any(step["status"] == "failed" for step in day["steps"].values())
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
    return bench.page("What a GPU showed", [*map(section, day["steps"].values())])


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


def python(script: str, *flags, ranks: int = 1) -> tuple:
    """A command: the script as one plain process, or on `ranks` ranks of this node."""
    launcher = bench.torchrun(ranks) if ranks > 1 else [sys.executable]
    return (*launcher, ROOT / script, *flags)


def measurement(job: Job, name: str, size: str = "124M") -> tuple:
    size = "tiny" if job.is_tiny else size
    flags = ("--device", job.args.device, "--size", size)
    return python("benchmarks/gpu_measurements.py", name, *flags)


# ---- the steps, in order


def environment(job: Job) -> None:
    job.run("environment", *measurement(job, "environment"))


def tests(job: Job) -> None:
    """With NCCL if each rank of a test has a GPU, else with Gloo on one GPU."""
    needed = ("pytest", "xdist", "pytest_timeout", "psutil")
    if not all(map(has, needed)):
        raise LeftOut(f"needs the modules {', '.join(needed)}")
    pytest = (sys.executable, "-m", "pytest", "-v", "-c", ROOT / "pyproject.toml")
    if job.is_tiny:
        one = (ROOT / "tests/test_gpu.py", "-k", "minimal and fsdp and 1")
        job.run("pytest", *pytest, *one, expects=" passed")
        return
    # The ranks of two NCCL jobs would compete for GPUs: with several GPUs, one job at a time.
    at_once, workers = (2, 4) if job.args.count == 1 else (1, 1)
    commands = {}
    quick = ("--device", "cuda", "-m", "quick or not slow")
    for marker, flags in (("gpu", ("-m", "gpu")), ("device", quick)):
        commands[" ".join(flags)] = (*pytest, "-n", workers, *flags, *test_files(marker))
    job.run_all(commands, at_once, expects=" passed")


def test_files(marker: str) -> list[Path]:
    """The files with tests of this marker: other files may import modules that are missing."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [file for file in files if re.search(rf"mark\.{marker}\b", file.read_text())]


def scripts(job: Job) -> None:
    run_scripts(job, ranks=1, gpus=job.args.count, at_once=max(1, min(8, os.cpu_count())))


def two_ranks(job: Job) -> None:
    """With N GPUs, N / 2 scripts run at a time, each on its own two GPUs."""
    if job.args.count < 2 or job.is_tiny:
        raise LeftOut("needs two devices, and --sizes full")
    run_scripts(job, ranks=2, gpus=2, visible=pairs_of_gpus(job.args.count))


def run_scripts(job: Job, ranks: int, gpus: int, **how) -> None:
    """Each script must print its device. gpus: the number of GPUs that its ranks see together."""
    commands = {}
    for name in ["collectives/hello_world.py"] if job.is_tiny else scripts_with_device():
        reason = why_not(name, job.args.device, ranks, gpus)
        if reason:
            job.leave_out(name, reason)
        else:
            commands[name] = python(name, *flags_of(name, job.args.device), ranks=ranks)
    names_it = rf"rank\(s\) on {job.args.device}"
    if job.args.device == "cuda":
        names_it += rf"|^{re.escape(torch.cuda.get_device_name())}, torch"
    job.run_all(commands, expects=names_it, seconds=120, **how)


def pairs_of_gpus(count: int) -> list[str]:
    """Values of CUDA_VISIBLE_DEVICES: 0,1 and 2,3 and so on, of the GPUs that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    gpus = visible.split(",")[:count]
    pairs = [f"{a},{b}" for a, b in zip(gpus[::2], gpus[1::2], strict=False)]
    return pairs[: max(1, os.cpu_count() // 2)]


def numbers(job: Job) -> None:
    job.run("numbers", *measurement(job, "numbers"))


def checkpoints(job: Job) -> None:
    """Train 2 steps on the CPU, 2 on the device, 2 on the CPU; then generate on the device."""
    flags = "--steps 6 --checkpoint-every 2 --keep 3 --log-every 1 --eval-batches 1 --sample 0"
    flags = [*flags.split(), "--batch-size", 4, "--data", ROOT / "tests/test_repository.py"]
    losses, previous = {}, None
    for name, device, step in (
        ("cpu", "cpu", 0),
        ("there", job.args.device, 2),
        ("back", "cpu", 4),
    ):
        folder = job.folder / name
        if previous:
            saved = previous / f"checkpoints/step_{step:08}"
            shutil.copytree(saved, folder / "checkpoints" / saved.name)
        here = ("--device", device, "--output-dir", folder)
        job.run(name, *python("transformer_basics/train.py", *flags, *here))
        previous = folder
        seen = {f"loss of step {n}": loss for n, loss in logged(folder, "loss").items() if n > 4}
        losses[name] = seen
        job.note({name: seen})
        for what, loss in seen.items():
            expected = losses["cpu"][what]
            if not abs(loss - expected) <= 5e-3:  # train.py uses TF32: 10 bits of mantissa
                raise Failed(f"{name}: {what} is {loss}, on the CPU {expected}")
    if not job.is_tiny:
        generate = ("transformer_basics/generate.py", previous, "--device", job.args.device)
        job.run("generate.py", *python(*generate))


def logged(folder: Path, name: str) -> dict[int, float]:
    """step -> value, of a train.py's metrics.jsonl."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line}


def speed(job: Job) -> None:
    for size in ["tiny"] if job.is_tiny else ["124M", "1B"]:
        job.run(size, *measurement(job, "speed", size))


def offload(job: Job) -> None:
    batch = 256 if job.is_tiny else 64
    model = "--dim 32 --depth 1" if job.is_tiny else "--dim 1024 --depth 12 --precision bf16"
    flags = [*model.split(), "--epochs", 1, "--log-every", 2, "--batch-size", batch]
    flags += ["--device", job.args.device]
    peaks = []
    for name in ("on_device", "offload"):
        folder = job.folder / name
        more = ["--offload"] if name == "offload" else []
        command = python("fsdp_basics/train.py", *flags, *more, "--output-dir", folder)
        job.run(name, *command, threads=os.cpu_count())  # with --offload the CPU runs the optimizer
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        peaks.append(max(logged(folder, "memory_mb").values()))
        _, *rates = logged(folder, "samples_per_second").values()  # the first steps warm up
        times = [1e3 * batch / rate for rate in rates]
        job.note({name: {"peak memory, MB": peaks[-1], "ms per step": times}})
    if job.args.device != "cpu" and peaks[1] >= peaks[0]:
        raise Failed(f"--offload saved no memory: {peaks} MB")


def traces(job: Job) -> None:
    """Steps 10 to 12 of the templates: open STEP/NAME/trace_RANK.json.gz in ui.perfetto.dev."""
    scripts = {"ddp_basics": ["--epochs", 1], "fsdp_basics": ["--epochs", 1]}
    if job.args.count > 1:
        scripts["transformer_basics"] = ["--steps", 12, "--pp", 2, "--sample", 0]
    for directory, flags in list(scripts.items())[: 1 if job.is_tiny else None]:
        folder, ranks = job.folder / directory, 2 if "--pp" in flags else 1
        flags += ["--profile", "--device", job.args.device, "--output-dir", folder]
        job.run(directory, *python(f"{directory}/train.py", *flags, ranks=ranks))
        for trace in sorted(folder.glob("trace_*.json")):
            text, packed = trace.read_bytes(), trace.with_suffix(".json.gz")
            packed.write_bytes(gzip.compress(text))
            trace.unlink()
            megabytes, kernels = packed.stat().st_size / 2**20, text.count(b'"cat": "kernel"')
            job.note({f"{directory}/{packed.name}": {"MiB": megabytes, "kernels": kernels}})
            if megabytes > 16:
                raise Failed(f"{packed} is larger than 16 MiB")
            if job.args.device == "cuda" and not kernels and not job.is_tiny:
                raise Failed(f"{packed} has no kernel: may a profiler use CUPTI here?")


def syncs(job: Job) -> None:
    directories = ["ddp_basics", "fsdp_basics", "transformer_basics", "t5_finetuning"]
    if not has("transformers"):
        job.leave_out(directories.pop(), "transformers is not installed")
    commands = {}
    for directory in directories[:1] if job.is_tiny else directories:
        flags = flags_of(f"{directory}/train.py", job.args.device)
        commands[directory] = python("benchmarks/gpu_syncs.py", directory, *flags)
    job.run_all(commands, at_once=4, expects="no wait for the GPU|no GPU to wait for")


def ranks(job: Job) -> None:
    """All devices of this node, or of several nodes: NCCL between ranks."""
    count, nodes, device = job.args.count, job.args.nodes, ("--device", job.args.device)
    if count * nodes < 2:
        raise LeftOut("needs two devices, or --nodes")
    size = ("--size", "124M", "--precision", "bf16")
    if job.is_tiny:
        size = ("--size", "tiny", "--repeats", 1)
    most = "64K" if job.is_tiny else "1G"
    bandwidth = ("--operations", "all_reduce", "--max-bytes", most)
    for name, script, flags, expects in (
        ("equivalence", "benchmarks/gpu_measurements.py", ("equivalence",), ""),
        ("all_reduce bandwidth", "collectives/bandwidth.py", bandwidth, "^all_reduce "),
        ("scaling", "transformer_basics/benchmark.py", size, "^(mesh|tp|pp|dp_)"),
    ):
        launcher = bench.torchrun(count)
        if job.is_tiny and nodes == 1 and name != "equivalence":
            launcher = [sys.executable]  # takes a third of the time
        if nodes > 1:
            launcher = [*launcher[:3], f"--nnodes={nodes}", f"--nproc_per_node={count}"]
            launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint={job.args.host}:29500"]
            launcher += [f"--rdzv-id={name.split()[0]}"]
        # Rank 0, which prints, may be on another node.
        told = {"expects": expects, "must": nodes == 1}
        job.run(name, *launcher, ROOT / script, *flags, *device, **told)
    if nodes == 1 and not job.is_tiny:
        alone = python("transformer_basics/benchmark.py", *size, *device)
        job.run("scaling: one rank", *alone, expects="^(mesh|dp_)")
    if nodes == 1 and not job.is_tiny and has("transformers"):
        ddp = ("--sizes", "124M", "--repeats", 3, "--no-write", *device)
        job.run("DDP", *python("benchmarks/gpt.py", *ddp), expects=r"^\| .*(DDP|ZeRO|DTensor)")


class Step(NamedTuple):
    run: Callable[[Job], None]
    minutes: float  # its time limit
    title: str
    needs_two: bool = False  # devices; with one it is left out, and costs nothing


STEPS = {
    "environment": Step(environment, 1, "The machine and its ceilings"),
    "tests": Step(tests, 5, "Tests that need a GPU"),
    "scripts": Step(scripts, 5, "Every script that has --device, one rank"),
    "two-ranks": Step(two_ranks, 5, "The same scripts on two ranks", needs_two=True),
    "numbers": Step(numbers, 1, "Losses and gradient norms: relative differences from the CPU's"),
    "checkpoints": Step(checkpoints, 2, "A CPU checkpoint continued on the device and back"),
    "speed": Step(speed, 8, "GPT in bf16"),
    "offload": Step(offload, 2, "FSDP with and without --offload"),
    "traces": Step(traces, 2, "Traces of three steps"),
    "syncs": Step(syncs, 2, "Hot steps of each train.py: does a line wait for the GPU?"),
    "ranks": Step(ranks, 6, "All ranks: equivalence, bandwidth, scaling", needs_two=True),
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    says = "run the cheapest steps whose time limits fit into MINUTES (default: all)"
    add("--minutes", type=float, default=math.inf, help=says)
    add("--sizes", choices=("full", "tiny"), default="full", help="tiny: a rehearsal")
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
