"""Save and load checkpoints: after a kill at any moment, a complete one is on the disk.

OUTPUT_DIR/checkpoints/step_00000044.pt     the newest few are kept: if one is broken, the run
OUTPUT_DIR/checkpoints/step_00000066.pt     continues from the previous one
"""

import os
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from zipfile import BadZipFile, ZipFile

import torch
import torch.distributed as dist
from alone import on_rank_0
from arguments import DiskError, UserError, disk_error
from runtime import Worker


def save_checkpoint(
    folder: Path, parts: dict, step: int, run: dict, worker: Worker, keep: int = 2
) -> None:
    """All ranks call this; rank 0 collects the random states of all ranks and writes the file.

    parts: name -> object with state_dict() and load_state_dict(); "model" is a module.
    step: optimizer steps done, which is also the position in the data.
    run: the settings, which `resume` compares with those of the run that continues.
    keep: the number of newest checkpoints to keep.
    Raises `UserError` if the write fails, or if another run saves to `folder`; older checkpoints
    stay untouched.
    """
    generators = {"cpu": torch.get_rng_state()}
    kind = worker.device.type
    if kind != "cpu":
        generators[kind] = torch.get_device_module(kind).get_rng_state(worker.device)
    all_generators = [None] * worker.world_size
    dist.all_gather_object(all_generators, generators)
    file = folder / f"step_{step:08}.pt"

    def write() -> None:
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"step": step, "run": run, "generators": all_generators}
        state["buffers"] = dict(parts["model"].named_buffers())  # a state dict may omit some
        state["updated"] = updated_names(parts)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            foreign = [other.name for other in saves(folder) if other >= file]
            if foreign:  # this run began after the newest save
                raise UserError(
                    f"another run wrote {foreign[-1]} to {folder}: choose another --output-dir"
                )
            write_file(file, state)
            killed = folder.glob("step_*.tmp")  # what a kill has left of a save
            for old in [*saves(folder)[:-keep], *killed]:
                old.unlink()
        except OSError as error:
            raise DiskError(f"cannot save to {folder}: {error}") from None

    on_rank_0(write, worker, f"writing {file}")


def resume(folder: Path, parts: dict, run: dict, worker: Worker) -> tuple[int, dict]:
    """All ranks call this. Restore `parts` from the newest intact checkpoint in `folder`.

    Returns the steps done and the saved settings; 0 and {} if there is no checkpoint.
    run: the settings that must equal the saved ones.
    Raises `UserError` if no checkpoint can be read, or if it is foreign or has other settings.
    """
    # Rank 0 reads and sends, so that all ranks continue from the same file, with or without a
    # shared disk.
    found = {}

    def read() -> None:
        check_writable(folder)
        try:
            found["state"] = newest(folder)
        except OSError as error:
            why = f"{error.filename} cannot be read ({error.strerror})"
            raise DiskError(f"{why}: start again when it can, or move it away") from None

    on_rank_0(read, worker, f"reading {folder}")
    state = broadcast_state(found.get("state"), worker)
    if state is None:
        return 0, {}
    for name, value in run.items():
        saved = state["run"].get(name, value)  # a flag that is newer than the run
        if saved != value:
            what = "other data:" if name == "data" else f"--{name.replace('_', '-')}"
            raise UserError(
                f"{folder} was trained with {what} {saved}, not {value}: choose another "
                "--output-dir"
            )
    for name, updated in updated_names(parts).items():
        if state.get("updated", {}).get(name, updated) != updated:
            raise UserError(
                f"{folder} was trained by an {name} with other parameters, or in another order: "
                "choose another --output-dir"
            )
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        for name, buffer in parts["model"].named_buffers():
            # One that is not in the state dict may grow in forward, which computes it again.
            if buffer.shape == state["buffers"][name].shape:
                buffer.copy_(state["buffers"][name])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{folder} does not fit this model ({reason}): choose another --output-dir"
        ) from None
    # With another number of ranks, or on another device, the ranks draw new numbers.
    torch.manual_seed((torch.initial_seed() + 1_000_003 * state["step"]) % 2**63)
    if len(state["generators"]) == worker.world_size:
        mine = state["generators"][worker.rank]
        torch.set_rng_state(mine["cpu"])
        kind = worker.device.type
        if kind != "cpu" and kind in mine:
            torch.get_device_module(kind).set_rng_state(mine[kind], worker.device)
    if worker.is_main:
        print(f"continuing from {folder} after step {state['step']}", flush=True)
    return state["step"], state["run"]


