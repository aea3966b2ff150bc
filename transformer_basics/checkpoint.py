"""Save and load sharded checkpoints: a kill at any moment leaves a complete one on the disk.

A checkpoint folder holds one folder per save. The newest few are kept: should one be broken, the
run continues from the one before.

    checkpoints/step_00000044/__0_0.distcp, __1_0.distcp, ...  what each rank holds: its shards
    checkpoints/step_00000044/.metadata                        which part of which tensor lies where
    checkpoints/step_00000044/run.pt                           step, settings, generators, checksums

Every rank writes its own part, and reads the saved shards that overlap its part, also when the mesh
has changed: tensors have the names and shapes of the full model, and are resharded while they are
read. No part of the model travels between ranks; on several nodes the folder lies on a disk that
all nodes share.
"""

import copy
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from alone import on_rank_0
from arguments import DiskError, UserError, disk_error
from runtime import Worker
from saves import (
    checksum,
    make_empty,
    newest_of,
    problem_of,
    read_run,
    saves,
    set_aside,
    write_file,
)
from sharded_state import (
    check_parts,
    load_model_state,
    load_sharded,
    model_state,
    optimizer_numbers,
    sharded_state,
    small_parts,
)


def check_shared(folder: Path, worker: Worker) -> None:
    """All ranks call this, before they train. Raise `UserError` unless all see the same `folder`.

    Otherwise each host would keep its own shards, and none of them could be loaded.
    """
    probe = [folder / f"probe_{uuid.uuid4().hex}"]
    dist.broadcast_object_list(probe, src=0)

    def write() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe[0].touch()
        except OSError as error:
            raise disk_error(f"cannot save to {folder}", error) from None

    together(lambda: write() if worker.is_main else None)
    deadline = time.monotonic() + 10  # a network file system may need a moment
    while not probe[0].exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = None if probe[0].exists() else socket.gethostname()
    hosts = [None] * worker.world_size
    dist.all_gather_object(hosts, (blind, socket.gethostname()))
    if worker.is_main:
        probe[0].unlink(missing_ok=True)
    for rank, (host, _) in enumerate(hosts):
        if host:
            raise UserError(
                f"{folder} is not on a disk that all ranks share: rank {rank} on {host} does not "
                f"see what rank 0 on {hosts[0][1]} writes there: choose another --output-dir"
            )


def save_checkpoint(
    folder: Path, parts: dict, step: int, run: dict, worker: Worker, keep: int = 2
) -> None:
    """All ranks call this. They write into a temporary folder, which is then renamed: in one step.

    parts: name -> object with state_dict() and load_state_dict(). "model" and every
        torch.optim.Optimizer are saved as shards. Of the other parts run.pt holds the state that
        they have on rank 0, and all ranks load that.
    step: optimizer steps done, which is also the position in the data.
    run: settings, so that the state is continued under the same ones.
    keep: how many of the newest saves stay.
    Raises `UserError` if it cannot be written, or if another run saves to `folder`; those before
    are then untouched.
    """
    start_save(folder, parts, step, run, worker, keep)()


