"""transformer_basics under context parallelism on 4 ranks: bytes by axis, and torch's own kernel.

Started by test_transformer_basics_context.py. torch's ring has no kernel for CPUs: there, this
worker gives it their flash kernel.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.place
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import context_parallel
import torch
import torch.distributed as dist
from counting_by_axis import CountByAxis
from data import batch_part
from optimizer import make_optimizer
from step import train_step
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from workers.gpt_equivalence import KINDS, batches, on_mesh, settings_of, spread
from workers.place import worker_of_test

COUNTED = {  # (flags, kind)
    ("--cp 4", "sgd"),
    ("--cp 4 --activation-checkpointing", "sgd"),
    ("--cp 4 --accumulate 2", "sgd"),
    ("--dp-shard 2 --cp 2", "sgd"),
    ("--dp-shard 2 --cp 2 --accumulate 2", "grouped"),
    ("--cp 2 --tp 2", "grouped"),
    ("--cp 4 --precision bf16", "grouped"),
}
FUSED = {
    ("--cp 4 --cp-kernel torch", "sgd"),
    ("--cp 2 --dp-shard 2 --cp-kernel torch", "grouped"),
    ("--cp 2 --tp 2 --cp-kernel torch --activation-checkpointing", "qwen"),
    ("--cp 2 --tp 2 --sequence-parallel --loss-parallel --cp-kernel torch", "clip"),
}


def sent(flags: str, kind: str, worker) -> dict:
    """Calls and bytes of a step on each axis; every rank's."""
    settings = settings_of(f"{flags} {KINDS[kind][0]}")
    mesh, model, pipeline = spread(settings, worker)
    optimizer, (part, parts) = make_optimizer(model, settings), batch_part(mesh)
    x, y = (tensor[part::parts].to(worker.device) for tensor in next(batches()))
    with CountByAxis(mesh) as counted:
        train_step(model, pipeline, x, y, optimizer, mesh, settings)
    of_ranks = [None] * worker.world_size
    dist.all_gather_object(of_ranks, {axis: counted.over(axis) for axis in counted.sizes})
    return of_ranks


def give_torch_a_kernel() -> None:
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def local(args):
        return [x.to_local() if isinstance(x, DTensor) else x for x in args]

    def ring(op, args, kwargs):
        mesh = args[0].device_mesh
        names = ("query", "key", "value", "dropout_p", "is_causal")
        given = dict(zip(names, local(args), strict=False)) | kwargs
        out = torch_ring._templated_ring_attention(mesh.get_group(), 2, forward, **given)
        return tuple(DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in out)

    def ring_backward(op, args, kwargs):
        mesh = args[0].device_mesh
        names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
        given = dict(zip(names, local(args), strict=False)) | kwargs
        run = torch_ring._templated_ring_attention_backward
        gradients = run(mesh.get_group(), 2, backward, grad_out_name="grad_out", **given)
        return tuple(DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in gradients)

    torch_ring.custom_ops |= {forward: ring, backward: ring_backward}
    context_parallel.WITHOUT_FUSED_RING = ()


def main(output: str) -> None:
    with worker_of_test(gpu_per_rank=True) as worker:
        found = {("sent", *case): sent(*case, worker) for case in sorted(COUNTED)}
        if worker.device.type == "cpu":
            give_torch_a_kernel()
        found |= {case: on_mesh(*case, worker) for case in sorted(FUSED)}
        if worker.is_main:
            torch.save(found, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
