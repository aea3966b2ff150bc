"""Run every command that a README or a docstring prints, in new processes, as printed.

python tests/readme.py --only check_environment.py
python tests/readme.py --write                # more than thirty minutes: what make readme does
"""

import argparse
import sys
from collections import Counter

import printed_commands
from helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import bench


def main() -> None:
    args = parse_args()
    rows = [("page", "commands", "run", "as above", "left out", "failed", "processor s")]
    done = set()  # the beginnings of the blocks that have been run
    all_left_out, failures = Counter(), []
    for path in printed_commands.pages():
        name = str(path.relative_to(ROOT))
        blocks = printed_commands.blocks_of(path)
        if not blocks or (args.only and not name.startswith(tuple(args.only))):
            continue
        before = printed_commands.processor_seconds()
        run, left_out, failed = 0, Counter(), 0
        for block in blocks:
            left_out += say_what_is_left_out(block)
            here = [command for command in block if not printed_commands.left_out(command)]
            texts = tuple(command.typed for command in here)
            if not here or texts in done:
                continue
            done |= {texts[: count + 1] for count in range(len(texts))}
            run += len(here)
            for outcome in printed_commands.run(here):
                say(outcome)
                if not outcome.as_printed:
                    failures.append(f"`{outcome.command}`: status {outcome.status}")
                    failed += 1
        printed = sum(map(len, blocks))
        used = round(printed_commands.processor_seconds() - before)
        all_left_out += left_out
        above = printed - run - left_out.total()
        rows.append((name, printed, run, above, listed(left_out), failed, used))
    rows.append(("all", *totals(rows[1:]), listed(all_left_out), len(failures), total(rows, 6)))
    sections = [EXPLANATION, bench.table(rows), *failures]
    if args.write:
        bench.write("readme", "The commands of READMEs and docstrings", sections)
    else:
        print("\n\n".join(sections))
    sys.exit(bool(failures))


def say_what_is_left_out(block: printed_commands.Block) -> Counter:
    """The reasons of a block; prints each."""
    reasons = {command: printed_commands.left_out(command) for command in block}
    for command, reason in reasons.items():
        if reason:
            print(f"left out ({reason}): {command}", flush=True)
    return Counter(reason for reason in reasons.values() if reason)


def say(outcome: printed_commands.Outcome) -> None:
    if outcome.as_printed:
        print(f"ok: {outcome.seconds} s: {outcome.command}", flush=True)
        return
    print(f"FAILED: status {outcome.status}: {outcome.command}", flush=True)
    for line in outcome.output.splitlines()[-8:]:
        print(f"    {line}", flush=True)


def listed(reasons: Counter) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())


def totals(rows: list[tuple]) -> list[int]:
    """Commands printed, run, and run above."""
    return [total(rows, column) for column in (1, 2, 3)]


def total(rows: list[tuple], column: int) -> int:
    return sum(row[column] for row in rows if isinstance(row[column], int))


EXPLANATION = """\
Each page's commands as printed, block by block, in a fresh copy of the repository and in new
processes. "As above": the block is the beginning of one that was run before. "Left out": what this
machine cannot run, with the reason; the tests have other ways to run many of these commands."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", metavar="PATH", help="pages whose paths begin so (default: all)")
    add("--write", action="store_true", help="write benchmarks/results/readme.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
