"""The commands that READMEs and docstrings print: found, named rightly, and some of them run.

`make readme` runs all of them.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import printed_commands
import psutil
import pytest
from helpers import REPEAT, ROOT
from printed_commands import REASONS, Block, Command, blocks_in, blocks_of, left_out

PAGES = printed_commands.pages()
READMES = [path for path in PAGES if path.name == "README.md"]
COMMANDS = [command for path in PAGES for block in blocks_of(path) for command in block]
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
# A line that looks like a command, wherever it stands in a page.
ANY_COMMAND = re.compile(r" {4,}(?:\$ )?((?:[A-Z_]+=\S* )*(?:torchrun|python3?|pytest|make) .*)")


def texts(block: Block) -> list[str]:
    return [command.text for command in block]


# What is found.


def test_every_readme_has_a_command():
    assert {path.parent.name for path in READMES} >= {ROOT.name, "notebooks", "ddp_basics"}
    assert [path for path in READMES if not blocks_of(path)] == []


def dropped(text: str, found: str) -> list[str]:
    """Lines of code that look like commands and are not part of a command in `found`."""
    matches, fenced = [], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        matches.append(ANY_COMMAND.match("    " + line if fenced else line))
    return [match[1].rstrip() for match in matches if match and match[1].rstrip() not in found]


def test_no_command_is_dropped():
    found = "\n".join(command.text for command in COMMANDS)
    assert len(COMMANDS) > 400
    for path in PAGES:
        assert not dropped(printed_commands.text_of(path)[1], found), path


def test_a_dropped_command_is_caught():
    page = "Words\n\n    A=1 python a.py   # why\n    rank 0: 1\n        torchrun b.py \\\n"
    assert dropped(page, "") == ["A=1 python a.py   # why", "torchrun b.py \\"]
    assert dropped(page, "A=1 python a.py   # why\ntorchrun b.py \\\n    --c") == []
    assert dropped("```bash\nmake a\n```\nmake b\n", "") == ["make a"]


def not_in_sight(command: str, source: str) -> list[str]:
    """Lines of the command that its file does not show as they are typed."""
    shown = {line.strip().removeprefix("$ ") for line in source.splitlines()}
    return [line for line in command.split("\n") if line.strip() not in shown]


def test_files_show_commands_as_they_are_typed():
    """A docstring that is not raw shows two backslashes, which continue no line of a shell."""
    for command in COMMANDS:
        source = (ROOT / command.file).read_text(encoding="utf-8")
        assert not not_in_sight(command.text, source), f"{command}: begin the docstring with r"


def test_a_docstring_that_is_not_raw_is_caught():
    command = "make \\\n    a"
    assert not_in_sight(command, 'r"""\n\n    make \\\n        a\n"""') == []
    assert not_in_sight(command, '"""\n\n    make \\\\\n        a\n"""') == ["make \\"]


def test_what_explains_a_command_begins_with_a_hash():
    """Else a shell takes it for arguments."""
    line = re.compile(r"[^#]*?\S {2,}[^#\s\\]")
    explained = [c for c in COMMANDS if any(map(line.match, map(str.strip, c.text.split("\n"))))]
    assert explained == []


def test_the_chinese_page_prints_the_same_commands():
    english, chinese = ([c for b in blocks_of(ROOT / name) for c in b] for name in FIRST_PAGES)

    def typed(commands: list[Command]) -> list[tuple[str, str]]:
        return [(command.typed, command.reason) for command in commands]

    assert typed(chinese) == typed(english)


FIRST_PAGES = ("README.md", "README.zh-CN.md")


def test_paragraphs_of_a_block():
    page = "Words\n\n    # why\n    torchrun a.py \\\n        --b 1   # or 2\n    tail -n 1 log\n\n"
    page += "    rank 0: python is here\n\n    python b.py\n\nWords\n"
    (block,) = blocks_in(page, "page")
    assert texts(block) == ["torchrun a.py \\\n    --b 1   # or 2", "tail -n 1 log", "python b.py"]
    assert [command.line for command in block] == [4, 6, 10]


def test_a_prompt_tells_commands_from_output():
    (block,) = blocks_in("    $ python a.py\n    python said this\n    $ make b\n", "page")
    assert texts(block) == ["python a.py", "make b"]


def test_which_blocks_are_commands():
    listing = '    """What it shows.\n\n        python a.py\n    """\n    import os\n'
    fenced = "```python\n    python a.py\n```\n```sh\npython b.py\n```\n```\nmake c\n```\n"
    assert blocks_in(listing, "page") == []
    assert [texts(block) for block in blocks_in(fenced, "page")] == [["python b.py"], ["make c"]]
    assert [texts(b) for b in blocks_in("    make a\n\nWords\n\n    make b\n", "page")] == [
        ["make a"],
        ["make b"],
    ]


# What is left out.


def test_each_reason_is_known():
    reasons = {command.reason for command in COMMANDS} - {""}
    assert reasons <= REASONS.keys()
    unused = REASONS.keys() - reasons - {"not on this machine"}
    assert not unused
    assert sum(not command.reason for command in COMMANDS) > 0.6 * len(COMMANDS)


def test_a_page_gives_a_reason_for_one_block():
    page = "Words\n\n<!-- make readme leaves this out: GPU -->\n\n    make a\n    make b\n\n"
    first, second = blocks_in(f"{page}Words\n\n    make c\n", "page")
    assert [command.reason for command in first + second] == ["GPU", "GPU", ""]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("torchrun --nnodes=2 --rdzv-endpoint=HOST:29500 a.py", "several hosts"),
        ("torchrun --nnodes=1:3 \\\n    --rdzv-endpoint=host0:29500 a.py", "several hosts"),
        ("python clusters/lab.py exec 0 -- torchrun --rdzv-endpoint=host0:29500 a.py", ""),
        ("bash clusters/slurm/train.sbatch a.py", "cluster manager"),
        ("torchrun ... a.py", "placeholder"),
        ("python a.py   # four minutes", "long"),
        ("torchrun --standalone --nproc_per_node=2 ddp_basics/train.py", ""),
    ],
)
def test_reasons(command, reason):
    assert printed_commands.reason(command) == reason


# What the commands name.


def scripts(command: Command) -> list[str]:
    """The Python files that it names, but those of a copy that its block has made."""
    names = re.findall(r"(?<![\w./-])[\w./]+\.py\b", command.typed)
    return [name for name in names if not name.startswith(("my_", "your_", "shm/"))]


@functools.cache
def strings(folder: Path) -> frozenset[str]:
    """Every string that begins with "--" in the Python files of a folder."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")]
    constants = (n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant))
    return frozenset(text for text in constants if isinstance(text, str) and text[:2] == "--")