def updated_names(parts: dict) -> dict[str, list[str]]:
    """optimizer -> its parameters, in the order by which load_state_dict finds their state."""
    names = {p: name for name, p in parts["model"].named_parameters()}
    return {
        part: [names.get(p, "?") for group in thing.param_groups for p in group["params"]]
        for part, thing in parts.items()
        if isinstance(thing, torch.optim.Optimizer)
    }


def check_writable(folder: Path) -> None:
    """Raise `UserError` now, before an epoch of work, if nothing can be saved in `folder`."""
    probe = folder / "probe.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise disk_error(f"cannot save to {folder}", error) from None


def newest(folder: Path) -> dict | None:
    """The newest intact state in `folder`, on the CPU; None if nothing was saved.

    Newer files that are broken get another name, so that `keep` does not count them.
    """
    broken = []
    for file in reversed(saves(folder)):
        try:
            state = read_file(file)
        except UserError as error:
            broken.append((file, error))
            continue
        for bad, error in broken:
            print(f"warning: {error}; continuing from the one before", flush=True)
            bad.rename(bad.with_suffix(".broken"))
        return state
    if broken:
        raise broken[0][1]
    return None


def saves(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the oldest first."""
    return sorted(path for path in folder.glob("step_*.pt") if path.stem[5:].isdigit())


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
        torch.load(temporary, map_location="cpu", mmap=True, weights_only=True)  # reads no tensors
        os.replace(temporary, path)
    except UnpicklingError as error:
        temporary.unlink(missing_ok=True)
        _, _, what = " ".join(str(error).split()).partition("WeightsUnpickler error: ")
        raise UserError(
            f"cannot save: no run could load a part's state again ({what[:150]})"
        ) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch.save reports a full disk
        temporary.unlink(missing_ok=True)
        raise DiskError(f"cannot write {path}, those before are untouched: {error}") from None


def read_file(path: Path) -> dict:
    """Return the state in `path` on the CPU.

    Raises `UserError` with the file's name if it is truncated or not a checkpoint of this script,
    and OSError if it cannot be read.
    """
    try:
        with ZipFile(path) as file:  # torch.save writes a zip file; torch.load checks no sums
            if bad := file.testzip():
                raise BadZipFile(f"wrong checksum in {bad}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of zip and pickle: the file is broken or foreign
        if isinstance(error, OSError):  # the disk's fault, perhaps for a moment: do not give it up
            raise
        raise UserError(f"{path} is no readable checkpoint ({type(error).__name__})") from None
    if not isinstance(state, dict) or not {"step", "run", "generators"} <= state.keys():
        raise UserError(f"{path} is not a checkpoint of this script")
    return state


def broadcast_state(state: dict | None, worker: Worker) -> dict | None:
    """Send rank 0's `state` (on the CPU) to all ranks: first its structure, then tensor by tensor.

    Each rank holds the state once, and no tensor is pickled or takes memory on a GPU. Tensors are
    sent dense and keep their strides on arrival: AdamW(fused=True) expects a parameter and its
    state to have the same memory layout.
    """
    form = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), state)
    box = [form]
    dist.broadcast_object_list(box, src=0)
    if not worker.is_main:
        state = map_tensors(lambda tensor: torch.empty_like(tensor, device="cpu"), box[0])

    def send(tensor: torch.Tensor) -> None:
        if tensor.numel():
            dense = tensor.contiguous()  # a slice would send the wrong numbers
            dist.broadcast(dense.view(-1).view(torch.uint8), src=0)  # bytes: any dtype
            if not worker.is_main:
                tensor.copy_(dense)

    map_tensors(send, state)
    return state


def map_tensors(function: Callable[[torch.Tensor], object], value):
    """`value` with each tensor in its dicts and lists replaced by function(tensor)."""
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]
    return function(value) if isinstance(value, torch.Tensor) else value
