"""Load each rank's batches of a data set, in an order that a restarted run can resume."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import islice

import torch
import torch.distributed as dist
from arguments import UserError
from runtime import Worker
from stopping import obey_the_rank_only
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


def make_loader(
    dataset: Dataset, collate, batch_size: int, seed: int, workers: int, worker: Worker
) -> DataLoader:
    """A loader of this rank's batches of `dataset`, each of `batch_size` samples.

    Rank r takes the samples r, r + N, r + 2N, ... of one shuffled order that all ranks share, so
    the k-th batches of all ranks together are the k-th batch of a single process. drop_last keeps
    every global batch full.
    """
    sampler = EpochSampler(
        dataset,
        num_replicas=worker.world_size,
        rank=worker.rank,
        shuffle=True,
        seed=seed,
        drop_last=True,
    )
    return DataLoader(
        Seeded(dataset, seed),
        batch_size=batch_size,
        sampler=sampler,
        drop_last=True,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,  # else each epoch starts new processes
        pin_memory=worker.device.type != "cpu",
        worker_init_fn=obey_the_rank_only,
        # Not the global generator, which the model uses. Worker processes seed random and NumPy
        # from this one.
        generator=torch.Generator().manual_seed(hash((seed, worker.rank)) % 2**63),
    )


def batches(
    loader: DataLoader, step: int, steps_per_epoch: int, epochs: int, device: torch.device
) -> Iterator[tuple[int, object]]:
    """Yield (epoch, batch) of this rank, on its device, from global batch `step` on."""
    for epoch in range(step // steps_per_epoch, epochs):
        loader.sampler.set_epoch(epoch)  # a new order per epoch, the same on all ranks
        loader.sampler.skip = step % steps_per_epoch * loader.batch_size  # used before a restart
        for batch in loader:
            yield epoch, to_device(batch, device)
            step += 1


class EpochSampler(DistributedSampler):
    """A DistributedSampler that can begin in the middle of an epoch; yields (epoch, index).

    It skips indices without reading the samples.
    """

    skip = 0  # samples of the epoch that this rank has used; set it before each epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self.epoch, index) for index in islice(super().__iter__(), self.skip, None))

    def __len__(self) -> int:
        return super().__len__() - self.skip


class Seeded(Dataset):
    """`dataset` with the random seed of each sample set from seed, epoch and index alone.

    Augmented samples are therefore the same with any number of ranks and --workers, and after a
    restart. The epoch comes with the index, because worker processes that outlive an epoch do not
    see an attribute that is set in this process. Transforms must draw from torch's global CPU
    generator, as torchvision's do; random and numpy have their own generators.
    """

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]):
        epoch, index = key
        before = torch.get_rng_state()
        # A hash of integers is the same in every process.
        torch.default_generator.manual_seed(hash((self.seed, epoch, index)) % 2**63)
        try:
            return self.dataset[index]
        finally:
            torch.set_rng_state(before)  # the model's dropout is not affected


def check_same_data(datasets: list[Dataset], workers: int, worker: Worker) -> str:
    """All ranks call this. Raise `UserError` if a rank has other data than rank 0.

    The check compares the length and three samples of each data set. An empty data set is an error,
    and so is a stream, which has no length.
    Returns what a run that continues compares: the lengths, and a digest of the integers in the
    samples, such as labels. (A text may be a path, and another decoder may round pixels otherwise.)
    """
    if any(isinstance(dataset, IterableDataset) for dataset in datasets):
        raise UserError(
            "load_data() returned an IterableDataset, of which a sampler cannot give each rank its "
            "share: return data sets with a length, or read ddp_basics/streaming_data.py"
        )
    own = []
    for dataset in datasets:
        own.append((len(dataset), *(digests_of_samples(dataset, workers) if len(dataset) else "")))
    by_rank = [None] * worker.world_size
    dist.all_gather_object(by_rank, own)
    for rank, data in enumerate(by_rank):
        if data != by_rank[0]:
            lengths = [[length for length, *_ in sets] for sets in (by_rank[0], data)]
            raise UserError(
                f"rank {rank} has other data than rank 0 (lengths {lengths[1]} and {lengths[0]}): "
                "copy the same files to every host; in load_data() sort the names that a folder "
                "lists, and seed what shuffles; let random transforms draw from torch's generator, "
                "not from those of random or NumPy"
            )
    lengths = [len(dataset) for dataset in datasets]
    if 0 in lengths:
        raise UserError(
            f"there are no samples: load_data() returned data sets of lengths {lengths}"
        )
    exact = "".join(digest for _, _, digest in own)
    return f"{' + '.join(map(str, lengths))} samples, digest {digest_of([exact])[:8]}"


def check_same_order(loader: DataLoader, worker: Worker) -> None:
    """All ranks call this. Raise `UserError` if the ranks shuffle with different seeds.

    Several ranks would then take one sample, and no rank would take another.
    """
    seeds = [None] * worker.world_size
    dist.all_gather_object(seeds, loader.sampler.seed)
    if len(set(seeds)) > 1:
        raise UserError(f"all ranks must shuffle the data with one seed, not with {seeds}")


def digests_of_samples(dataset: Dataset, workers: int) -> tuple[str, str]:
    """`digests` of the first sample of `dataset`, one from the middle, and the last.

    With --workers a worker process reads them: a file that this process has open would be open in
    all processes that it forks later, with one position for all of them.
    """
    indices = sorted({0, len(dataset) // 2, len(dataset) - 1})
    loader = DataLoader(
        Seeded(dataset, 0),
        batch_sampler=[[(0, i) for i in indices]],
        collate_fn=digests,
        num_workers=min(workers, 1),
        worker_init_fn=obey_the_rank_only,
        generator=torch.Generator(),
    )
    [found] = loader
    return found


def digests(samples: list) -> tuple[str, str]:
    """Of all numbers, texts and images in `samples`, and of its integers alone."""
    values, exact = [], []
    for leaf in leaves_of(samples):
        if isinstance(leaf, int):
            exact.append(repr(leaf))
        elif hasattr(leaf, "tolist"):  # a tensor; an array or a scalar of NumPy
            are_integers = re.search("int|bool", str(getattr(leaf, "dtype", "")))
            (exact if are_integers else values).append(numbers_of(leaf))
        elif hasattr(leaf, "tobytes"):  # an image of PIL
            values.append(repr(leaf.tobytes()))
        elif isinstance(leaf, float | complex | str | bytes):
            values.append(repr(leaf))
    return digest_of(values + exact), digest_of(exact)


def numbers_of(leaf) -> str:
    """The numbers of a tensor or an array as text; of many, a digest of their bytes."""
    if math.prod(getattr(leaf, "shape", ())) <= 10_000:
        return repr(leaf.tolist())
    content = leaf.contiguous().view(torch.uint8).numpy() if isinstance(leaf, Tensor) else leaf
    return f"{tuple(leaf.shape)} {hashlib.sha256(content.tobytes()).hexdigest()}"


def digest_of(texts: list[str]) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def to_device(batch, device: torch.device):
    """`batch` on `device`: what has a `to` in its dicts, lists, tuples and dataclasses moves."""

    def move(leaf):
        return leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf

    return map_leaves(move, batch)


def split(batch, parts: int) -> list:
    """`parts` micro-batches of equally many samples: each tensor is split along dim 0.

    Raises `UserError` if a part would not have the same samples in all its tensors.
    """
    if parts == 1:
        return [batch]
    leaves = leaves_of(batch)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise UserError(
                f"--accumulate {parts} cannot split a batch with a {type(leaf).__name__}: let "
                "collate() return only tensors, in dicts, lists, tuples or dataclasses, or use "
                "--accumulate 1"
            )
    sizes = sorted({leaf.shape[0] if leaf.ndim else 1 for leaf in leaves})
    if len(sizes) != 1 or sizes[0] % parts:
        raise UserError(
            f"--accumulate {parts} cannot split a batch whose tensors have first dims of sizes "
            f"{sizes}: let collate() stack the samples along dim 0 in each tensor, or use "
            "--accumulate 1"
        )
    return [map_leaves(lambda tensor, i=i: tensor.chunk(parts)[i], batch) for i in range(parts)]


def map_leaves(function, value):
    """`value` with function(leaf) for each leaf of its dicts, lists, tuples and dataclasses."""
    if isinstance(value, PackedSequence):  # a namedtuple that moves some of its tensors
        return function(value)
    if isinstance(value, Mapping):  # also a BatchEncoding of transformers
        return {key: map_leaves(function, item) for key, item in value.items()}
    if hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(map_leaves(function, item) for item in value))
    if isinstance(value, list | tuple):
        return [map_leaves(function, item) for item in value]
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{n: map_leaves(function, getattr(value, n)) for n in names})
    return function(value)


def leaves_of(value) -> list:
    found = []
    map_leaves(lambda leaf: found.append(leaf) or leaf, value)
    return found
