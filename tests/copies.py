"""List the files that several example directories hold as copies, and keep the copies equal.

    make copies            # or: python3 tests/copies.py

Each directory must work when it is copied alone, so such a file lies in each of them. It is changed
at its home; this program then overwrites the other copies. A test fails while one differs, and
while two directories hold an equal file that is not listed here.
"""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def examples(root: Path) -> list[str]:
    """The directories with a runtime.py that git knows: a reader's own copy is left alone."""
    command = ["git", "ls-files", "*/runtime.py"]
    known = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.split()
    files = map(Path, known) if known else root.glob("*/runtime.py")  # a download without git
    return sorted(path.parent.name for path in files)


EXAMPLES = examples(ROOT)

# (file, its home, the directories that hold a copy)
COPIES = [
    ("runtime.py", "ddp_basics", EXAMPLES),
    ("arguments.py", "ddp_basics", EXAMPLES),
    ("agreement.py", "ddp_basics", EXAMPLES),
    ("metrics.py", "ddp_basics", ["fsdp_basics", "t5_finetuning", "transformer_basics"]),
    ("stopping.py", "ddp_basics", ["fsdp_basics", "t5_finetuning", "transformer_basics"]),
    ("replicas.py", "ddp_basics", ["fsdp_basics", "t5_finetuning", "transformer_basics"]),
    ("data.py", "ddp_basics", ["fsdp_basics"]),
    ("alone.py", "ddp_basics", ["fsdp_basics", "t5_finetuning", "transformer_basics"]),
    ("loading.py", "ddp_basics", ["fsdp_basics"]),
    ("evaluation.py", "ddp_basics", ["fsdp_basics"]),
    ("optimizer.py", "ddp_basics", ["fsdp_basics"]),
    ("closed_pipe.py", "planner", ["clusters", "transformer_basics"]),
    ("materialize.py", "fsdp_basics", ["t5_finetuning"]),
    ("saves.py", "fsdp_basics", ["t5_finetuning", "transformer_basics"]),
    ("checkpoint.py", "fsdp_basics", ["t5_finetuning", "transformer_basics"]),
    ("sharded_state.py", "fsdp_basics", ["t5_finetuning", "transformer_basics"]),
    ("attention_ring.py", "parallel_basics", ["transformer_basics"]),
    ("model.py", "transformer_basics", ["parallel_basics"]),
    ("attention.py", "transformer_basics", ["parallel_basics"]),
    ("dropout.py", "transformer_basics", ["parallel_basics"]),
    ("head.py", "transformer_basics", ["parallel_basics"]),
    ("tiles.py", "transformer_basics", ["parallel_basics"]),
    ("comparing.py", "transformer_basics", ["parallel_basics"]),
    ("counting.py", "transformer_basics", ["parallel_basics"]),
]


def main() -> None:
    for original, copy in outdated(ROOT, COPIES):
        copy.write_bytes(original.read_bytes())
        print(f"{original.relative_to(ROOT)} -> {copy.relative_to(ROOT)}")


def outdated(root: Path, copies: list[tuple]) -> list[tuple[Path, Path]]:
    """(original, copy) wherever the copy differs, or is missing."""
    pairs = [
        (root / home / file, root / directory / file)
        for file, home, directories in copies
        for directory in directories
    ]
    return [(a, b) for a, b in pairs if not b.is_file() or a.read_bytes() != b.read_bytes()]


def unlisted(files: list[Path], copies: list[tuple]) -> list[list[Path]]:
    """Equal files of one name in several directories, without which nothing would keep them so."""
    listed = {
        (file, directory)
        for file, home, directories in copies
        for directory in [home, *directories]
    }
    equal = {}
    for path in files:
        equal.setdefault((path.name, path.read_bytes()), []).append(path)
    return [
        paths
        for paths in equal.values()
        if len(paths) > 1 and any((p.name, p.parent.name) not in listed for p in paths)
    ]


if __name__ == "__main__":
    main()
