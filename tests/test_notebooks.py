"""The course: every notebook is complete as saved, runs again with the same outputs, has exercises
whose checks tell right from wrong, and leaves no process behind. New notebooks are picked up."""

import ast
import base64
import functools
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import nbformat
import psutil
import pytest
from helpers import ROOT, Job, environment, still_running, those

FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))

import course  # noqa: E402
import processes  # noqa: E402

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHOWS = {"print", "display", "show", "start_ranks", "run_script", "check"}
SHOWS |= {"ranks", "curves", "bars", "timeline", "movie"}  # of figures
# Words that differ between runs or name a machine: ids, paths of the writer.
VOLATILE = re.compile(r"engine_uuid|msg_id|iopub|/home/|/Users/|/tmp/|" + re.escape(str(ROOT)))


@functools.cache
def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def assert_clean(look: Callable[[nbformat.NotebookNode], Iterable[str]]) -> None:
    """Fail with a line "notebook: what" for everything that `look` finds in the notebooks."""
    found = [f"{path.name}: {what}" for path in NOTEBOOKS for what in look(read(path))]
    assert not found, "\n" + "\n".join(found)


def each_cell(look: Callable[[nbformat.NotebookNode], Iterable[str]]) -> Callable:
    """A look at a notebook that says "code cell [number]: what" for what `look` finds in a cell."""
    return lambda notebook: [
        f"code cell [{number}]: {what}"
        for number, cell in enumerate(code_cells(notebook), 1)
        for what in look(cell)
    ]


def prose(notebook) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


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


def test_titles():
    assert_clean(wrong_title)


def wrong_title(notebook) -> list[str]:
    first = notebook.cells[0]
    begins = first.cell_type == "markdown" and first.source.startswith("# ")
    count = len(re.findall(r"^# ", without_code(prose(notebook)), flags=re.MULTILINE))
    return [] if begins and count == 1 else [f"{count} titles, or none in the first cell"]


RUN_IT = "**Run it**: clone this repository, type `make demo` once (it installs into `.venv`), "
RUN_IT += "then `.venv/bin/jupyter lab notebooks`."


def test_the_first_cell_says_how_to_run_the_chapter():
    """For a reader who opens it on GitHub."""
    assert_clean(lambda n: [] if n.cells[0].source.endswith(f"\n\n{RUN_IT}") else ["no: Run it"])


def test_saved_as_executed_from_top_to_bottom():
    assert_clean(wrong_order)


def wrong_order(notebook) -> list[str]:
    counts = [cell.execution_count for cell in code_cells(notebook)]
    return [] if counts == [*range(1, len(counts) + 1)] else [f"cells were run as {counts}"]


def test_outputs_are_there():
    says = "saved without its output:\n{}"
    assert_clean(
        each_cell(
            lambda c: [says.format(c.source)] if should_print(c.source) and not c.outputs else []
        )
    )


def test_printed_functions_are_those_of_today():
    """Seen here without running the chapter: a function that changed after it was saved."""
    assert any("getsource" in c.source for path in NOTEBOOKS for c in code_cells(read(path)))
    assert_clean(each_cell(old_functions))


def old_functions(cell) -> list[str]:
    if "getsource" not in cell.source:
        return []
    text = "".join(output.text for output in cell.outputs)
    names = re.findall(r"^ *def (\w+)\(", text, flags=re.MULTILINE)
    few = [] if len(names) >= cell.source.count("getsource") else ["prints too few functions"]
    old = [name for name in names if not any(now in text for now in functions().get(name, []))]
    return few + [f"{name} has changed: execute the chapter again" for name in old]


@functools.cache
def functions() -> dict[str, list[str]]:
    """Name of a function -> the source of each function of that name."""
    found = {}
    for path in ROOT.glob("[!.]*/*.py"):
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                now = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                found.setdefault(node.name, []).append(now)
    return found


def test_errors_are_meant():
    assert_clean(each_cell(other_than_meant))


def other_than_meant(cell) -> list[str]:
    raised = any(output.output_type == "error" for output in cell.outputs)
    meant = "raises-exception" in tags(cell)
    return [] if raised == meant else [f"raised: {raised}, meant to: {meant}\n{cell.source}"]


def test_outputs_are_small_and_plain():
    looks = (large_outputs, each_cell(not_plain), other_metadata)
    assert_clean(lambda notebook: [what for look in looks for what in look(notebook)])


