"""The course: every notebook is complete as saved, runs again with the same outputs, has exercises
whose checks tell right from wrong, and leaves no process behind. New notebooks are picked up."""

import ast
import base64
import json
import re
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from helpers import ROOT, Job, still_running, those

FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))

import course  # noqa: E402

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHOWS = {"print", "display", "show", "start_ranks", "run_script", "check"}
SHOWS |= {"ranks", "curves", "bars", "timeline", "movie"}  # of figures
# What nobody can compare, or what names a machine: times, ids, paths of the writer.
VOLATILE = re.compile(r"engine_uuid|msg_id|iopub|/home/|/Users/|/tmp/|" + re.escape(str(ROOT)))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


@pytest.fixture
def notebook(path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def tagged(notebook, tag: str) -> list:
    return [cell for cell in notebook.cells if tag in tags(cell)]


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def python_of(source: str) -> str:
    """The source without its magics."""
    return re.sub(r"^\s*[%!].*$", "", source, flags=re.MULTILINE)


def should_print(source: str) -> bool:
    """Whether a call at the top level prints, whatever happens: inside an "if" it might not."""
    statements = list(ast.parse(python_of(source)).body)
    while statements:
        statement = statements.pop()
        if isinstance(statement, ast.With | ast.Try):
            statements += statement.body
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            name = function.attr if isinstance(function, ast.Attribute) else function.id
            silent = any(k.arg == "show" or k.arg == "file" for k in statement.value.keywords)
            if name in SHOWS and not silent:
                return True
        elif isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
            return True  # a bare expression: its value is shown
    return False


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS][:1] == ["00_start_here.ipynb"]


def test_title(notebook):
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert len(re.findall(r"^# ", text, flags=re.MULTILINE)) == 1


def test_saved_as_executed_from_top_to_bottom(notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


def test_outputs_are_there(notebook):
    missing = [c.source for c in code_cells(notebook) if should_print(c.source) and not c.outputs]
    assert not missing, "saved without its output:\n" + "\n---\n".join(missing)


def test_errors_are_meant(notebook):
    for cell in code_cells(notebook):
        raised = any(output.output_type == "error" for output in cell.outputs)
        assert raised == ("raises-exception" in tags(cell)), cell.source


def test_outputs_are_small_and_plain(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    size = len(json.dumps(outputs))
    assert size < 1_500_000, f"{size:,} bytes of outputs"
    for output in outputs:
        assert not [mime for mime in output.get("data", {}) if "widget" in mime]
        assert not output.get("metadata")
    texts = [json.dumps({**output, "data": text_of(output)}) for output in outputs]
    found = [VOLATILE.search(text) for text in texts]
    assert not any(found), [match[0] for match in found if match]
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "jupyter"}
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def text_of(output) -> dict:
    return {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}


def test_links(path, notebook):
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), f"dead link: {target}"


# Words of the glossary that stand in no sentence of their chapter, only in headings or code.
NO_SENTENCE = {"part", "world", "preflight", "elastic", "MTBF", "point to point"}
NO_SENTENCE |= {"accumulation", "memory order", "lost wake-up"}


def glossary() -> list[tuple[str, str, list[str]]]:
    """(word, anchor of its section, chapters that use it first) of each row."""
    rows, anchor = [], ""
    for line in (FOLDER / "GLOSSARY.md").read_text().splitlines():
        if line.startswith("## "):
            anchor = line[3:].lower().replace(",", "").replace(" ", "-")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if anchor and len(cells) == 3 and cells[0] != "Word":
            rows.append((cells[0], anchor, re.findall(r"\d\d", cells[2])))
    return rows


def linked_words(path: Path) -> list[tuple[str, str]]:
    """(text, anchor) of each link into the glossary."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.findall(r"\[`?([^\]`]+)`?\]\(GLOSSARY\.md#([a-z-]+)\)", text)


def means(text: str, word: str) -> bool:
    """Whether a link's text is a form of a word: "axes" of "axis", "RPC" of "RPC, remote call"."""

    def alike(a: str, b: str) -> bool:
        return a.startswith(b[: max(2, min(len(a), len(b)) - 2)])

    said = text.lower().split()
    for name in (name.split() for name in word.lower().split(", ")):
        found = [[alike(part, one) for one in name] for part in said]
        if all(map(any, found)) or all(map(any, zip(*found, strict=True))):
            return True
    return False


