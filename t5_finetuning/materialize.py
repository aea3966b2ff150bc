"""Give a sharded model on the meta device, which has only shapes, memory and initial values.

model = build_on_meta(build)
fully_shard(model)              # each rank will hold its shards
allocate(model, device)
initialize(model, build, worker)    # or load a checkpoint
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from alone import on_rank_0
from arguments import UserError
from runtime import Worker
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes, with shapes and no memory: no rank needs room for the whole model.

    Raises `UserError` naming a parameter without a dimension, or without a number, or if `build`
    reads the numbers of a tensor.
    """
    with torch.device("meta"):
        try:
            model = build()
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise UserError(
                f"the model is built on the meta device, where tensors have no numbers ({error}): "
                'make a tensor whose numbers you read in `with torch.device("cpu"):`'
            ) from error
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0 or parameter.numel() == 0:
                raise UserError(
                    f"the parameter {name} has the shape {tuple(parameter.shape)}, which FSDP does "
                    "not shard: give a scalar the shape (1,), remove an empty one"
                )
            parameter.data = parameter.data.contiguous()  # FSDP takes no slice
    return model


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give a sharded model on the meta device memory for this rank's shards, without values yet.

    A buffer that several modules share becomes one buffer for each of them.
    Raises `UserError` naming a tensor that is neither a parameter nor a buffer.
    """
    model.to_empty(device=device)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if any(tensor.is_meta for tensor in tensors_in(value)):
                raise UserError(
                    f"{name or 'the model'} has a tensor {key!r} that is neither a parameter nor a "
                    "buffer, which nothing fills in a sharded model: use register_buffer()"
                )


def tensors_in(value) -> list[Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def initialize(model: nn.Module, build: Callable[[], nn.Module], worker: Worker) -> None:
    """Give an allocated model the values of an ordinarily built one; all ranks call it.

    build: makes the whole model with its values, on the CPU. Only rank 0 calls it: its host needs
    room for the whole model once, when a new run starts. Each parameter is then broadcast, and
    every rank keeps its shard. So all worlds begin with the parameters of one process, and no GPU
    ever holds more than one whole parameter. Buffers are broadcast too, also those that are not in
    the state dict (persistent=False), such as a rotary table. The model may have been used before.
    """
    for module in model.modules():  # a forward without a backward has left the root gathered
        if isinstance(module, FSDPModule):
            module.reshard()
    built = []
    on_rank_0(lambda: built.append(build()), worker, "building the whole model")
    state = built[0].state_dict() if built else {}
    for name, value in state.items():
        if isinstance(value, Tensor):  # of a slice the wrong numbers would be sent
            state[name] = value.contiguous()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    values = dict(built[0].named_buffers(remove_duplicate=False)) if built else {}
    for name, buffer in model.named_buffers():
        value = (values[name].to(buffer) if built else torch.empty_like(buffer)).contiguous()
        if value.numel():
            dist.broadcast(value.view(-1).view(torch.uint8), src=0)  # bytes: any dtype
        buffer.copy_(value)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers to `device`, once they have their values.

    Offloaded shards are on the CPU. FSDP copies parameters to the GPU, but no buffers.
    """
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))


def materialize(
    model: nn.Module, build: Callable[[], nn.Module], device: torch.device, worker: Worker
) -> nn.Module:
    """`allocate` and `initialize`: for what does not continue a run that was saved."""
    allocate(model, device)
    initialize(model, build, worker)
    return model
