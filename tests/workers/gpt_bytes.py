"""What transformer_basics/train.py's parts hold in memory on 4 ranks: bytes, saved by rank 0.

Started by test_transformer_basics_memory.py. Tensors are watched as torch's operators return them,
whichever module has called the operator.
"""

import gc
import sys
import time
import weakref
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import torch
from config import Settings
from evaluation import evaluate
from model import initialize
from optimizer import make_optimizer
from parallelize import spread_model
from runtime import distributed_worker
from step import train_step
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VOCABULARY, LENGTH, BATCH = 1024, 16, 64
WIDTH = 48  # where it must not be a number of tokens
SIZES = {"layers": 2, "heads": 4, "dim": 64, "block_size": LENGTH, "batch_size": BATCH}


class Watch(TorchDispatchMode):
    """The largest tensor that an operator made, no view; and all that were made and still live."""

    def __init__(self):
        super().__init__()
        self.largest, self.made = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        is_view = any(value.alias_info for value in function._schema.returns)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage)
                self.largest = max(self.largest, 0 if is_view else tensor.nbytes)
        return result

    def living(self) -> int:
        storages = [made() for made in self.made.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


meshes_by_shape = {}  # one for all cases: groups keep their threads


def spread(worker, **flags):
    settings = Settings(**SIZES | flags).on(worker.world_size)
    config, shape = settings.model(VOCABULARY), settings.mesh_shape()
    mesh = meshes_by_shape.get(shape)
    mesh, model, pipeline = spread_model(config, settings, worker.device, mesh)
    meshes_by_shape[shape] = mesh
    return settings, mesh, initialize(model, seed=0), pipeline


def text(settings, batches: int = 1):
    ranks = settings.dp_replicate * settings.dp_shard
    generator = torch.Generator().manual_seed(0)
    rows = batches * settings.batch_size // ranks
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def evaluation(worker, **flags) -> tuple[int, int]:
    """Bytes of the largest tensor in a training step, and in an evaluation."""
    settings, mesh, model, pipeline = spread(worker, **flags)
    optimizer = make_optimizer(model, settings)
    with Watch() as training:
        train_step(model, pipeline, *text(settings), optimizer, mesh, settings)
    ranks = settings.dp_replicate * settings.dp_shard
    held_out = [t.repeat(ranks, 1) for t in text(settings, batches=2)]
    with Watch() as evaluating:
        evaluate(model, pipeline, held_out, mesh, settings)
    return training.largest, evaluating.largest


def between_microbatches(worker, **flags) -> tuple[list[int], int]:
    """Bytes made in a step that live at the start of each micro-batch; bytes of all gradients."""
    settings, mesh, model, pipeline = spread(worker, dp_shard=4, accumulate=4, **flags)
    optimizer, found, watch = make_optimizer(model, settings), [], Watch()
    train_step(model, pipeline, *text(settings), optimizer, mesh, settings)  # makes what stays

    whole = 4 * sum(p.numel() for p in model.parameters())
    gradients = whole if settings.reduce_once else whole // 4

    def look(*_) -> None:
        gc.collect()  # what only waits for that does not count
        # A thread of Gloo's lets go of its tensors shortly after a collective has ended.
        most, limit = sum(found[:1]) + 4 + gradients, time.monotonic() + 10
        while watch.living() > most and time.monotonic() < limit:
            time.sleep(0.001)
        found.append(watch.living())

    model.register_forward_pre_hook(look, prepend=True)  # before FSDP's own, which gathers
    with watch:
        train_step(model, pipeline, *text(settings), optimizer, mesh, settings)
    return found, whole


class WatchLogits(Watch):
    """The peak of all tensors together that have `width` numbers for each of some tokens.

    The transposed weight of the head, and its gradient, have WIDTH such rows.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width, self.logits, self.peak = width, [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if result is not NotImplemented:
            self.made.clear()
            self.logits += [
                weakref.ref(tensor.untyped_storage())
                for tensor in tree_leaves(result)
                if isinstance(tensor, torch.Tensor)
                and tensor.shape[-1:] == (self.width,)
                and tensor.shape[0] != WIDTH
            ]
            self.logits = [made for made in self.logits if made() is not None]
            living = {made()._cdata: made().nbytes() for made in self.logits}
            self.peak = max(self.peak, sum(living.values()))
        return result


def logits(worker, **flags) -> tuple[int, int]:
    """Peak bytes of logits, their gradients and copies in a training step, and in an evaluation."""
    settings, mesh, model, pipeline = spread(worker, dim=WIDTH, **flags)
    optimizer = make_optimizer(model, settings)
    ranks = settings.dp_replicate * settings.dp_shard
    held_out = [t.repeat(ranks, 1) for t in text(settings)]
    with WatchLogits(VOCABULARY // settings.tp) as training:
        train_step(model, pipeline, *text(settings), optimizer, mesh, settings)
    with WatchLogits(VOCABULARY // settings.tp) as evaluating:
        evaluate(model, pipeline, held_out, mesh, settings)
    return training.peak, evaluating.peak


def activations(worker, **flags) -> int:
    """Bytes that wait for backward after a forward of 16 sequences."""
    settings, _, model, _ = spread(worker, **flags)
    x, _ = text(settings)
    with Watch() as watch:
        out = model(x)
        gc.collect()
        with_graph = watch.living()
        del out
        gc.collect()
    return with_graph - watch.living()


class CountDraws(Watch):
    """Also how many random numbers are drawn."""

    def __init__(self):
        super().__init__()
        self.drawn = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.normal_.default:
            self.drawn += args[0].numel()
        return super().__torch_dispatch__(function, types, args, kwargs)


def first_values(worker, **axes) -> tuple[int, int, int]:
    """Bytes of the largest tensor, numbers drawn, and numbers held by matrices of this rank."""
    sizes = {"layers": 1, "heads": 4, "dim": 1024, "block_size": 1024, "batch_size": BATCH}
    settings = Settings(**sizes | axes).on(worker.world_size)
    config = settings.model(1024)
    _, model, _ = spread_model(config, settings, worker.device)
    held = sum(p.to_local().numel() for p in model.parameters() if p.dim() == 2)
    with CountDraws() as watch:
        initialize(model, seed=0)
    return watch.largest, watch.drawn, held


def main() -> None:
    with distributed_worker("cpu") as worker:
        found = {
            "evaluation": {
                name: evaluation(worker, **flags)
                for name, flags in {
                    "data parallel": {"accumulate": 16},
                    "tensor parallel": {"tp": 4, "accumulate": 16, "loss_parallel": True},
                    "pipeline": {"pp": 4, "accumulate": 16, "layers": 4},
                }.items()
            },
            "logits": {
                "in one chunk": logits(worker),
                "in chunks": logits(worker, loss_chunks=8),
                "sharded, in chunks": logits(worker, dp_shard=4, loss_chunks=8),
                "tensor parallel, in chunks": logits(
                    worker, tp=4, loss_parallel=True, loss_chunks=8
                ),
                "pipeline, in chunks": logits(worker, pp=4, layers=4, loss_chunks=8),
                "bf16, in chunks": logits(worker, loss_chunks=8, precision="bf16"),
            },
            "activations": {
                (layers, mode): activations(worker, layers=layers, activation_checkpointing=mode)
                for layers in (2, 4)
                for mode in (None, "full", "selective", 2)
            },
            "first values": {
                "dp_shard": first_values(worker, dp_shard=2),
                "tp": first_values(worker, tp=2),
                "both": first_values(worker, dp_shard=2, tp=2),
            },
            "sharded": between_microbatches(worker),
            "unsharded": between_microbatches(worker, reduce_once=True),
        }
        if worker.is_main or worker.rank == worker.world_size - 1:
            torch.save(found, OUTPUT / str(worker.rank))


if __name__ == "__main__":
    OUTPUT = Path(sys.argv[1])
    main()
