"""How often to save checkpoints, and which share of the time remains for training (goodput).

    python clusters/goodput.py                                # the table, 16 to 16,384 GPUs
    python clusters/goodput.py --restart 60                   # what a quicker restart is worth
    python clusters/goodput.py --save 5 --durable-after 60    # what a background save is worth

Frequent saves cost time; after a failure, rare saves cost the work that must be repeated. Look at
both halves of the table: the same job on a cluster that was tuned for it, and on a research
cluster, where a job is interrupted six times as often.

    J. W. Young, A first order approximation to the optimum checkpoint interval,
        Communications of the ACM 17(9), 1974
    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
        Future Generation Computer Systems 22(3), 2006
"""

import argparse
import math
import random

from closed_pipe import quiet_if_closed

# (GPU hours between two unexpected interruptions of a job, the largest job with this figure): hours
# between interruptions times the job's GPUs. This is not how long a GPU lives: GPUs caused more
# than half of Llama 3's interruptions; hosts, network and software caused the rest.
#   tuned: 419 interruptions in 54 days on 16,384 GPUs. The Llama 3 Herd of Models, 2024, 3.3.4. (It
#       reports more than 90 % of effective time: saves and restarts took less than our defaults.)
#   research: 7.9 hours for jobs of 1,024 GPUs. Kokolis et al., Revisiting Reliability in
#       Large-Scale Machine Learning Research Clusters, HPCA 2025. (OPT-175B, 992 GPUs: 7.5 hours.)
CLUSTERS = {"tuned": (54 * 24 * 16384 / 419, 16384), "research": (7.9 * 1024, 1024)}
SIZES = [2**power for power in range(4, 15, 2)]


@quiet_if_closed()
def main() -> None:
    args = parse_args()
    clusters = {"yours": (args.gpu_hours, SIZES[-1])} if args.gpu_hours else CLUSTERS
    print_table(clusters, args.save, args.durable_after, args.restart)


# ---- the formulas: all times in one unit. mtbf: mean time between failures of the whole job.


def young(save: float, mtbf: float) -> float:
    """The interval between saves at which saves cost as much as repeated work. Young 1974.

    Per unit of work, saves cost save / interval; each failure repeats half an interval on average.
    """
    return math.sqrt(2 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """Young's interval to a higher order, for failures that are not rare. Daly 2006."""
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """The share of the time that becomes training: 1 for a machine that never fails or saves.

    interval: work between two saves. restart: from a failure, with its detection, to the next step.
    Exact if failures come at random (exponentially distributed), also during saves and restarts.
    Daly 2006: on average it takes mtbf e^(restart/mtbf) (e^((interval+save)/mtbf) - 1) to do and
    save one interval.

    A background save stops the training for `save`, and counts only when it is durable, `delay`
    later. After a failure each save counts `delay` later, as if the restart took `delay` longer:
    pass restart + delay, and an interval of at least `delay`.
    """
    takes = mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf)
    return interval / takes


# ---- the table


def print_table(clusters: dict, save: float, durable_after: float, restart: float) -> None:
    """clusters: GPU hours between interruptions, and the largest job; other times in seconds."""
    print(
        f"A save stops the training for {save:g} s and is durable after {durable_after:g} s; from a"
    )
    print(f"failure to the next step it takes {restart:g} s. The best interval between saves:\n")
    titles = (f"{name}: {hours:,.0f} GPU hours" for name, (hours, _) in clusters.items())
    print(" " * 6 + "".join(f"{title:>38}" for title in titles))
    print("  GPUs" + f"{'interrupted every':>19}{'save':>10}{'goodput':>9}" * len(clusters))
    for gpus in SIZES:
        rows = (row(gpus, *cluster, save, durable_after, restart) for cluster in clusters.values())
        print(f"{gpus:6,}" + "".join(f"{a:>19}{b:>10}{c:>9}" for a, b, c in rows))


def row(
    gpus: int, gpu_hours: float, largest: int, save: float, durable_after: float, restart: float
) -> tuple[str, str, str]:
    """Hours or minutes between interruptions and between saves, and the goodput."""
    if gpus > largest:
        return "-", "-", "-"
    mtbf, delay = gpu_hours * 3600 / gpus, durable_after - save
    interval = max(daly(save, mtbf), delay)  # one save is written at a time
    share = goodput(interval, save, restart + delay, mtbf)
    return spoken(mtbf), spoken(interval), f"{share:.1%}"


def spoken(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


# ---- the check: the same by Monte Carlo simulation


def replay(failures, interval: float, save: float, restart: float, end: float) -> int:
    """How many intervals are saved by the time `end`, if the job fails at these sorted times."""
    now = saved = 0
    for failure in [*failures, end]:
        if failure > end:
            failure = end
        saved += max(0, math.floor((failure - now) / (interval + save)))
        now = failure + restart  # a failure before that time starts the restart again
    return saved


def random_failures(mtbf: float, end: float, seed: int) -> list[float]:
    """The times at which a job fails until `end`; the gaps are exponentially distributed."""
    chance, now, failures = random.Random(seed), 0.0, []
    while (now := now + chance.expovariate(1 / mtbf)) < end:
        failures.append(now)
    return failures


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--gpu-hours",
        type=positive,
        help="hours between interruptions of a job x its GPUs (default: two clusters' figures)",
    )
    add(
        "--save",
        type=positive,
        default=60,
        help="seconds for which a save stops the training (default: 60)",
    )
    add(
        "--durable-after",
        type=positive,
        help="seconds from the beginning of a save until it is on disk (default: --save)",
    )
    add(
        "--restart",
        type=positive,
        default=300,
        help="seconds from a failure to the next step (default: 300)",
    )
    args = parser.parse_args()
    args.durable_after = args.durable_after or args.save
    if args.durable_after < args.save:
        parser.error(f"--durable-after {args.durable_after:g} is less than --save {args.save:g}")
    return args


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
