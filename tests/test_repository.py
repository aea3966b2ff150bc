"""The rules that every example directory keeps, and the commands of the Makefile.

An example directory is a top-level directory that holds runtime.py: a new one is found by itself.
Each scanner is also shown a bad example that it must catch.
"""

import ast
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

import copies
import pool
import pytest
from helpers import ROOT, Job, clean_environment, python
from printed_commands import tracked

from check_environment import read_pins

EXAMPLES = [ROOT / name for name in copies.EXAMPLES]
# clusters/ starts the scripts of the others, planner/ starts none.
FOLDERS = [*EXAMPLES, ROOT / "clusters", ROOT / "planner"]
SOURCES = [path for directory in FOLDERS for path in sorted(directory.glob("**/*.py"))]
SCRIPTS = [path for path in SOURCES if '__name__ == "__main__"' in path.read_text()]
LINES = 350  # of one file in an example directory, at most: about 300 is where to split it
MINIMAL_LINES = 66  # of a minimal.py, with its docstring; 40 to 60 are wanted
GPT_LINES = 80  # of that of transformer_basics, which has a model whose attention it cuts by heads


@functools.cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


def assert_clean(paths: list[Path], look: Callable[[Path], Iterable[str]]) -> None:
    """Fail with a line "path: what" for everything that `look` finds."""
    found = [f"{path.relative_to(ROOT)}: {what}" for path in paths for what in look(path)]
    assert not found, "\n" + "\n".join(found)


def test_there_is_something_to_check():
    assert "ddp_basics" in [path.name for path in EXAMPLES]
    assert {path.relative_to(ROOT).parts[0] for path in SCRIPTS} == {d.name for d in FOLDERS}


def test_directories_have_what_they_need():
    assert_clean(EXAMPLES, lacks)


def lacks(directory: Path) -> list[str]:
    names = [
        n for n in ("README.md", "runtime.py", "arguments.py") if not (directory / n).is_file()
    ]
    found = [f"{name} is missing" for name in names]
    return found if entry(directory).is_file() else [*found, "no script to begin with"]


def entry(directory: Path) -> Path:
    """The script that a reader tries first."""
    names = ("train.py", "minimal.py", "hello_world.py")
    return next((directory / name for name in names if (directory / name).is_file()), directory)


# Files that several directories hold.


def test_copies_are_equal():
    found = copies.outdated(ROOT, copies.COPIES)
    says = [
        f"{copy} is not {original}: change it there, then: make copies" for original, copy in found
    ]
    assert not says, "\n".join(says)


def test_equal_files_are_listed():
    found = copies.unlisted(SOURCES, copies.COPIES)
    assert not found, f"equal, so tests/copies.py should name them (or one is too many): {found}"


@pytest.mark.parametrize("with_git", [True, False])
def test_a_readers_copy_of_a_directory_is_left_alone(tmp_path, with_git):
    """`make copies` must not write over my_project, which README lets a reader make."""
    for name in ("a", "my_project"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "runtime.py").touch()
    if with_git:
        for command in ("init", "add a"):
            subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    assert copies.examples(tmp_path) == (["a"] if with_git else ["a", "my_project"])


def test_copies_that_differ_are_caught(tmp_path, monkeypatch):
    a, b, c = (tmp_path / name / "x.py" for name in "abc")
    for path in (a, b, c):
        path.parent.mkdir()
        path.write_text("1")
    assert copies.outdated(tmp_path, [("x.py", "a", ["a", "b", "c"])]) == []
    assert copies.unlisted([a, b, c], [("x.py", "a", ["b", "c"])]) == []
    assert copies.unlisted([a, b, c], [("x.py", "a", ["b"])]) == [[a, b, c]]
    assert copies.unlisted([a, b], [("y.py", "a", ["b"])]) == [[a, b]]
    b.write_text("2")
    c.unlink()
    assert copies.unlisted([a, b], []) == []
    listed = [("x.py", "a", ["b", "c"])]
    assert copies.outdated(tmp_path, listed) == [(a, b), (a, c)]
    monkeypatch.setattr(copies, "ROOT", tmp_path)
    monkeypatch.setattr(copies, "COPIES", listed)
    copies.main()
    assert copies.outdated(tmp_path, listed) == []
    assert c.read_text() == "1"


# What a file imports.


TRACKERS = {"wandb", "mlflow"}  # --tracker imports them, and says so where they are missing
EXTRAS = {"ray", "torchft"}  # of requirements-clusters.txt, where it could be installed


@functools.cache
def distributions() -> dict[str, set[str]]:
    """module -> the installed distributions that hold it."""
    found = metadata.packages_distributions()
    return {module: {normal(name) for name in names} for module, names in found.items()}


@functools.cache
def allowed_modules() -> set[str]:
    """The modules of the standard library and of the distributions that requirements name."""
    names = {normal(name) for name, _ in requirements()}
    modules = {module for module, holders in distributions().items() if names & holders}
    return modules | TRACKERS | EXTRAS | set(sys.stdlib_module_names)


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@functools.cache
def imported_modules(source: str) -> set[str]:
    found = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module.split(".")[0])
    return found


def foreign_imports(path: Path) -> list[str]:
    directory = ROOT / path.relative_to(ROOT).parts[0]
    siblings = {other.stem for other in directory.glob("*.py")}
    siblings |= {package.parent.name for package in directory.glob("*/__init__.py")}
    foreign = imported_modules(path.read_text()) - allowed_modules() - siblings
    if path.name == "setup.py":  # pip runs it, with what pyproject.toml requires
        foreign -= {"setuptools"}
    return [f"imports {name}, neither required nor a sibling" for name in sorted(foreign)]


