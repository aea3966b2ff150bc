"""The tensors of a sharded training state, by the names and shapes of the unsharded model.

checkpoint.py saves and loads them. Every rank holds its own shards of these tensors, also when the
mesh has changed since they were saved: torch reshards them while it reads.
"""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from arguments import UserError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor


def model_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Parameters and buffers by the names of the unsharded model; loading fills these tensors.

    A weight that several modules share (tied embeddings) has one entry, under its first name. A
    state dict leaves buffers out that were registered with persistent=False, a rotary table for
    example. Nothing else would fill them in a model that was built on the meta device.
    """
    state = get_model_state_dict(model)
    every_name = dict(model.named_parameters(remove_duplicate=False)).keys()
    for second_name in every_name - dict(model.named_parameters()).keys():
        state.pop(second_name, None)
    return {
        "model": state,
        "buffers": {name: b for name, b in model.named_buffers() if name not in state},
    }


def sharded_state(parts: dict) -> dict:
    """What the ranks hold different parts of, by the names that the unsharded model would use.

    "model", "buffers", and each optimizer under the name of its part.
    """
    state = model_state(parts["model"])  # first: it shards again what an evaluation left gathered
    for part in optimizers(parts):
        state[part] = {
            f"{name}.{key}": value for name, key, value in optimizer_tensors(parts, part)
        }
    return state


def optimizers(parts: dict) -> dict[str, torch.optim.Optimizer]:
    return {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}


def small_parts(parts: dict) -> dict:
    """Those that are not sharded, and equal on all ranks: a GradScaler, for example."""
    return {n: part for n, part in parts.items() if n != "model" and n not in optimizers(parts)}


def optimizer_tensors(parts: dict, part: str = "optimizer") -> list[tuple[str, str, Tensor]]:
    """(name of the parameter, name of the state, its tensor) of what an optimizer has so far.

    A parameter that is frozen, or has had no gradient yet, has no state. (torch's
    get_optimizer_state_dict asks for that of all trainable parameters, and so cannot load then.)
    """
    names = {p: name for name, p in parts["model"].named_parameters()}
    return [
        (names[p], key, value)
        for p, state in parts[part].state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    ]


def optimizer_numbers(parts: dict) -> dict[str, dict[str, tuple[dict, dict]]]:
    """part -> parameter -> (its group's entries, its state that is not a tensor), of this rank.

    Some optimizers count steps or adapt a rate in numbers of Python. They are small, and equal on
    all ranks that have the parameter.
    """
    names = {p: name for name, p in parts["model"].named_parameters()}
    found = {}
    for part, optimizer in optimizers(parts).items():
        found[part] = {}
        for group in optimizer.param_groups:
            entries = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                numbers = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
                found[part][names[p]] = (entries, numbers)
    return copy.deepcopy(found)  # training may go on while it is saved


def check_parts(parts: dict) -> None:
    """Raise `UserError` if a save of `parts` would lack something, or hold only rank 0's share."""
    model_state(parts["model"])  # it shards again what an evaluation left gathered
    known = set(parts["model"].parameters())
    for part, optimizer in optimizers(parts).items():
        if not all(p in known for group in optimizer.param_groups for p in group["params"]):
            raise UserError(
                f"part {part!r} updates parameters that are not in part 'model': make it after "
                "fully_shard, and let 'model' be one module that holds all networks"
            )
        check_optimizer(part, optimizer)
    for part, parameters in optimizer_numbers(parts).items():
        for name, (entries, numbers) in parameters.items():
            for key, value in (entries | numbers).items():
                if not (is_plain(value) or (key in entries and type(value) is Tensor)):
                    raise UserError(
                        f"part {part!r} has a {type(value).__name__} as {key!r} of {name}, which "
                        "cannot be saved: let the optimizer keep tensors, numbers or texts"
                    )
    for part, thing in small_parts(parts).items():
        if holds_shards(thing.state_dict()):
            raise UserError(
                f"part {part!r} holds shards, of which only rank 0's would be saved: shards are "
                "saved of part 'model', and of each part that is a torch.optim.Optimizer"
            )


def check_optimizer(part: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise `UserError` if it keeps more than a save takes from .state and .param_groups."""
    packed = optimizer.state_dict()
    more = sorted(packed.keys() - {"state", "param_groups"})
    if more or len(packed["state"]) != len(optimizer.state):
        raise UserError(f"part {part!r} has a state dict of its own, of which a save lacks a part")
    for p, state in optimizer.state.items():
        if not isinstance(p, Tensor):
            raise UserError(f"part {part!r} has state of {p!r}, which is no parameter")
        for key, value in state.items():
            if not isinstance(key, str) or "." in key:
                raise UserError(f"part {part!r} has a state named {key!r}: use words without dots")
            is_share = isinstance(p, DTensor) and type(value) is Tensor and value.numel() > 1
            if is_share and value.shape == p.to_local().shape and p.device_mesh.size() > 1:
                raise UserError(
                    f"part {part!r} has each rank's own numbers in the plain tensor {key!r}, of "
                    "which only one rank's would be saved: make it like the parameter, a DTensor"
                )


def is_plain(value) -> bool:
    """Whether torch.load(weights_only=True) reads it, and it does not depend on the rank."""
    if type(value) in (list, tuple, dict):
        return all(map(is_plain, value.values() if type(value) is dict else value))
    return value is None or type(value) in (bool, int, float, str)


def holds_shards(value) -> bool:
    if isinstance(value, dict):
        return any(map(holds_shards, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_shards, value))
    return isinstance(value, DTensor)


def load_sharded(save: Path, parts: dict, numbers: dict) -> None:
    """Fill the shards of this rank from `save`, whatever ranks wrote it; all ranks call this.

    numbers: the `optimizer_numbers` of all ranks that wrote it.
    """
    model = parts["model"]
    # The tensors say which parts this rank wants: the shapes are those of the whole model.
    state = model_state(model) | {part: {} for part in optimizers(parts)}
    parameters = dict(model.named_parameters())
    updated = {
        part: {p for group in optimizer.param_groups for p in group["params"]}
        for part, optimizer in optimizers(parts).items()
    }
    listed = dcp.FileSystemReader(save).read_metadata().state_dict_metadata
    for name, buffer in list(state["buffers"].items()):
        saved = listed.get(f"buffers.{name}")
        if saved and saved.size != buffer.shape:  # it grew in forward
            path, _, key = name.rpartition(".")
            grown = torch.empty(saved.size, dtype=buffer.dtype, device=buffer.device)
            setattr(model.get_submodule(path), key, grown)
            state["buffers"][name] = grown
    for entry, saved in listed.items():
        part, _, path = entry.partition(".")
        parameter = parameters.get(path.rpartition(".")[0])
        # Else it is another stage's of a pipeline, or one that this optimizer does not update now.
        if parameter in updated.get(part, ()):
            state[part][path] = empty_state(parameter, saved)
    try:
        dcp.load(state, checkpoint_id=save)
    except dcp.api.CheckpointException as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"{save} does not fit this model ({reason}): choose another --output-dir"
        ) from None
    check_nothing_left(save, [e for e in listed if e.startswith("model.")], state["model"])
    load_model_state(model, state)
    for part, optimizer in optimizers(parts).items():
        load_optimizer(optimizer, model, state[part], numbers.get(part, {}))


def check_nothing_left(save: Path, saved: list[str], wanted: dict[str, Tensor]) -> None:
    """All ranks call this. Raise `UserError` if no rank's model has an entry that was saved."""
    names = sorted(entry.removeprefix("model.") for entry in saved)
    device = next(iter(wanted.values())).device
    found = torch.tensor([name in wanted for name in names], dtype=torch.uint8, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)  # the stages of a pipeline want different ones
    left = [name for name, one in zip(names, found.tolist(), strict=True) if not one]
    if left:
        raise UserError(
            f"{save} does not fit this model, which has no {left[0]}: choose another --output-dir"
        )


def load_optimizer(optimizer, model: nn.Module, tensors: dict, numbers: dict) -> None:
    """As optimizer.load_state_dict() of what was saved, but by the names of the parameters.

    So the entries of a group are the save's, where it knows a parameter of the group.
    """
    names = {p: name for name, p in model.named_parameters()}
    state = {}
    for path, value in tensors.items():
        name, _, key = path.rpartition(".")
        state.setdefault(name, {})[key] = value
    packed = optimizer.state_dict()
    by_number = {}
    for group, own in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        for number, p in zip(group["params"], own["params"], strict=True):
            entries, of_parameter = numbers.get(names[p], ({}, {}))
            group.update(entries)
            whole = state.get(names[p], {}) | of_parameter
            if whole:
                by_number[number] = whole
    optimizer.load_state_dict({**packed, "state": by_number})


def load_model_state(model: nn.Module, state: dict) -> None:
    """state: `model_state(model)`, filled."""
    options = StateDictOptions(strict=False)  # second names of shared weights are missing
    set_model_state_dict(model, state["model"], options=options)


def empty_state(parameter: Tensor, saved) -> Tensor:
    """Memory for a tensor of the optimizer; saved: what dcp's metadata tell of it."""
    dtype = saved.properties.dtype
    if saved.size == parameter.shape:  # sharded like its parameter
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=dtype)  # the number of its steps
