r"""Find out why a job hangs: torch's flight recorder with Gloo, read by torchfrtrace.

    torchrun --standalone --nproc_per_node=2 clusters/flight_recorder.py \
        --output-dir runs/hang                  # ends with status 1
    torchfrtrace runs/hang --prefix rank_

After step 5, rank 0 writes a file and all ranks should meet in a barrier. But the barrier is
indented into the `if rank == 0:`. The job ends after --timeout seconds, and the error names neither
the rank that went wrong nor the line. torch's flight recorder keeps the last 2000 collectives of
each rank (TORCH_FR_BUFFER_SIZE) with their sizes and Python stacks. Look at torchfrtrace's output:
the first collective in which the ranks differ, what each rank called, and at which line.

    --bug stuck    the last rank hangs while it reads its data, without an exception
    --bug none     no file is written

NCCL's watchdog writes such a file when it ends a process (TORCH_FR_DUMP_TEMP_FILE has the path).
Gloo has no watchdog. To get the files with Gloo, copy flight_recorder().
"""

import argparse
import os
import pickle
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    store, rank, world_size = next(dist.rendezvous("env://"))
    # A rank may start seconds after another one, which would give up at its --timeout.
    store.set(f"rank {rank} has started", "")
    store.wait([f"rank {other} has started" for other in range(world_size)])
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=args.timeout),
    )
    with flight_recorder(args.output_dir, store):
        train(args.bug, args.output_dir)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def flight_recorder(folder: Path, store: dist.Store, groups=()):
    """When an exception leaves this block on one rank, all ranks write folder/rank_<rank>.

    A rank that hangs outside of collectives raises nothing, so a thread on each rank asks the
    store four times per second whether another rank has failed. store: one that all ranks reach.
    groups: the groups, besides the default one, in which this rank calls collectives.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    written = [f"flight_recorder/written_{other}" for other in range(world_size)]
    over = threading.Event()

    def watch() -> None:
        with suppress(RuntimeError):  # the store is gone: the job has ended
            while not over.wait(0.25):
                if store.check(["flight_recorder/failed"]):
                    write_record(folder / f"rank_{rank}", groups)
                    store.set(written[rank], "")
                    return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except Exception:
        with suppress(RuntimeError):
            store.set("flight_recorder/failed", "")
            # Wait until all have written, because torchrun ends all ranks when one fails. (No
            # store.wait(): it would block our own watcher's use of the store.)
            deadline = time.monotonic() + 10
            while not store.check(written) and time.monotonic() < deadline:
                over.wait(0.1)
        raise
    finally:
        over.set()
        watcher.join()


def write_record(path: Path, groups=()) -> None:
    """Write this rank's last collectives in torchfrtrace's format."""
    # Private: torch has no public call that writes the record of Gloo's groups.
    from torch._C._distributed_c10d import _dump_fr_trace

    content = pickle.loads(_dump_fr_trace())
    # Gloo leaves out the ranks of each group, without which torchfrtrace raises KeyError.
    content["pg_config"] = {
        group.group_name: {
            "name": group.group_name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for group in (dist.group.WORLD, *groups)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))


# ---- the demonstration


def train(bug: str, folder: Path, steps: int = 10) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        if bug == "stuck" and step == 5 and rank == world_size - 1:
            read_from_a_dead_disk()
        loss = model(torch.randn(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
        if bug == "barrier" and step == 5 and rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), folder / "model.pt")
            dist.barrier()  # the bug: this line belongs outside the `if`


def read_from_a_dead_disk() -> None:
    time.sleep(3600)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--bug", choices=("barrier", "stuck", "none"), default="barrier", help="bug to plant"
    )
    parser.add_argument("--timeout", type=float, default=5, help="timeout of collectives, seconds")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs/hang"), help="write the dumps to this folder"
    )
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error(
            "a hang needs another rank: torchrun --standalone --nproc_per_node=2 flight_recorder.py"
        )
    if args.timeout <= 0:
        parser.error(f"--timeout must be above 0, not {args.timeout:g}")
    return args


if __name__ == "__main__":
    main()
