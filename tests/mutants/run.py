"""Apply one-line bugs to a copy of the tree, one at a time: the tests named for each must fail.

    python tests/mutants/run.py                            # all mutants (make mutants)
    python tests/mutants/run.py --only 17 ddp_basics       # number 17, and those of this directory
    python tests/mutants/run.py --resume --write           # continue an interrupted run, record it
    python tests/mutants/run.py --check-green              # the named tests without any mutation

The TOML files next to this program list the mutants. An entry has

    file        the file to change
    old, new    a part of one line that occurs once in the file, and the bug to put there
    tests       node ids below tests/, the cheapest that must fail
    equivalent  only for a mutant that no test can see: the reason

A mutant is killed if one of its tests fails, or does not end in time. It survives if they pass. A
mutation that does not parse, import or compile is an error, because it would prove nothing.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from dataclasses import dataclass
from datetime import date
from importlib.metadata import entry_points, version
from itertools import count
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECORD = ROOT / "benchmarks/results/mutants.md"
RESULTS = ROOT / "runs/mutants.jsonl"  # what --resume reads
EMULATED = ".venv-emulated"  # tests on emulated GPUs run in it
SECONDS = 240  # for one test; a test that takes longer counts as failed
IMPORTED = (  # by many tests; none of this starts a thread
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torchvision",
    "transformers.models.t5.modeling_t5",
)
COMPILE = {  # the backends in C++, by their directory: how to compile them ahead
    "shm": ["shm/build.py"],
    "pipe": ["-c", "import pipe; pipe.compiled()"],
}
KILLED, SURVIVED, EQUIVALENT, ERROR = "killed", "SURVIVED", "equivalent", "ERROR"


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    new: str
    tests: list[str]
    equivalent: str = ""

    @property
    def id(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def apply(self, text: str) -> str:
        """The text of the file with the bug; raises ValueError if that is no one-line mutation."""
        found = text.count(self.old)
        if found != 1 or "\n" in self.old or self.old == self.new:
            raise ValueError(f"{self.file}: {self.old!r} occurs {found} times, or changes nothing")
        mutated = text.replace(self.old, self.new)
        is_python = self.file.endswith(".py")
        if is_python and ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(text)):
            raise ValueError(f"{self.file}: {self.new!r} does not change the program")
        return mutated


def mutants() -> list[Mutant]:
    """All mutants, in the order of the TOML files and of their entries."""
    return [
        Mutant(**entry)
        for path in sorted(HERE.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutants"]
    ]


def main() -> None:
    args = parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, too
        signal.signal(number, signal.default_int_handler)
    listed = mutants()
    chosen = [
        (number, mutant)
        for number, mutant in enumerate(listed, start=1)
        if not args.only
        or any(
            asked in (str(number), mutant.file) or mutant.file.startswith(f"{asked}/")
            for asked in args.only
        )
    ]
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = Path(folder) / "tree"
        copy_tracked_files(tree)
        if args.check_green:
            check_green(tree, [mutant for _, mutant in chosen])
            return
        warm_up(tree)
        results = run(tree, chosen, read_results() if args.resume else {})
    unexpected = [r for r in results if r["verdict"] in (SURVIVED, ERROR)]
    print(f"{len(results)} mutants, {len(unexpected)} survivors or errors that are not expected")
    for result in unexpected:
        print(f"{result['verdict']}: {result['file']}: {result['old']} -> {result['new']}")
    if args.write:
        write(results)
    sys.exit(bool(unexpected))


def run(tree: Path, chosen: list[tuple[int, Mutant]], known: dict[str, dict]) -> list[dict]:
    """Try each mutant that has no result yet; print a line and keep the result of each."""
    results = []
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a" if known else "w") as file:
        for number, mutant in chosen:
            result = known.get(mutant.id)
            if result is None:
                started = time.monotonic()
                verdict, by = attempt(tree, mutant)
                result = {"id": mutant.id, "file": mutant.file, "old": mutant.old}
                result |= {"new": mutant.new, "verdict": verdict, "by": by}
                result["seconds"] = round(time.monotonic() - started)
                file.write(json.dumps(result) + "\n")
                file.flush()
            results.append(result)
            print(
                f"{number:3} {result['verdict']:10} {mutant.file}: {mutant.old} -> {mutant.new}   "
                f"{result['by']}   {result['seconds']} s",
                flush=True,
            )
    return results


def attempt(tree: Path, mutant: Mutant) -> tuple[str, str]:
    """(verdict, the test that killed it or the reason) of one mutant; the tree is as before."""
    path = tree / mutant.file
    text = path.read_text()
    try:
        write_anew(path, mutant.apply(text))
        if path.parent.name in COMPILE and path.suffix in (".h", ".cpp"):
            status, said = compile_backend(tree, path.parent.name)
            if status != 0:
                return ERROR, f"does not compile: {' '.join(said[-500:].split())}"
        status, said = pytest_in_a_fork(tree, mutant)
    except (SyntaxError, ValueError) as error:
        return ERROR, str(error)
    finally:
        write_anew(path, text)
    verdict, by = judge(status, said, mutant.tests)
    if mutant.equivalent:
        return (EQUIVALENT, mutant.equivalent) if verdict == SURVIVED else (ERROR, f"killed {by}")
    return verdict, by


seconds_of_files = count(int(time.time()))


def write_anew(path: Path, text: str) -> None:
    """Write a file with a time that no version of it had: Python compiles it again only then."""
    path.write_text(text)
    now = next(seconds_of_files)
    os.utime(path, (now, now))


def judge(status: int | None, said: str, tests: list[str]) -> tuple[str, str]:
    """What pytest's exit status and output mean."""
    if status is None:
        return KILLED, "timeout"
    if status == 0 and " passed" not in said:
        return ERROR, "its tests were skipped"
    if status == 0:
        return SURVIVED, ""
    failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+?::.*?)(?: - .*)?$", said, re.M)
    named = [test for test in failed if test in tests or test.split("[")[0] in tests]
    unfair = re.search(r"\b(SyntaxError|ImportError|ModuleNotFoundError|NameError)\b.*", said)
    if status != 1 or not named or unfair:
        reason = unfair[0] if unfair else f"pytest's exit status {status}"
        return ERROR, f"{reason}: {' '.join(said[-500:].split())}"
    late = re.search(r"Timeout \(>|printed nothing", said)
    return KILLED, named[0] + (" (timeout)" if late else "")


