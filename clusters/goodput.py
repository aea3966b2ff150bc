"""How often to save, and which part of a cluster's time is left for training.

    python clusters/goodput.py                           # the table, 16 to 16,384 GPUs
    python clusters/goodput.py --save 5 --restart 60     # what saving faster would be worth
    python clusters/goodput.py --measure 20              # 20 s of real processes, killed at random

To save often costs the time of saving; to save rarely costs what is done twice after a failure.
Look at the table's last columns: GPUs that lose next to nothing as 16 lose an eighth as 16,384.

    J. W. Young, A first order approximation to the optimum checkpoint interval,
        Communications of the ACM 17(9), 1974
    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
        Future Generation Computer Systems 22(3), 2006
"""

import argparse
import math
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path

# 419 unexpected interruptions in 54 days on 16,384 GPUs: The Llama 3 Herd of Models, 2024, 3.3.4
GPU_MTBF = 54 * 24 * 16384 / 419  # hours between failures of one GPU and its share of the host
FORK = multiprocessing.get_context("fork")  # no imports again: it starts at once
SIZES = [2**power for power in range(4, 15, 2)]


def main() -> None:
    args = parse_args()
    if args.measure:
        measure(args.measure)
    else:
        print_table(args.gpu_mtbf * 3600, args.save, args.restart)


# ---- the formulas: all times in one unit. mtbf: mean time between failures of the whole job.


def young(save: float, mtbf: float) -> float:
    """The interval between saves at which saving costs as much as what is lost. Young 1974.

    Per unit of work: save / interval for saving; of each failure, half an interval is done again.
    """
    return math.sqrt(2 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """The same to a higher order, for when failures are not rare. Daly 2006."""
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """The share of the time that becomes training: 1 would be a machine that never fails or saves.

    interval: work between two saves. restart: from a failure to the next step, to notice it too.
    Failures come at random (exponentially), also during saves and restarts: then this is exact.
    Daly 2006: on average it takes mtbf e^(restart/mtbf) (e^((interval+save)/mtbf) - 1) to do and
    save one interval.
    """
    takes = mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf)
    return interval / takes


# ---- the table


def print_table(gpu_mtbf: float, save: float, restart: float) -> None:
    print(f"one GPU fails every {gpu_mtbf / 3600:,.0f} h; to save takes {save:g} s, to restart")
    print(f"{restart:g} s. Intervals between saves in minutes, goodput in %.\n")
    print("  GPUs  a failure every   Young    Daly   goodput   if saved hourly   GPUs' worth lost")
    for gpus in SIZES:
        mtbf = gpu_mtbf / gpus
        interval = daly(save, mtbf)
        best = goodput(interval, save, restart, mtbf)
        hourly = goodput(3600, save, restart, mtbf)
        print(
            f"{gpus:6,}  {mtbf / 3600:13,.1f} h  {young(save, mtbf) / 60:6.1f}  "
            f"{interval / 60:6.1f}  {best:8.1%}  {hourly:16.1%}  {gpus * (1 - best):17,.1f}"
        )


# ---- the check: the same by throwing dice, and with processes that are killed


def replay(failures, interval: float, save: float, restart: float, end: float) -> int:
    """How many intervals are saved by the time `end`, if it fails at these times, in order."""
    now = saved = 0
    for failure in [*failures, end]:
        if failure > end:
            failure = end
        saved += max(0, math.floor((failure - now) / (interval + save)))
        now = failure + restart  # struck again before that, it begins to restart anew
    return saved


def random_failures(mtbf: float, end: float, seed: int) -> list[float]:
    """When a job fails until `end`: the times between failures are exponentially distributed."""
    chance, now, failures = random.Random(seed), 0.0, []
    while (now := now + chance.expovariate(1 / mtbf)) < end:
        failures.append(now)
    return failures


def measure(seconds: float, seed: int = 0) -> tuple[int, int]:
    """Run, kill and restart a process for this long; print what it got done, and the formula's.

    Its work and its saves are sleep, so that the machine's speed is left out of it; the kills
    (SIGKILL), the restarts and the file are real. Small numbers, so that it fails often.
    Returns the intervals saved, and what they can be at most with the same kills.
    """
    mtbf, save, restart = 1.0, 0.02, 0.1
    interval = daly(save, mtbf)
    failures, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "saved")
        for planned in [*random_failures(mtbf, seconds, seed), seconds]:
            starts = restart if failures else 0
            process = FORK.Process(target=work, args=(file, interval, save, starts))
            process.start()
            process.join(max(0, began + planned - time.monotonic()))
            process.kill()
            process.join()
            failures.append(time.monotonic() - began)
        saved = read(file)
    end = failures.pop()
    on_paper = replay(failures, interval, save, restart, end)
    print(f"{len(failures)} kills in {end:.1f} s, saved every {interval:.3f} s")
    print(f"measured            goodput {saved * interval / end:6.1%}")
    print(f"these kills, on paper       {on_paper * interval / end:6.1%}")
    print(f"formula, for many kills     {goodput(interval, save, restart, mtbf):6.1%}")
    return saved, on_paper


def work(file: Path, interval: float, save: float, restart: float) -> None:
    """Continue where the last process stopped. A kill at any moment leaves a whole file."""
    time.sleep(restart)
    saved = read(file)
    while True:
        time.sleep(interval)
        time.sleep(save)
        saved += 1
        temporary = file.with_suffix(".tmp")
        temporary.write_text(str(saved))
        os.replace(temporary, file)


def read(file: Path) -> int:
    return int(file.read_text()) if file.exists() else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gpu-mtbf", type=positive, default=GPU_MTBF, help="hours between failures of one GPU")
    add("--save", type=positive, default=60, help="seconds for which a save stops the training")
    add("--restart", type=positive, default=300, help="seconds from a failure to the next step")
    add("--measure", type=positive, help="for so many seconds, instead of the table")
    return parser.parse_args()


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


if __name__ == "__main__":
    main()