def test_sources_import_nothing_foreign():
    assert_clean(SOURCES, foreign_imports)


def test_foreign_imports_are_caught():
    bad = "import os\ndef f():\n    from fsdp_basics.data import x\n    from . import y\n"
    assert imported_modules(bad) - allowed_modules() == {"fsdp_basics", "."}
    assert {"sklearn", "torch", "json"} <= allowed_modules()


def scripts_imported(path: Path, scripts: list[Path]) -> set[str]:
    """The scripts of its own directory that this file imports: what two scripts need is a module,
    so that a reader of either one meets nothing of the other."""
    names = {other.stem for other in scripts if other.parent == path.parent}
    return imported_modules(path.read_text()) & names


def test_sources_import_no_script():
    says = "imports {}, a script: what they share should be a module"
    assert_clean(SOURCES, lambda path: map(says.format, scripts_imported(path, SCRIPTS)))


def test_an_imported_script_is_caught(tmp_path):
    script, other = tmp_path / "train.py", tmp_path / "other.py"
    script.write_text("def f(): ...\n")
    other.write_text("import torch\nfrom train import f\n")
    assert scripts_imported(other, [script]) == {"train"}
    assert scripts_imported(other, []) == set()  # a module


def test_benchmarks_import_what_they_mean():
    """Their path has a directory of examples before their own: no name may be in both."""
    benchmarks = list((ROOT / "benchmarks").glob("*.py"))
    imported = set().union(*(imported_modules(path.read_text()) for path in benchmarks))
    shared = imported & {path.stem for path in benchmarks}
    assert "bench" in shared
    assert [str(path) for path in SOURCES if path.stem in shared] == []


# Public names only.


def private_uses(source: str) -> list[str]:
    """Lines that use a private name of torch, or of an object that is not the code's own.

    A comment on the line or on the one above excuses it: it says why there is no other way.
    """
    tree, tokens = parse(source), tokenize.generate_tokens(io.StringIO(source).readline)
    excused = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    others, found = set(), []  # others: names bound by imports of modules that are not torch's

    def private(name: str) -> bool:
        return name.startswith("_") and not name.endswith("__")

    def note(node, name: str) -> None:
        if not excused & {node.lineno, node.lineno - 1}:
            found.append(f"line {node.lineno}: {name}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                path = f"{module}.{alias.name}" if module else alias.name
                if path.split(".")[0] != "torch":
                    others.add(alias.asname or alias.name.split(".")[0])
                elif any(private(part) for part in path.split(".")):
                    note(node, path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            owner = root.id if isinstance(root, ast.Name) else ""
            own = owner in {"self", "cls", "super"} and isinstance(node.value, ast.Name | ast.Call)
            tuple_method = node.attr in {"_replace", "_asdict", "_fields", "_make"}
            if not own and not tuple_method and owner not in others:
                note(node, ast.unparse(node))
    return found


def test_sources_use_public_names_only():
    assert_clean(SOURCES, lambda path: private_uses(path.read_text()))


def test_private_names_are_caught():
    for line in (
        "import torch.distributed._tensor",
        "from torch._C import x",
        "from torch.distributed import _functional_collectives",
        "from torch.testing._internal import common",
        "import torch.distributed as dist; dist._get_default_group()",
        "mesh._flatten()",
        "x = self.group._backend",
        "f(model.layers[0]._parameters)",
    ):
        assert private_uses(f"import os\n{line}\n"), line
        assert not private_uses(f"import os\n{line}  # there is no public name for it\n"), line
        assert not private_uses(f"import os\n# there is no public name for it\n{line}\n"), line


def test_what_is_not_private():
    assert not private_uses("import os\nos._exit(1)\nself._x = 1\ntorch.__version__\n_a = 1\n")


# How a file looks.


def flaws(text: str, name: str) -> list[str]:
    """What is wrong with the form of an example; name: "directory/file.py"."""
    tree, found = parse(text), []
    docstring = ast.get_docstring(tree)
    if not docstring:
        found.append("no docstring")
    if not text.isascii():
        found.append("not ASCII")
    if text.count("\n") > LINES:
        found.append(f"{text.count(chr(10))} lines, more than {LINES}")
    if '__name__ == "__main__"' in text and "def distributed_worker" not in text:
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        mains = [node for node in functions if node.name == "main"]
        decorators = [ast.unparse(node) for main in mains for node in main.decorator_list]
        if "distributed_worker" in imported_names(tree) and "record" not in decorators:
            found.append("main() lacks @record")
        if name not in (docstring or ""):
            found.append(f"the docstring has no command with {name}")
    return found


def imported_names(tree: ast.Module) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in nodes for alias in node.names}


def test_form_of_the_sources():
    assert_clean(SOURCES, lambda path: flaws(path.read_text(), path.relative_to(ROOT).as_posix()))


def test_flaws_are_caught():
    script = (
        '"""Shows x.\n\n    python a/b.py\n"""\n'
        "from runtime import distributed_worker\n@record\ndef main():\n    pass\n"
        'if __name__ == "__main__":\n    main()\n'
    )
    assert flaws(script, "a/b.py") == []
    assert flaws(script.replace("@record\n", ""), "a/b.py") == ["main() lacks @record"]
    assert flaws(script, "a/c.py") == ["the docstring has no command with a/c.py"]
    assert flaws('"""x"""\n' + "\n" * LINES, "a/b.py")
    assert flaws('"""\u00e9"""\n', "a/b.py") == ["not ASCII"]
    assert flaws("x = 1\n", "a/b.py") == ["no docstring"]


# Tricks: what saves a line, or outwits the formatter, and costs the reader a second look.


def tricks(source: str) -> list[str]:
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(isinstance(value, ast.NamedExpr) for value in given):
                found.append(f"line {node.lineno}: a value is assigned inside a call")
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple):
            found.append(f"line {node.lineno}: several statements in one")
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            found.append(f"line {node.lineno}: the stars of a literal do nothing")
        if isinstance(node, ast.Dict) and any(
            key is None and isinstance(value, ast.Dict)
            for key, value in zip(node.keys, node.values, strict=True)
        ):
            found.append(f"line {node.lineno}: a dict literal inside a dict literal")
    return found


