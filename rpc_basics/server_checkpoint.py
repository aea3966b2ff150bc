"""The saves of one or more parameter servers: each writes its own part, at the same versions.

    saves/version_00000040.server0
    saves/version_00000040.server1

A part is written under another name and then renamed: a kill leaves a whole file or none. A version
counts when all servers have saved it; servers may be killed between one's save and the other's, so
each keeps its newest two.
"""

import os
from pathlib import Path

import torch
from arguments import UserError


def save(folder: Path, server: int, version: int, state: dict) -> None:
    path = folder / f"version_{version:08}.server{server}"
    temporary = path.with_name(f"{path.name}.unfinished")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    for old in sorted(folder.glob(f"version_????????.server{server}"))[:-2]:
        old.unlink()


def newest(folder: Path, servers: int) -> int:
    """The newest version that all servers have saved; 0 if there is none."""
    common = set.intersection(*(versions(folder, server) for server in range(servers)))
    return max(common, default=0)


def versions(folder: Path, server: int) -> set[int]:
    return {int(path.stem[-8:]) for path in folder.glob(f"version_????????.server{server}")}


def load(folder: Path, server: int, version: int, settings: dict) -> dict:
    """What this server has saved. Raises `UserError` if it is broken or of a run unlike ours."""
    path = folder / f"version_{version:08}.server{server}"
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # of zip, pickle or the disk: it cannot be read
        raise UserError(f"{path} is no readable save ({type(error).__name__})") from None
    for name, value in settings.items():
        if state["settings"].get(name) != value:
            was = state["settings"].get(name)
            raise UserError(f"{path} is of a run with {name} {was}, not {value}")
    return state
