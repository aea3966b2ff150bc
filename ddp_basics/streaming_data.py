"""Stream samples from files to all ranks and all loader workers: an IterableDataset under DDP.

    python ddp_basics/streaming_data.py
    torchrun --standalone --nproc_per_node=2 ddp_basics/streaming_data.py --workers 2
    torchrun --standalone --nproc_per_node=3 ddp_basics/streaming_data.py --workers 1

No sampler distributes the samples of an IterableDataset. Each worker process of each rank has its
own copy of the dataset and iterates over it. The table counts what three datasets do in an epoch:

    all files    each worker reads everything: 2 ranks with 2 workers see each sample 4 times
    by file      worker i of N reads files i, i + N, ...: each sample once, but the ranks have
                 different numbers of batches, so DDP would hang (uneven_inputs_hang.py)
    streams      the epoch's samples are split into --streams pieces of equal length, and each
                 global batch takes equally many samples from each piece. A file at the border of
                 two pieces is read twice: use many more files than streams

The streams belong to the job, and ranks and workers only share them. So the global batches are the
same for any number of ranks and workers, and the position in the data is one number: the step. Look
at the last line: a training that stops in mid-epoch and continues with another number of workers
gets the same samples and ends with the same parameters, bit for bit on one or two ranks. (On three
or more ranks, DDP's first step after a restart adds the ranks' gradients in another order than its
later steps, so the sums are rounded differently.)

The script does not use torchdata's StatefulDataLoader (0.11, maintained but not developed). It runs
with torch 2.15, but has one state per rank, which fits only the number of workers that saved it, so
ranks and workers could not change at a restart.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from model import SmallCNN
from runtime import Worker, distributed_worker
from sample_files import find_files
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker, TemporaryDirectory() as temporary:
        check_arguments(args, worker)
        files = find_files(args.data_dir or Path(temporary), args.files, worker)
        counts = [count for _, count in files]
        if args.batch_size > sum(counts):
            raise UserError(
                f"--batch-size {args.batch_size} exceeds the {sum(counts)} samples in the files"
            )
        if worker.is_main:
            print(
                f"{sum(counts):,} samples in {len(files)} files of {min(counts)} to {max(counts)}, "
                f"{args.workers} worker(s) per rank, {args.streams} streams"
            )
        compare_datasets(files, args, worker)
        train_with_a_stop(files, args, worker)


class Files(IterableDataset):
    """Files of samples, and a count of what this rank's workers read from them.

    files: (path, number of samples) of each file; all ranks have the same list.
    """

    def __init__(self, files: list[tuple[Path, int]], worker: Worker):
        self.files, self.rank, self.world_size = files, worker.rank, worker.world_size
        # In shared memory, one row per worker process: files opened, bytes read.
        self.reads = torch.zeros(1024, 2, dtype=torch.int64).share_memory_()

    def read(self, path: Path) -> list[tuple[int, Tensor, Tensor]]:
        """All samples of a file: (number of the sample, image (1, 8, 8) in [0, 1], label)."""
        number, _ = this_worker()
        self.reads[number] += torch.tensor([1, path.stat().st_size])
        with np.load(path) as content:
            images = torch.from_numpy(content["images"]).float().unsqueeze(1) / 16
            labels = torch.from_numpy(content["labels"]).long()
            return list(zip(content["numbers"].tolist(), images, labels, strict=True))


def this_worker() -> tuple[int, int]:
    """(the number of this worker process of the loader, how many there are)."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


class AllFiles(Files):
    """The naive dataset: it knows nothing of ranks or workers."""

    def __iter__(self) -> Iterator:
        for path, _ in self.files:
            yield from self.read(path)


class ByFile(Files):
    """Each worker of each rank reads its own files: correct, but uneven."""

    def __iter__(self) -> Iterator:
        number, workers = this_worker()
        first = self.rank * workers + number
        for path, _ in self.files[first :: self.world_size * workers]:
            yield from self.read(path)


