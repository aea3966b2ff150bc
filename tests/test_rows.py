"""Each row of each table under "What usually goes wrong" has its test, and each test its row."""

import ast
import re
from pathlib import Path

from helpers import ROOT

TESTS = ROOT / "tests"
TITLE = "What usually goes wrong"
READMES = [p for p in sorted(ROOT.glob("*/README.md")) if f"# {TITLE}" in p.read_text()]


def rows_of(text: str) -> list[str]:
    """The first cells of the tables under such a heading, without their headers."""
    rows = []
    for section in re.split(r"^#+ ", text, flags=re.M):
        if section.startswith(TITLE):
            for table in re.findall(r"(?:^\|.*\n)+", section, re.M):
                rows += [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    return rows


def pages_of(directory: Path) -> str:
    """The README and the manuals beside it."""
    return "\n".join(page.read_text() for page in sorted(directory.glob("*.md")))


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


def wrong_rows(readme: Path) -> list[str]:
    path = TESTS / f"test_{readme.parent.name}_rows.py"
    named = registry(path)
    tests = {test for of_row in named.values() for test in of_row}
    exist = set().union(*(functions_in(TESTS / test.split("::")[0]) for test in tests))
    return [
        *complaints(rows_of(pages_of(readme.parent)), named),
        *(f"no such test: {test}" for test in sorted(tests - exist)),
        *(f"a test without a row: {test}" for test in sorted(functions_in(path) - tests)),
    ]


def test_each_row_is_provoked_and_cured():
    found = [f"{readme.parent.name}: {what}" for readme in READMES for what in wrong_rows(readme)]
    assert READMES
    assert not found, "\n" + "\n".join(found)


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
