"""Train other people's models with our templates, unchanged, and compare with a plain loop.

    python tests/foreign/matrix.py --write                  # all: benchmarks/results/foreign.md
    python tests/foreign/matrix.py --only Llama ResNet --variants plain lora
    python tests/foreign/matrix.py --quick --rows rows.jsonl     # what make test runs

Each case is trained for five steps on 2 ranks, saved, and continued for five steps on 1 rank and on
3 ranks. Compared with oracle.py are, on every rank, all losses, norms, gradients, parameters and
buffers. The table has the largest differences, relative to the largest number of a tensor.
"""

import argparse
import copy
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: this process is forked
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import bench
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.nn.parallel
from cases import Case
from jobs import Job, Outcome
from oracle import Oracle
from records import Record, compare
from variants import REFUSED, VARIANTS
from zoo import GROUPS, ZOO

TEMPLATES = ("ddp_basics", "fsdp_basics", "t5_finetuning")
# Numbers of 64 bits, added up in another order: 1e-12 after ten steps. More where a gradient is
# nothing but rounding, as that of a bias before a BatchNorm: AdamW, which divides by the gradient's
# size plus 1e-8, makes 1e-8 of a step of it. A wrong factor is seen as 1e-3 or more.
TOLERANCE = 1e-7
KINDS = ("losses", "gradients", "parameters", "buffers")
# Both optimizers for the model as it is, one of them for each of its variants.
OPTIMIZERS = {"plain": ("sgd", "adamw"), "frozen": ("sgd",)}

# Eight models in which something is special, each in one case, continued on 1 or on 3 ranks.
QUICK = [
    (Case("ResNet", "plain", "sgd"), (3,), TEMPLATES[:2]),  # BatchNorm
    (Case("Llama", "plain", "adamw"), (1,), TEMPLATES),  # a buffer that no checkpoint holds
    (Case("T5", "tied", "adamw"), (3,), TEMPLATES),  # two stacks, one embedding, uneven batches
    (Case("BERT", "unused", "adamw"), (1,), TEMPLATES[:2]),  # a bias of its own that takes no part
    (Case("GPT-2", "lora", "sgd"), (3,), TEMPLATES[:2]),  # matrices the other way round
    (Case("Qwen2-MoE", "frozen", "sgd"), (1,), TEMPLATES[:2]),  # experts
    (Case("Mamba", "plain", "adamw"), (3,), TEMPLATES[:2]),  # no attention
    (Case("CLIP", "frozen", "sgd"), (1,), TEMPLATES[:2]),  # two towers, a 0-d parameter
]


def main() -> None:
    args = parse_args()
    started = time.monotonic()
    torch.set_num_threads(1)
    cases = chosen(args.only, args.variants)
    plan = [*QUICK] if args.quick else [(case, (1, 3), templates_for(case)) for case in cases]
    plan += [(Case("Llama", name), (1,), TEMPLATES[:2]) for name in REFUSED if "Llama" in args.only]
    for name in {case.name for case, _, _ in plan}:
        Case(name).build()  # what it imports, all ranks then have
    gc.collect()
    gc.freeze()  # the ranks need not look through this process's objects
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to the finally
    matrix, found = Matrix(), good_rows(args.rows)
    try:
        for case, worlds, templates in plan:
            if all((case.name, case.variant, case.optimizer, t) in found for t in templates):
                continue
            for row in matrix.try_case(case, worlds, templates):
                found[key_of(row)] = row
                print(line(row), flush=True)
                if args.rows:
                    lines = [json.dumps(row) + "\n" for row in found.values()]
                    args.rows.write_text("".join(lines))
        matrix.close()
    finally:
        matrix.kill()
    rows = list(found.values())
    wrong = [row for row in rows if row["error"]]
    times = os.times()
    processor = sum(times[:4])
    print(
        f"{len(rows)} trainings, {len(wrong)} of them wrong: {time.monotonic() - started:.0f} s, "
        f"{processor:.0f} s of processor time"
    )
    if args.write:
        bench.write("foreign", "Other people's models in our templates", sections(rows))
    sys.exit(1 if wrong else 0)


