"""For the tensor-parallel scripts: the single-process baseline, and the tables they print."""

import torch.distributed as dist
from comparing import as_it_is, norm_of, train
from counting import layers_of
from model import GPT, GPTConfig, cross_entropy, initialize
from runtime import Worker
from torch import Tensor
from torch.distributed.tensor import DTensor


def one_process(config: GPTConfig, args, worker: Worker) -> tuple[GPT, list[dict]]:
    """The single-process baseline: the full model, trained on every rank without communication."""
    model = initialize(GPT(config).to(worker.device), args.seed)
    return model, train(model, cross_entropy, norm_of, as_it_is, args, worker.device)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def numbers_held(model: GPT) -> list[int]:
    """How many numbers each rank holds; every rank gets the list."""
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, sum(local(p).numel() for p in model.parameters()))
    return held


def is_like_another(name: str) -> bool:
    """All blocks are sharded like block 0, which stands for them in the tables."""
    return name.startswith("blocks.") and not name.startswith("blocks.0.")


def print_parameters(full_model: GPT, model: GPT, dim_of) -> None:
    """One line per parameter that was sharded by hand. dim_of: its name -> the sharded dim."""
    print(f"\n{'parameter':32}{'full':>12}{'on rank 0':>14}   sharded")
    local_parameters = dict(model.named_parameters())
    for name, parameter in full_model.named_parameters():
        if is_like_another(name):
            continue
        dim = dim_of(name)
        cut = "" if dim is None else f"dim {dim}"
        full_shape, local_shape = tuple(parameter.shape), tuple(local_parameters[name].shape)
        print(f"{name:32}{full_shape!s:>12}{local_shape!s:>14}   {cut}".rstrip())


def print_layers(model: GPT) -> None:
    """One line per layer: the placement of its weight, its full shape and its local shape."""
    print(f"\n{'weight of':28}{'placement':13}{'full':>12}{'on rank 0':>13}")
    for name, layer in layers_of(model):
        if is_like_another(name):
            continue
        children = {f"{name}.{child}": module for child, module in layer.named_children()}
        for title, module in (children or {name: layer}).items():
            weight, placement = module.weight, "-"
            if isinstance(weight, DTensor):
                (kind,) = weight.placements
                placement = f"Shard({kind.dim})" if kind.is_shard() else type(kind).__name__
            full_shape, local_shape = tuple(weight.shape), tuple(local(weight).shape)
            print(f"{title:28}{placement:13}{full_shape!s:>12}{local_shape!s:>13}")


def print_held(full_model: GPT, held: list[int]) -> None:
    total = sum(p.numel() for p in full_model.parameters())
    print(f"of {total:,} parameters each rank holds " + ", ".join(f"{n:,}" for n in held))


def print_sent(sent: dict[str, int]) -> None:
    print("\nbytes sent per rank and step")
    for title, nbytes in sent.items():
        print(f"{title:21}{nbytes:11,}")
