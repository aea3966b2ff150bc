"""tests/mutants: each mutant is one bug in one line, its tests exist, and no other survives."""

import functools
import re
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatch

import pytest
from conftest import COLLECTED
from helpers import ROOT
from mutants import run as runner

MUTANTS = runner.mutants()
# Files that must have mutants, and at least how many.
COVERED = {
    "*_basics/train.py": 20, "t5_finetuning/train.py": 5, "transformer_basics/step.py": 5,
    "*/data.py": 10, "*/loading.py": 5, "*/evaluat*.py": 10, "*/optimizer.py": 8,
    "transformer_basics/pipeline.py": 3, "transformer_basics/sampling.py": 3, "*/model.py": 3,
    "*/checkpoint.py": 8, "*/saves.py": 3, "*/runtime.py": 8, "*/agreement.py": 3,
    "*/stopping.py": 3, "*_from_scratch.py": 20, "parallel_basics/attention_ring.py": 6,
    "notebooks/course.py": 4, "notebooks/exercises.py": 4, "notebooks/ranks.py": 1,
    "notebooks/processes.py": 2, "notebooks/terminal.py": 4,
    "custom_backend/shm/*.h": 7, "custom_backend/shm/*.cpp": 2,
    "custom_backend/shm/heap*.h": 9, "custom_backend/pipe/*": 11,
    "transformer_basics/lora.py": 12, "transformer_basics/chat.py": 5,
    "transformer_basics/generate.py": 4, "transformer_basics/attention.py": 6,
    "transformer_basics/activation_checkpointing.py": 4, "transformer_basics/float8.py": 12,
}  # fmt: skip


def test_there_are_enough_of_all_kinds():
    assert len(MUTANTS) >= 150
    files = Counter(mutant.file for mutant in MUTANTS)
    for pattern, least in COVERED.items():
        assert sum(n for file, n in files.items() if fnmatch(file, pattern)) >= least, pattern
    assert {str(p.relative_to(ROOT)) for p in ROOT.glob("*/minimal.py")} <= files.keys()
    assert {str(p.relative_to(ROOT)) for p in ROOT.glob("*/*_from_scratch.py")} <= files.keys()
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.slow
def test_each_changes_one_line_of_a_program():
    wrong = []
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text()
        try:
            mutated = mutant.apply(text)
        except (ValueError, SyntaxError) as error:  # it does not occur once, or does not parse
            wrong.append(str(error))
            continue
        lines = zip(text.splitlines(), mutated.splitlines(), strict=True)
        if sum(a != b for a, b in lines) != 1:
            wrong.append(f"not one line: {mutant}")
    assert wrong == []


@functools.cache
def names_in(file: str) -> set[str]:
    return set(re.findall(r"^def (\w+)", (ROOT / "tests" / file).read_text(), re.M))


def test_the_named_tests_exist(request):
    assert all(mutant.tests for mutant in MUTANTS)
    named = sorted({test for mutant in MUTANTS for test in mutant.tests})
    split = [test.partition("[")[0].split("::") for test in named]
    assert [f"{file}::{name}" for file, name in split if name not in names_in(file)] == []
    # Their cases, too, where this run of pytest has collected them.
    ids = {id.removeprefix("tests/") for id in request.config.stash[COLLECTED]}
    functions = {id.partition("[")[0] for id in ids}
    cases = [test for test in named if "[" in test and test.partition("[")[0] in functions]
    assert [test for test in cases if test not in ids] == []


def test_a_survivor_has_a_reason():
    for mutant in MUTANTS:
        assert not mutant.equivalent or len(mutant.equivalent) > 20, mutant


def test_the_record_has_every_mutant_and_no_unexpected_survivor():
    if not runner.RECORD.exists():
        pytest.skip("not recorded yet: make mutants")
    record = runner.RECORD.read_text()
    for mutant in MUTANTS:
        verdict = runner.EQUIVALENT if mutant.equivalent else runner.KILLED
        row = runner.cells({**vars(mutant), "verdict": verdict, "by": "", "seconds": 0})[:3]
        assert f"| {' | '.join(row)} |" in record, mutant
    assert f"{len(MUTANTS)} mutants: " in record
    assert ", 0 unexpected" in record


# ---- the program that tries them


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (0, "1 passed", (runner.SURVIVED, "")),
        (0, "1 skipped", (runner.ERROR, "its tests were skipped")),
        (None, "", (runner.KILLED, "timeout")),
        (1, "FAILED tests/test_a.py::test_x[2] - assert 1 == 2", (runner.KILLED, "test_a.py::")),
        (1, "ERROR tests/test_a.py::test_x - AssertionError", (runner.KILLED, "test_a.py::")),
        (1, "FAILED tests/test_a.py::test_xy - assert 1 == 2", (runner.ERROR, "")),  # not named
        (1, "NameError: x\nFAILED tests/test_a.py::test_x", (runner.ERROR, "NameError: x")),
        (2, "ERROR tests/test_a.py", (runner.ERROR, "pytest's exit status 2")),  # collection
        (4, "ERROR: not found", (runner.ERROR, "pytest's exit status 4")),
        (5, "no tests ran", (runner.ERROR, "pytest's exit status 5")),
    ],
)
def test_what_counts_as_killed(status, said, expected):
    verdict, by = runner.judge(status, said, ["test_a.py::test_x"])
    assert verdict == expected[0]
    assert by.startswith(expected[1])


def test_a_mutation_that_is_none_is_refused():
    for old, new in (("a", "b"), ("absent", "b"), ("x = 1", "x = 1  # one"), ("x = 1", "x =")):
        with pytest.raises((ValueError, SyntaxError)):
            runner.Mutant("f.py", old, new, []).apply("x = 1\na = a\n")


@pytest.mark.slow
def test_a_mutant_is_killed_and_another_survives(tmp_path):
    """A tree of its own, with a test that sees one of two bugs."""
    (tmp_path / "tests/mutants").mkdir(parents=True)
    (tmp_path / "sums.py").write_text("def mean(x):\n    return sum(x) / len(x)\n")
    (tmp_path / "tests/test_sums.py").write_text(
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parents[1]))\n"
        "from sums import mean\n\ndef test_mean():\n    assert mean([2, 2]) == 2\n"
    )
    (tmp_path / "tests/helpers.py").write_text("def keeper(number):\n    pass\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntimeout = 60\n")
    entry = (
        '[[mutants]]\nfile = "sums.py"\nold = "len(x)"\nnew = "{}"\ntests = ["test_sums.py::{}"]\n'
    )
    entries = [("(1 + len(x))", "test_mean"), ("x[0]", "test_mean"), ("0", "test_absent")]
    listed = "".join(entry.format(new, test) for new, test in entries)
    (tmp_path / "tests/mutants/some.toml").write_text(listed)
    program = (ROOT / "tests/mutants/run.py").read_text()
    (tmp_path / "tests/mutants/run.py").write_text(program)
    for command in (("init", "-q"), ("add", ".")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "tests/mutants/run.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["killed", "SURVIVED", "ERROR"], done
    assert "3 mutants, 2 survivors or errors that are not expected" in done.stdout
    assert done.returncode == 1
    assert (tmp_path / "sums.py").read_text().endswith("/ len(x)\n")