def test_sources_have_no_tricks():
    assert_clean(SOURCES, lambda path: tricks(path.read_text()))


def test_tricks_are_caught():
    for bad in (
        "dist.all_reduce(total := x.sum())",
        "f(x=(y := 1))",
        "x.fill_(0), y.fill_(0)",
        "NAMES = (*('a', 'b'), 'c')",
        "{**{'a': 1}, 'b': 2}",
    ):
        assert len(tricks(bad)) == 1, bad
    for good in (
        "while (size := f()) < 3: pass",
        "[y for x in a if (y := f(x))]",
        "f(*a, *(x for x in b), **{'src=0': 1})",
        "{**a, 'b': {'c': 1}}",
        "x, y = 1, 2",
    ):
        assert not tricks(good), good


# minimal.py: the idea alone.

MINIMAL = [path for path in SCRIPTS if path.name == "minimal.py"]


def too_much(path: Path) -> list[str]:
    """What a minimal.py should do without."""
    text = path.read_text()
    siblings = {other.stem for other in path.parent.glob("*.py")}
    found = [f"imports {name}" for name in sorted(imported_modules(text) & siblings)]
    limit = GPT_LINES if path.parent.name == "transformer_basics" else MINIMAL_LINES
    if text.count("\n") > limit:
        found.append(f"{text.count(chr(10))} lines, more than {limit}")
    return found


def test_minimals_are_minimal():
    assert MINIMAL
    assert_clean(MINIMAL, too_much)


def shows(page: str, source: str) -> bool:
    """Whether the page has the code in full, in fences or indented, from its first function on."""
    code = source[source.index("\ndef ") + 1 :]
    return f"{code}```" in page or textwrap.indent(code, "    ") in page


def not_in_full(page: Path, minimal: Path) -> list[str]:
    shown = shows(page.read_text(encoding="utf-8"), minimal.read_text())
    return [] if shown else [f"{minimal.relative_to(ROOT)} is not shown in full"]


