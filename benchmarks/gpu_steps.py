"""The steps of benchmarks/gpu.py, in order: each runs commands, and raises Failed or LeftOut."""

import gzip
import json
import os
import re
import shutil
import sys
from pathlib import Path

import bench
import torch
from gpu_runner import Failed, Job, LeftOut
from gpu_scripts import flags_of, has, scripts_with_device, why_not

ROOT = Path(__file__).resolve().parent.parent


def python(script: str, *flags, ranks: int = 1) -> tuple:
    """A command: the script as one plain process, or on `ranks` ranks of this node."""
    launcher = bench.torchrun(ranks) if ranks > 1 else [sys.executable]
    return (*launcher, ROOT / script, *flags)


def measurement(job: Job, name: str, size: str = "124M") -> tuple:
    size = "tiny" if job.is_tiny else size
    flags = ("--device", job.args.device, "--size", size)
    return python("benchmarks/gpu_measurements.py", name, *flags)


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
    several = max(4, min(8, bench.cores() // 2))
    at_once, workers = (2, several) if job.args.count == 1 else (1, 1)
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
    run_scripts(job, ranks=1, gpus=job.args.count, at_once=max(1, min(8, bench.cores())))


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
    return pairs[: max(1, bench.cores() // 2)]


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


def kernels(job: Job) -> None:
    job.run("kernels", *measurement(job, "kernels"))


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
        job.run(name, *command, threads=bench.cores())  # with --offload the CPU runs the optimizer
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
    commands = {}
    for directory in directories[:1] if job.is_tiny else directories:
        reason = why_not(f"{directory}/train.py", job.args.device, ranks=1, gpus=1)
        if reason:
            job.leave_out(directory, reason)
            continue
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
