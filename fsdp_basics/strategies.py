"""The strategies that memory.py, communication.py and the benchmark compare.

one process       the full model trains on the full global batch: the baseline
DDP               a copy of everything on each rank; the gradients are averaged
ZeRO-1            DDP, but one rank per parameter keeps its optimizer state and updates it
ZeRO-2            shards of everything; parameters stay gathered from forward to backward
ZeRO-3            shards of everything; parameters are gathered twice, for forward and for backward
ZeRO-3, offload   ZeRO-3 with shards and optimizer in CPU memory
HSDP              ZeRO-3 inside each of two rows of ranks, which are replicas (4, 6, 8, ... ranks)

This file builds each strategy, and has the formulas for the bytes that a rank holds and sends. The
names are those of S. Rajbhandari et al., ZeRO: memory optimizations toward training trillion
parameter models, SC 2020, arXiv:1910.02054. (There, stage 2 shards gradients and optimizer state
only; fully_shard also shards the parameters, from the end of backward to the next forward.)
"""

import math
from itertools import chain

import torch
from sharding import shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STRATEGIES = ("one process", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, offload", "HSDP")
ROWS = 2  # of HSDP's mesh

Shapes = list[torch.Size]


def make_meshes(device_type: str, world_size: int) -> dict[str, DeviceMesh]:
    """Strategy -> its mesh of ranks; HSDP only if the ranks form two rows of two or more.

    A collective. It makes process groups: call it once, not for each model.
    """
    line = init_device_mesh(device_type, (world_size,))
    meshes = dict.fromkeys(STRATEGIES[:-1], line)
    if world_size >= 2 * ROWS and world_size % ROWS == 0:
        meshes["HSDP"] = init_device_mesh(
            device_type, (ROWS, world_size // ROWS), mesh_dim_names=("replicate", "shard")
        )
    return meshes


def build(name: str, model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Apply the strategy to a VisionTransformer on its device, with equal values on every rank.

    Returns the model that the training loop calls, and AdamW in the form that the strategy needs.
    """
    if name == "one process":
        return model, torch.optim.AdamW(model.parameters())
    if name in ("DDP", "ZeRO-1"):
        model = DistributedDataParallel(
            model, process_group=mesh.get_group(), gradient_as_bucket_view=True
        )
        if name == "DDP":
            return model, torch.optim.AdamW(model.parameters())
        return model, ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=mesh.get_group()
        )
    shard(model, mesh, reshard_after_forward=name != "ZeRO-2", offload=name == "ZeRO-3, offload")
    return model, torch.optim.AdamW(model.parameters())


def units_of(model: nn.Module) -> list[Shapes]:
    """The shapes of the parameters of each unit: one list per block, and last the root's."""
    blocks = [[p.shape for p in block.parameters()] for block in model.blocks]
    rest = [p.shape for name, p in model.named_parameters() if not name.startswith("blocks.")]
    return [*blocks, rest]


# ---- what a rank holds


def expected_memory(name: str, units: list[Shapes], rank: int, ranks: int) -> dict[str, int]:
    """Bytes on rank `rank` of `ranks`, for float32 and AdamW with its two numbers per parameter.

    P = bytes of all parameters, N = ranks (in HSDP: of a row). If all tensors divide by N:

                   parameters   gathered (end of forward)   gradients (end of backward)   optimizer
    DDP                     P                           -                             P          2P
    ZeRO-1                  P                           -                             P        2P/N
    ZeRO-2                P/N                           P                           P/N        2P/N
    ZeRO-3, HSDP          P/N            the root's share                           P/N        2P/N

    Exactly: each rank gets ceil(rows / N) rows of a tensor, so the last ranks may have fewer or
    none. Every rank pads a shard and its gradient to the size on the first rank, because a
    collective moves pieces of one size. The optimizer state has no padding, but 4 bytes more for
    each tensor: its step count.
    ZeRO-1 distributes full tensors: 2P/N is the mean over ranks, and no rank has more than 2P/N
    plus the state of one tensor.
    """
    shapes = list(chain.from_iterable(units))
    model_bytes = 4 * sum(shape.numel() for shape in shapes)
    if name in ("one process", "DDP", "ZeRO-1"):
        own_shapes = deal(shapes, ranks)[rank] if name == "ZeRO-1" else shapes
        return {
            "parameters": model_bytes,
            "gathered": 0,
            "gradients": model_bytes,
            "optimizer": sum(8 * shape.numel() + 4 for shape in own_shapes),
        }
    shard_ranks = ranks // ROWS if name == "HSDP" else ranks
    shard_rank = rank % shard_ranks
    shard_bytes = 4 * padded(shapes, shard_ranks)
    gathered_shapes = shapes if name == "ZeRO-2" else units[-1]
    own_sizes = [rows_of(s, shard_ranks, shard_rank) * s[1:].numel() for s in shapes]
    return {
        "parameters": shard_bytes,
        "gathered": 4 * shard_ranks * padded(gathered_shapes, shard_ranks),
        "gradients": shard_bytes,
        "optimizer": sum(8 * size + 4 for size in own_sizes),
    }


def rows_of(shape: torch.Size, ranks: int, rank: int) -> int:
    """The number of rows that rank `rank` gets, as torch.chunk cuts a tensor."""
    most = math.ceil(shape[0] / ranks)
    return max(0, min(shape[0] - rank * most, most))


def padded(shapes: Shapes, ranks: int) -> int:
    """How many numbers each rank allocates: as many as the first rank needs."""
    return sum(rows_of(shape, ranks, 0) * shape[1:].numel() for shape in shapes)


def deal(shapes: Shapes, ranks: int) -> list[Shapes]:
    """Distribute tensors as ZeroRedundancyOptimizer does: largest first, to the emptiest rank."""
    hands = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for shape in sorted(shapes, key=torch.Size.numel, reverse=True):
        rank = sizes.index(min(sizes))
        hands[rank].append(shape)
        sizes[rank] += shape.numel()
    return hands


# ---- what a rank sends


def expected_traffic(name: str, units: list[Shapes], ranks: int) -> dict[str, tuple[int, int]]:
    """Collective -> (calls, bytes that a rank sends) in one step; 0 calls: DDP's buckets decide.

    With P bytes of parameters and N ranks, a ring sends per rank (N-1)/N P for an all_gather or a
    reduce_scatter, twice that for an all_reduce, and on average (N-1)/N P for a broadcast. Hence

    DDP     2(N-1)/N P    an all_reduce of the gradients
    ZeRO-1  3(N-1)/N P    as DDP, and a broadcast of each updated parameter by its owner
                          (the paper's stage 1 reduce-scatters the gradients: 2(N-1)/N P)
    ZeRO-2  2(N-1)/N P    an all_gather for forward, a reduce_scatter of the gradients
    ZeRO-3  3(N-1)/N P    another all_gather for backward, except for the root's unit
    HSDP    as ZeRO-3 with the N of a row, and an all_reduce of each shard between the rows

    For shards P includes the padding. A single rank sends nothing.
    """
    if name == "one process" or ranks == 1:
        return {}
    shapes = list(chain.from_iterable(units))
    model_bytes = 4 * sum(shape.numel() for shape in shapes)
    if name in ("DDP", "ZeRO-1"):
        traffic = {"all_reduce": (0, 2 * (ranks - 1) * model_bytes // ranks)}
        if name == "ZeRO-1":
            traffic["broadcast"] = (len(shapes), (ranks - 1) * model_bytes // ranks)
        return traffic
    shard_ranks = ranks // ROWS if name == "HSDP" else ranks
    for_forward = [4 * (shard_ranks - 1) * padded(unit, shard_ranks) for unit in units]
    for_backward = [] if name == "ZeRO-2" else for_forward[:-1]
    traffic = {
        "all_gather": (len(for_forward + for_backward), sum(for_forward + for_backward)),
        "reduce_scatter": (len(units), sum(for_forward)),
    }
    if name == "HSDP":
        shard_bytes = 4 * padded(shapes, shard_ranks)
        traffic["all_reduce"] = (len(units), 2 * (ROWS - 1) * shard_bytes // ROWS)
    return traffic
