"""Fits the constants of every stack on published runs and writes them to stacks.toml.

    python planner/fit.py                     # fit, and print the constants with their errors
    python planner/fit.py --write             # write stacks.toml as well

Look at: constants that repeat, and those that are far from their prior: these have absorbed another
term.
"""

import argparse
import csv
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
from closed_pipe import quiet_if_closed
from fitting import FITS, fit_all, rows_of
from published import PUBLISHED, UnreadableRow, measured, parse, read, stacked
from stacks import FILE, Stack
from step_time import step_s

# What plan.py must know of the rows to say what they do not cover.
COVERED = {"zero_stages": "zero_stage", "gpu_counts": "n_gpus", "pp": "pp", "tp": "tp", "cp": "cp"}


@quiet_if_closed()
def main():
    args = parse_args()
    try:
        rows = read(args.rows)
        for row in rows:
            parse(row)
        lacking = [name for name, fit in FITS.items() if not rows_of(fit, rows, "step_time_s")]
        if lacking:
            raise UnreadableRow(f"no measured row for {', '.join(lacking)}")
    except (OSError, UnicodeDecodeError, csv.Error, UnreadableRow) as error:
        print(f"{args.rows} cannot be fitted: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    stacks = fit_all(rows)
    for name, stack in stacks.items():
        mine = rows_of(FITS[name], rows, "step_time_s")
        model, mesh, cluster = stacked(mine)
        target = np.array([measured(row, "step_time_s") for row in mine])
        error = np.abs(step_s(model, mesh, cluster, stack) / target - 1)
        constants = ", ".join(
            f"{key} {getattr(stack, key):.3g}" for key in FITS[name].time + FITS[name].memory
        )
        print(f"{name:24s} {len(mine):5d} rows  MAPE {100 * error.mean():4.1f} %  {constants}")
    if args.write:
        FILE.write_text(as_toml(stacks, rows))


def as_toml(stacks: dict[str, Stack], rows: list[dict]) -> str:
    """The text of stacks.toml: constants with three digits."""
    lines = [
        "# Written by: python planner/fit.py --write",
        "# `fitted`: set on the rows of `families` in train_rows.csv; other numbers are",
        "# known of the software or set by hand. stacks.py says what each constant means.",
        "",
        "[generic]",
        "rows = 0",
    ]
    default = Stack()
    for name, stack in stacks.items():
        fit = FITS[name]
        names = (*fit.time, *fit.memory)
        lines += ["", f"[{json.dumps(name)}]"]
        for key in ("families", "software", "gpus"):
            lines.append(f"{key} = {json.dumps(list(getattr(fit, key)))}")
        mine = rows_of(fit, rows, "step_time_s")
        lines.append(f"rows = {len(mine)}")
        lines.append(f"ran_on = {json.dumps(sorted({row['gpu'] for row in mine}))}")
        for key, column in COVERED.items():
            lines.append(f"{key} = {json.dumps(sorted({int(row[column]) for row in mine}))}")
        lines.append(f"fitted = {json.dumps(list(names))}")
        for field in dataclasses.fields(Stack):
            value = getattr(stack, field.name)
            if value != getattr(default, field.name):
                lines.append(f"{field.name} = {value:.3g}")
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rows", type=Path, default=PUBLISHED, help="published runs (CSV)")
    parser.add_argument("--write", action="store_true", help="write stacks.toml")
    return parser.parse_args()


if __name__ == "__main__":
    main()