def start_save(
    folder: Path,
    parts: dict,
    step: int,
    run: dict,
    worker: Worker,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Callable[[], None]:
    """Like `save_checkpoint`, but the save counts only when all ranks have called what is returned.

    group: None: everything is written now. A Gloo group that is used for nothing else: the shards
        are copied now, and a thread writes them while training goes on.
    """
    # A name per step: a network file system may take an old name for the folder that had it before.
    temporary, final = folder / f"unfinished_{step:08}", folder / f"step_{step:08}"

    def own_checksums(saving: Future | None = None) -> dict[str, int]:
        """Of the files of this rank, once they are written: dcp itself keeps no sums."""
        if saving:
            saving.result()
        own_files = temporary.glob(f"__{worker.rank}_*.distcp")
        return {file.name: checksum(file) for file in own_files}

    def begin() -> None:
        check_parts(parts)
        if not worker.is_main:
            return
        foreign = [other.name for other in saves(folder) if other >= final]
        if foreign:  # this run began after the newest save
            raise UserError(
                f"another run wrote {foreign[-1]} to {folder}: choose another --output-dir"
            )
        for left in folder.glob("unfinished*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        make_empty(temporary)

    together(begin)
    generators = {"cpu": torch.get_rng_state()}
    kind = worker.device.type
    if kind != "cpu":
        generators[kind] = torch.get_device_module(kind).get_rng_state(worker.device)
    state = {name: part.state_dict() for name, part in small_parts(parts).items()}
    state = copy.deepcopy(state)  # training may go on while it is saved
    state |= {"step": step, "run": run}
    numbers = optimizer_numbers(parts)
    sharded = sharded_state(parts)
    if group:
        # With a writer of its own, torch's thread makes a CUDA context on GPU 0, on every rank.
        writer = dcp.FileSystemWriter(temporary)
        saving = dcp.async_save(sharded, storage_writer=writer, process_group=group)
        checksums = ThreadPoolExecutor(1).submit(own_checksums, saving)

    def finish() -> None:
        try:
            write()
        except UserError:  # on all ranks: none of them writes any more
            if worker.is_main:
                shutil.rmtree(temporary, ignore_errors=True)  # it may be what fills the disk
            raise

    def write() -> None:
        try:
            if group:
                own = checksums.result()
            else:
                dcp.save(sharded, checkpoint_id=temporary)
                own = own_checksums()
        except dcp.api.CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise DiskError(
                f"cannot write {folder}, those before are untouched: {reason}"
            ) from None
        # Only small things are collected: the sums, the states of the random generators of a rank,
        # which no other rank has, and the numbers of its optimizers.
        collected = [None] * worker.world_size
        dist.all_gather_object(collected, (generators, own, numbers))
        on_rank_0(lambda: write_run(collected), worker, f"writing {temporary / 'run.pt'}")

    def write_run(collected: list[tuple]) -> None:
        try:
            complete(collected)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch.save, full disk
            raise DiskError(f"cannot write {folder}, those before are untouched: {error}") from None

    def complete(collected: list[tuple]) -> None:
        checksums = {".metadata": checksum(temporary / ".metadata")}
        for _, checksums_of_rank, _ in collected:
            checksums.update(checksums_of_rank)
        missing = [name for name in checksums if not (temporary / name).is_file()]
        if missing:
            raise UserError(
                f"cannot save to {folder}: rank 0 does not see {missing[0]}, which another rank "
                "wrote: it is not on a disk that all ranks share"
            )
        state["generators"] = [generators for generators, _, _ in collected]
        state["optimizers"] = {}
        for _, _, numbers_of_rank in collected:  # the stages of a pipeline have other parameters
            for name, of_parameters in numbers_of_rank.items():
                state["optimizers"].setdefault(name, {}).update(of_parameters)
        state["checksums"] = checksums
        write_file(temporary / "run.pt", state)
        os.replace(temporary, final)  # from here on the new save counts
        for old in saves(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    if not group:
        finish()
        return lambda: None
    return finish


def resume(folder: Path, parts: dict, run: dict, worker: Worker) -> tuple[int, dict]:
    """All ranks call this. Restore `parts` from the newest save in `folder` that is whole.

    Returns the steps done and the settings that were saved; 0 and {} if there is no save. The mesh
    may differ from that of the ranks that saved.
    run: what of these settings must be the same now.
    Raises `UserError` if no save is whole, or if it is foreign or of a run with other settings.
    """
    together(lambda: check_parts(parts))  # now, and not at the first save
    save, broken = newest_whole(folder, worker)
    if save is None:
        return 0, {}
    state = read_run(save)
    for name, value in run.items():
        saved = state["run"].get(name, value)  # a flag that is newer than the run
        if saved != value:
            raise UserError(
                f"{folder} was trained with {name} = {saved}, not {value}: choose another "
                "--output-dir"
            )
    unknown = parts.keys() - {"model"} - state.keys() - state.get("optimizers", {}).keys()
    if unknown:
        raise UserError(f"{save} has no part {min(unknown)!r}: choose another --output-dir")
    load_sharded(save, parts, state.get("optimizers", {}))
    for name, part in small_parts(parts).items():
        part.load_state_dict(state[name])
    # With another number of ranks, or on another device, the ranks draw new numbers.
    torch.manual_seed((torch.initial_seed() + 1_000_003 * state["step"]) % 2**63)
    if len(state["generators"]) == worker.world_size:
        own_generators = state["generators"][worker.rank]
        torch.set_rng_state(own_generators["cpu"])
        kind = worker.device.type
        if kind != "cpu" and kind in own_generators:
            torch.get_device_module(kind).set_rng_state(own_generators[kind], worker.device)
    if worker.is_main:
        for newer, problem in broken.items():
            print(f"warning: {problem}; continuing from the save before it")
            set_aside(newer)
        print(f"continuing from {save} after step {state['step']}", flush=True)
    return state["step"], state["run"]


def newest_whole(folder: Path, worker: Worker) -> tuple[Path | None, dict[Path, str]]:
    """All ranks call this. The newest save that is whole, and what is wrong with those after it.

    None if there is no save. Raises `UserError` if none of them is whole.
    """
    candidates = [saves(folder)]
    dist.broadcast_object_list(candidates, src=0)  # names only: what is in them, each rank reads

    def problem_on_any_rank(save: Path) -> str | None:
        """Together the ranks read every file once."""
        problems = [None] * worker.world_size
        dist.all_gather_object(problems, problem_of(save, worker.rank, worker.world_size))
        return next(filter(None, problems), None)

    save, problems = newest_of(candidates[0], problem_on_any_rank)
    return save, dict(zip(reversed(candidates[0]), problems, strict=False))


def load_model(
    folder: Path, make: Callable[[dict], torch.nn.Module], worker: Worker
) -> tuple[torch.nn.Module, dict]:
    """All ranks call this. The model of the newest save in `folder`, and the settings of its run.

    make: the settings -> the model, spread over the mesh of those who load it.
    Raises `UserError` if there is no save, or a broken or foreign one.
    """
    save, broken = newest_whole(folder, worker)
    if save is None:
        raise UserError(f"there is no checkpoint in {folder}")
    if worker.is_main:
        for problem in broken.values():
            print(f"warning: {problem}; using the save before it", flush=True)
    run = read_run(save)["run"]
    try:
        model = make(run)
    except KeyError:
        raise UserError(f"{save} is of another script") from None
    state = model_state(model)
    try:
        dcp.load(state, checkpoint_id=save)
    except dcp.api.CheckpointException:
        raise UserError(f"{save} does not hold this model") from None
    load_model_state(model, state)
    return model, run


def together(action: Callable[[], object]) -> None:
    """Every rank runs `action`; where one fails, all raise its error: none waits for one that left.

    Raises `UserError`.
    """
    error = None
    try:
        action()
    except UserError as failure:
        error = failure
    except OSError as failure:
        error = DiskError(str(failure))
    except RuntimeError as failure:  # of a state_dict(), for example
        error = UserError(f"{type(failure).__name__}: {failure}")
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for found in filter(None, errors):
        raise found