class Streams(Files):
    """Equal pieces of the epoch's samples, distributed over the workers of all ranks.

    Yields chunks, (numbers, images, labels) of batch_size / streams samples each. This rank's local
    batch is the next streams / world_size chunks: see `local_batches`. Each epoch leaves out the
    samples that do not fill a global batch: fewer than batch_size, and other ones in each epoch.
    """

    def __init__(self, files, worker: Worker, streams: int, batch_size: int, seed: int = 0):
        super().__init__(files, worker)
        self.seed, self.streams, self.chunk = seed, streams, batch_size // streams
        self.steps = sum(count for _, count in files) // batch_size  # per epoch
        # In shared memory too: persistent workers keep the copy of the dataset they started with,
        # and would never see a new value of an ordinary attribute.
        self.position = torch.zeros(2, dtype=torch.int64).share_memory_()

    def start_at(self, epoch: int, step: int) -> None:
        """Call this before each `iter(loader)`. step: within the epoch; 0: its beginning."""
        self.position.copy_(torch.tensor([epoch, step]))

    def __iter__(self) -> Iterator:
        epoch, first_step = self.position.tolist()
        number, workers = this_worker()
        per_rank = self.streams // self.world_size
        # The loader takes one chunk from each worker in turn. Each worker has every workers-th
        # stream, so the chunks of a step arrive in the order of the streams.
        mine = range(self.rank * per_rank, (self.rank + 1) * per_rank)[number::workers]
        length = self.steps * self.chunk
        streams = [
            self.samples(epoch, stream * length + first_step * self.chunk, (stream + 1) * length)
            for stream in mine
        ]
        for _ in range(first_step, self.steps):
            for stream in streams:
                yield default_collate(list(islice(stream, self.chunk)))

    def samples(self, epoch: int, start: int, end: int) -> Iterator:
        """Samples start ... end - 1 of the epoch: the files in a new order, each one shuffled.

        It opens only files with such samples, and holds one file in memory at a time.
        """
        first = 0  # position in the epoch of the file's first sample
        for index in self.shuffled(len(self.files), epoch, 0):
            path, count = self.files[index]
            if first < end and start < first + count:
                rows = self.read(path)
                order = self.shuffled(count, epoch, 1 + index)
                for row in order[max(start - first, 0) : end - first]:
                    yield rows[row]
            first += count

    def shuffled(self, count: int, epoch: int, draw: int) -> list[int]:
        """A permutation that depends on seed, epoch and draw, not on what was drawn before."""
        number = (self.seed * 1_000_003 + epoch) * (1 + len(self.files)) + draw
        return torch.randperm(count, generator=torch.Generator().manual_seed(number)).tolist()


def local_batches(loader: DataLoader, chunks: int) -> Iterator[list[Tensor]]:
    """This rank's part of each global batch: `chunks` consecutive chunks of the loader."""
    iterator = iter(loader)
    while parts := list(islice(iterator, chunks)):
        yield [torch.cat(column) for column in zip(*parts, strict=True)]


