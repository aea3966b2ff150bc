r"""Fault-tolerant training with torchft: when a replica group is lost, the other groups continue.

    torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 1000 &   # knows which groups live
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 RUST_LOG=warn
    torchrun --standalone --nproc-per-node=1 --max-restarts=10 clusters/torchft/train.py \
        --group 0 --groups 2 &
    torchrun ... --group 1 --groups 2   # the other group, in another shell: export there, too

Then `kill -9` the rank of group 1, the child process of its torchrun: group 0 does not stop. Group
1 restarts, and gets parameters and momentum from group 0. At the end both print the same checksum.
benchmarks/torchft_kills.py kills ranks at random, and counts the lost steps.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

try:
    from torchft import Manager, Optimizer, ProcessGroupGloo
except ImportError as error:
    print(f"train.py: error: {error}: pip install -r requirements-clusters.txt", file=sys.stderr)
    sys.exit(2)

BATCH = 32  # images per group and step


@record
def main() -> None:
    args = parse_args()
    images, labels = load_data()
    model, sgd = new_model()

    def state_dict() -> dict:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict()}

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = join(args, state_dict, load_state_dict)
    optimizer = Optimizer(manager, sgd)
    log, attempt, ended, full = Log(args), 0, None, 0
    while True:
        optimizer.zero_grad()  # asks the lighthouse which groups live; heals a group that is behind
        step, groups = manager.current_step(), manager.num_participants()
        if step == args.steps:  # stay until all groups are here, healed, and have asked once more
            ended = ended or time.monotonic()
            full = full + 1 if groups == args.groups else 0
            if full == 2 or time.monotonic() > ended + args.patience:
                break
            time.sleep(0.1)
            continue

        # torchft does not distribute data. With this number each batch is trained on once.
        batch = manager.batches_committed() + manager.participating_rank()
        if args.fixed_shares:  # the usual way, a shard of the data per group
            batch = attempt * args.groups + args.group
        attempt += 1
        log.write(step=step, ranks=groups, batch=batch)
        x, y = (data[indices_of(batch, len(images))] for data in (images, labels))
        time.sleep(args.pause)
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()  # the mean over the groups that live
        optimizer.step()  # does nothing if a group was lost meanwhile: the step is tried again
        log.write(step=step, ranks=groups, committed=manager.current_step() > step)
    if args.output_dir:
        torch.save(state_dict(), args.output_dir / f"group{args.group}.pt")
    print(f"group {args.group}: step {step}, parameters {checksum(model)}", flush=True)
    manager.shutdown()


def join(args, state_dict: Callable[[], dict], load_state_dict: Callable[[dict], None]) -> Manager:
    """Join the lighthouse. The functions give and take the state with which a peer is healed."""
    seconds = timedelta(seconds=args.timeout)
    try:
        return Manager(
            pg=ProcessGroupGloo(seconds),  # recreated whenever a group joins or leaves
            state_dict=state_dict,
            load_state_dict=load_state_dict,
            min_replica_size=1,  # one group is enough to continue
            use_async_quorum=False,  # heal before the forward pass, and join this step
            replica_id=f"group{args.group}",
            timeout=seconds,
            quorum_timeout=seconds,
            connect_timeout=seconds,
        )
    except Exception as error:
        print(f"train.py: error: no lighthouse at {args.lighthouse}: {error}", file=sys.stderr)
        sys.exit(2)


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Log:
    """Writes JSON lines for benchmarks/torchft_kills.py; nothing without --output-dir."""

    def __init__(self, args: argparse.Namespace):
        path = args.output_dir and args.output_dir / f"group{args.group}.jsonl"
        self.file = path.open("a") if path else None

    def write(self, **values) -> None:
        if self.file:
            print(json.dumps(values | {"time": time.time()}), file=self.file, flush=True)


def load_data() -> tuple[Tensor, Tensor]:
    """1,797 images (64 float32 in [0, 1] each) and their labels (int64)."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)


def indices_of(batch: int, count: int) -> Tensor:
    """The images of batch number `batch`; each epoch has a new order."""
    epoch, place = divmod(batch, count // BATCH)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return order[place * BATCH :][:BATCH]


def checksum(model: nn.Module) -> str:
    """A checksum of every bit of the parameters."""
    values = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--group", type=int, default=0, help="number of this group, from 0")
    add("--groups", type=int, default=1, help="total number of groups")
    add("--steps", type=int, default=300, help="number of optimizer steps")
    add("--timeout", type=float, default=10, help="seconds for a collective, and to find peers")
    add("--patience", type=float, default=60, help="seconds to wait at the end for lost groups")
    add("--pause", type=float, default=0.1, help="seconds to sleep per step, like a larger model")
    add("--fixed-shares", action="store_true", help="give each group a fixed shard of the data")
    add("--output-dir", type=Path, help="write a log and the final parameters here")
    args = parser.parse_args()
    args.lighthouse = os.environ.get("TORCHFT_LIGHTHOUSE")
    if not args.lighthouse:
        parser.error("TORCHFT_LIGHTHOUSE is not set: start torchft_lighthouse, set its address")
    if os.environ.get("WORLD_SIZE") != "1":
        parser.error("start with torchrun, one rank per group: --standalone --nproc-per-node=1")
    if not 0 <= args.group < args.groups:
        parser.error(
            f"--group {args.group}: must be 0 to {args.groups - 1} (--groups {args.groups})"
        )
    if args.steps < 1 or min(args.timeout, args.patience, args.pause) < 0:
        parser.error("--steps must be at least 1, and seconds must not be negative")
    if args.output_dir:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
