"""Where the ranks of a test compute: on the CPU, or with pytest --device cuda on GPUs."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from runtime import Worker, distributed_worker, leave, meeting_point
from torch.distributed.tensor import DTensor

DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # see conftest.py

# Methods of a process group that Gloo has for CPU tensors only. With CUDA tensors it copies through
# the CPU's memory for broadcast, all_reduce, reduce, all_gather, gather, scatter, all_to_all_single
# and reduce_scatter_tensor (an all_reduce of a copy). The coalesced ones refuse CUDA tensors, or
# crash on the GPU's address, as send and recv do (ProcessGroupGloo.cpp; seen on an H100).
NOT_FOR_GPUS = ("send", "recv", "recv_anysource", "allreduce_coalesced", "allgather_coalesced")
NOT_FOR_GPUS += ("alltoall", "reduce_scatter")  # of lists


@contextmanager
def worker_of_test(gpu_per_rank: bool = False) -> Iterator[Worker]:
    """This rank's worker: NCCL if each rank has a GPU; Gloo if all ranks share one GPU.

    A world of one process is the reference: it computes on the CPU.
    gpu_per_rank: the ranks do what ranks that share a GPU cannot: they send point to point, or
    redistribute DTensors. Their tests have this mark. Who sends without it gets an error on CPUs,
    too.
    """
    rank, ranks = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
    with ExitStack() as stack:
        if not gpu_per_rank:
            stack.enter_context(as_on_a_shared_gpu())
        if DEVICE == "cpu" or ranks == 0:
            with distributed_worker("cpu") as worker:
                yield worker
        elif not share_a_gpu(ranks):
            with distributed_worker(DEVICE) as worker:
                yield worker
        else:  # distributed_worker() refuses to share a GPU
            device, store = torch.device(DEVICE, 0), meeting_point(timedelta(minutes=2))
            torch.accelerator.set_device_index(0)
            torch.zeros(1, device=device)  # or a DeviceMesh would choose the device LOCAL_RANK
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            print(f"{ranks} ranks share one {DEVICE} device, {dist.get_backend()}", flush=True)
            yield Worker(rank, rank, ranks, device, store)
            leave()


def share_a_gpu(ranks: int) -> bool:
    return DEVICE != "cpu" and torch.accelerator.device_count() < ranks


@contextmanager
def as_on_a_shared_gpu() -> Iterator[None]:
    """Raise an error where a process group is asked for what Gloo cannot do with CUDA tensors."""

    def refuse(name: str):
        def refused(*_, **__):
            raise AssertionError(
                f"Gloo has no {name} for CUDA tensors: needs the mark `gpu_per_rank`"
            )

        return refused

    with ExitStack() as stack:
        for name in NOT_FOR_GPUS:
            stack.enter_context(patch.object(dist.ProcessGroup, name, refuse(name)))
        yield


def gather_shards(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a DTensor, or a copy of a plain one, on the CPU. A collective.

    DTensor.full_tensor() ends the process (SIGSEGV, torch 2.11) where ranks share a GPU: its
    all_gather is allgather_into_tensor_coalesced, in which Gloo reads the GPU's address.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu().clone()
    whole, mesh = tensor.detach().to_local().cpu(), tensor.device_mesh
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if placement.is_shard():
            shards = [None] * mesh.size(axis)
            dist.all_gather_object(shards, whole, group=mesh.get_group(axis))
            whole = torch.cat(shards, dim=placement.dim)
        else:
            assert placement.is_replicate(), placement
    return whole.clone()


def on_cpu(found):
    """The same dicts, lists and tuples, with tensors that any process can unpickle."""
    if isinstance(found, dict):
        return {name: on_cpu(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(on_cpu(value) for value in found)
    return found.cpu() if isinstance(found, torch.Tensor) else found
