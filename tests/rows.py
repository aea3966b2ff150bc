"""Copies of an example directory with a mistake: "What usually goes wrong" is tried on them.

    copy = Copy("ddp_basics", tmp_path)
    copy.edit("train.py", "sampler.set_epoch(epoch)", "pass")    # the mistake
    assert ... in copy.run("train.py", "--epochs", 2, ranks=2).output
    copy.edit("train.py", "pass", "sampler.set_epoch(epoch)")    # what the row says to do

Each test_*_rows.py has a dictionary ROWS: a part of a row's first cell -> the test of that row, by
its name, or as file::name where it is in another file. test_rows.py compares them with the tables.
"""

import re
import shutil
from pathlib import Path

import pool
from helpers import ROOT, Result, torchrun


class Copy:
    """An example directory alone in an empty folder, to be changed and run there."""

    def __init__(self, directory: str, folder: Path):
        self.path = folder / directory
        ignored = shutil.ignore_patterns("runs", "build", "data")
        shutil.copytree(ROOT / directory, self.path, ignore=ignored)

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace what must be there exactly once, or the test has nothing to do with the file."""
        path = self.path / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
        path.write_text(text.replace(old, new))

    def join_slowly(self) -> None:
        """A short time limit is then one of collectives alone: on a busy machine a rank is late."""
        limit = "meeting_point(timedelta(minutes=10)) if"
        self.edit("runtime.py", "meeting_point(timeout) if", limit)

    def run(self, script: str, *args, ranks: int = 2, timeout: float = 120, **environment):
        """Run a script of the copy on `ranks` ranks, without torchrun."""
        found = pool.run(
            self.path / script, *args, ranks=ranks, timeout=timeout, cwd=self.path, **environment
        )
        return plain(found)

    def torchrun(self, script: str, *args, ranks: int = 2, timeout: float = 120, **options):
        return plain(
            torchrun(
                self.path / script, *args, ranks=ranks, timeout=timeout, cwd=self.path, **options
            )
        )


def plain(result: Result) -> Result:
    """Without what a progress bar draws over."""
    result.output = re.sub(r"[^\n]*\r", "", result.output)
    return result
