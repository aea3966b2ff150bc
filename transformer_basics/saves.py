"""The saves of a run on the disk: which of them count, and how their files are read and checked.

checkpoint.py says what is in them.
"""

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from zipfile import BadZipFile, ZipFile

import torch
from arguments import DiskError, UserError

UNREADABLE = "cannot be read"  # in what is said of a save that may be whole


def saves(folder: Path) -> list[Path]:
    """The saves in `folder`, the oldest first."""
    found = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def newest(folder: Path) -> tuple[Path, dict] | None:
    """The newest save in `folder` that is whole, and what its run.pt holds; None if there is none.

    For one process. Raises `UserError` if all are broken.
    """
    save, problems = newest_of(saves(folder), problem_of)
    for problem in problems:
        print(f"warning: {problem}; using the save before it", flush=True)
    return None if save is None else (save, read_run(save))


def newest_of(
    candidates: list[Path], problem_with: Callable[[Path], str | None]
) -> tuple[Path | None, list[str]]:
    """The newest save without a problem, and the problems of those that are newer.

    None if there are no candidates. Raises `UserError` if each of them has a problem, or if one of
    these cannot be read.
    """
    problems = []
    for save in reversed(candidates):
        problem = problem_with(save)
        if problem is None:
            return save, problems
        if UNREADABLE in problem:  # the disk's fault, perhaps for a moment: do not give the save up
            raise DiskError(f"{problem}: start again when it can be read, or move {save} away")
        problems.append(problem)
    if problems:
        raise UserError(f"{problems[0]}: move {candidates[0].parent} away to start again")
    return None, []


def problem_of(save: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """What is wrong with the files of `save` that are this rank's to check; None if nothing is."""
    try:
        checksums = read_run(save)["checksums"]
    except UserError as error:
        return str(error)
    for name in sorted(checksums)[rank::world_size]:
        file = save / name
        try:
            if checksum(file) != checksums[name]:  # torch checks none: a flipped bit would load
                return f"{file} is broken"
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as error:
            return f"{file} {UNREADABLE} ({error.strerror})"
    return None


def set_aside(save: Path) -> None:
    """Rename a broken save, so that it counts no more and the same step can be saved again."""
    target = save.with_name(f"{save.name}.broken")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(save, target)


def read_run(save: Path) -> dict:
    """What run.pt of a save holds. Raises `UserError`, naming it, if that is not ours or broken."""
    file = save / "run.pt"
    try:
        with ZipFile(file) as zipped:  # what torch.save writes; torch.load checks no sums
            bad = zipped.testzip()
            if bad:
                raise BadZipFile(f"wrong checksum in {bad}")
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of zip and pickle, or no file: it is broken, or not ours
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise DiskError(f"{file} {UNREADABLE} ({error.strerror})") from None
        raise UserError(f"{file} is no readable checkpoint ({type(error).__name__})") from None
    if not isinstance(state, dict) or not {"step", "run", "generators", "checksums"} <= set(state):
        raise UserError(f"{file} is no checkpoint of this script")
    return state


def checksum(file: Path) -> int:
    """CRC-32 of a file, read piece by piece."""
    value = 0
    with open(file, "rb") as content:
        while piece := content.read(1 << 20):
            value = zlib.crc32(piece, value)
    return value


def make_empty(folder: Path) -> None:
    """Make `folder` an empty one: a save that was killed may have left something."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_file(file: Path, state: dict) -> None:
    """Raises `UserError` if torch.load(weights_only=True) could not read it again."""
    with open(file, "wb") as content:
        torch.save(state, content)
        content.flush()
        os.fsync(content.fileno())  # the bytes are on the disk before the folder gets its name
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        _, _, what = " ".join(str(error).split()).partition("WeightsUnpickler error: ")
        raise UserError(
            f"cannot save: no run could load a part's state again ({what[:150]})"
        ) from None
