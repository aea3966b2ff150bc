"""Compare the planner's predictions for this machine with train.py's measured steps.

    python benchmarks/planner.py               # calibrate, then every mesh: about ten minutes
    python benchmarks/planner.py --repeats 1 --steps 8 --seconds 1 --no-write      # a quick look

calibrate.py measures the machine's constants on as many ranks as the mesh has. Then
transformer_basics/train.py trains a GPT on the mesh, and logs tokens per second and peak memory.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "planner"), str(ROOT / "benchmarks")]

import bench
import inputs
from search import Job, evaluate, meshes
from shapes import Model

SHAPE = Model(4, 256, 4, 4, 64, 1024, 0, 256, 0)  # of the GPT; bytes as tokens
SEQUENCE, BATCH = 128, 16
MESHES = {  # name -> (ranks, flags of train.py, sizes of the planner's mesh)
    "one process": (1, "", {}),
    "dp 2": (2, "--dp-replicate 2", {"dp_replicate": 2, "zero_stage": 0}),
    "fsdp 2": (2, "--dp-shard 2", {"dp_shard": 2}),
    "tp 2": (2, "--tp 2", {"tp": 2}),
    "pp 2": (2, "--pp 2 --accumulate 4", {"pp": 2, "accumulation": 4}),
    "fsdp 4": (4, "--dp-shard 4", {"dp_shard": 4}),
    "tp 2, fsdp 2": (4, "--tp 2 --dp-shard 2", {"tp": 2, "dp_shard": 2}),
}
ONE = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1, "cp": 1, "accumulation": 1}
ONE |= {"full_checkpointing": 0, "virtual_stages": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement")
    parser.add_argument(
        "--steps", type=int, default=40, help="steps of each run; the first half warms up"
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="seconds to measure each constant"
    )
    parser.add_argument("--no-write", action="store_true", help="only print the results")
    args = parser.parse_args()
    rows = [("mesh", "predicted s", "measured s", "error", "predicted GiB", "measured GiB")]
    with tempfile.TemporaryDirectory() as folder:
        clusters = {n: calibrated(Path(folder), n, args.seconds) for n in (1, 2, 4)}
        plans = {name: predicted(clusters[ranks], name) for name, (ranks, *_) in MESHES.items()}
        measured = {name: [] for name in MESHES}
        for repeat in range(args.repeats):  # the meshes take turns
            for name in MESHES:
                measured[name].append(train(Path(folder) / f"{repeat} {name}", name, args.steps))
    for name in MESHES:
        seconds, gib = plans[name]
        times, peaks = zip(*measured[name], strict=True)
        error = 100 * (seconds / statistics.median(times) - 1)
        held = bench.summary(list(peaks))
        rows.append((name, f"{seconds:.3f}", bench.summary(list(times)), f"{error:+.0f} %"))
        rows[-1] += (f"{gib:.2f}", held)
    sections = [EXPLANATION, bench.table(rows)]
    if args.no_write:
        print("\n\n".join(sections))
    else:
        bench.write("planner", "The planner's predictions of this machine", sections)


EXPLANATION = f"""\
Predicted by planner/ with the constants of calibrate.py, measured by transformer_basics/train.py:
a GPT of {SHAPE.layers} layers, width {SHAPE.width}, {BATCH} sequences of {SEQUENCE} bytes per step,
fp32, one thread per rank. Error: of the predicted time.

What the formulas leave out: Python (on such small layers DTensor's bookkeeping was 41 ms of a step
of 181 ms, transformer_basics/running.md), and that over loopback the cores that compute also copy
the messages."""


def calibrated(folder: Path, ranks: int, seconds: float) -> str:
    """Measure this machine's constants on `ranks` ranks; returns the file's name."""
    output = folder / f"machine_{ranks}.toml"
    options = ("--output", output, "--seconds", seconds, "--device", "cpu")
    run(*bench.torchrun(ranks), ROOT / "planner/calibrate.py", *options)
    return str(output)


def train(folder: Path, name: str, steps: int) -> tuple[float, float]:
    """Seconds per step and peak GiB of a rank, from the log of a run of train.py."""
    ranks, flags, _ = MESHES[name]
    shape = f"--layers {SHAPE.layers} --dim {SHAPE.width} --heads {SHAPE.heads}"
    batch = f"--block-size {SEQUENCE} --batch-size {BATCH} --precision fp32 --device cpu"
    rest = f"--steps {steps} --log-every {steps // 4} --eval-every {steps} --eval-batches 1"
    rest += f" --checkpoint-every {steps} --sample 0"
    script = ROOT / "transformer_basics/train.py"
    options = f"{shape} {batch} {rest} {flags}".split()
    run(*bench.torchrun(ranks), script, *options, "--output-dir", folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    logged = [found for found in map(json.loads, lines) if "tokens_per_second" in found]
    late = logged[len(logged) // 2 :]
    speed = statistics.median(found["tokens_per_second"] for found in late)
    peak = max(value for found in late for key, value in found.items() if key.endswith("_mb"))
    return BATCH * SEQUENCE / speed, peak * 1e6 / 2**30


def predicted(machine: str, name: str) -> tuple[float, float]:
    """Seconds per step and peak GiB of a rank, by the planner."""
    cluster, _, stack = inputs.cluster(machine)
    ranks, _, sizes = MESHES[name]
    job = Job(SHAPE, cluster, stack, ranks, SEQUENCE, BATCH, flash=1)
    wanted = ONE | sizes
    found = [m for m in meshes(job) if all(getattr(m, k) == v for k, v in wanted.items())]
    plan = evaluate(job, found[:1])[0]
    return plan.step_s, plan.total_gib


def run(*command) -> None:
    subprocess.run(list(map(str, command)), check=True, timeout=1800, capture_output=True)


if __name__ == "__main__":
    main()
