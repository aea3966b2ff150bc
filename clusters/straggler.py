"""Find the straggler, the rank that all other ranks wait for: four lines in a training script.

    torchrun --standalone --nproc_per_node=2 clusters/straggler.py                    # no rank
    torchrun --standalone --nproc_per_node=2 clusters/straggler.py --slow-rank 1      # rank 1

One slow rank slows all ranks, and the time of a step does not tell which: each step ends with a
collective, in which the fast ranks wait for the slow one. Look at the table at the end: "a whole
step" takes equally long on all ranks. "Own work", from the end of one collective to the start
of the next, differs: during it a rank waits for no other rank.

To use it, copy the class, and mark in the loop where the rank waits for other ranks:

    store, _, _ = next(dist.rendezvous("env://"))
    watch = StragglerWatch(store, rank, world_size, device)
    for images, labels in loader:
        loss = F.cross_entropy(ddp_model(images), labels)
        with watch.waiting():
            loss.backward()  # DDP's all-reduces are in here
        optimizer.step()
"""

import argparse
import gc
import os
import socket
import statistics
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


class StragglerWatch:
    """Compares the median time of each rank's own work; rank 0 prints which ranks are slow.

    store: a store that all ranks reach. Each rank writes one short text per check. No rank waits
        for the text of another rank: rank 0 reads the texts that are there.
    device: the model's. On a GPU, events in its stream take the times; a check synchronizes once.
    every: seconds between two checks; a check also needs five steps.
    factor: a rank is slow if it takes `factor` times as long as the median rank in two consecutive
        checks. (One check may be bad luck.) It is named after 2 to 3 times `every`.
    """

    def __init__(self, store, rank, world_size, device="cpu", every=10.0, factor=1.2):
        self.store, self.rank, self.every, self.factor = store, rank, every, factor
        self.keys = [f"straggler_{other}" for other in range(world_size)]
        self.device = torch.device(device).type
        self.slow, self.named = {}, set()
        self.marks = [self._now()]  # own work begins, ends, begins, ends, ..., begins
        self.next_look = time.monotonic() + every

    @contextmanager
    def waiting(self):
        """Put it around each step's lines from the first collective to the last.

        Under DDP that is backward(); own work is then the loader, the forward pass and the
        optimizer. With BatchNorm, DDP sends buffers in the forward pass: include it as well. FSDP
        all-gathers in the forward pass: include it; own work is the loader and the optimizer only.
        (preflight.py finds a slow GPU.)
        """
        self.marks.append(self._now())
        yield
        self.marks.append(self._now())
        if len(self.marks) > 10 and time.monotonic() >= self.next_look:
            self._look()

    def _now(self):
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()  # the time at which the GPU reaches this place in its stream
        return event

    def _look(self) -> None:
        mine = statistics.median(own_work(self.marks))
        self.marks = self.marks[-1:]
        self.next_look = time.monotonic() + self.every
        self.store.set(self.keys[self.rank], f"{mine} {socket.gethostname()}")
        if self.rank == 0 and self.store.check(self.keys):  # else some ranks have not looked yet
            texts = [text.decode().split() for text in self.store.multi_get(self.keys)]
            self._compare([float(seconds) for seconds, _ in texts], [host for _, host in texts])

    def _compare(self, seconds: list[float], hosts: list[str]) -> None:
        before, self.slow = self.slow, slow_ranks(seconds, self.factor)
        for rank in sorted(before.keys() & self.slow.keys() - self.named):
            print(
                f"straggler: rank {rank} on {hosts[rank]} takes {seconds[rank] * 1e3:.1f} ms per"
                f" step for its own work, {self.slow[rank]:.1f} times the median rank",
                flush=True,
            )
        for rank in sorted(self.named - before.keys() - self.slow.keys()):
            print(f"straggler: rank {rank} on {hosts[rank]} keeps up again", flush=True)
            self.named.remove(rank)
        self.named |= before.keys() & self.slow.keys()


def own_work(marks: list) -> list[float]:
    """Seconds from each start to the end that follows it. marks: numbers, or events of a GPU."""
    if not isinstance(marks[0], float):
        marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(marks[::2], marks[1::2], strict=False)]
    return [b - a for a, b in zip(marks[::2], marks[1::2], strict=False)]


def slow_ranks(seconds: list[float], factor: float) -> dict[int, float]:
    """{rank: its time relative to the median rank's}, for ranks at `factor` or above.

    This is the lower median: with two ranks, the slower one is compared with the faster one.
    """
    usual = statistics.median_low(seconds)
    return {rank: t / usual for rank, t in enumerate(seconds) if t >= factor * usual}


# ---- the demonstration


@record
def main() -> None:
    args = parse_args()
    store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    watch = StragglerWatch(store, rank, world_size, every=args.every)
    own, whole = train(args, rank, watch)  # a function: the model must end before the group
    show_table(rank, world_size, own, whole)
    gc.collect()  # a model holds cycles; when it is gone, nothing uses the group any more
    dist.barrier()
    dist.destroy_process_group()


def train(args, rank: int, watch: StragglerWatch) -> tuple[float, float]:
    """The median seconds of a step: this rank's own work, and the whole step."""
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    own, whole = [], []
    for _ in range(args.steps):
        began = time.perf_counter()
        if rank == args.slow_rank:
            time.sleep(args.sleep)  # as if its disk were slow
        loss = model(torch.randn(32, 256)).square().mean()
        own.append(time.perf_counter() - began)
        with watch.waiting():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole.append(time.perf_counter() - began)
    return statistics.median(own), statistics.median(whole)


def show_table(rank: int, world_size: int, own: float, whole: float) -> None:
    lines = [None] * world_size
    line = f"{rank:4}  {socket.gethostname():12} {own * 1e3:11.1f} {whole * 1e3:16.1f}"
    dist.all_gather_object(lines, line)
    if rank == 0:
        heading = "\nrank  host          own work, ms   whole step, ms    (medians)"
        print(heading, *lines, sep="\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow-rank", type=int, help="slow this rank down (default: none)")
    parser.add_argument(
        "--sleep",
        type=float,
        default=0.03,
        help="seconds that the slow rank sleeps in each step (default: 0.03)",
    )
    parser.add_argument("--steps", type=int, default=200, help="number of steps (default: 200)")
    parser.add_argument(
        "--every", type=float, default=1.0, help="seconds between two checks (default: 1)"
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("needs two ranks: torchrun --standalone --nproc_per_node=2 straggler.py")
    world_size = int(os.environ["WORLD_SIZE"])
    if args.slow_rank is not None and not 0 <= args.slow_rank < world_size:
        parser.error(f"there is no rank {args.slow_rank} in a job of {world_size}")
    return args


if __name__ == "__main__":
    main()