def facts_of_rows(page: str) -> list[tuple]:
    """Of each row of the page's tables: where its links lead, and its numbers, in any order."""
    rows = re.findall(r"^\|.*", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    links = [re.findall(r"\]\(([^)#]+)\)", row) for row in rows]
    return [
        (to, sorted(re.findall(r"\d(?:[\d.,]*\d)?", row)))
        for to, row in zip(links, rows, strict=True)
    ]


def test_both_first_pages_say_the_same():
    assert facts_of_rows("README.zh-CN.md") == facts_of_rows("README.md")


def test_readmes_show_minimal_in_full_or_not_at_all():
    """Half of a script would be copied, and would not run."""
    pages = [path.parent / "README.md" for path in MINIMAL]
    pages = [page for page in pages if "```python" in page.read_text(encoding="utf-8")]
    assert_clean(pages, lambda page: not_in_full(page, page.parent / "minimal.py"))


def test_code_that_a_page_lacks_is_caught():
    source = '"""About it."""\n\nimport torch\n\n\ndef main():\n    print(1)\n\n\nmain()\n'
    assert shows("# t\n```python\ndef main():\n    print(1)\n\n\nmain()\n```\n", source)
    assert shows("# t\n\n    def main():\n        print(1)\n\n\n    main()\n", source)
    assert not shows("# t\n```python\ndef main():\n    print(2)\n\n\nmain()\n```\n", source)


def leaves_in_order(source: str) -> bool:
    """Whether the group ends right after all ranks have met: else an exit may abort, rarely."""
    end = r"^( +)dist\.barrier\(\).*\n\1dist\.destroy_process_group\(\)$"
    return "init_process_group(" not in source or bool(re.search(end, source, re.MULTILINE))


def test_minimals_leave_in_order():
    wrong = "ends its group without a barrier right before"
    assert_clean(MINIMAL, lambda path: [] if leaves_in_order(path.read_text()) else [wrong])


WRAPPERS = {"DistributedDataParallel", "fully_shard"}


def ends_with_a_model(source: str) -> list[str]:
    """Functions that end the group while their model still holds it: such a process may abort.

    `del model` is not enough: the loss holds the graph, and the graph holds the model.
    """
    found = []
    for function in ast.walk(parse(source)):
        if isinstance(function, ast.FunctionDef):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
            if "destroy_process_group" in names and names & WRAPPERS:
                found.append(f"{function.name}() ends the group, and has a model that holds it")
    return found


def test_models_end_before_the_group():
    # The backend of custom_backend/minimal.py starts no thread: none can abort the exit.
    ours = [path for path in SOURCES if path != ROOT / "custom_backend/minimal.py"]
    assert_clean(ours, lambda path: ends_with_a_model(path.read_text()))


def test_a_model_that_lives_longer_is_caught():
    made = "def main():\n    model = fully_shard(layer)\n"
    end = "    dist.destroy_process_group()\n"
    assert len(ends_with_a_model(made + end)) == 1
    assert ends_with_a_model(f"{made}def leave():\n{end}") == []


def test_leaving_without_a_barrier_is_caught():
    begin, meet = "    dist.init_process_group()\n", "    dist.barrier()  # why\n"
    end = "    dist.destroy_process_group()\n"
    assert leaves_in_order(begin + meet + end)
    assert not leaves_in_order(begin + end)
    assert not leaves_in_order(begin + meet)
    assert leaves_in_order("rpc.init_rpc()\n")


def test_too_much_is_caught(tmp_path):
    minimal = tmp_path / "minimal.py"
    minimal.write_text("import torch\nfrom runtime import Worker\n" + "\n" * MINIMAL_LINES)
    (tmp_path / "runtime.py").touch()
    assert too_much(minimal) == ["imports runtime", "68 lines, more than 66"]


# --help, of all scripts in one process: importing torch once is enough.

# A minimal.py may do without options, and so may what a launcher starts.
BARE = {"minimal.py", "from_any_launcher.py", "preflight_agent.py", "agent.py"}
PARSING = [p for p in SCRIPTS if p.name not in BARE or "argparse" in p.read_text()]
HELP = """
import contextlib, io, json, os, runpy, sys
answers = {}
for script in sys.argv[1:]:
    directory = os.path.dirname(script)
    sys.path.insert(0, directory)
    sys.argv = [script, "--help"]
    out, status = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            status = error.code or 0
        except BaseException as error:
            status = repr(error)
    answers[script] = [status, out.getvalue()]
    sys.path.remove(directory)
    for name, module in list(sys.modules.items()):  # the next directory has its own runtime.py
        if os.path.dirname(getattr(module, "__file__", None) or "") == directory:
            del sys.modules[name]
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def helps(tmp_path_factory) -> dict[Path, tuple]:
    script = tmp_path_factory.mktemp("help") / "all_helps.py"
    script.write_text(HELP)
    output = python(script, *PARSING, timeout=120).check().output
    answers = json.loads(output.rpartition("ANSWERS")[2])
    return {Path(path): tuple(answer) for path, answer in answers.items()}


def options_of(source: str) -> set[str]:
    """The options that the code adds to its parser."""
    calls = [node for node in ast.walk(parse(source)) if isinstance(node, ast.Call)]
    texts = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]
    return {t for t in texts if isinstance(t, str) and re.fullmatch(r"--[a-z][a-z0-9-]*", t)}


def poor_help(path: Path, status: int | str, text: str) -> list[str]:
    if status != 0 or not text.startswith(f"usage: {path.name}"):
        return [f"--help: status {status}, {text[:200]!r}"]
    missing = sorted(option for option in all_options(path) if option not in text)
    return [f"--help is silent on {option}" for option in missing] + vague_options(text)


def vague_options(text: str) -> list[str]:
    """Options without a text, or with a value whose default the text of --help does not show."""
    usage, _, rest = text.partition("\n\n")
    entries = re.findall(r"^  (-.*?)(?:  +(.*))?$((?:\n {10,}.*)*)", rest, re.MULTILINE)
    vague = []
    for option, begins, goes_on in entries:
        words = f"{begins} {goes_on}".split()
        name, *value = option.rpartition(", ")[2].split(" ", 1)
        required = f"[{name}" not in " ".join(usage.split()) and name != "--help"
        if not words:
            vague.append(f"--help explains {name} with no word")
        elif value and not required and "default" not in " ".join(words):
            vague.append(f"--help does not show the default of {name}")
    return vague


@pytest.mark.slow
def test_help_of_the_scripts(helps):
    assert helps.keys() == set(PARSING)
    assert_clean(PARSING, lambda path: poor_help(path, *helps[path]))


def test_poor_help_is_caught(tmp_path):
    script = tmp_path / "script.py"
    script.write_text('add("--one"), add("--two")')
    assert poor_help(script, 0, "usage: script.py --one --two") == []
    assert poor_help(script, 0, "usage: script.py --one") == ["--help is silent on --two"]
    assert poor_help(script, 2, "usage: script.py --one --two") != []
    assert poor_help(script, 0, "usage: other.py --one --two") != []
    usage = "usage: script.py [-h] [--one N] [--two] --three N\n\nWhat.\n\noptions:\n"
    entries = ["  -h, --help  show this", "  --one N     steps (default: 1)"]
    entries += ["  --two       also that", "  --three N", "              paths"]
    assert vague_options(usage + "\n".join(entries)) == []
    assert vague_options(usage + "  --one N     steps") != []
    assert vague_options(usage + "  --one N\n  --two       also that") != []


def all_options(path: Path) -> set[str]:
    """Those that the script adds, and a template's config.py or flags.py for it."""
    source = path.read_text()
    options = options_of(source)
    for name in re.findall(r"^from (\w+) import .*parse_args", source, flags=re.MULTILINE):
        options |= options_of((path.parent / f"{name}.py").read_text())
    return options


def test_train_options_are_found():
    assert {"--epochs", "--device"} <= all_options(ROOT / "ddp_basics/train.py")


# Each directory alone, without a network.

OFFLINE = ROOT / "tests/workers/offline.py"


def offline(folder: Path) -> dict[str, str]:
    """Environment of a run by OFFLINE, which notes there each attempt to leave this machine."""
    folder.mkdir()
    proxies = [f"{kind}_proxy" for kind in ("http", "https", "all", "ftp")]
    none = {name: "" for proxy in proxies for name in (proxy, proxy.upper())}
    return none | {"OFFLINE_LOG": str(folder / "log")}


def attempts(environment: dict) -> tuple[list[str], list[str]]:
    lines = Path(environment["OFFLINE_LOG"]).read_text().splitlines()
    return [x for x in lines if x.startswith("on,")], [x for x in lines if not x.startswith("on,")]


SMALL = {  # else minutes
    "t5_finetuning": "--dim 32 --layers 1 --batch-size 512 --eval-samples 4 --vocab-size 300 "
    "--max-source 32 --max-target 8"
}


def short_run(script: Path, help_text: str) -> list[str]:
    for option in ("--epochs", "--steps", "--max-steps"):
        if option in help_text:
            return [option, "1", *SMALL.get(script.parent.name, "").split()]
    assert script.name != "train.py", "it needs --epochs or --steps, to be tried shortly"
    return []


@pytest.mark.slow  # together they are
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=[] if path in map(entry, EXAMPLES) else [pytest.mark.release])
        for path in sorted({*map(entry, EXAMPLES), *MINIMAL})
    ],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_runs_alone_and_offline(script, helps, tmp_path):
    alone = tmp_path / "alone"
    shutil.copytree(script.parent, alone, ignore=shutil.ignore_patterns("__pycache__"))
    environment = offline(tmp_path / "offline")
    if any(
        re.search(r"^\s*(from|import) transformers", p.read_text(), re.M)
        for p in alone.glob("*.py")
    ):
        environment["HF_HUB_OFFLINE"] = "0"  # as a reader has it: a new process
    help_text = helps.get(script, (0, ""))[1]
    options = short_run(script, help_text)
    if "--device" in help_text:
        options += ["--device", "cpu"]
    script = alone / script.name
    pool.run(OFFLINE, script, *options, ranks=2, cwd=alone, **environment).check()
    started, refused = attempts(environment)
    assert {"on, rank 0", "on, rank 1"} <= set(started)
    assert not refused, f"{script} looks for the network: {refused}"