def large_outputs(notebook) -> list[str]:
    size = len(json.dumps([output for cell in code_cells(notebook) for output in cell.outputs]))
    return [f"{size:,} bytes of outputs"] if size >= 1_500_000 else []


def not_plain(cell) -> list[str]:
    found = []
    for output in cell.outputs:
        found += [mime for mime in output.get("data", {}) if "widget" in mime]
        found += [f"metadata {output.metadata}"] if output.get("metadata") else []
        text = json.dumps({**output, "data": text_of(output)})
        found += [match[0] for match in VOLATILE.finditer(text)]
    return found


def other_metadata(notebook) -> list[str]:
    found = {key for cell in notebook.cells for key in cell.metadata} - {"tags", "jupyter"}
    found |= set(notebook.metadata) ^ {"kernelspec", "language_info"}
    return [f"metadata, too much or too little: {sorted(found)}"] if found else []


def text_of(output) -> dict:
    return {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}


def test_links():
    assert_clean(dead_links)


def dead_links(notebook) -> list[str]:
    targets = re.findall(r"\]\(([^)#\s]+)", without_code(prose(notebook)))
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    return [f"dead link: {target}" for target in local if not (FOLDER / target).exists()]


# Words of the glossary that stand in no sentence of their chapter, only in headings or code.
NO_SENTENCE = {"world", "preflight", "elastic", "point to point"}
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
    return re.findall(r"\[`?([^\]`]+)`?\]\(GLOSSARY\.md#([a-z-]+)\)", prose(read(path)))


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


def test_links_into_the_glossary():
    """Each leads to the section of a word which is first used in this chapter."""
    words = glossary()
    wrong = [
        f"{path.name}: {text} in #{anchor}"
        for path in NOTEBOOKS
        for text, anchor in linked_words(path)
        if not any(
            a == anchor and path.name[:2] in chapters and means(text, word)
            for word, a, chapters in words
        )
    ]
    assert not wrong, "\n".join(wrong)


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


@functools.cache
def subjects_of(number: int) -> set[str]:
    """The beginnings of the words of a chapter's name, headings and line in the course's README."""
    (file,) = FOLDER.glob(f"{number:02d}_*.ipynb")
    headings = re.findall(r"^#+ (.*)", prose(read(file)), flags=re.MULTILINE)
    row = re.search(rf"^.*\({file.name}\).*$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    return {word[:5] for word in re.findall(r"[a-z]{3,}", " ".join([*headings, row[0]]).lower())}


def wrong_references(text: str) -> list[str]:
    """Wrong statements of a text about chapters."""
    numbers = {int(file.name[:2]) for file in NOTEBOOKS}
    links = re.findall(r"\[(?:[Cc]hapter )?(\d+)\]\(\S*?(\d\d)_", text)
    wrong = [f"[{label}]({number})" for label, number in links if int(label) != int(number)]
    for number, subject in chapters_named(text):
        words = {word[:5] for word in re.findall(r"[a-z]{3,}", subject.lower())}
        if number not in numbers or (words and not words & subjects_of(number)):
            wrong.append(f"chapter {number} ({subject})")
    return wrong + re.findall(r"[Cc]hapters?[^.]*\bplanned", text)


def test_what_a_chapter_names_is_there():
    """Sections, exercises and pictures: some were lost when chapters were saved again."""
    by_number = {path.name[:2]: read(path) for path in NOTEBOOKS}
    assert_clean(lambda notebook: named_in_vain(notebook, by_number))


# A section in quotation marks, with the link to its chapter if it is another one.
SECTION = re.compile(
    r"(?:\[\d+\]\((?P<chapter>\d\d)_\S*\) )?"
    r"(?:up to|from|as far as|[Ss]kip|[Rr]ead|[Ss]ee|then) "
    r'(?P<names>"[A-Z][^"]*"(?:(?:,| and|, and) "[A-Z][^"]*")*)'
)


def named_in_vain(notebook, by_number: dict) -> list[str]:
    found = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        text = without_code(cell.source)
        for match in SECTION.finditer(text):
            there = headings(by_number[match["chapter"]] if match["chapter"] else notebook)
            for name in re.findall(r'"([^"]*)"', match["names"]):
                if not any(heading.startswith(name.rstrip(".")) for heading in there):
                    found.append(f'no section "{name}"')
        for match in re.finditer(r"\bexercises? (\d)(?: and (\d))?(?: of chapter (\d+))?", text):
            chapter = by_number[f"{int(match[3]):02}"] if match[3] else notebook
            exercises = exercises_of(chapter)
            found += [f"no exercise {n}" for n in match.groups()[:2] if n and n not in exercises]
        for match in re.finditer(r"(?:figure|picture|movie)s? (above|below)", text):
            cells = notebook.cells[:number] if match[1] == "above" else notebook.cells[number:]
            if not any(
                "image/" in mime
                for c in cells
                for o in c.get("outputs", [])
                for mime in o.get("data", {})
            ):
                found.append(f"nothing is drawn: {match[0]}")
    return found


def headings(notebook) -> list[str]:
    return re.findall(r"^#+ (.*)", without_code(prose(notebook)), flags=re.MULTILINE)


def exercises_of(notebook) -> list[str]:
    """Their numbers, which stand in bold: **Exercise 3.**, **3. Which GPU?** or (exercise 6)."""
    text = without_code(prose(notebook))
    return re.findall(r"^\*\*(?:Exercise |.*\(exercise )?(\d)[.,: )]", text, re.MULTILINE)


def test_what_is_named_in_vain_is_caught():
    markdown = nbformat.v4.new_markdown_cell
    text = '## Tags and more\n\n**Exercise 1.** Skip "Tags", do exercise 1; '
    bad = 'read "The ring"; exercise 2 of chapter 3; see the figure above.'
    chapter = nbformat.v4.new_notebook(cells=[markdown(text)])
    worse = nbformat.v4.new_notebook(cells=[markdown(text + bad)])
    assert named_in_vain(chapter, {}) == []
    expected = ['no section "The ring"', "no exercise 2", "nothing is drawn: figure above"]
    assert named_in_vain(worse, {"03": chapter}) == expected


PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("*/README.md"))


