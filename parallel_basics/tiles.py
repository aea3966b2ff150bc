"""Draw a sharded matrix tile by tile: each rank draws its part, equal on every mesh."""

from itertools import product

import torch
from arguments import UserError
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

TILE = 512  # rows and columns of what is drawn at a time: 1 MB


def fill_normal(matrix: Tensor, std: float, seed: int) -> None:
    """Fill what this rank holds of `matrix`, tile by tile. Raises `UserError` if not 2-D."""
    if matrix.dim() != 2:
        raise UserError(
            f"initialize() draws matrices only: give the parameter of shape {tuple(matrix.shape)} "
            "its values there (model.py)"
        )
    rows, columns = (indices_here(matrix, dim) for dim in (0, 1))
    generator = torch.Generator(matrix.device)
    for row, column in product(tiles(rows), tiles(columns)):
        generator.manual_seed(seed + row * matrix.shape[1] + column)  # of the tile's first number
        sizes = [min(TILE, n - i) for n, i in zip(matrix.shape, (row, column), strict=True)]
        tile = torch.empty(sizes, device=matrix.device).normal_(0, std, generator=generator)
        top, left = max(row, rows.start), max(column, columns.start)
        part = tile[top - row : rows.stop - row, left - column : columns.stop - column]
        here = local_part(matrix)[top - rows.start :, left - columns.start :]
        here[: part.shape[0], : part.shape[1]] = part


def tiles(indices: range) -> range:
    """The first rows, or columns, of the tiles that hold some of these."""
    return range(indices.start // TILE * TILE, indices.stop, TILE)


def indices_here(tensor: Tensor, dim: int) -> range:
    """The rows (dim 0) or columns (1) of `tensor` that this rank holds: neighbours, or none."""
    if not isinstance(tensor, DTensor):
        return range(tensor.shape[dim])
    # Numbers that are cut as the tensor is; `distribute_tensor` knows every kind of shard.
    numbers = torch.arange(tensor.shape[dim]).unsqueeze(1 - dim)
    cuts = [p if not p.is_replicate() and p.dim == dim else Replicate() for p in tensor.placements]
    numbers = distribute_tensor(numbers, tensor.device_mesh, cuts, src_data_rank=None)
    here = numbers.to_local().flatten().tolist()
    return range(here[0], here[-1] + 1) if here else range(0)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
