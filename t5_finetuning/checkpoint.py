"""Save a sharded training state so that a kill at any moment leaves a whole one, and load it.

A checkpoint is a folder `path` with one folder per save in it, of which the newest counts:

    path/step_00000044/__0_0.distcp, __1_0.distcp, ...  what each rank holds: its shards
    path/step_00000044/.metadata                        which part of which tensor lies where
    path/step_00000044/run.pt                           step, settings, generators, checksums

Every rank writes and reads only its own part, also when the number of ranks has changed: the shards
are then cut anew (resharding) while they are read.
"""

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from arguments import UserError
from runtime import Worker
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

SHARDED = ("model", "optimizer")  # the parts that differ between ranks; the others are the same


def save_checkpoint(path: Path, parts: dict, step: int, run: dict, worker: Worker) -> None:
    """All ranks call this. They write into a temporary folder, which is then renamed: in one step.

    parts: name -> object with state_dict() and load_state_dict(); "model" and "optimizer" sharded.
    step: optimizer steps done, which is also the position in the data.
    run: the settings under which alone the state may be continued.
    Raises `UserError` if it cannot be written; the checkpoint before is then untouched.
    """
    temporary, final = path / "unfinished", path / f"step_{step:08}"
    together(lambda: clear(temporary) if worker.is_main else None)
    generators = {"cpu": torch.get_rng_state()}
    if worker.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(worker.device)
    try:
        dcp.save(sharded_state(parts), checkpoint_id=temporary)
    except dcp.api.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise UserError(f"cannot write {path}, the one before is untouched: {reason}") from None
    mine = {file.name: checksum(file) for file in temporary.glob(f"__{worker.rank}_*.distcp")}
    collected = [None] * worker.world_size
    dist.all_gather_object(collected, (generators, mine))

    def finish():
        state = {k: part.state_dict() for k, part in parts.items() if k not in SHARDED}
        state |= {"step": step, "run": run, "generators": [g for g, _ in collected]}
        state["checksums"] = {name: c for _, files in collected for name, c in files.items()}
        state["checksums"][".metadata"] = checksum(temporary / ".metadata")
        write(temporary / "run.pt", state)
        os.replace(temporary, final)  # from here on the new save counts
        for old in folders(path)[:-1]:
            shutil.rmtree(old, ignore_errors=True)

    together(lambda: finish() if worker.is_main else None)


def resume(path: Path, parts: dict, run: dict, worker: Worker) -> int:
    """All ranks call this. Restore `parts` from the newest save in `path`; return the steps done.

    Returns 0 if there is none. The number of ranks may differ from that of the ranks that saved.
    Raises `UserError` if a file is broken or foreign, or of a run with other settings.
    """
    box = [None]
    if worker.is_main:
        try:
            box = [newest(path)]
        except UserError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], UserError):
        raise box[0]
    if box[0] is None:
        return 0
    folder, state = box[0]
    for name, value in run.items():
        if state["run"].get(name) != value:
            raise UserError(
                f"{path} was trained with --{name.replace('_', '-')} {state['run'].get(name)}, "
                f"not {value}: choose another --output-dir"
            )
    # Each rank checks a part of the files. torch checks no sums: a flipped bit would load silently.
    mine = sorted(state["checksums"].items())[worker.rank :: worker.world_size]
    together(lambda: verify(folder, mine))
    load_sharded(folder, parts)
    for name, part in parts.items():
        if name not in SHARDED:
            part.load_state_dict(state[name])
    # With another number of ranks the data order is the same, but the ranks draw new numbers.
    if len(state["generators"]) == worker.world_size:
        mine = state["generators"][worker.rank]
        torch.set_rng_state(mine["cpu"])
        if worker.device.type == "cuda" and "cuda" in mine:
            torch.cuda.set_rng_state(mine["cuda"], worker.device)
    if worker.is_main:
        print(f"continuing from {folder} after step {state['step']}", flush=True)
    return state["step"]


def sharded_state(parts: dict) -> dict:
    """What the ranks hold different parts of, by the names that the unsharded model would use."""
    model, optimizer = parts["model"], parts["optimizer"]
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def load_sharded(folder: Path, parts: dict) -> None:
    """Fill the shards of this rank from `folder`, whatever ranks wrote it; all ranks call this."""
    state = sharded_state(parts)  # its tensors say which parts this rank wants; they are filled
    try:
        dcp.load(state, checkpoint_id=folder)
    except dcp.api.CheckpointException:
        raise UserError(f"{folder} does not fit this model: choose another --output-dir") from None
    set_model_state_dict(parts["model"], state["model"])
    set_optimizer_state_dict(parts["model"], parts["optimizer"], state["optimizer"])


def folders(path: Path) -> list[Path]:
    """The whole saves in `path`, the oldest first."""
    return sorted(path.glob("step_*"))


def newest(path: Path) -> tuple[Path, dict] | None:
    """The newest save in `path` and what its run.pt holds, or None if there is no save."""
    if not (saves := folders(path)):
        return None
    file = saves[-1] / "run.pt"
    try:
        with ZipFile(file) as zipped:
            if bad := zipped.testzip():
                raise BadZipFile(f"wrong checksum in {bad}")
        state = torch.load(file, map_location="cpu", weights_only=True)
        return saves[-1], {key: state[key] for key in ("step", "run", *state)}  # KeyError: foreign
    except Exception as error:  # zip, pickle and OS errors: all mean that the file is not ours
        raise UserError(
            f"{file} is no readable checkpoint ({type(error).__name__}): move {path} away to start "
            "anew"
        ) from None


def verify(folder: Path, checksums: list[tuple[str, int]]) -> None:
    for name, expected in checksums:
        file = folder / name
        if not file.exists() or checksum(file) != expected:
            raise UserError(
                f"{file} is {'broken' if file.exists() else 'missing'}: move {folder} away to "
                "start anew"
            )


def checksum(file: Path) -> int:
    """CRC-32 of a file, read piece by piece."""
    value = 0
    with open(file, "rb") as content:
        while piece := content.read(1 << 20):
            value = zlib.crc32(piece, value)
    return value


def clear(folder: Path) -> None:
    """Make `folder` an empty one: a save that was killed may have left something."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write(file: Path, state: dict) -> None:
    with open(file, "wb") as content:
        torch.save(state, content)
        content.flush()
        os.fsync(content.fileno())  # the bytes are on the disk before the folder gets its name


def together(action: Callable[[], object]) -> None:
    """Every rank runs `action`; where one fails, all raise its error: none waits for one that left.

    Raises `UserError`.
    """
    error = None
    try:
        action()
    except (UserError, OSError, RuntimeError) as failure:  # RuntimeError: torch.save, full disk
        error = str(failure)
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for message in filter(None, errors):
        raise UserError(message)