def test_pages_name_the_right_chapters():
    wrong = {
        page.relative_to(ROOT).as_posix(): wrong_references(page.read_text(encoding="utf-8"))
        for page in PAGES
    }
    assert not {page: found for page, found in wrong.items() if found}


def test_chapters_name_the_right_chapters():
    assert_clean(lambda notebook: wrong_references(prose(notebook)))


def test_wrong_references_are_caught():
    assert not wrong_references("Chapter 3 and chapters 1 and 2; [chapter 4](04_cost.ipynb).")
    assert not wrong_references("as in chapter 2 (point-to-point, deadlock)")
    assert wrong_references("as in chapter 2 (optimizers)") == ["chapter 2 (optimizers)"]
    assert wrong_references("see chapters 3 and 99") == ["chapter 99 ()"]
    assert wrong_references("[5](../notebooks/06_ddp.ipynb)") == ["[5](06)"]


WIDEST = 100  # letters of a line of code or output: more, and a page has to be moved sideways
PICTURE_WIDTH = 1200  # dots: 8 inches at 150


def test_nothing_is_wider_than_the_page():
    assert_clean(each_cell(wide_lines))


def wide_lines(cell) -> list[str]:
    lines = cell.source.splitlines()
    for output in cell.outputs:
        lines += output.get("text", "").splitlines()
        lines += text_of(output).get("text/plain", "").splitlines()
    return [line for line in lines if len(line) > WIDEST]


def test_pictures_fill_the_page_and_are_small():
    assert_clean(each_cell(wrong_pictures))


def wrong_pictures(cell) -> list[str]:
    found = (
        ["draws with matplotlib: that belongs in figures/"] if "matplotlib" in cell.source else []
    )
    for output in cell.outputs:
        if png := output.get("data", {}).get("image/png"):
            picture = base64.b64decode(png)
            width = int.from_bytes(picture[16:20])
            if len(picture) >= 150_000 or width != PICTURE_WIDTH:
                found.append(f"a picture of {len(picture):,} bytes, {width} dots wide")
    return found


def test_a_cell_that_draws_is_short():
    """Six lines for the picture; what is computed for it does not count."""
    assert_clean(each_cell(long_drawing))


def long_drawing(cell) -> list[str]:
    draws = re.findall(r"^.*\b(?:ax|axes|fig|figures?|pictures|plt)\b.*$", cell.source, re.M)
    return [f"{len(draws)} lines draw:\n{cell.source}"] if len(draws) > 6 else []