def compare_datasets(files: list, args, worker: Worker) -> None:
    if worker.is_main:
        print("one epoch  samples  each seen  left out  batches per rank  files opened  bytes read")
    rows = {"all files": AllFiles(files, worker), "by file": ByFile(files, worker)}
    for name, dataset in rows.items():
        local_batch = args.batch_size // worker.world_size
        loader = DataLoader(dataset, local_batch, num_workers=args.workers)
        count_samples(name, loader, dataset, files, worker)
    streams = Streams(files, worker, args.streams, args.batch_size)
    loader = DataLoader(streams, batch_size=None, num_workers=args.workers)
    batches = local_batches(loader, args.streams // worker.world_size)
    count_samples("streams", batches, streams, files, worker)


def count_samples(name: str, batches, dataset: Files, files: list, worker: Worker) -> None:
    numbers = [batch[0].tolist() for batch in batches]
    rows = [None] * worker.world_size
    dist.all_gather_object(rows, (numbers, dataset.reads.sum(0).tolist()))
    if not worker.is_main:
        return
    seen = Counter(n for batches, _ in rows for batch in batches for n in batch)
    least, most = min(seen.values()), max(seen.values())
    often = f"{least} x" if least == most else f"{least} to {most} x"
    per_rank = " ".join(str(len(batches)) for batches, _ in rows)
    opened, read = (sum(reads[i] for _, reads in rows) for i in (0, 1))
    left_out = sum(count for _, count in files) - len(seen)
    print(
        f"{name:9}  {seen.total():7,}  {often:>9}  {left_out:8}  {per_rank:>16}  {opened:12}  "
        f"{read:10,}"
    )


def train_with_a_stop(files: list, args, worker: Worker) -> None:
    """Train for --epochs without and with a stop in mid-epoch, and compare the two runs."""
    steps = Streams(files, worker, args.streams, args.batch_size).steps
    if args.epochs * steps < 2:
        raise UserError(f"--batch-size {args.batch_size} leaves one step: no place to stop in it")
    straight = train(None, args.epochs * steps, args.workers, files, args, worker)
    stop = (args.epochs - 1) * steps + steps // 2
    state = train(None, stop, args.workers, files, args, worker)
    resumed = train(state, args.epochs * steps, args.workers_after, files, args, worker)

    pairs = zip(straight["model"].values(), resumed["model"].values(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    same = straight["numbers"][stop:] == resumed["numbers"]
    by_rank = [None] * worker.world_size
    dist.all_gather_object(by_rank, (difference, same, straight["numbers"]))
    if not worker.is_main:
        return
    print(f"{args.epochs} epochs of {steps} steps, loss of the last step {straight['loss']:.4f}")
    print(
        f"stopped after step {stop}, continued with {args.workers_after} worker(s): "
        f"{'the same samples' if all(same for _, same, _ in by_rank) else 'OTHER SAMPLES'}, "
        f"max difference of parameters {max(row[0] for row in by_rank):.1e}"
    )
    if args.output:
        by_step = zip(*(numbers for _, _, numbers in by_rank), strict=True)
        straight["numbers"] = [[n for part in parts for n in part] for parts in by_step]
        torch.save(straight, args.output)


def train(state: dict | None, until: int, workers: int, files: list, args, worker: Worker) -> dict:
    """Train from `state`, or from the beginning, to optimizer step `until`; returns the new state.

    "step" is the position in the data. "numbers" are the samples of this rank in each step.
    """
    torch.manual_seed(0)
    model = SmallCNN(channels=8).to(worker.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    ddp_model = DistributedDataParallel(model)
    dataset = Streams(files, worker, args.streams, args.batch_size)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0
    )
    step, numbers, gradients = state["step"] if state else 0, [], []
    while step < until:
        dataset.start_at(*divmod(step, dataset.steps))  # the epoch, the step in it
        batches = local_batches(loader, args.streams // worker.world_size)
        for batch_numbers, images, labels in islice(batches, until - step):
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp_model(images.to(worker.device)), labels.to(worker.device))
            loss.backward()
            optimizer.step()
            step += 1
            numbers.append(batch_numbers.tolist())
            gradients.append([p.grad.cpu().clone() for p in model.parameters()])
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {
        "model": {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "step": step,
        "loss": total.item() / worker.world_size,
        "numbers": numbers,
        "gradients": gradients,
    }


def check_arguments(args, worker: Worker) -> None:
    for workers in (args.workers, args.workers_after):
        if args.streams % (worker.world_size * max(workers, 1)):
            raise UserError(
                f"--streams {args.streams} is not a multiple of {worker.world_size} rank(s) x "
                f"{max(workers, 1)} worker(s)"
            )
    if args.batch_size % args.streams:
        raise UserError(
            f"--batch-size {args.batch_size} is not a multiple of --streams {args.streams}"
        )


def parse_args():
    parser = ArgumentParser(description="Stream samples from files to all ranks and workers.")
    add = parser.add_argument
    add("--data-dir", type=Path, help="read files from this folder; write them if there are none")
    add("--files", type=at_least(1), default=64, help="files to write (default: 64)")
    add("--streams", type=at_least(1), default=12, help="equal pieces of an epoch (default: 12)")
    add("--batch-size", type=at_least(1), default=96, help="images per global batch (default: 96)")
    add("--epochs", type=at_least(1), default=2, help="epochs to train (default: 2)")
    add("--workers", type=at_least(0), default=2, help="loader processes per rank (default: 2)")
    add("--workers-after", type=at_least(0), default=0, help="workers after the stop (default: 0)")
    add("--output", type=Path, help="save samples, gradients and parameters to this file")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    parser.make_folder("--data-dir", args.data_dir)
    return args


if __name__ == "__main__":
    main()
