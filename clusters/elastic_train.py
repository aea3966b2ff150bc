r"""Elastic training: hosts join and leave, and the result stays that of one process.

    python clusters/elastic_train.py                                        # one process
    torchrun --standalone --nproc_per_node=3 clusters/elastic_train.py      # the same losses

    # on each available host, and on each host that joins later (see elastic.md)
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:3 --nproc-per-node=1 --rdzv-id=a \
        --rdzv-backend=c10d --rdzv-endpoint=host0:29500 --max-restarts=100 \
        clusters/elastic_train.py --output-dir runs/elastic

A step has PARTS micro-batches, for any number of ranks. They are distributed round-robin: three
ranks take 4 each, five take 3, 3, 2, 2 and 2. Each rank accumulates the gradients of its own
micro-batches, then DDP averages over the ranks; a factor of world_size / PARTS makes this the mean
over all micro-batches. So the global batch, the order of the data and the
learning rate depend on the step alone, and a rank's memory does not grow when another rank leaves.
"""

import argparse
import gc
import json
import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

PARTS, PART = 12, 8  # a global batch of 96 images


@record
def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    finished = train(args, dist.get_rank(), dist.get_world_size())
    gc.collect()  # a model holds cycles; when it is gone, nothing uses the group any more
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if finished else 128 + signal.SIGTERM)


def train(args, rank: int, world_size: int) -> bool:
    """Train to the end and return True, or save and return False when a rank has got SIGTERM."""
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))  # a host joins, or we must leave
    images, labels = load_data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    file = args.output_dir / "state.pt" if args.output_dir else None
    log = args.output_dir / "log.jsonl" if file and rank == 0 else None
    first = load(file, model, optimizer) if file and file.exists() else 0
    check_all_equal(args, first)
    my_parts = range(rank, PARTS, world_size)
    if rank == 0:
        print(f"{world_size} rank(s), from step {first} of {args.steps}", flush=True)
    for step in range(first, args.steps):
        indices = global_batch(step, len(images))
        optimizer.param_groups[0]["lr"] = learning_rate(step, args.steps)
        optimizer.zero_grad()
        notes = torch.zeros(2, dtype=torch.float64)
        for part in my_parts:
            x, y = (data[indices].chunk(PARTS)[part] for data in (images, labels))
            with nullcontext() if part == my_parts[-1] else ddp_model.no_sync():
                # DDP divides the sum by the number of ranks, but here the mean is over PARTS.
                loss = F.cross_entropy(ddp_model(x), y) / PARTS
                (loss * world_size).backward()
            notes[0] += loss.detach()
        optimizer.step()
        if args.hold and args.hold.exists():
            time.sleep(0.1)

        notes[1] = bool(asked)
        dist.all_reduce(notes)  # the global batch's loss, and whether any rank must leave
        loss, stopping = notes.tolist()
        last = step + 1 == args.steps
        if rank == 0 and file and (stopping or last or (step + 1) % args.save_every == 0):
            save(file, model, optimizer, step + 1)
        if log:
            line = {"step": step + 1, "loss": loss, "ranks": world_size, "time": time.time()}
            append(log, line)
        if stopping and not last:
            if rank == 0:
                print(f"saved after step {step + 1}, to begin again with other ranks", flush=True)
            return False
    if rank == 0:
        print(f"loss {loss:.6f} after step {args.steps}" if first < args.steps else "done before")
    return True


def check_all_equal(args, first: int) -> None:
    """End the job if the ranks have different settings, or have read different states."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, f"{args.steps} steps from {first} in {args.output_dir}")
    runs = sorted(set(everyone))
    if len(runs) > 1:
        sys.exit(
            f"elastic_train.py: error: not one job: {' and '.join(runs)}: two jobs with one "
            "--rdzv-id, or a disk that does not show all hosts the same"
        )


def load_data() -> tuple[Tensor, Tensor]:
    """1,797 images (64 float32 in [0, 1] each) and their labels (int64)."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)


def global_batch(step: int, count: int) -> Tensor:
    """The indices of this step's images, equal on all ranks; each epoch has a new order."""
    epoch, place = divmod(step, count // (PARTS * PART))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return order[place * PARTS * PART :][: PARTS * PART]


def learning_rate(step: int, steps: int) -> float:
    return 0.05 * (1 + math.cos(math.pi * step / steps))


def save(file: Path, model, optimizer, step: int) -> None:
    """A kill or a full disk leaves the old file or the new one, never a partial one."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    temporary = file.with_suffix(".tmp")
    try:
        with temporary.open("wb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch.save reports a full disk
        temporary.unlink(missing_ok=True)
        sys.exit(f"elastic_train.py: error: cannot write {file}, it is as it was: {error}")


def append(file: Path, line: dict) -> None:
    """Append a line; a full disk leaves no partial line."""
    end = file.stat().st_size if file.exists() else 0
    try:
        with file.open("a") as out:
            print(json.dumps(line), file=out)
    except OSError as error:
        os.truncate(file, end)
        sys.exit(f"elastic_train.py: error: cannot write {file}, it is as it was: {error}")


def load(file: Path, model, optimizer) -> int:
    """Every rank reads the file, from a disk that all hosts share. Returns the steps done."""
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument(
        "--output-dir", type=Path, help="write checkpoints and logs here; resume what is there"
    )
    parser.add_argument("--save-every", type=int, default=20, help="save every N steps")
    parser.add_argument("--timeout", type=float, default=60, help="timeout of collectives, seconds")
    parser.add_argument("--hold", type=Path, help="slow each step by 0.1 s while this file exists")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) > PARTS:
        parser.error(f"a step has {PARTS} micro-batches: at most {PARTS} ranks")
    if args.output_dir:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
