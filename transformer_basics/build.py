"""The mesh, and this rank's part of the model on it: for train.py and generate.py."""

import torch
from config import AXES, PRECISIONS
from model import GPT, GPTConfig, cross_entropy, initialize
from parallelize import (
    apply_activation_checkpointing,
    apply_compile,
    apply_fsdp,
    apply_tensor_parallel,
)
from runtime import Worker
from stages import Stages
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_mesh(args, worker: Worker) -> DeviceMesh:
    """Every rank gets a coordinate on each axis: pp, dp_replicate, dp_shard, tp.

    Ranks that differ in one coordinate only are that axis' group. Neighbours on the last axis are
    neighbours in rank, so on one node: tensor parallelism communicates most.
    """
    shape = tuple(getattr(args, axis) for axis in AXES)
    return init_device_mesh(worker.device.type, shape, mesh_dim_names=AXES)


def build_model(config: GPTConfig, mesh: DeviceMesh, args, worker: Worker):
    """This rank's part of the model, and the pipeline it is a stage of, if there is one."""
    dtype = PRECISIONS[args.precision]
    with torch.device("meta"):  # shapes without memory: no rank needs room for the whole model
        model = GPT(config, stage_layers(config.layers, mesh["pp"]))
    if args.tp > 1:
        apply_tensor_parallel(model, mesh["tp"], args.sequence_parallel, args.loss_parallel)
    if args.activation_checkpointing:
        apply_activation_checkpointing(model)
    if args.compile:
        apply_compile(model)
    apply_fsdp(
        model, mesh["dp_replicate", "dp_shard"], dtype, not (args.keep_gathered or args.pp > 1)
    )
    initialize(model, args.seed, worker.device)
    if args.pp == 1:
        return model, None
    split = args.tp if args.sequence_parallel else 1
    stages = Stages(model, mesh["pp"], args.accumulate, cross_entropy, worker.device, dtype, split)
    return model, stages


def stage_layers(layers: int, mesh: DeviceMesh) -> range:
    """The blocks of this rank's stage: equally many for all, or one more for the first ones."""
    stages, stage = mesh.size(), mesh.get_local_rank()
    ends = [
        sum(layers // stages + (i < layers % stages) for i in range(n)) for n in range(stages + 1)
    ]
    return range(ends[stage], ends[stage + 1])