def pytest_in_a_fork(tree: Path, mutant: Mutant) -> tuple[int | None, str]:
    """pytest's exit status and output; the status is None if it did not end in time.

    It runs in a fork of this process, which has imported PyTorch already.
    """
    options = ("-x", "-q", "-p", "no:cacheprovider", f"--timeout={SECONDS}")
    nodes = [f"tests/{test}" for test in mutant.tests]
    with tempfile.TemporaryFile(mode="w+") as log:
        mark = uuid.uuid4().hex
        process = os.fork()
        if process == 0:
            status = 1
            try:
                os.environ["MUTANT"] = mark
                os.setsid()
                os.chdir(tree)
                for stream in (1, 2):
                    os.dup2(log.fileno(), stream)
                if mutant.file.endswith((".h", ".cpp")):
                    os.environ |= build_folders(tree)
                status = pytest.main([*options, *nodes])
                sys.stdout.flush()
            finally:
                os._exit(status)
        status = wait_for(process, mark, 2 * SECONDS)
        log.seek(0)
        return status, log.read()


def wait_for(process: int, mark: str, seconds: float) -> int | None:
    """The exit status of a fork, or None if it was stopped. No process of it is left.

    mark: in the environment of all programs that it has started.
    """
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(process, signal.SIGINT)  # the test then ends its ranks
        time.sleep(20)
        return None
    finally:  # at Ctrl-C too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        for pid in psutil.pids():
            with contextlib.suppress(psutil.Error):  # gone, or another user's
                other = psutil.Process(pid)
                if other.environ().get("MUTANT") == mark:
                    other.kill()


def build_folders(tree: Path) -> dict[str, str]:
    """Variables that keep compiled mutants out of the user's caches."""
    return {name: str(tree.parent / name) for name in ("SHM_BUILD_DIR", "TORCH_EXTENSIONS_DIR")}


def compile_backend(tree: Path, name: str) -> tuple[int, str]:
    """The exit status and the output of the compilation, outside the tests' time limits."""
    process = subprocess.Popen(
        [sys.executable, *COMPILE[name]],
        cwd=tree / "custom_backend",
        env=os.environ | build_folders(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate()
    finally:  # at Ctrl-C too: no compiler is left
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def warm_up(tree: Path) -> None:
    """Import and start once what each fork then has."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    for name in IMPORTED:
        importlib.import_module(name)
    sys.path.insert(0, str(tree / "tests"))
    from helpers import keeper

    keeper(0), keeper(1)  # the forks, one after the other, ask these for processes


def copy_tracked_files(tree: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    if (ROOT / EMULATED).exists():
        (tree / EMULATED).symlink_to(ROOT / EMULATED)


def check_green(tree: Path, chosen: list[Mutant]) -> None:
    """Run all named tests on the tree as it is: each must pass, or its failure means nothing."""
    tests = sorted({f"tests/{test}" for mutant in chosen for test in mutant.tests})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    sys.exit(subprocess.run(command, cwd=tree).returncode)


def read_results() -> dict[str, dict]:
    """The results that --resume keeps: those that are as they should be."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    results = map(json.loads, lines)
    return {r["id"]: r for r in results if r["verdict"] in (KILLED, EQUIVALENT)}


def write(results: list[dict]) -> None:
    killed = sum(result["verdict"] == KILLED for result in results)
    equivalent = sum(result["verdict"] == EQUIVALENT for result in results)
    rows = "".join(f"| {' | '.join(cells(result))} |\n" for result in results)
    RECORD.write_text(
        f"# Mutants\n\n`make mutants`, {date.today()}, {processor()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {version('torch')}, "
        f"pytest {version('pytest')}. The machine ran other jobs too.\n\n"
        "Each row is a one-line bug in a copy of the tree, and the first test that failed. "
        f"{len(results)} mutants: {killed} killed, {equivalent} equivalent, "
        f"{len(results) - killed - equivalent} unexpected.\n\n"
        "| file | bug | verdict | test, or reason | seconds |\n| --- | --- | --- | --- | --- |\n"
        + rows
    )
    print(f"wrote {RECORD}")


def cells(result: dict) -> list[str]:
    bug = f"{code(result['old'])} -> {code(result['new'])}"
    by = result["by"].replace("|", "\\|").replace("\n", " ")
    return [result["file"], bug, result["verdict"], by[:200], str(result["seconds"])]


def code(text: str) -> str:
    """As code in a cell of a table."""
    return "`` " + text.replace("|", "\\|") + " ``" if text else "nothing"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor()


def parse_args():
    parser = argparse.ArgumentParser(description="Apply one-line bugs: the named tests must fail.")
    add = parser.add_argument
    add("--only", nargs="+", metavar="WHAT", help="numbers, files or directories (default: all)")
    add("--resume", action="store_true", help="keep the results of the interrupted run")
    add("--write", action="store_true", help="write benchmarks/results/mutants.md")
    add("--check-green", action="store_true", help="run the named tests without a mutation")
    args = parser.parse_args()
    if args.write and args.only:
        parser.error("--write records all mutants: leave out --only")
    return args


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: run.py --resume continues")