def test_offline_means_offline(tmp_path):
    script, environment = tmp_path / "call.py", offline(tmp_path / "offline")
    script.write_text(
        "import socket, urllib.request\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(('localhost', server.getsockname()[1])).close()\n"
        "for call in (lambda: urllib.request.urlopen('http://example.org'),\n"
        "             lambda: socket.socket().connect(('192.0.2.1', 80))):\n"
        "    try:\n"
        "        call()\n"
        "    except OSError as error:\n"
        "        print(error)\n"
    )
    output = python(OFFLINE, script, **environment).check().output
    assert output.count("offline: ") == 2, output
    refused = ["socket.getaddrinfo 'example.org'", "socket.connect '192.0.2.1'"]
    assert attempts(environment)[1] == refused


# Documents.


FENCED = re.compile(r"^( *)(```|~~~).*?^ *\2", re.MULTILINE | re.DOTALL)


def texts(path: Path) -> str:
    """The prose of a Markdown file or of a notebook, without code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return re.sub(r"(`+)[^\n]*?(?<!`)\1(?!`)", "code", FENCED.sub("", text))


@functools.cache
def anchors(page: Path) -> set[str]:
    """Those that GitHub gives the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.*)", FENCED.sub("", page.read_text(encoding="utf-8")), re.M)
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", each).strip().replace(" ", "-") for each in words}


def dead_links(path: Path) -> list[str]:
    """The links to no file, and those to no heading of a Markdown file."""
    text = texts(path)
    links = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    links += re.findall(r"\b(?:src|href)=[\"']([^\"']+)", text)
    links += re.findall(r"^\[[^\]]+\]:\s+(\S+)", text, flags=re.MULTILINE)
    dead = []
    for link in links:
        name, _, anchor = unquote(link).partition("#")
        target = path.parent / name if name else path
        if re.match(r"[a-z]+:|//", link):
            continue
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            dead.append(link)
    return dead


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix in (".md", ".ipynb")]


def test_links_lead_somewhere():
    assert documents()
    dead = {path.relative_to(ROOT).as_posix(): dead_links(path) for path in documents()}
    assert not {name: links for name, links in dead.items() if links}


PLACEHOLDER = re.compile(r"@[A-Z_]+@|\b(?:TODO|FIXME|TBD|XXX)\b")


def test_nothing_is_left_to_fill_in():
    left = {
        path.relative_to(ROOT).as_posix(): PLACEHOLDER.findall(path.read_text())
        for path in documents()
    }
    assert not {name: found for name, found in left.items() if found}


def test_what_is_left_to_fill_in_is_caught():
    text = "It prints\n\n@OUTPUT@\n\nTODO: say why. (ask@HOST.org, PR_TODO_LIST)"
    assert PLACEHOLDER.findall(text) == ["@OUTPUT@", "TODO"]


