"""The tensors of a sharded training state, by the names and shapes of the unsharded model.

checkpoint.py saves and loads them. Every rank holds its own shards of these tensors, also when the
mesh has changed since they were saved: torch reshards them while it reads.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from arguments import UserError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)


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
    """What the ranks hold different parts of, by the names that the unsharded model would use."""
    state = model_state(parts["model"])  # first: it shards again what an evaluation left gathered
    state["optimizer"] = {f"{name}.{key}": value for name, key, value in optimizer_tensors(parts)}
    return state


def optimizer_tensors(parts: dict) -> list[tuple[str, str, Tensor]]:
    """(name of the parameter, name of the state, its tensor) of what the optimizer has so far.

    A parameter that is frozen, or has had no gradient yet, has no state. (torch's
    get_optimizer_state_dict asks for that of all trainable parameters, and so cannot load then.)
    """
    names = {p: name for name, p in parts["model"].named_parameters()}
    return [
        (names[p], key, value)
        for p, state in parts["optimizer"].state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    ]


def load_sharded(save: Path, parts: dict) -> None:
    """Fill the shards of this rank from `save`, whatever ranks wrote it; all ranks call this."""
    model, optimizer = parts["model"], parts["optimizer"]
    # The tensors say which parts this rank wants: the shapes are those of the whole model.
    state = {**model_state(model), "optimizer": {}}
    parameters = dict(model.named_parameters())
    for entry, saved in dcp.FileSystemReader(save).read_metadata().state_dict_metadata.items():
        kind, _, path = entry.partition(".")
        name, _, key = path.rpartition(".")
        if kind == "optimizer" and name in parameters:  # else it is another stage's of a pipeline
            state["optimizer"][path] = empty_state(parameters[name], saved)
    try:
        dcp.load(state, checkpoint_id=save)
    except dcp.api.CheckpointException as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"{save} does not fit this model ({reason}): choose another --output-dir"
        ) from None
    load_model_state(model, state)
    numbers = {p: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    by_number = {}
    for path, value in state["optimizer"].items():
        name, _, key = path.rpartition(".")
        by_number.setdefault(numbers[parameters[name]], {})[key] = value
    # The settings of the optimizer are the program's; its tensors are the save's.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": by_number})


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
