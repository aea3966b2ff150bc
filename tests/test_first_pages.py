"""README.md and its pictures: what a stranger sees first is there, is short, and is true."""

import re
import sys

import pytest
from helpers import ROOT
from PIL import Image

sys.path.append(str(ROOT / "docs"))
import demo
import pictures

PAGES = ("README.md", "README.zh-CN.md")
PINNED = re.search(r"^torch===([\d.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_it_is_short():
    assert len(text_of("README.md").split()) <= 900


@pytest.mark.parametrize("page", PAGES)
def test_the_first_command_is_on_the_first_screen(page):
    first = text_of(page).splitlines()[:25]
    assert any(line.startswith("make demo") for line in first)
    assert "docs/pictures/demo.gif" in text_of(page).partition("\n## ")[0]


@pytest.mark.parametrize("page", PAGES)
def test_its_code_is_that_of_minimal(page):
    (code,) = re.findall(r"^```python\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    lines = [line.strip() for line in code.splitlines()]
    lines = [line.replace("dist.get_world_size()", "world_size") for line in lines]
    written = (ROOT / "ddp_basics/minimal.py").read_text().splitlines()
    unknown = [
        line
        for line in lines
        if not any(own.partition("  #")[0].strip() == line.partition("  #")[0] for own in written)
    ]
    assert len(lines) == 14
    assert unknown == []
    added = [line for line in lines if re.search(r"dist\.|Distr|set_epoch|accelerator|RANK", line)]
    assert len(added) == 8
    assert re.search("eight lines|八行", text_of(page))


@pytest.mark.parametrize("page", PAGES)
def test_the_command_of_the_demo_is_the_recorded_one(page):
    (command,) = re.findall(r"^\*[^`]*`([^`]*)`.*\*$", text_of(page), re.MULTILINE)
    assert command == demo.COMMAND


@pytest.mark.parametrize("page", PAGES)
def test_it_lists_each_chapter_in_order(page):
    listed = re.findall(r"^- \[\d\d\]\((.*?)\)", text_of(page), re.MULTILINE)
    assert listed == [
        f"notebooks/{file.name}" for file in sorted((ROOT / "notebooks").glob("*.ipynb"))
    ]


# The first screens of the directories.

DIRECTORIES = sorted(ROOT.glob("[a-z]*/README.md"))
FOR_DEVELOPERS = {"benchmarks", "tests"}  # and the course: no table of mistakes, or no picture
each_directory = pytest.mark.parametrize("page", DIRECTORIES, ids=lambda page: page.parent.name)


def lacks(text: str, kind: str) -> list[str]:
    """The flaws of a directory's page; kind: its directory."""
    lines = text.splitlines()
    fences = [
        n for n, line in enumerate(lines) if re.match(r"```bash|    (python|torchrun) ", line)
    ]
    found = []
    if len(lines) >= 150:
        found.append(f"{len(lines)} lines")
    if len(text.split()) > 2000:
        found.append(f"{len(text.split())} words")
    if not fences or fences[0] > 30:
        found.append("no command on the first screen")
    if kind not in FOR_DEVELOPERS and not re.search(
        r"^!\[.{30,}\]\(\.\./docs/", text, re.MULTILINE
    ):
        found.append("no picture with a text for those who cannot see it")
    if kind not in {*FOR_DEVELOPERS, "notebooks"} and "\n## What usually goes wrong\n" not in text:
        found.append("no table of what usually goes wrong")
    return found


@each_directory
def test_a_directory_has_a_first_screen(page):
    assert lacks(page.read_text(encoding="utf-8"), page.parent.name) == []


def test_a_page_that_lacks_something_is_caught():
    picture = "![what each rank holds before and after](../docs/pictures/a.png)\n"
    good = f"# a\n{picture}```bash\nmake\n```\n\n## What usually goes wrong\n"
    assert lacks(good, "a") == []
    assert lacks(good.replace(picture, ""), "a") != []
    assert lacks(good.replace("what each rank holds", ""), "a") != []
    assert lacks(good.replace("bash", "text"), "a") != []
    assert lacks(good.replace("usually", ""), "a") != []
    assert lacks(good + "word " * 2000, "a") == [f"{len(good.split()) + 2000} words"]
    assert lacks(good + "\n" * 150, "a") == ["157 lines"]
    assert lacks("# a\n```bash\nmake\n", "tests") == []


def test_it_counts_notebooks_and_directories():
    others = {"benchmarks", "notebooks", "tests"}
    directories = {page.parent.name for page in DIRECTORIES} - others
    notebooks = [*(ROOT / "notebooks").glob("*.ipynb")]
    assert f"{len(notebooks)} notebooks" in text_of("notebooks/README.md").splitlines()[0]
    assert f"{len(notebooks)} notebooks" in text_of("README.md")
    assert f"{len(directories)} directories of scripts" in text_of("README.md")
    assert f"{len(notebooks)} 个 notebook" in text_of("README.zh-CN.md")
    assert f"{len(directories)} 个目录" in text_of("README.zh-CN.md")


def test_the_map_has_each_directory_and_each_chapter():
    others = {"benchmarks", "notebooks", "tests"}
    names = {path.parent.name for path in ROOT.glob("[a-z]*/README.md")} - others
    directories = [f"{name}/" for name in names]
    assert sorted(row[2] for row in pictures.MAP) == sorted(directories)
    covered = set()
    for row in (row for row in pictures.MAP if row[1]):
        first, _, last = row[1].partition("-")
        covered.update(range(int(first), int(last or first) + 1))
    chapters = {int(file.name[:2]) for file in (ROOT / "notebooks").glob("*.ipynb")}
    assert covered == chapters - {0}


@pytest.mark.slow
def test_pictures_are_those_of_the_chapters():
    stored = {name: (pictures.FOLDER / name).read_bytes() for name in pictures.made()}
    different = [name for name, content in pictures.made().items() if stored[name] != content]
    assert different == [], "python docs/pictures.py makes them again"
    assert {path.name for path in pictures.FOLDER.iterdir()} == {"demo.gif", *stored}


def test_a_picture_without_its_cell_is_an_error():
    with pytest.raises(ValueError, match="03_collectives has no picture below"):
        pictures.stored(pictures.Picture("x", "03_collectives", "nothing("))


def test_each_picture_is_shown():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [path.name for path in pictures.FOLDER.iterdir() if path.name not in shown] == []


def test_the_demo_moves_and_is_small():
    file = pictures.FOLDER / "demo.gif"
    with Image.open(file) as gif:
        assert gif.n_frames > 20
    assert file.stat().st_size < 1_000_000


def test_badges_are_true():
    oldest = re.search(r"^TORCH \?= ([\d.]+)\.0$", text_of("Makefile"), re.MULTILINE)[1]
    assert pictures.BADGES["torch"] == ("torch", f"{oldest} to {PINNED.rpartition('.')[0]}")
    assert "not Python 3.11 or newer" in text_of("Makefile")
    assert pictures.BADGES["python"] == ("python", "3.11 or newer")
    assert "BSD 3-Clause" in text_of("LICENSE")


def test_results_are_recorded_where_the_row_says():
    """Each number of a row is in the page that it links, perhaps rounded."""
    rows = re.findall(r"^\|.*\]\((benchmarks/results/.*?)\).*", text_of("README.md"), re.MULTILINE)
    assert len(rows) == 5
    for row in re.findall(r"^\|.*\]\(benchmarks/results/.*", text_of("README.md"), re.MULTILINE):
        record = re.search(r"\]\((benchmarks/results/.*?)\)", row)[1]
        recorded = [float(n.replace(",", "")) for n in NUMBERS.findall(text_of(record))]
        _, measured, verdict = row.strip("| ").split(" | ")
        for number in NUMBERS.findall(f"{measured} {verdict}"):
            half = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9
            assert any(abs(float(number) - value) <= half for value in recorded), (number, record)


NUMBERS = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-])")
