"""Run PyTorch's own backend tests on Gloo and on our shared-memory backend.

    python benchmarks/torch_backend_tests.py               # writes results/torch_backend_tests.md
    python benchmarks/torch_backend_tests.py --ranks 2 --only all_reduce --no-write

PyTorch installs these tests: `DistributedTest._DistTestBase` in torch.testing. Tests whose name
says that they need a GPU are left out. Most other tests skip a backend not named "gloo" or "nccl"
before they call it; so shm runs them twice: unchanged, and with these gates open.

Needs `pip install expecttest`. One run of all tests takes about a minute and a half.
"""

import argparse
import collections
import importlib.abc
import importlib.util
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "custom_backend"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank

import bench
import torch

# torch's own tests, which have no public name.
MODULE = "torch.testing._internal.distributed.distributed_test"
FOR_GPUS = re.compile("cuda|nccl|gpu|xpu|hpu|accelerator", re.IGNORECASE)
SIDES = {"gloo": ("gloo", False), "shm": ("shm", False), "shm, gates open": ("shm", True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", help="run only tests with this in their name")
    parser.add_argument("--no-write", action="store_true", help="only print the results")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # what a child runs
    args = parser.parse_args()
    if importlib.util.find_spec("expecttest") is None:
        sys.exit("PyTorch's tests need one more package: pip install expecttest")
    if args.side:
        bench.say(run_tests(*SIDES[args.side], args.only))
        return
    sections = [section for ranks in args.ranks for section in both(ranks, args.only)]
    if args.no_write:
        print("\n\n".join(sections))
    else:
        bench.write("torch_backend_tests", "PyTorch's own tests of a backend", sections)


def both(ranks: int, only: str) -> list[str]:
    """Each side's results on `ranks` ranks, and each test in which shm differs from Gloo."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(WORLD_SIZE=str(ranks), TEMP_DIR=folder)
        for side in SIDES:
            command = (sys.executable, __file__, "--side", side, "--only", only)
            found[side] = bench.measure(*command, timeout=1500)
    rows = [(f"{ranks} ranks", "passed", "failed", "skipped")]
    for side, outcomes in found.items():
        counts = collections.Counter(outcome for outcome, _ in outcomes.values())
        rows.append((side, counts["passed"], counts["failed"], counts["skipped"]))
    different = [("test: Gloo passes, shm with open gates does not", "", "why")]
    for name, (outcome, why) in found["shm, gates open"].items():
        if found["gloo"][name][0] == "passed" and outcome != "passed":
            different.append((f"`{name}`", outcome, why.replace("|", "/")))
    return [bench.table(rows), bench.table(different)]


# ---- in a separate process, because the module reads the backend's name when it is imported


def run_tests(backend: str, open_gates: bool, only: str) -> dict[str, tuple[str, str]]:
    """Run them on $WORLD_SIZE ranks; {name: (passed, failed or skipped, why)}."""
    os.environ.update(BACKEND=backend, INIT_METHOD="env://")
    for name in ("barrier", "test_dir", "init_dir"):
        Path(os.environ["TEMP_DIR"], name).mkdir(exist_ok=True)
    if backend == "shm":
        import shm  # noqa: F401 (registers itself)

        # Only this table says which features a backend has.
        from torch.testing._internal.common_distributed import DistTestCases

        for feature in ("ddp", "subgroup", "plugin", *(["gpu"] if open_gates else [])):
            DistTestCases.backend_feature[feature].add("shm")
    tests = opened() if open_gates else importlib.import_module(MODULE)

    class TestBackend(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    chosen = [
        name
        for name in unittest.TestLoader().getTestCaseNames(TestBackend)
        if only in name and not FOR_GPUS.search(name)
    ]
    outcomes = Outcomes()
    unittest.TestSuite(map(TestBackend, chosen)).run(outcomes)
    return outcomes.of


class Outcomes(unittest.TestResult):
    """Keeps each test's outcome, and the line that says why."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, tuple[str, str]] = {}

    def note(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        self.of[test._testMethodName] = (outcome, why)
        print(test._testMethodName, outcome, why, file=sys.stderr, flush=True)

    def addSuccess(self, test) -> None:
        self.note(test, "passed")

    def addSkip(self, test, reason) -> None:
        self.note(test, "skipped", reason)

    def addFailure(self, test, error) -> None:
        lines = [line.strip() for line in str(error[1]).splitlines()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        self.note(test, "failed", (errors or lines or [""])[0][:300])

    addError = addFailure


def opened():
    """PyTorch's module in which every gate for "gloo" also lets "shm" through."""
    spec = importlib.util.find_spec(MODULE)
    text = Path(spec.origin).read_text()
    text = text.replace('BACKEND != "gloo"', 'BACKEND not in ("gloo", "shm")')
    text = text.replace('BACKEND == "gloo"', 'BACKEND in ("gloo", "shm")')
    text = text.replace("    dist.Backend.GLOO,\n", '    dist.Backend.GLOO,\n    "shm",\n')
    text = text.replace('is_available({"gloo"})', 'is_available({"gloo", "shm"})')
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    exec(compile(text, spec.origin, "exec"), module.__dict__)
    return module


if __name__ == "__main__":
    main()
