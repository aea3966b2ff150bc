"""Replica groups: when one is lost the others train on, and when it is back a peer heals it.

    torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 1000 &   # one for all: who is here?
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 RUST_LOG=warn
    line="torchrun --standalone --nproc-per-node=1 --max-restarts=10 clusters/torchft/train.py"
    $line --group 0 --groups 2 &
    $line --group 1 --groups 2                         # in another shell, or on another host

Then `kill -9` the rank of group 1, the process below its torchrun: group 0 does not stop. Group 1
starts anew, takes parameters and momentum from group 0, and at the end both print one checksum.
benchmarks/torchft_kills.py does this at random, and counts what it costs.
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

BATCH = 32  # images: a group's part of a step


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
        optimizer.zero_grad()  # asks the lighthouse who is here; one that is behind is healed
        step, groups = manager.current_step(), manager.num_participants()
        if step == args.steps:  # stay until all are here, and, healed, have asked once more
            ended = ended or time.monotonic()
            full = full + 1 if groups == args.groups else 0
            if full == 2 or time.monotonic() > ended + args.patience:
                break
            time.sleep(0.1)
            continue

        # Which data? torchft leaves that to us. Counted so, each batch is trained on once.
        batch = manager.batches_committed() + manager.participating_rank()
        if args.fixed_shares:  # the usual way, a share of the data for each group
            batch = attempt * args.groups + args.group
        attempt += 1
        log.write(step=step, ranks=groups, batch=batch)
        x, y = (data[indices_of(batch, len(images))] for data in (images, labels))
        time.sleep(args.pause)
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()  # the mean over the groups that are here
        optimizer.step()  # nothing, if one of them was lost on the way: the step is tried again
        log.write(step=step, ranks=groups, committed=manager.current_step() > step)
    if args.output_dir:
        torch.save(state_dict(), args.output_dir / f"group{args.group}.pt")
    print(f"group {args.group}: step {step}, parameters {checksum(model)}", flush=True)
    manager.shutdown()


def join(args, state_dict: Callable[[], dict], load_state_dict: Callable[[dict], None]) -> Manager:
    """The functions give away what a peer needs to be healed, and take it."""
    seconds = timedelta(seconds=args.timeout)
    try:
        return Manager(
            pg=ProcessGroupGloo(seconds),  # made anew whenever a group has come or gone
            state_dict=state_dict,
            load_state_dict=load_state_dict,
            min_replica_size=1,  # so many groups are enough to go on
            use_async_quorum=False,  # heal before the forward pass, and take part in this step
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
    """Lines of JSON, for benchmarks/torchft_kills.py to count; none without --output-dir."""

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
    """The images of the batch of this number: a new order for each epoch."""
    epoch, place = divmod(batch, count // BATCH)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return order[place * BATCH :][:BATCH]


def checksum(model: nn.Module) -> str:
    """Of every bit of the parameters."""
    values = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--group", type=int, default=0, help="the number of this group, from 0")
    add("--groups", type=int, default=1, help="how many there are when all are here")
    add("--steps", type=int, default=300, help="optimizer steps")
    add("--timeout", type=float, default=10, help="seconds for a collective, and to find others")
    add("--patience", type=float, default=60, help="seconds to wait at the end for who is away")
    add("--pause", type=float, default=0.1, help="seconds of sleep a step, for a larger model")
    add("--fixed-shares", action="store_true", help="the group's own share of the data")
    add("--output-dir", type=Path, help="for a log, and the parameters at the end")
    args = parser.parse_args()
    args.lighthouse = os.environ.get("TORCHFT_LIGHTHOUSE")
    if not args.lighthouse:
        parser.error("TORCHFT_LIGHTHOUSE is not set: start torchft_lighthouse, and say where it is")
    if os.environ.get("WORLD_SIZE") != "1":
        parser.error("start it with torchrun, one rank a group: --standalone --nproc-per-node=1")
    if not 0 <= args.group < args.groups:
        parser.error(f"--group {args.group} is not one of {args.groups}, which begin with 0")
    if args.steps < 1 or min(args.timeout, args.patience, args.pause) < 0:
        parser.error("--steps must be 1 or more, the seconds not negative")
    if args.output_dir:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