def test_links_into_the_glossary(path):
    """Each leads to the section of a word which is first used in this chapter."""
    for text, anchor in linked_words(path):
        here = [
            word
            for word, a, chapters in glossary()
            if (a, path.name[:2] in chapters) == (anchor, True)
        ]
        assert any(means(text, word) for word in here), f"{text} in #{anchor}"


def test_the_words_of_the_glossary_are_linked():
    links = {path.name[:2]: linked_words(path) for path in NOTEBOOKS}
    missing = {
        word
        for word, anchor, chapters in glossary()
        if not any(a == anchor and means(text, word) for c in chapters for text, a in links[c])
    }
    assert missing == NO_SENTENCE


CHAPTER = re.compile(r"\b[Cc]hapters? \[?(\d+(?:(?:, | and | to | or )\d+)*)(?! KB)")


def chapters_named(text: str) -> list[tuple[int, str]]:
    """(number, what stands in brackets behind it) for each chapter that a text speaks of."""
    found = []
    for match in CHAPTER.finditer(text):
        subject = re.match(r" \(([^()]*)\)", text[match.end() :])
        numbers = [int(number) for number in re.findall(r"\d+", match[1])]
        alone = len(numbers) == 1 and subject
        found += [(number, subject[1] if alone else "") for number in numbers]
    return found


