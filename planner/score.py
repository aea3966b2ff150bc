"""Scores the formulas on published runs.

    python planner/score.py                         # the rows that set the constants
    python planner/score.py --leave-out model       # cross-validation: see below
    python planner/score.py NAME.csv --json         # rows of yours, for a program

One line per family: errors of time and memory; skill, which is 0 for the best single constant and 1
for no error; how often "fits" is right; what the pick costs next to the best measured mesh. With
--leave-out, the constants for the rows of a model (or a number of GPUs, a random fifth, or one row)
are set without these rows.
"""

import argparse
import csv
import dataclasses
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from closed_pipe import quiet_if_closed
from fitting import FITS, fitted, rows_of
from memory import fits, memory_gib
from published import PUBLISHED, UnreadableRow, measured, number, parse, read, stacked
from stacks import Stack, choose, load
from step_time import model_flop, step_s

PICKS = ("planner", "dp first", "tp 8 first", "pp first")


@dataclasses.dataclass
class Scored:
    """A row with what was measured and what the formulas say."""

    row: dict
    time_s: float
    memory_gib: float
    fits: bool
    ideal_s: float  # seconds at the peak of the GPU: what one constant multiplies

    @property
    def fault(self) -> bool:
        return self.row.get("fault_suspect") == "1"


def usable(rows: list[dict]) -> tuple[list[dict], dict[str, int]]:
    """The rows that the formulas can read, and how often which reason kept a row out."""
    good, reasons = [], defaultdict(int)
    for row in rows:
        try:
            parse(row)
            good.append(row)
        except UnreadableRow as error:
            reasons[str(error)] += 1
    return good, dict(reasons)


def predict(rows: list[dict], stack: Stack) -> list[Scored]:
    """All rows with one stack's constants."""
    if not rows:
        return []
    model, mesh, cluster = stacked(rows)
    ideal = model_flop(model, mesh) / mesh.gpus / (cluster.peak_tflops * 1e12 * (1 + mesh.fp8))
    columns = (
        step_s(model, mesh, cluster, stack),
        memory_gib(model, mesh, stack),
        fits(model, mesh, cluster, stack),
        ideal,
    )
    return [Scored(row, *map(float, values)) for row, *values in zip(rows, *columns, strict=True)]


def stack_names(rows: list[dict], stacks: dict) -> dict[str, list[dict]]:
    """stack -> the rows that it is used for."""
    names = defaultdict(list)
    for row in rows:
        found = choose(stacks, *(row.get(key) or "" for key in ("family", "software", "gpu")))
        names[found].append(row)
    return names


def predictions(rows: list[dict]) -> list[Scored]:
    """Each row with the constants of stacks.toml."""
    stacks = load()
    return [
        scored
        for name, mine in stack_names(rows, stacks).items()
        for scored in predict(mine, stacks[name][0])
    ]


def cross_validated(rows: list[dict], key: str) -> list[Scored]:
    """Each row with constants that were set without the rows that share its `key`."""
    if key == "fifth":  # equal parts, dealt at random
        dealt = np.random.default_rng(0).permutation(len(rows)) % 5
        rows = [row | {key: str(part)} for row, part in zip(rows, dealt, strict=True)]
    scored = []
    for name, mine in stack_names(rows, load()).items():
        for value in sorted({row.get(key) or "" for row in mine}):
            rest = [row for row in mine if (row.get(key) or "") != value]
            left_out = [row for row in mine if (row.get(key) or "") == value]
            stack = fitted(FITS[name], rest) if name in FITS else Stack()
            scored += predict(left_out, stack)
    return scored


def from_one_node(rows: list[dict]) -> list[Scored]:
    """The rows of several nodes, with constants that were set on the rows of one node."""
    scored = []
    for name, mine in stack_names(rows, load()).items():
        single = [
            row for row in mine if number(row, "n_gpus", 0) <= number(row, "gpus_per_node", 8)
        ]
        rest = [row for row in mine if row not in single]
        if name in FITS and rows_of(FITS[name], single, "step_time_s"):
            scored += predict(rest, fitted(FITS[name], single))
    return scored


def errors(predicted: list[float], target: list[float]) -> dict[str, float]:
    """Errors of predictions, in percent of the measured value."""
    error = 100 * (np.array(predicted) / np.array(target) - 1)
    return {
        "rows": len(error),
        "mape": float(np.abs(error).mean()),
        "median": float(np.median(np.abs(error))),
        "p90": float(np.quantile(np.abs(error), 0.9)),
        "signed": float(error.mean()),
    }


def time_errors(scored: list[Scored]) -> dict[str, float] | None:
    """Errors of the step time, and skill over the best constant utilization on the same rows."""
    timed = [s for s in scored if measured(s.row, "step_time_s")]
    if not timed:
        return None
    target = np.array([measured(s.row, "step_time_s") for s in timed])
    ideal = np.array([s.ideal_s for s in timed])
    constants = np.quantile(target / ideal, np.linspace(0, 1, 101))
    constant = min(np.abs(c * ideal / target - 1).mean() for c in constants)
    result = errors([s.time_s for s in timed], target)
    result["constant_mape"] = float(100 * constant)
    result["skill"] = float(1 - result["mape"] / (100 * constant)) if constant > 1e-9 else None
    return result


def memory_errors(scored: list[Scored]) -> dict[str, float] | None:
    """Errors of the peak memory."""
    held = [s for s in scored if measured(s.row, "memory_gib")]
    if not held:
        return None
    return errors([s.memory_gib for s in held], [measured(s.row, "memory_gib") for s in held])