# nbformat needs jsonschema, which takes 3 s to build 39 grammars of addresses, if it can.
PYTEST = """
import sys
sys.modules["rfc3987_syntax"] = None
import pytest
sys.exit(pytest.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_again_with_the_same_outputs(path, tmp_path):
    """nbval on a copy with one cell more per exercise: it tries the solution, then a mistake."""
    notebook = nbformat.read(path, as_version=4)
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
    command = [sys.executable, "-c", PYTEST, "-q", *options, copy]
    with Job(command, cwd=tmp_path, COURSE_QUIET="yes") as job:
        job.wait(timeout=1100).check()  # minutes on a busy machine
        assert f"{len(code_cells(notebook))} passed" in job.output
        wait_until_gone(job.processes)


def proof_cell(exercise, check, solution) -> str:
    """A cell that runs the check on wrong answers of all kinds, and on the solution.

    The solution's first python block is the answer; ALSO_RIGHT has others. Further blocks are
    tempting mistakes; without any, what the answer's variables hold is spoiled.
    """
    right, *wrong = re.findall(r"```python\n(.*?)```", solution.source, flags=re.DOTALL)
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

    def every(value: str) -> str:
        """Set all variables of the answer, after it was given rightly."""
        return magic + ABUSE + "".join(f"{name} = {value.format(name)}\n" for name in names)

    wrong = wrong or [every("spoil({})")]
    open_ones = [exercise.source]
    if magic:
        open_ones.append(magic + "if rank > 0:\n    " + " = ".join(names) + " = None\n")
    kinds = ["fails", "hangs", "another_type"]
    if "def " not in right or "return " in right:  # others work in place
        kinds.append("another_shape")
    abuse = [every(f"{kind}({{}})") for kind in kinds]
    abuse += [magic + answer for first, answer in DEADLY.items() if first in exercise.source]
    rights = [right]
    rights += [magic + answer for first, answer in ALSO_RIGHT.items() if first in exercise.source]
    return f"{RUN}\nprove({rights!r}, {wrong!r}, {open_ones!r}, {abuse!r}, {check.source!r})"


# Answers that differ from the solution and are right.
ALSO_RIGHT = {
    "\npair_mean = None": """
def pair_mean(x):  # only the members make their group
    first = rank // 2 * 2
    pair = dist.new_group([first, first + 1], use_local_synchronization=True)
    dist.all_reduce(x, group=pair)
    return x / 2
""",
    "bytes_sent_per_rank = None": "bytes_sent_per_rank, seconds = 179e6, 0.14\n",  # rounded
    "checkpoint_bytes = None": """
checkpoint_bytes, bytes_per_rank, seconds_to_write = 156e9, 3.25e9, 1.6
""",
    "save = None": """
import os


def save(state, path):  # by name, not through an open file
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
""",
    "\nW1_placements = None": """
x_placements = [Shard(0), Replicate()]
W1_placements, W2_placements = (Shard(0), Shard(-1)), (Shard(-1), Shard(0))
""",
    "\nbest_word = None": """
def best_word(logits):
    value, index = logits.max(dim=0)
    every = [None] * world_size
    dist.all_gather_object(every, (value.item(), index.item() + rank * len(logits)))
    return max(every)[1]
""",
    "best_word = None  # def": """
def best_word(logits):
    value, index = logits.max(dim=0)
    mine = torch.stack([value, index + rank * len(logits)])
    every = torch.empty(2 * world_size)
    dist.all_gather_into_tensor(every, mine)
    return int(max(every.view(-1, 2).tolist())[1])
""",
}


# Answers that leave ranks in a collective, or end a process. They come last.
DEADLY = {
    "\nmean = None": "numbers = torch.ones(3 + 2 * rank)\nmean = dist.all_reduce(numbers)\n",
    "\npair_mean = None": """
def pair_mean(x):
    if rank < 2:
        pair = dist.new_group([0, 1])
    else:
        pair = dist.new_group([2, 3])
    dist.reduce(x, dst=0, group=pair)
    if rank == 0:
        x /= 2
    dist.broadcast(x, src=0, group=pair)
    return x
""",
    "\nall_to_all = None": """
def all_to_all(incoming, outgoing):  # into places that are too small for some
    for d in range(1, world_size):
        to, source = (rank + d) % world_size, (rank - d) % world_size
        exchange(outgoing[to], to, incoming[to], source)
""",
    "\nsteps_until_done = None": """
def steps_until_done(comm, loss):
    steps = 0
    while loss > 0.5:
        comm.all_reduce(loss.clone())
        loss, steps = loss / 2, steps + 1
    return steps