def subjects_of(number: int) -> set[str]:
    """The beginnings of the words of a chapter's name, headings and line in the course's README."""
    (file,) = FOLDER.glob(f"{number:02d}_*.ipynb")
    cells = nbformat.read(file, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    row = re.search(rf"^.*\({file.name}\).*$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    return {word[:5] for word in re.findall(r"[a-z]{3,}", " ".join([*headings, row[0]]).lower())}


def wrong_references(text: str) -> list[str]:
    """What a text says of chapters that is not so."""
    numbers = {int(file.name[:2]) for file in NOTEBOOKS}
    links = re.findall(r"\[(?:[Cc]hapter )?(\d+)\]\(\S*?(\d\d)_", text)
    wrong = [f"[{label}]({number})" for label, number in links if int(label) != int(number)]
    for number, subject in chapters_named(text):
        words = {word[:5] for word in re.findall(r"[a-z]{3,}", subject.lower())}
        if number not in numbers or (words and not words & subjects_of(number)):
            wrong.append(f"chapter {number} ({subject})")
    return wrong + re.findall(r"[Cc]hapters?[^.]*\bplanned", text)


PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("*/README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_name_the_right_chapters(page):
    assert not wrong_references(page.read_text(encoding="utf-8"))


def test_chapters_name_the_right_chapters(notebook):
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    assert not wrong_references(text)


def test_wrong_references_are_caught():
    assert not wrong_references("Chapter 3 and chapters 1 and 2; [chapter 4](04_cost.ipynb).")
    assert not wrong_references("as in chapter 2 (point-to-point, deadlock)")
    assert wrong_references("as in chapter 2 (optimizers)") == ["chapter 2 (optimizers)"]
    assert wrong_references("see chapters 3 and 99") == ["chapter 99 ()"]
    assert wrong_references("[5](../notebooks/06_ddp.ipynb)") == ["[5](06)"]


WIDEST = 100  # letters of a line of code or output: more, and a page has to be moved sideways
PICTURE_WIDTH = 1200  # dots: 8 inches at 150


def test_nothing_is_wider_than_the_page(notebook):
    lines = [line for cell in code_cells(notebook) for line in cell.source.splitlines()]
    for cell in code_cells(notebook):
        for output in cell.outputs:
            lines += output.get("text", "").splitlines()
            lines += text_of(output).get("text/plain", "").splitlines()
    assert not [line for line in lines if len(line) > WIDEST]


def test_pictures_fill_the_page_and_are_small(notebook):
    for cell in code_cells(notebook):
        assert "matplotlib" not in cell.source, "drawing belongs in figures/"
        for output in cell.outputs:
            if png := output.get("data", {}).get("image/png"):
                picture = base64.b64decode(png)
                assert len(picture) < 150_000
                assert int.from_bytes(picture[16:20]) == PICTURE_WIDTH


def test_a_cell_that_draws_is_short(notebook):
    """Six lines for the picture; what is computed for it does not count."""
    for cell in code_cells(notebook):
        draws = re.findall(r"^.*\b(?:ax|axes|fig|figures?|pictures|plt)\b.*$", cell.source, re.M)
        assert len(draws) <= 6, cell.source


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_again_with_the_same_outputs(path, notebook, tmp_path):
    """nbval on a copy with one cell more per exercise: it tries the solution, then a mistake."""
    exercises, checks = tagged(notebook, "exercise"), tagged(notebook, "check")
    solutions = tagged(notebook, "solution")
    assert len(exercises) == len(checks) == len(solutions) > 0
    proofs = [
        nbformat.v4.new_code_cell(proof_cell(*cells), metadata={"tags": ["nbval-ignore-output"]})
        for cells in zip(exercises, checks, solutions, strict=True)
    ]
    last = max(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells[last:last] = proofs  # the last one ends the ranks
    # The copy lies in a tree of links that looks like the repository.
    (tmp_path / "notebooks").mkdir()
    for place, target in ((ROOT, tmp_path), (FOLDER, tmp_path / "notebooks")):
        for entry in place.iterdir():
            if entry != FOLDER and entry.suffix != ".ipynb" and not entry.name.startswith("."):
                (target / entry.name).symlink_to(entry)
    copy = tmp_path / "notebooks" / path.name
    nbformat.write(notebook, copy)
    options = (
        "--nbval",
        "--nbval-current-env",
        "--nbval-cell-timeout=600",
        "-p",
        "no:cacheprovider",
    )
    with Job([sys.executable, "-m", "pytest", "-q", *options, copy], cwd=tmp_path) as job:
        job.wait(timeout=1100).check()  # minutes on a busy machine
        assert f"{len(code_cells(notebook))} passed" in job.output
        wait_until_gone(job.processes)


def proof_cell(exercise, check, solution) -> str:
    """A cell that runs the check on the solution, and on wrong answers.

    The solution's first python block is the answer. Further blocks are tempting mistakes; without
    any, what the answer's variables hold is spoiled.
    """
    right, *wrong = re.findall(r"```python\n(.*?)```", solution.source, flags=re.DOTALL)
    if not wrong:
        magic = "%%px\n" if exercise.source.startswith("%%px") else ""
        names = [
            target.id
            for statement in ast.parse(python_of(exercise.source)).body
            if isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Constant)
            and statement.value.value is None
            for target in statement.targets
        ]
        assert names, f"an exercise sets its answer to None:\n{exercise.source}"
        wrong = [magic + SPOIL + "".join(f"{name} = spoil({name})\n" for name in names)]
    return f"{RUN}\nprove({right!r}, {wrong!r}, {check.source!r})"


SPOIL = '''
def spoil(value):
    """A wrong answer of the same kind."""
    if callable(value):
        return lambda *args, **kwargs: spoil(value(*args, **kwargs))
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "?"
    if isinstance(value, (list, tuple)):
        return type(value)(spoil(v) for v in value)
    if isinstance(value, dict):
        return {k: spoil(v) for k, v in value.items()}
    return value * 2 + 1
'''

RUN = """
def prove(right, wrong, check):
    from IPython.utils.capture import capture_output

    def run(source):
        # Not run_cell(): it would report an error to nbval also where we expect it.
        code = get_ipython().transform_cell(source)
        with capture_output() as said:
            try:
                exec(code, get_ipython().user_ns)
            except Exception as error:  # that of a rank has its type in the text
                return f"{type(error).__name__}: {error}", said.stdout
        return None, said.stdout

    error, said = run(right)
    assert not error, error
    error, said = run(check)
    assert not error and said.strip().endswith("correct"), (error, said)
    for mistake in wrong:
        error, said = run(mistake)
        assert not error, error
        error, said = run(check)
        assert not error, ("a check never fails, it says what is wrong", mistake, error)
        assert said.count("not yet: ") == 1 and len(said.split("\\n")) <= 3, (mistake, said)
        assert len(said) < 400, ("one line", said)
"""


def wait_until_gone(processes, timeout: float = 20) -> None:
    """A guard process cleans up after a killed kernel: that takes a moment."""
    deadline = time.monotonic() + timeout
    while left := still_running(processes()):
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.05)


def of_this_kernel() -> list[psutil.Process]:
    """Ranks and scripts that `course` has started here, and whatever they have started."""
    mark = f"{course.KERNEL}/"
    return those(lambda p: p.environ().get("COURSE_MARK", "").startswith(mark))


SCRIPT = """
import os
import subprocess
import sys
import time

mode, rank = sys.argv[1], os.environ.get("RANK", "alone")
print("here is", rank, flush=True)
if mode == "raise" and rank != "0":
    raise ValueError("no such digit: 11")
if mode == "half":
    sys.stdout.buffer.write(b"half a letter: \\xc3")  # as if killed there
    sys.exit(1)
if mode == "talk":
    for i in range(100_000):
        print(rank, i, flush=i % 10 == 0)
    sys.exit()
if mode != "ok":
    # torchrun knows nothing of this one
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("script") / "script.py"
    file.write_text(SCRIPT)
    return file


@pytest.mark.slow
def test_run_script_prints_in_rank_order(script, capsys):
    course.run_script(script, "ok", ranks=3)
    assert capsys.readouterr().out == "here is 0\nhere is 1\nhere is 2\n"
    assert course.run_script(script, "ok", ranks=1, show=False) == "here is alone\n"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_run_script_raises_what_the_script_raises(script, ranks):
    with pytest.raises(RuntimeError, match=r"failed with exit status 1\n(.|\n)*no such digit: 11"):
        course.run_script(script, "raise", ranks=ranks, timeout=300)
    assert not of_this_kernel()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_run_script_returns_all_that_was_printed(script, ranks):
    printed = course.run_script(script, "talk", ranks=ranks, show=False)
    expected = []
    for rank in ["alone"] if ranks == 1 else range(ranks):
        expected += [f"here is {rank}", *(f"{rank} {i}" for i in range(100_000))]
    assert printed.splitlines() == expected


def test_run_script_reads_what_a_killed_process_left_unfinished(script):
    with pytest.raises(RuntimeError, match="exit status 1\nhere is alone\nhalf a letter: "):
        course.run_script(script, "half", ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "timeout"), [(1, 10), (2, 30)])
def test_run_script_ends_a_hang(script, ranks, timeout):
    # Enough for the ranks to start on a busy machine, so that there is something to end
    with pytest.raises(TimeoutError, match=rf"did not end within {timeout} s\nhere is"):
        course.run_script(script, "hang", ranks=ranks, timeout=timeout)
    assert not of_this_kernel()


LIFE = """
import sys
sys.path.insert(0, {folder!r})
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()

def run(source):
    shell.run_cell(source).raise_error()

run("from course import *")
run("start_ranks(2, timeout=5)")
run("%px y = rank + 1")
run("assert gather('y') == [1, 2], gather('y')")
result = shell.run_cell("%%px\\nif rank == 0: dist.all_reduce(torch.ones(1))")
assert "Timed out" in str(result.error_in_exec), result
run("start_ranks(3)")  # a broken group is replaced
run("%px x = torch.tensor([1, 10, 100][rank]); dist.all_reduce(x)")
run("assert [x.item() for x in gather('x')] == [111] * 3")
print("alive", flush=True)
shell.run_cell("%px import time; time.sleep(300)")
"""


@pytest.mark.slow
def test_ranks_start_again_after_a_hang_and_die_with_their_kernel(tmp_path):
    life = tmp_path / "life.py"
    life.write_text(LIFE.format(folder=str(FOLDER)))
    with Job([sys.executable, life], cwd=tmp_path) as job:
        job.wait_until(lambda: "\nalive" in job.output, timeout=300)
        assert len(job.processes()) > 3
        job.process.kill()  # no chance to clean up: what a Jupyter server does to a stuck kernel
        job.process.wait()
        wait_until_gone(job.processes)


BROKEN = """
import os, sys
sys.path.insert(0, {folder!r})
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance()
from course import start_ranks
os.environ["PYTHONPATH"] = {broken!r}
start_ranks(2)
"""


@pytest.mark.slow
def test_ranks_that_cannot_start_say_why_at_once(tmp_path):
    """Not after a minute, and not only that there are none."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    page = tmp_path / "page.py"
    page.write_text(BROKEN.format(folder=str(FOLDER), broken=str(tmp_path)))
    with Job([sys.executable, page], cwd=FOLDER) as job:
        result = job.wait(60)
    assert result.returncode == 1
    says = r"RuntimeError: the ranks have ended before they were ready:\n(?s:.*)no torch here\n"
    assert re.search(says, result.output)


def test_should_print():
    assert should_print("%%px\nx = 1\nprint(x)")
    assert should_print("x")
    assert should_print("try:\n    run_script(1)\nfinally:\n    pass")
    assert not should_print("def f():\n    print(1)")
    assert not should_print("x = run_script(1, show=False)\nrun_script(2, show=False)")