def test_dead_links_are_caught(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "## [A](#there) part, in `code`\n[a](gone.md) ![b](page.md#a-part-in-code)\n"
        "[c](https://example.org) [d](#here) [h](page.md#g) [i](#a-part-in-code)\n"
        "`[e](no)` `` [&](no) ` ``\n"
        '<img src="none.png">\n[f]: lost.md\n```\n# g\n[g](no)\n```\n'
    )
    dead = ["#there", "gone.md", "#here", "page.md#g", "none.png", "lost.md"]
    assert dead_links(page) == dead


# The first screen of a directory.

FIRST_LINES = ("Read this first:", "Copy this:", "The ideas:")


def beginning(text: str) -> tuple[str, ...]:
    """How the first lines below the title begin, list marks and emphasis left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return tuple(re.sub(r"^[-* ]*(.*?:)?.*", r"\1", line) for line in lines[:3])


def test_readmes_say_where_to_begin():
    def other_beginning(page: Path) -> list[str]:
        found = beginning(page.read_text(encoding="utf-8"))
        return [] if found == FIRST_LINES else [f"begins with {found}, not with {FIRST_LINES}"]

    assert_clean([directory / "README.md" for directory in FOLDERS], other_beginning)


def test_beginning():
    page = "# title\n\n- **Read this first:** a: b\n- Copy this: b\n* The ideas: c\n"
    assert beginning(page) == FIRST_LINES
    assert beginning("# title\n\nEvery strategy: one\n") != FIRST_LINES


# A measurement in a document is written as in benchmarks/results/, perhaps rounded, or in percent.
NUMBER = r"([\d.]+(?:e[+-]?\d+)?)"


def measurements(text: str) -> list[tuple[str, ...]]:
    """Every "median (minimum ... maximum)", with or without a unit after the median."""
    return re.findall(rf"{NUMBER}(?: %| s)? \({NUMBER} \.\.\. {NUMBER}\)", text)


def not_recorded(text: str, recorded: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    def rounds_to(value: str, printed: str) -> bool:
        half = 0.5 * 10.0 ** -len(printed.partition(".")[2]) + 1e-9
        return any(abs(float(value) * unit - float(printed)) <= half for unit in (1, 100))

    def is_recorded(printed: tuple[str, ...]) -> bool:
        return any(all(map(rounds_to, values, printed)) for values in recorded)

    return [printed for printed in measurements(text) if not is_recorded(printed)]


def test_measurements_are_recorded():
    results = ROOT / "benchmarks/results"
    recorded = [m for path in results.glob("*.md") for m in measurements(path.read_text())]
    says = (
        "{} is not in benchmarks/results: after a benchmark write the new numbers into the page, "
        "or get the recorded ones back with git"
    )
    pages = [page for page in documents() if page.parent != results]
    assert_clean(pages, lambda page: map(says.format, not_recorded(texts(page), recorded)))
    assert measurements(texts(ROOT / "README.md"))


def test_measurements_that_differ_are_caught():
    recorded = measurements("| 0.7386 (0.6771 ... 0.8471) | 1.475e+04 (1.309e+04 ... 1.535e+04) |")
    same = "0.74 (0.68 ... 0.85), 74 % (68 ... 85), 14750 (13090 ... 15350)"
    other = [("0.74", "0.67", "0.85"), ("7.4", "6.8", "8.5")]
    assert not_recorded(same, recorded) == []
    assert not_recorded("0.74 (0.67 ... 0.85), 7.4 s (6.8 ... 8.5)", recorded) == other


# Requirements.


def requirements() -> list[tuple[str, str]]:
    """(distribution, the rest of its line) of all requirements files."""
    lines = [x for path in ROOT.glob("requirements*.txt") for x in path.read_text().splitlines()]
    lines = [line.partition(" #")[0].strip() for line in lines]
    lines = [line for line in lines if line and not line.startswith(("#", "-"))]
    return [re.fullmatch(r"([\w.-]+)(.*)", line).groups() for line in lines]


def test_requirements_are_pinned():
    assert len(requirements()) > 10
    exact = {"torch": "===", "torchvision": "==="}
    loose = [n + rest for n, rest in requirements() if not pinned(rest, exact.get(n, "=="))]
    assert not loose, f"not pinned by == (torch and torchvision: by ===): {loose}"
    assert pinned("==1.2.0", "==")
    assert not pinned("==1.2.0", "===")
    assert not pinned(">=1.2.0", "==")


def pinned(rest: str, exact: str) -> bool:
    return bool(re.fullmatch(exact + r"\d[\w.+]*", rest))


def test_each_requirement_says_what_it_is_for():
    """And what it costs, but where another line is said to bring it, or another file says it."""
    silent = [
        f"{path.name}: {line}"
        for path in ROOT.glob("requirements*.txt")
        for line in path.read_text().splitlines()
        if line and not line.startswith(("#", "-")) and not says_why(line, path.name)
    ]
    assert not silent, "\n".join(silent)
    assert says_why("a==1 # plots: 20 MB", "requirements.txt")
    assert not says_why("a==1 # plots", "requirements.txt")
    assert not says_why("a==1", "requirements-cpu.txt")


def says_why(line: str, file: str) -> bool:
    cost = "" if file == "requirements-cpu.txt" else r"(: [\d.,]+ [kM]B\b|; comes with )"
    return bool(re.search(r" # .*\w.*" + cost, line))


# Started, not imported: as a command, or as a plug-in of one.
STARTED = {"jupyterlab", "ipykernel", "ipywidgets", "ninja", "py-spy", "ruff"}
STARTED |= {"nbval", "pytest-timeout", "pytest-xdist"}
FOR_RAY = {"pandas", "pyarrow"}  # imported by Ray Train


def test_each_requirement_is_used():
    files = [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py"), *ROOT.glob("notebooks/*.ipynb")]
    a_line = re.compile(r'^[ "]*(?:import|from) (\w+)', re.MULTILINE)  # in a notebook, in quotes
    modules = {name for path in files for name in a_line.findall(path.read_text(encoding="utf-8"))}
    imports = set().union(*(distributions().get(module, ()) for module in modules))
    extras = {normal(name) for name in read_pins(ROOT / "requirements-clusters.txt")}
    installed = {normal(d.metadata["Name"]) for d in metadata.distributions()}
    unused = {normal(n) for n, _ in requirements()} - imports - STARTED - FOR_RAY
    unused -= extras - installed  # of these, nothing says which modules they hold
    assert not unused, f"required, but not imported: {unused}"


def test_both_sets_hold_one_release():
    full, small = (read_pins(ROOT / f"requirements{part}.txt") for part in ("", "-cpu"))
    assert small == {name: f"{version}+cpu" for name, version in full.items()}
    assert full.keys() == {"torch", "torchvision"}


# The Makefile, with stand-ins for Python and its tools that write down how they were called.

STAND_IN = """#!/bin/sh
case "$*" in
"-m venv "*)
    mkdir -p $3/bin
    for name in python pip torchrun ruff; do cp "$0" $3/bin/$name; done ;;
