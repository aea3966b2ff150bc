"""The commands that READMEs and docstrings print: found, and run as a reader runs them.

A block is the code between two paragraphs of prose. Its commands run in order in one shell, in a
copy of the repository of their own, with torchrun and python on PATH as after `activate`.
"""

import ast
import functools
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from helpers import ROOT, Job, installed

# A paragraph of code that begins with one of these, perhaps after "$ " or variables, is commands.
PROGRAMS = r"""torchrun python3? \.venv/bin/\w+ make cp pip pytest bash source export cd echo kill
    pgrep tmux clusters/\S+\.sh srun sbatch salloc mpirun kubectl docker jupyter unshare"""
BEGINS = re.compile(rf"(\$ )?([A-Z_]+=(\".*?\"|\S*) )*({'|'.join(PROGRAMS.split())}|torchft_\w+) ")

# Why a command is left out, and how it shows. Where a command does not show it, the page says it
# above the block: <!-- make readme leaves this out: long -->
REASONS = {
    "placeholder": r"\.\.\.|your_train|\b(PID|NAME|COMMAND|FOLDER|SCRIPT)\b|/path/to/",
    "cluster manager": r"\b(srun|sbatch|salloc|kubectl|docker|mpirun)\b|test_cluster|RAY_ADDR",
    "several hosts": r"\bHOST\b|hosts\.txt|\$SLURM|(?s:^(?!.*lab\.py exec).*host0:)",
    "GPU": r"--device cuda|pytest -m gpu|# .*\bGPUs|make gpu\b",
    "network": r"--model google|requirements-cpu",
    "interactive": r"\bjupyter lab|--breakpoint-on",
    "changes the machine": r"pip install|-m venv|make test-torch",
    "long": r"# .*minutes|make (test|quick|lint|notebooks|bench|foreign|mutants|readme)\b"
    r"|^(\.venv/bin/)?pytest|\.ci/run|benchmarks/\w+\.py|notebooks/execute|foreign/matrix|mutants/run",
    "not on this machine": r"(?!)",  # see `is_missing`
}
STATUS = re.compile(r"# .*\bstatus (\d+)")  # how a command ends, where not with 0
LEFT_OUT = re.compile(r"<!-- make readme leaves this out: (.*) -->")
TIMEOUT = 600  # seconds for one command, on a busy machine
PATIENCE = 60  # seconds for commands in the background, once those in front have ended


@dataclass(frozen=True)
class Command:
    file: str  # relative to the repository
    line: int
    text: str  # as printed, with its comment and its continuation lines
    reason: str = ""  # why it is left out, a key of REASONS

    @property
    def typed(self) -> str:
        """The text as one line, without its comments."""
        return " ".join(re.sub(r"\s+# .*", "", self.text).replace("\\\n", " ").split())

    @property
    def expected(self) -> int:
        """The exit status that its comment says."""
        said = STATUS.search(self.text)
        return int(said[1]) if said else 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.text.split())}"


Block = list[Command]


@dataclass(frozen=True)
class Outcome:
    command: Command
    status: int | None  # None: the command did not end in time, or was not reached
    seconds: int
    output: str

    @property
    def as_printed(self) -> bool:
        return self.status == self.command.expected


def tracked() -> list[Path]:
    """The files of the repository, and those that are about to be added to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in sorted(names.split("\0")) if name and (ROOT / name).is_file()]


def pages() -> list[Path]:
    """Markdown files, but not the recorded results, then Python files."""
    kinds = [[p for p in tracked() if p.suffix == kind] for kind in (".md", ".py")]
    return [p for pages in kinds for p in pages if p.parent.name != "results"]


@functools.cache
def text_of(path: Path) -> tuple[int, str]:
    """What a reader reads, of a Python file its docstring; and the number of its first line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return 1, text
    docstring = re.match(r'(?:#.*\n|\n)*r?""".*?"""', text, re.DOTALL)
    tree = ast.parse(docstring[0] if docstring else "")  # all of all files would take 2 s
    return (tree.body[0].lineno if tree.body else 1), ast.get_docstring(tree, clean=False) or ""


@functools.cache
def blocks_of(path: Path) -> list[Block]:
    """The commands of one page, block by block."""
    first, text = text_of(path)
    return blocks_in(text, str(path.relative_to(ROOT)), first)


def blocks_in(text: str, name: str, first: int = 1) -> list[Block]:
    found = []
    for marked, lines in code_blocks(text):
        commands = [
            Command(name, first + at, printed, marked or reason(printed))
            for at, printed in commands_in(lines)
        ]
        if commands:
            found.append(commands)
    return found


