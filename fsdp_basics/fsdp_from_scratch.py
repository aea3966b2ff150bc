"""Fully sharded data parallelism (FSDP) by hand: parameters are gathered only while they are used.

    python fsdp_basics/fsdp_from_scratch.py
    torchrun --standalone --nproc_per_node=2 fsdp_basics/fsdp_from_scratch.py
    torchrun --standalone --nproc_per_node=4 fsdp_basics/fsdp_from_scratch.py --keep --optimizer sgd

Each block is a unit; the root is a unit with all other parameters. Between steps a rank holds one
flat shard of every unit. A unit is gathered only around its forward and its backward:

    forward    all_gather the unit's parameters, compute, free them
    backward   all_gather them again, compute, reduce_scatter the gradients, free both
    step       an ordinary optimizer updates the shards

That is ZeRO-3. With --keep, parameters stay gathered between forward and backward: ZeRO-2. Hooks do
the work: before and after the module's forward, before its backward, and after its gradients.

The script compares FSDP by hand with torch's fully_shard and with one process. Look at the
differences (on 2 CPU ranks, fully_shard gives the same bits), at the bytes that a rank holds
between steps, at the most bytes that were gathered at one time, and at the order of events.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare_fsdp import compare, parse_args
from runtime import distributed_worker
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.elastic.multiprocessing.errors import record

# Before torch 2.13 they have the second names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(shard_by_hand, args, worker)


class Unit:
    """Parameters of `module` that are gathered, freed and reduced together; all of one dtype.

    shard: the parameter for the optimizer: 1 / world_size of the unit's numbers, flat, padded with
        zeros at the end.
    full_flat: all numbers of the unit, flat and padded. The module's parameters are views of it.
        It has memory only while the module computes, otherwise 0 bytes.
    keep: keep the parameters gathered between forward and backward.
    events: a list that receives ("gather" | "free" | "reduce", name, bytes of `full_flat`).
    """

    def __init__(self, name, module, params: dict[str, nn.Parameter], keep, group, events):
        self.name = name
        self.params = params
        self.keep = keep
        self.group = group
        self.events = events
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        flat = torch.cat([p.detach().flatten() for p in params.values()])
        self.full_flat = F.pad(flat, (0, -len(flat) % world_size))
        dist.broadcast(self.full_flat, group=group, group_src=0)  # one model on all ranks
        trainable = next(iter(params.values())).requires_grad
        self.shard = nn.Parameter(self.full_flat.chunk(world_size)[rank].clone(), trainable)
        # Autograd counts the in-place writes to each tensor that it saves for backward, and refuses
        # a tensor that was written to since. Our gather is such a write, although it restores the
        # same numbers. A parameter that is set through .data shares the memory of `full_flat`, but
        # has a counter of its own: a write into `full_flat` does not change the counter.
        for param, window in zip(params.values(), self.windows(self.full_flat), strict=True):
            param.data = window
        self.is_gathered = self.in_backward = False
        self.full_flat.untyped_storage().resize_(0)

        self.watches = []
        module.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        module.register_forward_hook(self.after_forward)
        if trainable:
            # Fires when this backward has the gradients of all parameters that it reaches. A tied
            # parameter counts once, after all its uses.
            register_multi_grad_hook(list(params.values()), self.reduce)
            for param in params.values():
                param.register_post_accumulate_grad_hook(drop_gradient)

    def windows(self, flat: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self.params.values()]
        pieces = flat[: sum(sizes)].split(sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self.params.values(), strict=True)]

    def gather(self) -> None:
        if not self.is_gathered:
            self.full_flat.untyped_storage().resize_(self.full_flat.nbytes)
            all_gather(self.full_flat, self.shard.detach(), group=self.group)
            self.is_gathered = True
            self.events.append(("gather", self.name, self.full_flat.nbytes))

    def free(self) -> None:
        if self.is_gathered:
            # Unlike `del`, this also frees the memory of the tensors that autograd has saved. The
            # next gather gives memory to all of them again.
            self.full_flat.untyped_storage().resize_(0)
            self.is_gathered = self.in_backward = False
            self.events.append(("free", self.name, self.full_flat.nbytes))

    def before_forward(self, module, args, kwargs) -> None:
        self.gather()
        if not self.shard.requires_grad and torch.is_grad_enabled():
            # Backward also needs a frozen unit, for the gradients of its inputs. No reduction
            # frees it, so free it after the last gradient of the module's inputs and parameters.
            others = (*tensors_in([args, kwargs]), *module.parameters())
            watched = [t for t in others if t.requires_grad]
            if watched:
                self.watches.append(register_multi_grad_hook(watched, self.after_backward))

    def after_forward(self, module, args, output) -> None:
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        for tensor in outputs:
            tensor.register_hook(self.before_backward)
        # Inside backward, activation checkpointing runs this forward again: do not free.
        if not self.in_backward and not (self.keep and outputs):
            self.free()

    def before_backward(self, gradient: Tensor) -> None:
        self.in_backward = True
        self.gather()

    def after_backward(self, gradients) -> None:
        self.free()
        while self.watches:
            self.watches.pop().remove()

    @torch.no_grad()
    def reduce(self, gradients: list[Tensor | None]) -> None:
        """Average the gradients over the ranks; each rank keeps its shard of them."""
        flat = torch.zeros_like(self.full_flat)  # zero for parameters without a gradient
        for window, gradient in zip(self.windows(flat), gradients, strict=True):
            if gradient is not None:
                window.copy_(gradient)
        flat /= dist.get_world_size(self.group)
        shard_gradient = torch.empty_like(self.shard)
        reduce_scatter(shard_gradient, flat, group=self.group)
        if self.shard.grad is not None:
            shard_gradient += self.shard.grad
        self.shard.grad = shard_gradient
        self.events.append(("reduce", self.name, flat.nbytes))
        self.free()

    def full(self, shard: Tensor) -> dict[str, Tensor]:
        """Gather `shard` (or its gradient) from all ranks; returns full tensors by name."""
        flat = torch.empty_like(self.full_flat)
        all_gather(flat, shard.detach(), group=self.group)
        return dict(zip(self.params, self.windows(flat), strict=True))


def shard_by_hand(model: nn.Module, blocks, keep=False, group=None, events=None) -> list[Unit]:
    """Shard `model` over the ranks of `group`, in place. The optimizer takes the units' shards.

    blocks: the modules that become units. The root has all other parameters, and stays gathered
        from its forward to the end of its backward. A block may be called several times in a step.
    Every rank must call the same blocks in the same order. Freeze parameters before this call. The
    gradient of a parameter that backward does not reach is zero, not None.
    Raises ValueError if two units share a parameter.
    """
    if events is None:
        events = []
    owners, units = {}, []
    chosen = set(blocks)
    blocks = [module for module in model.modules() if module in chosen]  # each once, in order
    names = {module: name for name, module in model.named_modules()} | {model: "root"}
    for module in (*blocks, model):
        kinds = {}  # (trainable?, dtype) -> name -> parameter: a flat tensor is of one kind
        for name, param in parameters_of(module, blocks):
            if param not in owners:
                owners[param] = names[module]
                kinds.setdefault((param.requires_grad, param.dtype), {})[name] = param
            elif owners[param] != names[module]:
                raise ValueError(
                    f"{name} of unit {names[module]} belongs to unit {owners[param]}, too, and "
                    "would be freed by one while the other computes: leave both to one unit"
                )
        prefix = f"{names[module]}." if module is not model else ""
        for kind in kinds.values():
            params = {prefix + name: param for name, param in kind.items()}
            keep_it = keep or module is model
            units.append(Unit(names[module], module, params, keep_it, group, events))
    return units


def parameters_of(module: nn.Module, blocks, prefix: str = ""):
    """(name, parameter) of a module without its blocks; a tied parameter has several names."""
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, param
    for name, child in module.named_children():
        if child not in blocks:
            yield from parameters_of(child, blocks, f"{prefix}{name}.")


def drop_gradient(param: nn.Parameter) -> None:
    param.grad = None  # reduce() has it; the optimizer reads the gradient of the shard


def tensors_in(x) -> list[Tensor]:
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, list | tuple):
        return [tensor for item in x for tensor in tensors_in(item)]
    return [x] if isinstance(x, Tensor) else []


if __name__ == "__main__":
    main()