"-c import ensurepip"*) test ! -e no_venv; exit ;;
"-c import sys"*) test ! -e too_old; exit ;;
esac
echo "$(basename $0) $* (threads $OMP_NUM_THREADS)" >>calls
echo "output of $*"
case "$*" in "-m uv "*) test ! -e fail_uv || exit 1 ;; esac
case "$*" in *clusters.txt) test ! -e fail_clusters || exit 1 ;; esac
test ! -e "fail_$(basename $0)"
"""


@pytest.fixture
def project(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, tmp_path)
        os.utime(tmp_path / path.name, (1, 1))  # older than what the test makes
    (tmp_path / "python_stand_in").write_text(STAND_IN)
    (tmp_path / "python_stand_in").chmod(0o755)
    (tmp_path / ".venv-emulated/bin").mkdir(parents=True)  # installed: one test installs it
    (tmp_path / ".venv-emulated/bin/pip").touch()
    (tmp_path / ".venv-emulated/installed").touch()
    return tmp_path


def make(project: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Returns the exit status, the calls, the output."""
    calls = project / "calls"
    calls.unlink(missing_ok=True)
    with Job(["make", "PYTHON=./python_stand_in", *arguments], cwd=project) as job:
        result = job.wait(30)
    lines = calls.read_text().splitlines() if calls.exists() else []
    return result.returncode, [line.removesuffix(" (threads 1)") for line in lines], result.output


UV = re.search(r"uv==\S+", (ROOT / "Makefile").read_text())[0]


def install(what: str) -> list[str]:
    return [f"python -m pip install {UV}", f"python -m uv pip install {what}"]


def install_file(name: str) -> list[str]:
    return install(f"-r {name}")


FOR_TESTS = [
    *install_file("requirements-test.txt"),
    *install_file("requirements-clusters.txt"),
]
CHECK = "python check_environment.py --brief"
PYTEST = "python -m pytest -n 4"
PART = f"{PYTEST} -m not release"
TRAIN = "torchrun --standalone --nproc_per_node=2 ddp_basics/train.py --epochs 5 --device cpu"


def test_make_demo(project):
    status, calls, output = make(project, "demo")
    full, small = map(install_file, ("requirements.txt", "requirements-cpu.txt"))
    assert (status, calls) == (0, ["python_stand_in -m venv .venv", *full, CHECK, TRAIN])
    assert "00_start_here.ipynb" in output.splitlines()[-3]
    assert make(project, "demo")[1] == [CHECK, TRAIN]  # nothing is installed twice
    os.utime(project / "requirements-common.txt")
    assert make(project, "demo")[1] == [*full, CHECK, TRAIN]
    other = "REQUIREMENTS=requirements-cpu.txt"
    assert make(project, "demo", other)[1] == [*small, CHECK, TRAIN]
    assert make(project, "demo")[1] == [CHECK, TRAIN]  # the choice is remembered
    assert make(project, "demo", "REQUIREMENTS=requirements.txt")[1] == [*full, CHECK, TRAIN]


def test_make_installs_what_a_target_needs(project):
    full = install_file("requirements.txt")
    venv = ["python_stand_in -m venv .venv"]
    assert make(project, "quick")[1][:-2] == [*venv, *full, *FOR_TESTS]
    assert make(project, "test")[1] == [CHECK, PART]
    os.utime(project / "requirements-test.txt")
    assert make(project, "notebooks")[1] == [CHECK, "python notebooks/execute.py"]
    assert make(project, "lint")[1][:-2] == FOR_TESTS
    os.utime(project / "requirements.txt")
    assert make(project, "bench")[1][:6] == [*full, *FOR_TESTS]


def test_an_installation_is_one_line_and_a_log(project):
    printed = make(project, "check")[2].splitlines()
    assert "installing requirements.txt (progress: tail -f .venv/install.log)" in printed
    assert not any("pip install" in line for line in printed)
    assert "output of -m uv pip install" in (project / ".venv/install.log").read_text()


def test_pip_installs_where_uv_fails(project):
    (project / "fail_uv").touch()
    status, calls, output = make(project, "demo")
    plain = "python -m pip install -r requirements.txt"
    assert calls[1:] == [*install_file("requirements.txt"), plain, CHECK, TRAIN]
    assert status == 0
    assert "could not" not in output


