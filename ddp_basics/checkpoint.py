"""Save a training state so that a kill at any moment leaves a whole file, and load it."""

import os
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import torch
import torch.distributed as dist
from arguments import UserError
from runtime import Worker


def write_file(path: Path, state: dict) -> None:
    """Replace `path` by `state` in one step: readers see the old file or the new one, never a part.

    state: nested dicts, lists, tensors, numbers, strings: what weights_only=True can load.
    Raises `UserError` if it cannot be written; the old file is then untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the bytes are on the disk before the name points to them
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch.save reports a full disk
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}, the one before is untouched: {error}") from None


def read_file(path: Path) -> dict | None:
    """Return the state in `path` on the CPU, or None if there is no such file.

    Raises `UserError`, naming the file, if it is truncated or not a checkpoint of ours.
    """
    if not path.exists():
        return None
    try:
        with ZipFile(path) as file:  # what torch.save writes; torch.load checks no sums
            if bad := file.testzip():
                raise BadZipFile(f"wrong checksum in {bad}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and OS errors: all mean that the file is not ours
        raise UserError(
            f"{path} is no readable checkpoint ({type(error).__name__}): move it away to start anew"
        ) from None
    if not isinstance(state, dict) or not {"step", "run", "generators"} <= state.keys():
        raise UserError(f"{path} is not a checkpoint of this script: move it away to start anew")
    return state


def save_checkpoint(path: Path, parts: dict, step: int, run: dict, worker: Worker) -> None:
    """All ranks call this; rank 0 writes. What differs between ranks, the random generators, is
    collected first.

    parts: name -> object with state_dict() and load_state_dict().
    step: optimizer steps done, which is also the position in the data.
    run: the settings under which alone the state may be continued.
    """
    generators = {"cpu": torch.get_rng_state()}
    if worker.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(worker.device)
    all_generators = [None] * worker.world_size
    dist.all_gather_object(all_generators, generators)
    if worker.is_main:
        state = {name: part.state_dict() for name, part in parts.items()}
        write_file(path, {**state, "step": step, "run": run, "generators": all_generators})


def resume(path: Path, parts: dict, run: dict, worker: Worker) -> int:
    """All ranks call this. Restore `parts` from `path`, if it exists, and return the steps done.

    Rank 0 reads and sends: all ranks continue from the same file, with or without a shared disk. An
    error is sent likewise, or the others would wait for a rank that has left.
    Raises `UserError` if the file is broken, foreign, or of a run with other settings.
    """
    box = [None]
    if worker.is_main:
        try:
            box = [read_file(path)]
        except UserError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    state = box[0]
    if isinstance(state, UserError):
        raise state
    if state is None:
        return 0
    for name, value in run.items():
        if state["run"].get(name) != value:
            raise UserError(
                f"{path} was trained with --{name.replace('_', '-')} {state['run'].get(name)}, "
                f"not {value}: choose another --output-dir"
            )
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except (KeyError, RuntimeError, ValueError):
        raise UserError(f"{path} does not fit this model: choose another --output-dir") from None
    # With another number of ranks the data order is the same, but the ranks draw new numbers.
    if len(state["generators"]) == worker.world_size:
        mine = state["generators"][worker.rank]
        torch.set_rng_state(mine["cpu"])
        if worker.device.type == "cuda" and "cuda" in mine:
            torch.cuda.set_rng_state(mine["cuda"], worker.device)
    if worker.is_main:
        print(f"continuing from {path} after step {state['step']}", flush=True)
    return state["step"]