def code_blocks(text: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Indented blocks, and fenced ones of a shell: (reason given above it, [(number, line)])."""
    marked, block, language = "", [], None
    for at, line in enumerate([*text.splitlines(), "end"]):
        fence = line.startswith("```")
        if fence:
            language = line.removeprefix("```").strip() if language is None else None
        indented = line.startswith("    ") or (block and not line)
        shell = language in ("", "sh", "bash", "shell", "console")
        if not fence and (indented if language is None else shell):
            block.append((at, line.strip()))
            continue
        if block and not block[0][1].startswith('"""'):  # not the listing of a Python file
            yield marked, block
        if block or (line and not fence):
            marked = (LEFT_OUT.search(line) or ["", ""])[1]
        block = []


def commands_in(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The commands of a block, each with its number; other paragraphs are what they print."""
    paragraphs = [[]]
    for at, line in lines:
        if not line:
            paragraphs.append([])
        elif not line.startswith("#"):
            paragraphs[-1].append((at, line))
    for paragraph in paragraphs:
        if not paragraph or not BEGINS.match(paragraph[0][1] + " "):
            continue
        if paragraph[0][1].startswith("$ "):  # lines without the prompt are output
            paragraph = [(at, line[2:]) for at, line in paragraph if line.startswith("$ ")]
        parts = []
        for at, line in paragraph:
            parts.append(line)
            if not line.endswith("\\"):
                yield at - len(parts) + 1, "\n    ".join(parts)
                parts = []


def reason(command: str) -> str:
    return next((why for why, pattern in REASONS.items() if re.search(pattern, command)), "")


def left_out(command: Command) -> str:
    """Why the command does not run here; "" if it does."""
    return command.reason or ("not on this machine" if is_missing(command.text) else "")


def is_missing(command: str) -> bool:
    """Whether this machine lacks an optional package or what else the command needs."""
    needs = {
        r"clusters/ray/|ray_parameter_server": functools.partial(installed, "ray"),
        r"torchft": functools.partial(installed, "torchft"),
        r"\bshm\b|counting_backend": lambda: torch.__version__ >= "2.14",
        r"lab\.py|--lab\b": has_lab,
        r"\bshm\b|(minimal|pipe)_backend": lambda: shutil.which("c++"),
        r"\bping\b": lambda: shutil.which("ping"),
        r"^make demo": lambda: list(Path(sys.prefix).glob("installed-*")),
    }
    return any(re.search(pattern, command) and not there() for pattern, there in needs.items())


@functools.cache
def has_lab() -> bool:
    """Whether clusters/lab.py can make a host here."""
    lab = [sys.executable, ROOT / "clusters/lab.py", "--name", f"try{os.getpid()}"]
    made = subprocess.run([*lab, "up", "1"], capture_output=True, timeout=300).returncode == 0
    if made:
        subprocess.run([*lab, "down"], capture_output=True, timeout=60, check=True)
    return made


def copy_repository(to: Path) -> None:
    for path in tracked():
        copy = to / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    for path in to.glob("requirements*.txt"):
        os.utime(path, (0, 0))  # older than what .venv holds: make has nothing to install
    (to / ".venv").symlink_to(sys.prefix)


def run(block: Block, timeout: float = TIMEOUT) -> list[Outcome]:
    """Run the commands in one shell, then kill those that still run in the background."""
    mark = uuid.uuid4().hex
    script = ["later=()"]
    for number, command in enumerate(block):
        script += [f"echo {mark} {number} begins $SECONDS", command.text]
        if re.search(r"[^&]&$", command.typed):
            script.append(f"later+=({number}:$!)")
        else:
            script.append(f"printf '\\n{mark} {number} %s %s\\n' $? $SECONDS")
    script.append(WAIT.format(mark=mark, patience=PATIENCE))
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="readme") as folder:
        copy_repository(Path(folder))
        shell, lab = ["bash", "-c", "\n".join(script)], f"readme{os.getpid()}"
        with Job(shell, cwd=Path(folder), PATH=path, LAB=lab) as job:
            try:
                output = job.wait(timeout * len(block)).output
            except TimeoutError as error:
                output = str(error)
    return [outcome(command, number, mark, output) for number, command in enumerate(block)]


WAIT = """
for job in ${{later[@]}}; do
    number=${{job%:*}} process=${{job#*:}}
    for ((i = 0; i < {patience}; i++)); do kill -0 $process 2>/dev/null && sleep 1; done
    if kill -0 $process 2>/dev/null; then status=0; else wait $process; status=$?; fi
    printf '\\n{mark} %s %s %s\\n' $number $status $SECONDS
done
"""


def outcome(command: Command, number: int, mark: str, output: str) -> Outcome:
    begun = re.search(rf"^{mark} {number} begins (\d+)\n", output, re.MULTILINE)
    if not begun:
        return Outcome(command, None, 0, "not reached")
    ended = re.search(rf"^{mark} {number} (\d+) (\d+)$", output, re.MULTILINE)
    said = output[begun.end() :].partition(f"{mark} {number + 1} begins")[0]
    said = "\n".join(line for line in said.splitlines() if mark not in line).strip()
    if not ended:
        return Outcome(command, None, 0, said)
    return Outcome(command, int(ended[1]), int(ended[2]) - int(begun[1]), said)


def processor_seconds() -> float:
    """Of all commands that have ended, with their descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