def test_make_shows_the_end_of_the_log_of_what_fails(project):
    make(project, "check")
    os.utime(project / "requirements.txt")
    (project / "fail_python").touch()
    for _ in range(2):  # an installation that failed is tried again
        status, calls, output = make(project, "demo")
        assert status == 2
        assert calls == [  # without uv, pip
            f"python -m pip install {UV}",
            "python -m pip install -r requirements.txt",
        ]
        end = output.index("output of -m pip install -r requirements.txt")
        says = "could not install requirements.txt: above is the end of .venv/install.log, "
        assert output.index(says) > end


def test_make_test_goes_on_without_the_extras(project):
    make(project, "check")
    (project / "fail_clusters").touch()
    status, calls, output = make(project, "test")
    plain = "python -m pip install -r requirements-clusters.txt"
    assert (status, calls) == (0, [*FOR_TESTS, plain, CHECK, PART])
    assert "could not install requirements-clusters.txt" in output
    assert make(project, "test")[1] == [CHECK, PART]  # not tried again each time


def test_make_test_installs_the_emulated_gpu_once(project):
    make(project, "lint")
    shutil.rmtree(project / ".venv-emulated")
    status, calls, _ = make(project, "test")
    assert (status, calls[-1]) == (0, PART)
    assert "python_stand_in -m venv .venv-emulated" in calls
    assert "python -m uv pip install -r requirements-emulated.txt" in calls
    assert "python tests/emulated_gpu/build.py" in calls
    assert make(project, "test")[1] == [CHECK, PART]


def test_make_stops_at_what_fails(project):
    assert make(project, "lint")[0] == 0
    (project / "fail_torchrun").touch()
    status, calls, output = make(project, "demo")
    assert (status, calls) == (2, [CHECK, TRAIN])
    assert "open next" not in output
    (project / "fail_python").touch()
    assert make(project, "test")[:2] == (2, [CHECK])


@pytest.mark.parametrize(("what", "says"), [("too_old", "not Python 3.11"), ("no_venv", "apt")])
def test_make_says_what_is_missing(project, what, says):
    (project / what).touch()
    status, calls, output = make(project, "demo")
    assert (status, calls) == (2, [])
    assert says in output.splitlines()[0]


def test_make_other_targets(project):
    make(project, "lint")
    assert make(project, "lint")[1] == ["ruff check", "ruff format --check"]
    assert make(project, "check")[1] == ["python check_environment.py"]
    assert make(project, "test")[1] == [CHECK, PART]
    assert make(project, "release")[1] == [CHECK, f"{PYTEST} -m release"]
    few = "python -m pytest -n 3 -p no:nbval -m quick or not slow"
    assert make(project, "quick")[1] == [CHECK, few]
    assert make(project, "copies")[1] == ["python_stand_in tests/copies.py"]
    assert make(project, "notebooks")[1] == [CHECK, "python notebooks/execute.py"]
    names = ("collectives", "ddp", "fsdp", "gpt", "llama", "backend", "rpc", "clusters")
    benchmarks = [f"python benchmarks/{name}.py" for name in (*names, "planner")]
    assert make(project, "bench")[1] == [CHECK, *benchmarks]
    assert make(project, "readme")[1] == [CHECK, "python tests/readme.py --write"]
    assert make(project, "gpu")[1] == ["python benchmarks/gpu.py"]  # installs and checks nothing
    shutil.rmtree(project / ".venv")
    assert make(project, "gpu")[1] == ["python_stand_in benchmarks/gpu.py"]
    status, calls, output = make(project)
    assert (status, calls) == (0, [])
    targets = (
        "demo",
        "test",
        "release",
        "quick",
        "test-torch",
        "copies",
        "lint",
        "notebooks",
        "bench",
        "gpu",
        "readme",
    )
    for target in (*targets, "help"):
        assert re.search(rf"^{target} +\w", output, flags=re.MULTILINE)


def test_make_test_with_another_torch(project):
    tests = f"{PYTEST} --ignore=tests/test_notebooks.py"
    files = "-r requirements-common.txt -r requirements-test.txt"
    environment = [
        "python_stand_in -m venv .venv-2.13.0",
        *install(f"torch===2.13.0 torchvision {files}"),
    ]
    assert make(project, "test-torch", "TORCH=2.13.0")[1] == [*environment, tests]
    assert not (project / ".venv").exists()
    assert make(project, "test-torch", "TORCH=2.13.0")[1] == [tests]  # nothing is installed twice
    (project / ".venv-2.13.0/bin/python").write_text("#!/bin/sh\nexit 1\n")
    assert make(project, "test-torch", "TORCH=2.13.0")[0] == 2


def test_ci_runs_lint_and_test_from_anywhere(project):
    shutil.copytree(ROOT / ".ci", project / ".ci")
    make(project, "lint")
    (project / "calls").unlink()
    (project / "deep").mkdir()
    result = subprocess.run(
        ["bash", "../.ci/run"],
        cwd=project / "deep",
        env=clean_environment(INSTALL="no"),
        capture_output=True,
        timeout=30,
    )
    assert result.returncode == 0, result.stderr
    calls = [x.partition(" (")[0] for x in (project / "calls").read_text().splitlines()]
    assert calls == ["ruff check", "ruff format --check", CHECK, f"{PART} --budget 3900"]
