"""Save while training goes on: dcp.async_save against dcp.save, and how long training waits.

    torchrun --standalone --nproc_per_node=2 fsdp_basics/async_checkpoint.py
    torchrun --standalone --nproc_per_node=2 fsdp_basics/async_checkpoint.py --dim 512 --depth 8
    python fsdp_basics/async_checkpoint.py

Look at "waits": during a synchronous save, training waits until the bytes are on the disk. During
an asynchronous save, training waits only for copies of the shards. A thread writes the copies while
the next steps run, which are slower if both need the processor. The last line compares the written
files with the state at the moment of the save.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from materialize import materialize
from model import VisionTransformer
from runtime import Worker, distributed_worker
from sharded_state import sharded_state
from sharding import shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker, shared_folder(args.folder, worker) as folder:
        seen = compare(args.dim, args.depth, args.saves, folder, worker)
        if worker.is_main:
            report(seen)


def compare(dim: int, depth: int, saves: int, folder: Path, worker: Worker) -> dict:
    """Train, and alternate both kinds of save, `saves` times each; returns this rank's numbers.

    "waits": seconds that training waited for each save; "written": seconds until each save was on
    the disk (both: kind of save -> list); "step": seconds of a training step, alone and during an
    asynchronous save; "bytes": bytes that this rank writes; "as saved": whether every asynchronous
    save holds the state at its moment.
    """
    model, optimizer = build_sharded(dim, depth, worker)
    parts = {"model": model, "optimizer": optimizer}
    images = torch.rand(8, 1, 8, 8, device=worker.device)
    labels = torch.zeros(8, dtype=torch.int64, device=worker.device)

    def timed_step() -> float:
        started = now(worker.device)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return now(worker.device) - started

    # The saving thread communicates with the threads of the other ranks. It needs a group of its
    # own: in one group, its messages and those of the training would be mixed up. Gloo, because
    # the copies are in CPU memory.
    saving_group = dist.new_group(backend="gloo")
    for _ in range(3):
        timed_step()  # the first ones allocate gradients and optimizer state

    waits = {"save": [], "async_save": []}
    written = {"save": [], "async_save": []}
    steps = {"alone": [], "during async_save": []}
    as_saved = True
    for i in range(saves):
        dist.barrier()
        started = now(worker.device)
        dcp.save(sharded_state(parts), checkpoint_id=folder / f"save_{i}")
        seconds = now(worker.device) - started
        waits["save"].append(seconds)
        written["save"].append(seconds)

        for _ in range(3):
            steps["alone"].append(timed_step())

        dist.barrier()
        values = [p.to_local().clone() for p in model.parameters()]  # to compare later
        async_folder = folder / f"async_{i}"
        started = now(worker.device)
        # With a writer of its own, torch's thread makes a CUDA context on GPU 0, on every rank.
        writer = dcp.FileSystemWriter(async_folder)
        saving = dcp.async_save(
            sharded_state(parts), storage_writer=writer, process_group=saving_group
        )
        waits["async_save"].append(now(worker.device) - started)
        while not all_done(saving, worker):  # the same on all ranks: a step needs all of them
            steps["during async_save"].append(timed_step())
        saving.result()  # raises the thread's exception, if any
        written["async_save"].append(now(worker.device) - started)
        as_saved = as_saved and holds(async_folder, model, values)
    own_files = folder.glob(f"save_0/__{worker.rank}_*")
    return {
        "waits": waits,
        "written": written,
        "step": steps,
        "as saved": as_saved,
        "bytes": sum(file.stat().st_size for file in own_files),
    }


def build_sharded(dim: int, depth: int, worker: Worker):
    """A sharded model on this rank's device, and its optimizer."""

    def build() -> VisionTransformer:
        torch.manual_seed(0)
        return VisionTransformer(dim=dim, depth=depth)

    with torch.device("meta"):
        model = build()
    shard(model, init_device_mesh(worker.device.type, (worker.world_size,)))
    materialize(model, build, worker.device, worker)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def now(device: torch.device) -> float:
    """The time in seconds, after a GPU has finished its queue: it runs asynchronously."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def all_done(saving, worker: Worker) -> bool:
    done = torch.tensor(float(saving.done()), device=worker.device)
    dist.all_reduce(done, op=dist.ReduceOp.MIN)
    return bool(done)


def holds(folder: Path, model: torch.nn.Module, values: list[torch.Tensor]) -> bool:
    """Whether the save in `folder` holds `values` as this rank's shards of the parameters."""
    state = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    dcp.load({"model": state}, checkpoint_id=folder)
    return all(
        torch.equal(tensor.to_local(), value)
        for tensor, value in zip(state.values(), values, strict=True)
    )


def report(seen: dict) -> None:
    print(f"{seen['bytes'] / 1e6:.1f} MB on this rank\n")
    print(f"{'milliseconds, median (min ... max)':24} {'waits':>22} {'until written':>24}")
    for way in seen["waits"]:
        print(f"{way:24} {spread(seen['waits'][way]):>32} {spread(seen['written'][way]):>24}")
    medians = {way: statistics.median(seconds) for way, seconds in seen["waits"].items()}
    ratio = medians["async_save"] / medians["save"]
    print(f"async_save keeps training waiting for {ratio:.0%} of the time of save\n")
    for when, times in seen["step"].items():
        print(f"a step {when:17} {spread(times) if times else 'none: it was written at once':>32}")
    print(f"\nwritten as it was at the moment of the save, while steps went on: {seen['as saved']}")


def spread(seconds: list[float]) -> str:
    low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
    return f"{middle:.0f} ({low:.0f} ... {high:.0f})"


@contextmanager
def shared_folder(parent: Path, worker: Worker) -> Iterator[Path]:
    """A temporary folder in `parent` for all ranks (on several nodes: on a disk they share)."""
    name, temporary = [None], None
    if worker.is_main:
        temporary = tempfile.TemporaryDirectory(dir=parent)
        name = [temporary.name]
    dist.broadcast_object_list(name, src=0)
    yield Path(name[0])
    dist.barrier()
    if temporary:
        temporary.cleanup()


def parse_args():
    parser = ArgumentParser(description="Compare a synchronous and an asynchronous sharded save.")
    add = parser.add_argument
    add("--dim", type=at_least(4), default=256, help="width of the model, a multiple of 4")
    add("--depth", type=at_least(1), default=4, help="transformer blocks")
    add("--saves", type=at_least(1), default=3, help="saves of each kind")
    temporary = Path(tempfile.gettempdir())
    add("--folder", type=Path, default=temporary, help="folder for temporary files")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.dim % 4:
        parser.error(f"--dim must be a multiple of 4, not {args.dim}")
    if not args.folder.is_dir():
        parser.error(f"--folder {args.folder} is no folder")
    return args


if __name__ == "__main__":
    main()