""",
    "\nfull_weight = None": """
def full_weight(u):
    return u.layer.weight.detach()
""",
    "\nask_all = None": """
def ask_all(names, function):
    [call.wait() for call in [rpc.rpc_async(name, function) for name in names]]
""",
    "\nSafeAccount = None": """
class SafeAccount:
    pass
""",
}


ABUSE = '''
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


def fails(value):
    def failure(*args, **kwargs):
        raise ValueError("of an answer")
    return failure

def hangs(value):
    import time
    def hang(*args, **kwargs):
        while True:
            time.sleep(0.01)
    return hang

def another_type(value):
    return (lambda *args, **kwargs: "a word") if callable(value) else object()

def another_shape(value):
    """Of the same type, but with more or fewer elements, or inside a list."""
    if isinstance(value, type):
        return type("Empty", (), {})
    if callable(value):
        return lambda *args, **kwargs: another_shape(value(*args, **kwargs))
    if isinstance(value, dict):
        return {}
    if isinstance(value, (list, tuple, str)):
        return value[:-1] if len(value) > 1 else value * 2
    if hasattr(value, "detach"):
        return value.detach().reshape(-1).repeat(2)
    return [value]
'''

RUN = """
def prove(rights, wrong, open_ones, abuse, check):
    import exercises
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

    def patience(seconds):
        exercises.SECONDS = seconds
        if check.startswith("%%px"):
            run(f"%px exercises.SECONDS = {seconds}")

    def expect(answer, start):
        error, said = run(answer)
        if error and error.startswith("UsageError: rank "):  # it has ended a process
            return
        assert not error, (answer, error)
        error, said = run(check)
        assert not error, ("a check never fails, it says what is wrong", answer, error)
        said = said.removeprefix("[stdout:0] \\n")
        assert said.splitlines()[-1].startswith(start), (answer, said)
        assert said.count("\\n") <= 2 and len(said) < 420, ("one line", answer, said)

    right = rights[0]
    for nothing in open_ones:
        expect(right, "")
        expect(nothing, "not answered yet")
    for also in rights:
        expect(also, "correct")
    for mistake in wrong:
        expect(right, "correct")
        expect(mistake, "not yet: ")
    for mistake in abuse:
        expect(right, "correct")
        patience(2 if "= hangs(" in mistake else 60)
        expect(mistake, "not yet: ")
        patience(60)
    expect(right, "correct")
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
    return those(lambda p: environment(p).get("COURSE_MARK", "").startswith(mark))


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere another rule")
def test_what_is_becoming_another_program_is_ended_too(tmp_path):
    """In the middle of exec() a process has no environment, and so no mark."""
    script = tmp_path / "becomes.sh"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o700)
    variables = os.environ | {"COURSE_MARK": (mark := f"test/{uuid.uuid4().hex}")}
    started = [subprocess.Popen([script], env=variables) for _ in range(10)]
    try:
        for _ in range(100):
            assert len(processes.marked(mark)) == len(started)
        processes.end_processes(mark)
        assert None not in [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="only root chooses a pid")
def test_the_number_of_an_ended_process_is_used_again():
    """psutil knows the old one and refuses to kill the new one."""
    mark = f"test/{uuid.uuid4().hex}"
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with subprocess.Popen(["sleep", "0.1"]) as old:
            list(psutil.process_iter())
        LAST_PID.write_text(str(old.pid - 1))
        marked = os.environ | {"COURSE_MARK": mark}
        with subprocess.Popen(["sleep", "1000"], env=marked) as new:
            try:
                if new.pid == old.pid:  # else some other process was faster
                    processes.end_processes(mark)
                    assert not psutil.pid_exists(new.pid)
                    return
            finally:
                new.kill()
    raise TimeoutError("no process got the number")