@functools.cache
def torchrun_flags() -> frozenset[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return frozenset(re.findall(r"--[\w-]+", said.stdout))


def unknown_flags(command: Command) -> list[str]:
    """Flags that the named scripts, or torchrun, do not have."""
    names = [name for name in scripts(command) if name != "notebooks/ranks.py"]  # hands them on
    known = set().union(*(strings((ROOT / name).parent) for name in names))
    if "torchrun" in command.typed or "--nproc-per-node" in command.typed:
        known |= torchrun_flags()
    # sbatch, srun, salloc and mpirun have their own.
    typed = re.sub(r"^.*\b(sbatch|srun|salloc|mpirun) .*\s(?=\S+\.py)", "", command.typed)
    flags = re.findall(r"(?<!\S)--\w[\w-]*", typed)
    return [flag for flag in flags if names and flag not in known]


def in_sentences(path: Path) -> list[Command]:
    """Commands between backquotes."""
    text = printed_commands.text_of(path)[1]
    found = re.findall(r"`((?:torchrun|python3?|make) [^`]+)`", text)
    return [Command(str(path.relative_to(ROOT)), 1, command) for command in found]


ALL = COMMANDS + [command for path in PAGES for command in in_sentences(path)]


@pytest.mark.slow
def test_scripts_and_flags_exist():
    absent = [str(c) for c in ALL for name in scripts(c) if not (ROOT / name).is_file()]
    assert absent == []
    assert sum(len(scripts(command)) for command in ALL) > 300
    assert [(str(c), flags) for c in ALL if (flags := unknown_flags(c))] == []


def test_a_pattern_of_pytest_selects_a_test():
    selecting = re.compile(r"pytest .*?(tests/\S+\.py) -k (\w+)$")
    found = [(command, selecting.search(command.typed)) for command in ALL]
    patterns = [(command, match[1], match[2]) for command, match in found if match]
    assert patterns
    for command, file, pattern in patterns:
        assert re.search(rf"^def test_\w*{pattern}", (ROOT / file).read_text(), re.M), command


def test_targets_of_make_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {match[1] for c in ALL if (match := re.match(r"make ([\w-]+)", c.typed))}
    assert "demo" in named
    assert named - set(targets) == set()


@pytest.mark.slow
def test_a_wrong_flag_is_caught():
    right = "torchrun --standalone --nproc_per_node=2 ddp_basics/train.py --epochs 1"
    assert unknown_flags(Command("page", 1, right)) == []
    assert unknown_flags(Command("page", 1, right.replace("epochs", "epoch"))) == ["--epoch"]
    assert unknown_flags(Command("page", 1, right.replace("alone", ""))) == ["--stand"]


# How they are run.


def block_of(*commands: str) -> Block:
    return [Command("page", 1, text) for text in commands]


def test_one_shell_in_a_copy_runs_a_block():
    block = block_of(
        "export A=3   # a comment",
        "echo said $A",
        "cp -r ddp_basics my_project && \\\n    cd my_project",
        "cmp train.py ../ddp_basics/train.py && ls runtime.py",
        "false",
        "(sleep 0.1; exit 4) &",
        "python3 -c 'import sys; print(sys.prefix)'",
    )
    outcomes = printed_commands.run(block)
    assert [outcome.status for outcome in outcomes] == [0, 0, 0, 0, 1, 4, 0]
    said = [outcome.output for outcome in outcomes]
    assert (said[1], said[3]) == ("said 3", "runtime.py")
    assert said[6].startswith(sys.prefix)
    assert not (ROOT / "my_project").exists()
    assert [outcome.as_printed for outcome in outcomes[:5]] == [True] * 4 + [False]


def test_an_expected_status():
    (outcome,) = printed_commands.run(block_of("(exit 3)   # ends with status 3"))
    assert outcome.as_printed
    (outcome,) = printed_commands.run(block_of("true   # ends with status 3"))
    assert not outcome.as_printed


@pytest.mark.slow
def test_what_hangs_is_killed():
    script = (
        "import os, time; os.fork() or os.setsid(); print('began', flush=True); time.sleep(600)"
    )
    block = block_of("echo first", f'python3 -c "{script}"', "echo last")
    first, hangs, last = printed_commands.run(block, timeout=10)
    assert first.as_printed
    assert (hangs.status, last.status) == (None, None)
    assert "on" in hangs.output
    assert not [p for p in psutil.process_iter(["cmdline"]) if script in (p.info["cmdline"] or [])]


# Some of them, as printed; make readme runs all.

SOME = [block for block in blocks_of(ROOT / "README.md")]
SOME += [
    next(([c] for block in blocks_of(path) for c in block if not c.reason), [])
    for path in READMES
    if path.parent != ROOT
]
SOME = [block for block in SOME if any(not command.reason for command in block)]


@pytest.mark.slow
@pytest.mark.timeout(900 * REPEAT)
@pytest.mark.parametrize("block", SOME, ids=lambda block: f"{block[0].file}:{block[0].line}")
def test_as_printed(block):
    """REPEAT=30 is the proof that no minimal.py is aborted when the interpreter ends."""
    here = [command for command in block if not left_out(command)]
    if not here:
        pytest.skip(f"{left_out(block[0])}: {block[0]}")
    for _ in range(REPEAT):
        for outcome in printed_commands.run(here):
            assert outcome.as_printed, (
                f"status {outcome.status}: {outcome.command}\n{outcome.output}"
            )
