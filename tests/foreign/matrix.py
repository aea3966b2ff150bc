"""Train other people's models with our templates, unchanged, and compare with a plain loop.

    python tests/foreign/matrix.py                     # all: the table of the README
    python tests/foreign/matrix.py --only Llama ResNet --variants plain lora
    python tests/foreign/matrix.py --templates ddp_basics --output results.jsonl

Each case is trained for five steps on 2 ranks, saved, and continued for five steps on 1 rank and on
3 ranks. Compared with oracle.py are, on every rank, all losses, norms, gradients, parameters and
buffers. The table says the largest difference, relative to the largest number of its tensor.
"""

import argparse
import copy
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: this process is forked
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.nn.parallel
from cases import Case
from comparing import Record, compare
from jobs import Job, Outcome
from oracle import Oracle
from variants import VARIANTS
from zoo import ZOO

TEMPLATES = ("ddp_basics", "fsdp_basics")
# Numbers of 64 bits, added up in another order over ten steps. Measured: below 1e-9.
TOLERANCE = 1e-8
KINDS = ("losses", "gradients", "parameters", "buffers")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    for name in args.only:
        Case(name).build()  # what it imports, all ranks then have
    gc.collect()
    gc.freeze()  # the ranks need not look through this process's objects
    rows = []
    matrix = Matrix(args.templates)
    try:
        for name in args.only:
            for case in cases_of(name, args.variants):
                for row in matrix.try_case(case):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    finally:
        matrix.close()
    if args.output:
        args.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bad = [row for row in rows if row["error"]]
    print(f"{len(rows)} trainings, {len(bad)} of them wrong")
    sys.exit(1 if bad else 0)


def cases_of(name: str, variants: list[str]) -> list[Case]:
    """Both optimizers for the model as it is, one of them for each of its variants."""
    chosen = {"frozen": "sgd", "unused": "adamw", "tied": "adamw", "lora": "sgd"}
    cases = [Case(name, variant, chosen.get(variant, "adamw")) for variant in variants]
    return [Case(name, "plain", "sgd")] * ("plain" in variants) + cases


class Matrix:
    def __init__(self, templates: list[str]):
        self.folder = Path(tempfile.mkdtemp(prefix="foreign"))
        self.jobs = {(t, ranks): Job(t, ranks) for t in templates for ranks in (2, 1, 3)}
        self.templates = templates

    def close(self) -> None:
        for job in self.jobs.values():
            job.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def try_case(self, case: Case) -> list[dict]:
        """Train on 2 ranks, and from there on 1 and on 3; one row per template."""
        started = time.monotonic()
        for template in self.templates:
            shutil.rmtree(self.folder / template, ignore_errors=True)
            self.jobs[template, 2].start(case, 1, self.folder / template / "2")
        expected = expected_records(case)  # while the ranks work
        outcomes = {t: {2: self.jobs[t, 2].finish()} for t in self.templates}
        saved = [t for t in self.templates if outcomes[t][2].records]
        further = [(t, ranks) for t in saved for ranks in (1, 3)]
        for template, ranks in further:
            folder = self.folder / template / str(ranks)
            shutil.copytree(self.folder / template / "2", folder)
            self.jobs[template, ranks].start(case, 2, folder)
        for template, ranks in further:
            outcomes[template][ranks] = self.jobs[template, ranks].finish()
        rows = [report(case, t, expected, outcomes[t]) for t in self.templates]
        seconds = round((time.monotonic() - started) / len(rows), 1)
        return [row | {"seconds": seconds} for row in rows]


def expected_records(case: Case) -> dict[int, Record]:
    oracle = Oracle(case)
    expected = {2: oracle.epoch(2, 1)}
    for ranks in (1, 3):
        continued = copy.deepcopy(oracle)
        expected[ranks] = continued.epoch(ranks, 2)
    return expected


def report(case: Case, template: str, records: dict, outcomes: dict[int, Outcome]) -> dict:
    result = {"model": case.name, "variant": case.variant, "optimizer": case.optimizer}
    result |= {"template": template, "size": 0, "error": ""}
    worst = dict.fromkeys(KINDS, (0.0, ""))
    for ranks, outcome in outcomes.items():
        if not outcome.records:
            result["error"] = f"{ranks} rank(s): {outcome.error}"
            break
        for rank, record in enumerate(outcome.records):
            for kind, (difference, what) in compare(
                record, records[ranks], ZOO[case.name].by_sample
            ).items():
                if not difference <= worst[kind][0]:
                    worst[kind] = difference, f"{what}, rank {rank} of {ranks}"
    result["size"] = sum(p.numel() for p in records[2].parameters.values())
    result |= {kind: difference for kind, (difference, _) in worst.items()}
    wrong = [f"{kind}: {what} by {d:.1e}" for kind, (d, what) in worst.items() if not d < TOLERANCE]
    result["error"] = result["error"] or "; ".join(wrong)
    return result


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Other people's models in our templates.")
    add = parser.add_argument
    add("--only", nargs="+", choices=ZOO, default=list(ZOO), metavar="MODEL", help="default: all")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--templates", nargs="+", choices=TEMPLATES, default=list(TEMPLATES))
    add("--output", type=Path, help="write the results there, one JSON object a line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