def fits_accuracy(scored: list[Scored]) -> float | None:
    """How often "fits or not" is right; None unless rows of both kinds are there."""
    outcome = [s.row.get("outcome") == "ok" for s in scored]
    if all(outcome) or not any(outcome):
        return None
    return float(np.mean([s.fits == ok for s, ok in zip(scored, outcome, strict=True)]))


def order(scored: Scored, pick: str) -> tuple:
    """Sorts the meshes of a job: the first is the pick. It knows nothing of what was measured."""
    row = scored.row
    tp, pp = number(row, "tp", 1), number(row, "pp", 1)
    dp = number(row, "dp_replicate", 1) * number(row, "dp_shard", 1)
    batch = -number(row, "micro_batch_sequences", 1)
    keys = {
        "planner": (round(scored.time_s, 9), round(scored.memory_gib, 9)),  # as search.best
        "dp first": (-dp, tp, pp, batch),
        "tp 8 first": (abs(np.log2(tp / 8)), -dp, pp, batch),
        "pp first": (-pp, -dp, tp, batch),
    }
    return keys[pick]


def regret(scored: list[Scored]) -> dict | None:
    """What the picks cost, in percent of the best measured step of the same job.

    A job is a model, a number of GPUs and a batch. Candidates are the meshes that ran; the planner
    leaves out those that it thinks do not fit. Runs that a rule cannot tell apart cost their mean.
    """
    jobs = defaultdict(list)
    same = ("model", "n_gpus", "global_batch_sequences", "sequence", "dtype", "software", "gpu")
    for s in scored:
        if measured(s.row, "step_time_s"):
            jobs[tuple(s.row.get(key) for key in same)].append(s)
    jobs = [job for job in jobs.values() if len(job) > 2]
    if not jobs:
        return None
    costs = defaultdict(list)
    for job in jobs:
        best = min(measured(s.row, "step_time_s") for s in job)
        for pick in PICKS:
            allowed = ([s for s in job if s.fits] if pick == "planner" else job) or job
            first = min(order(s, pick) for s in allowed)
            picked = [s for s in allowed if order(s, pick) == first]
            seconds = np.mean([measured(s.row, "step_time_s") for s in picked])
            costs[pick].append(seconds / best - 1)
    result = {"jobs": len(jobs)}
    for pick, values in costs.items():
        result[pick] = {
            "mean": 100 * float(np.mean(values)),
            "median": 100 * float(np.median(values)),
        }
    return result


def score(scored: list[Scored]) -> dict:
    """All figures of some rows. Rows that are suspected of a fault count for memory only."""
    sound = [s for s in scored if not s.fault]
    return {
        "rows": len(scored),
        "fault_rows": len(scored) - len(sound),
        "time": time_errors(sound),
        "memory": memory_errors(scored),
        "fits_accuracy": fits_accuracy(scored),
        "regret": regret(sound),
    }


def line(name: str, figures: dict) -> str:
    """A family as a line of the table."""

    def cell(group: str, key: str, width: int, digits: int = 1) -> str:
        value = (figures[group] or {}).get(key)
        return f"{'':>{width}}" if value is None else f"{value:{width}.{digits}f}"

    cells = [f"{name:16s}{figures['rows']:6d}"]
    cells += [cell("time", key, 7) for key in ("mape", "median", "signed")]
    cells += [cell("time", "skill", 6, 2)]
    cells += [cell("memory", key, 7) for key in ("mape", "median", "signed")]
    accuracy = figures["fits_accuracy"]
    cells.append(f"{'':6}" if accuracy is None else f"{accuracy:6.2f}")
    if figures["regret"]:
        means = [figures["regret"][pick]["mean"] for pick in PICKS]
        cells.append("  " + " / ".join(f"{mean:.1f}" for mean in means))
    return "".join(cells).rstrip()


@quiet_if_closed()
def main():
    args = parse_args()
    try:
        rows = read(args.rows)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        print(f"{args.rows} cannot be read: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    good, reasons = usable(rows)
    if args.one_node:
        scored = from_one_node(good)
    elif args.leave_out:
        scored = cross_validated(good, args.leave_out)
    else:
        scored = predictions(good)
    families = sorted({s.row.get("family") or "" for s in scored})
    figures = {f: score([s for s in scored if (s.row.get("family") or "") == f]) for f in families}
    if args.json:
        print(json.dumps({"families": figures, "left_out": reasons}, indent=1))
        return
    print(f"{'time, %':>33}{'memory, %':>23}{'fits':>16}  regret, mean %")
    print(
        f"family{'rows':>16}{'MAPE':>7}{'median':>7}{'signed':>7}{'skill':>6}{'MAPE':>7}{'median':>7}"
        f"{'signed':>7}{'right':>6}  {' / '.join(PICKS)}"
    )
    for family, result in figures.items():
        print(line(family, result))
    for reason, count in sorted(reasons.items()):
        print(f"{count} rows left out: {reason}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "rows",
        type=Path,
        nargs="?",
        default=PUBLISHED,
        help="CSV file with the columns of train_rows.csv",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument(
        "--leave-out",
        choices=("model", "n_gpus", "sequence", "tp", "fifth", "row_id"),
        help="set the constants without the rows that share this column, or a random fifth",
    )
    one_node = "set the constants on rows of one node, score the rows of several"
    parser.add_argument("--one-node", action="store_true", help=one_node)
    return parser.parse_args()


if __name__ == "__main__":
    main()