def good_rows(path: Path | None) -> dict[tuple, dict]:
    """What an earlier run with this --rows has found, but for what went wrong."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {key_of(row): row for row in map(json.loads, lines) if not row["error"]}


def key_of(row: dict) -> tuple:
    return row["model"], row["variant"], row["optimizer"], row["template"]


def chosen(names: list[str], variants: list[str]) -> list[Case]:
    return [
        Case(name, variant, optimizer)
        for name in names
        for variant in variants
        for optimizer in OPTIMIZERS.get(variant, ("adamw",))
    ]


# ---- running


class Matrix:
    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="foreign"))
        self.jobs = {(t, ranks): Job(t, ranks) for t in TEMPLATES for ranks in (2, 1, 3)}

    def close(self) -> None:
        for job in self.jobs.values():
            job.close()

    def kill(self) -> None:
        for job in self.jobs.values():
            job.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def try_case(
        self, case: Case, worlds: tuple[int, ...], templates: tuple[str, ...]
    ) -> list[dict]:
        """Train on 2 ranks, and from there on each of the `worlds`; one row per template."""
        for template in templates:
            shutil.rmtree(self.folder / template, ignore_errors=True)
            self.jobs[template, 2].start(case, 1, self.folder / template / "2")
        pairs = "t5_finetuning" in templates
        expected = {False: expected_records(case, worlds)}  # while the ranks work
        expected |= {True: expected_records(case, worlds, pairs)} if pairs else {}
        outcomes = {t: {2: self.jobs[t, 2].finish()} for t in templates}
        further = [(t, n) for t in templates if outcomes[t][2].records for n in worlds]
        for template, ranks in further:
            folder = self.folder / template / str(ranks)
            shutil.copytree(self.folder / template / "2", folder)
            self.jobs[template, ranks].start(case, 2, folder)
        for template, ranks in further:
            outcomes[template][ranks] = self.jobs[template, ranks].finish()
        return [row_of(case, t, expected[t == "t5_finetuning"], outcomes[t]) for t in templates]


def templates_for(case: Case) -> tuple[str, ...]:
    """t5_finetuning trains what generates text, with AdamW."""
    fits = ZOO[case.name].language and case.optimizer == "adamw"
    return TEMPLATES if fits else TEMPLATES[:2]


def expected_records(case: Case, worlds: tuple[int, ...], pairs: bool = False) -> dict[int, Record]:
    oracle = Oracle(case, pairs)
    expected = {2: oracle.epoch(2, 1)}
    for ranks in worlds:
        continued = copy.deepcopy(oracle)
        expected[ranks] = continued.epoch(ranks, 2)
    return expected


def row_of(case: Case, template: str, expected: dict, outcomes: dict[int, Outcome]) -> dict:
    row = {"model": case.name, "variant": case.variant, "optimizer": case.optimizer}
    row |= {"template": template, "refused": "", "error": ""}
    row["size"] = sum(p.numel() for p in expected[2].parameters.values())
    refusing, sentence, _ = refusal(case.name, case.variant)
    for ranks, outcome in outcomes.items():
        if not outcome.records:
            refused = refusing == template and sentence in outcome.error
            row["refused" if refused else "error"] = f"{ranks} rank(s): {outcome.error}"
    if refusing == template and not row["refused"]:
        row["error"] += f"not refused with {sentence!r}"
    worst = dict.fromkeys(KINDS, (0.0, ""))
    for ranks, outcome in outcomes.items():
        for rank, record in enumerate(outcome.records):
            found = compare(record, expected[ranks], ZOO[case.name].by_sample)
            for kind, (difference, what) in found.items():
                if difference > worst[kind][0]:
                    worst[kind] = difference, f"{what}, rank {rank} of {ranks}"
    wrong = [f"{kind}: {what} by {d:.1e}" for kind, (d, what) in worst.items() if not d < TOLERANCE]
    row["error"] = row["error"] or "; ".join(wrong)
    return row | {kind: difference for kind, (difference, _) in worst.items()}


def refusal(name: str, variant: str) -> tuple[str, str, str]:
    return REFUSED.get(variant) or ZOO[name].refused


# ---- telling


def line(row: dict) -> str:
    words = f"{row['model']}, {row['variant']}, {row['optimizer']}, {row['template']}: "
    if row["error"] or row["refused"]:
        return words + (f"WRONG: {row['error']}" if row["error"] else f"refused: {row['refused']}")
    return words + ", ".join(f"{kind} {row[kind]:.0e}" for kind in KINDS)


def sections(rows: list[dict]) -> list[str]:
    return [
        EXPLANATION,
        "## In short",
        bench.table(summary(rows)),
        "## What cannot work",
        bench.table(exceptions(rows)),
        "## Each architecture",
        bench.table(details(rows)),
    ]


def summary(rows: list[dict]) -> list[tuple]:
    """A line for each group of architectures: docs/your_model.md has these lines, too."""
    lines = [("models", "architectures", *TEMPLATES, "largest difference")]
    for group, entries in GROUPS.items():
        own = [row for row in rows if row["model"] in entries and row["variant"] in VARIANTS]
        worst = max((row[kind] for row in own for kind in KINDS), default=0)
        lines.append((group, ", ".join(entries), *counts(own), f"{worst:.0e}"))
    return lines


def exceptions(rows: list[dict]) -> list[tuple]:
    """A line for each thing that cannot work. docs/your_model.md has them, too."""
    lines = {}
    for row in rows:
        what = row["model"]
        if row["variant"] in REFUSED or row["error"]:
            what += f": {row['variant']}"
        if row["refused"] or row["error"]:
            text = row["error"] or row["refused"].split(": ", 1)[1]
            text = textwrap.shorten(text, 140, placeholder=" ...")
            cure = "" if row["error"] else refusal(row["model"], row["variant"])[2]
            lines[what, row["template"]] = (what, row["template"], text, cure)
    return [("model", "template", "what the template says", "what to do"), *lines.values()]


def details(rows: list[dict]) -> list[tuple]:
    lines = [("architecture", "parameters", *TEMPLATES, *KINDS)]
    rows = [row for row in rows if row["variant"] in VARIANTS]
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        size = next(row["size"] for row in own if row["variant"] == "plain")
        worst = [f"{max(row[kind] for row in own):.0e}" for kind in KINDS]
        lines.append((name, f"{size:,}", *counts(own), *worst))
    return lines


def counts(rows: list[dict]) -> list[str]:
    """For each template: how many of its trainings equal the plain loop."""
    found = []
    for template in TEMPLATES:
        own = [row for row in rows if row["template"] == template]
        equal = [row for row in own if not row["error"] and not row["refused"]]
        found.append(f"{len(equal)} of {len(own)}" if own else "")
    return found


EXPLANATION = """\
Each architecture has a tiny random configuration and numbers of 64 bits. There are six cases:
unchanged with SGD, unchanged with AdamW, with a frozen part, with a part that no step uses, with
tied weights, with LoRA adapters. In each case 2 ranks train for five steps and save; then 1 rank
and 3 ranks load the checkpoint and train for five more steps. "6 of 6" under a template: in all six
cases the losses, gradients, parameters and buffers of all ranks equal those of a plain loop in one
process. t5_finetuning trains what generates text, with AdamW. Differences are relative to the
largest number of the tensor."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Other people's models in our templates.")
    add = parser.add_argument
    add("--only", nargs="+", choices=ZOO, default=list(ZOO), metavar="MODEL", help="default: all")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    add("--quick", action="store_true", help="eight models, one case each")
    rows = "write one JSON object per training to this file; skip trainings that it has"
    add("--rows", type=Path, help=rows)
    add("--write", action="store_true", help="write benchmarks/results/foreign.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
