"""Each row of each table under "What usually goes wrong" has its test, and each test its row."""

import ast
import re
from pathlib import Path

import pytest
from helpers import ROOT

TESTS = ROOT / "tests"
TITLE = "What usually goes wrong"
READMES = [p for p in sorted(ROOT.glob("*/README.md")) if f"# {TITLE}" in p.read_text()]
each_readme = pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)


def rows_of(text: str) -> list[str]:
    """The first cells of the tables under such a heading, without their headers."""
    rows = []
    for section in re.split(r"^#+ ", text, flags=re.M):
        if section.startswith(TITLE):
            for table in re.findall(r"(?:^\|.*\n)+", section, re.M):
                rows += [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    return rows


def registry(path: Path) -> dict[str, tuple[str, ...]]:
    """ROWS of a test file: part of a row's first cell -> its tests as file::name."""
    assert path.exists(), f"{path.name} has the tests of the rows"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "ROWS":
            named = ast.literal_eval(node.value)
            return {row: in_file(path, tests) for row, tests in named.items()}
    raise AssertionError(f"{path.name} has no ROWS")


def in_file(path: Path, tests: str | tuple[str, ...]) -> tuple[str, ...]:
    tests = (tests,) if isinstance(tests, str) else tests
    if tests[0].startswith("not provoked: "):  # and why
        return ()
    return tuple(test if "::" in test else f"{path.name}::{test}" for test in tests)


def functions_in(path: Path) -> set[str]:
    functions = [node for node in ast.parse(path.read_text()).body if hasattr(node, "args")]
    return {f"{path.name}::{f.name}" for f in functions if f.name.startswith("test_")}


def complaints(rows: list[str], named: dict[str, tuple[str, ...]]) -> list[str]:
    """What is wrong between a table and a registry, one sentence each."""
    found = [f"no test: {row}" for row in rows if not any(part in row for part in named)]
    for part in named:
        matches = sum(part in row for row in rows)
        if matches != 1:
            found.append(f"{matches} rows have: {part}")
    return found


@each_readme
def test_each_row_is_provoked_and_cured(readme):
    path = TESTS / f"test_{readme.parent.name}_rows.py"
    named = registry(path)
    assert complaints(rows_of(readme.read_text()), named) == []
    tests = {test for of_row in named.values() for test in of_row}
    exist = set().union(*(functions_in(TESTS / test.split("::")[0]) for test in tests))
    assert not tests - exist, "no such test"
    assert not functions_in(path) - tests, "a test without a row"


def test_a_row_without_a_test_is_caught():
    text = "# x\n| a | b |\n|---|---|\n| other | |\n\n### What usually goes wrong\n\n"
    text += "| what | why |\n| --- | --- |\n| `one` fails | x |\n| two | y |\n\n## next\n| no | |\n"
    rows = rows_of(text)
    assert rows == ["`one` fails", "two"]
    assert complaints(rows, {"`one`": ("t",), "two": ("t",)}) == []
    assert complaints(rows, {"`one`": ("t",)}) == ["no test: two"]
    assert complaints(rows, {"o": ("t",), "three": ("t",)}) == [
        "2 rows have: o",
        "0 rows have: three",
    ]