LIFE = """
import os, signal, sys, threading, time
sys.path.insert(0, {folder!r})
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it

def run(source):
    shell.run_cell(source).raise_error()

def says(source, words):
    error = shell.run_cell(source).error_in_exec
    assert words in str(error), error

run("from course import *")
says("%%px\\n1", "call start_ranks() first")
run("start_ranks(2, timeout=5)")
run("%px y = rank + 1")
run("assert gather('y') == [1, 2], gather('y')")
says("%px import os; rank == 1 and os.abort()", "rank 1 is gone")
run("assert gather('y') == [1, 2], gather('y')")  # new ranks, which know what the old ones knew
run("%px x = torch.ones(1); dist.all_reduce(x)")
result = shell.run_cell("%%px\\nif rank == 0: dist.all_reduce(torch.ones(1))")
assert "Timed out" in str(result.error_in_exec), result
run("start_ranks(3)")  # a broken group is replaced
run("%px x = torch.tensor([1, 10, 100][rank]); dist.all_reduce(x)")
run("assert [x.item() for x in gather('x')] == [111] * 3")

def interrupt():
    while not os.path.exists("asleep"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)  # as Jupyter's button does

threading.Thread(target=interrupt).start()
says("%px import time; open('asleep', 'w').close(); time.sleep(300)", "interrupted. 3 new ranks")
run("assert [x.item() for x in gather('x')] == [111] * 3")
print("alive", flush=True)
shell.run_cell("%px import time; time.sleep(300)")
"""


@pytest.mark.slow
def test_ranks_start_again_when_dead_or_hung_and_die_with_their_kernel(tmp_path):
    life = tmp_path / "life.py"
    life.write_text(LIFE.format(folder=str(FOLDER)))
    with Job([sys.executable, life], cwd=tmp_path) as job:
        job.wait_until(lambda: "\nalive" in job.output, timeout=300)
        assert len(job.processes()) > 3
        job.process.kill()  # no chance to clean up: what a Jupyter server does to a stuck kernel
        job.process.wait()
        wait_until_gone(job.processes)


def test_a_slow_start_says_what_it_waits_for(capsys):
    said = ""
    with course._saying(lambda: "2 of 4 ranks", every=0.01):
        while not said:
            said = capsys.readouterr().out
    assert said.startswith("waiting for 2 of 4 ranks\n")


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


WITHOUT_RANKS = """
import sys
sys.path.insert(0, {folder!r})
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
import course
course.stop_ranks()
for cell in ("%%px\\n1", "%px 1", "import course; course.gather('x')"):
    print("error:", shell.run_cell(cell).error_in_exec)
"""


@pytest.mark.slow
def test_cells_without_ranks_say_so(tmp_path):
    page = tmp_path / "page.py"
    page.write_text(WITHOUT_RANKS.format(folder=str(FOLDER)))
    with Job([sys.executable, page], cwd=FOLDER) as job:
        output = job.wait(120).check().output
    assert output.count("error: there are no ranks: call start_ranks() first") == 3


def test_should_print():
    assert should_print("%%px\nx = 1\nprint(x)")
    assert should_print("x")
    assert should_print("try:\n    run_script(1)\nfinally:\n    pass")
    assert not should_print("def f():\n    print(1)")
    assert not should_print("x = run_script(1, show=False)\nrun_script(2, show=False)")


def test_a_hint_belongs_to_a_message():
    """Each part of a message that has a hint is one that some code of the page can say."""
    tree = ast.parse((FOLDER / "exercises.py").read_text())
    always = [node.value for node in ast.walk(tree) if is_text(node)]
    assert_clean(lambda notebook: hints_of_nothing(notebook, always))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def hints_of_nothing(notebook, texts: list[str]) -> list[str]:
    """The keys of hints that occur in no text of the notebook's code, nor in `texts`.

    A key may end in a value: "loop a" of f"loop {name} has a bug".
    """
    keys, texts, before_values = [], list(texts), set()
    for cell in code_cells(notebook):
        texts += [output.get("text", "") for output in cell.outputs]  # what torch says
        tree = ast.parse(python_of(cell.source))
        own = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "hints":
                keys += [key.value for key in getattr(node.value, "keys", [])]
                own |= {id(inner) for inner in ast.walk(node)}
            if isinstance(node, ast.JoinedStr):
                pairs = zip(node.values, node.values[1:], strict=False)
                before_values |= {a.value for a, b in pairs if is_text(a) and not is_text(b)}
        texts += [node.value for node in ast.walk(tree) if is_text(node) and id(node) not in own]

    def is_said(key: str) -> bool:
        start = key.rpartition(" ")[0] + " "
        said = any(key in text for text in texts)
        return said or (start != " " and any(text.endswith(start) for text in before_values))

    return [f"no message says {key!r}" for key in keys if not is_said(key)]


def test_a_hint_without_a_message_is_caught():
    source = "assert x, f'loop {x} has a bug'\nhints = {'loop a': '1', 'a bug': '2', 'a bag': '3'}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    assert hints_of_nothing(notebook, []) == ["no message says 'a bag'"]
