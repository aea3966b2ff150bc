"""Fully sharded data parallelism by hand: parameters that are whole only while they are used.

    python fsdp_basics/fsdp_from_scratch.py
    torchrun --standalone --nproc_per_node=2 fsdp_basics/fsdp_from_scratch.py
    torchrun --standalone --nproc_per_node=4 fsdp_basics/fsdp_from_scratch.py --keep --optimizer sgd

The model is cut into units: each block is one, what is left is the root's. Between steps a rank
holds one flat shard of every unit. A unit is whole only around its forward and its backward:

    forward    all_gather the unit's parameters, compute, free them
    backward   all_gather them again, compute, reduce_scatter the gradients, free both
    step       the optimizer updates the shards: it is an ordinary one, and sees nothing else

That is ZeRO-3. With --keep, nothing is freed between forward and backward: ZeRO-2. Hooks do the
work: before and after the module's forward, before its backward, and when its gradients are there.

The script compares it with torch's fully_shard and with one process. Look at the differences (with
2 ranks on CPUs all bits agree with fully_shard's), at the bytes that a rank holds between steps, at
the most that was whole at one time, and at the order of events.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare_fsdp import compare, parse_args
from runtime import distributed_worker
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.elastic.multiprocessing.errors import record

# The second names are those of torch before 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        compare(shard_by_hand, args, worker)


class Unit:
    """Parameters of `module` that are gathered, freed and reduced together; all of one dtype.

    shard: what the optimizer gets: 1 / world_size of the unit's numbers, in one dim, with zeros at
        the end where they do not divide.
    full_flat: all numbers of the unit, padded. The module's parameters are windows into its memory,
        which is there only while the module computes: in between it has 0 bytes.
    keep: leave the parameters whole between forward and backward.
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
        dist.broadcast(self.full_flat, group=group, group_src=0)  # else shards of different models
        trainable = next(iter(params.values())).requires_grad
        self.shard = nn.Parameter(self.full_flat.chunk(world_size)[rank].clone(), trainable)
        # Autograd counts the in-place writes to each tensor that it saves for backward, and refuses
        # to use one that was written to since. Our gather is such a write, though of the numbers
        # that were there before. Set through .data, a parameter shares the memory of `full_flat`,
        # but keeps a counter of its own: what we write into `full_flat` is not held against it.
        for param, window in zip(params.values(), self.windows(self.full_flat), strict=True):
            param.data = window
        self.is_gathered = self.in_backward = False
        self.full_flat.untyped_storage().resize_(0)

        self.watches = []
        module.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        module.register_forward_hook(self.after_forward)
        if trainable:
            # Fires when this backward has computed all gradients that it will: a parameter that it
            # does not reach is not waited for. A tied one comes once, after all its uses.
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
            # Other than `del`, this also takes the memory from what autograd has saved, and the
            # next gather gives it back to all of them.
            self.full_flat.untyped_storage().resize_(0)
            self.is_gathered = self.in_backward = False
            self.events.append(("free", self.name, self.full_flat.nbytes))

    def before_forward(self, module, args, kwargs) -> None:
        self.gather()
        if not self.shard.requires_grad and torch.is_grad_enabled():
            # A frozen unit is needed in backward, too, for the gradients of its inputs. Nobody
            # reduces it: it may go when the gradients of all that the module has are there.
            others = (*tensors_in([args, kwargs]), *module.parameters())
            watched = [t for t in others if t.requires_grad]
            if watched:
                self.watches.append(register_multi_grad_hook(watched, self.after_backward))

    def after_forward(self, module, args, output) -> None:
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        for tensor in outputs:
            tensor.register_hook(self.before_backward)
        # Inside backward, this is activation checkpointing that runs the module once more.
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
        """Average the gradients over the ranks; each keeps those of its own shard."""
        flat = torch.zeros_like(self.full_flat)  # zero also where no gradient is
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
        """What all ranks hold in `shard`, or in another tensor of its kind, by parameter name."""
        flat = torch.empty_like(self.full_flat)
        all_gather(flat, shard.detach(), group=self.group)
        return dict(zip(self.params, self.windows(flat), strict=True))


def shard_by_hand(model: nn.Module, blocks, keep=False, group=None, events=None) -> list[Unit]:
    """Shard `model` over the ranks of `group`, in place. The optimizer takes the units' shards.

    blocks: the modules that are to be units; all other parameters are the root's, which stays whole
        from its forward to the end of its backward. A block may be called several times in a step.
    Every rank must call the same blocks in the same order. What is frozen must be so before. The
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
    """(name, parameter) of a module without the blocks in it; a tied one under each name."""
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, param
    for name, child in module.named_children():
        if child not in blocks:
            yield from parameters_of(child, blocks, f"{prefix}{name}.")


def drop_gradient(param: nn.Parameter) -> None:
    param.grad = None  # reduce() has it; the shard's gradient is the one that counts


def tensors_in(x) -> list[Tensor]:
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, list | tuple):
        return [tensor for item in x for tensor in tensors_in(item)]
    return [x] if isinstance(x, Tensor) else []


if __name__ == "__main__":
    main()
