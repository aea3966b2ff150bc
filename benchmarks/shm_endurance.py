"""Run 10,000 lists of random operations on our shared-memory backend: does one hang, fail, differ?

    python benchmarks/shm_endurance.py                        # half an hour; writes the results
    python benchmarks/shm_endurance.py --jobs 3 --no-write    # a quick look

A job is a torchrun of 2, 3 or 4 ranks. It creates groups and runs 100 lists of 20 operations (see
tests/workers/shm_stress.py), each compared with Gloo. Then it must end with status 0; every second
job does not call destroy_process_group.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import bench

STRESS = Path(__file__).resolve().parent.parent / "tests/workers/shm_stress.py"
RANKS = (2, 3, 4)
LISTS, OPERATIONS = 100, 20  # lists in a job; operations in a list


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--no-write", action="store_true", help="only print the results")
    args = parser.parse_args()
    seconds = {ranks: [] for ranks in RANKS}
    for seed in range(args.jobs):
        ranks = RANKS[seed % len(RANKS)]
        seconds[ranks].append(job(seed, ranks))
        print(f"job {seed}: {ranks} ranks, {seconds[ranks][-1]:.1f} s", file=sys.stderr, flush=True)
    rows = [("ranks", "jobs", "lists", "operations", "seconds of a job")]
    for ranks, each in seconds.items():
        if each:
            count = LISTS * len(each)
            rows.append((ranks, len(each), count, count * OPERATIONS, bench.summary(each)))
    lists = f"{args.jobs} jobs, {args.jobs * LISTS:,} lists"
    sections = [bench.table(rows), f"All ended with status 0 and equal to Gloo: {lists}."]
    if args.no_write:
        print("\n\n".join(sections))
    else:
        bench.write(
            "shm_endurance",
            "A shared-memory backend in long runs: errors, wrong numbers, hangs",
            sections,
        )


def job(seed: int, ranks: int) -> float:
    """Seconds of a job. Raises RuntimeError if it fails, TimeoutExpired if it hangs."""
    leave = ["--leave"] if seed % 2 else []
    command = [*bench.torchrun(ranks), str(STRESS), str(seed), str(LISTS * OPERATIONS), *leave]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0 or "operations in groups of" not in done.stdout:
        raise RuntimeError(f"seed {seed}, {ranks} ranks:\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
