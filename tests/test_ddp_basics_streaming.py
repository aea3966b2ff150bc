"""ddp_basics/streaming_data.py: each sample once, equally many batches, resumed at the step."""

import importlib
import itertools
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pool
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, python
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.slow  # each launch of ranks takes some seconds

HERE = ROOT / "ddp_basics"
SCRIPT = HERE / "streaming_data.py"
SAMPLES, BATCH, STREAMS, FILES = 1437, 96, 12, 64
STEPS = SAMPLES // BATCH


@pytest.fixture(scope="module")
def streaming():
    sys.path.insert(0, str(HERE))
    yield importlib.import_module("streaming_data")
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """ranks -> output, samples and gradients of each step, parameters; workers as named here."""
    folder, found = tmp_path_factory.mktemp("streaming"), {}
    for ranks, workers, after in ((1, 0, 1), (2, 2, 0), (3, 1, 2)):
        flags = ("--workers", workers, "--workers-after", after, "--data-dir", folder / "files")
        flags += ("--output", folder / f"{ranks}.pt")
        output = pool.run(SCRIPT, *flags, ranks=ranks).check().output
        saved = torch.load(folder / f"{ranks}.pt", weights_only=True)
        found[ranks] = SimpleNamespace(output=output, workers=max(workers, 1), **saved)
    found["files"] = sorted((folder / "files").glob("*.npz"))
    return found


def row(output: str, name: str) -> list[int]:
    line = next(line for line in output.splitlines() if line.startswith(f"{name} "))
    words = line.removeprefix(name).replace(" x", "").replace(",", "").split()
    return [int(word) for word in words]


def test_the_files_hold_each_sample_once(runs):
    content = [np.load(path) for path in runs["files"]]
    index = json.loads((runs["files"][0].parent / "index.json").read_text())
    assert [index[path.name] for path in runs["files"]] == [len(c["labels"]) for c in content]
    assert len(set(index.values())) > 3  # of different length
    numbers = np.concatenate([c["numbers"] for c in content])
    assert sorted(numbers) == list(range(SAMPLES))
    images, labels = digits()
    stored = torch.from_numpy(np.concatenate([c["images"] for c in content])).float() / 16
    assert torch.equal(stored.flatten(1), images[numbers].flatten(1))
    assert torch.equal(
        torch.from_numpy(np.concatenate([c["labels"] for c in content])).long(), labels[numbers]
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_the_three_datasets_read(runs, ranks):
    run, everybody = runs[ranks], ranks * runs[ranks].workers
    on_disk = sum(path.stat().st_size for path in runs["files"])
    samples, seen, left_out, *batches, opened, read = row(run.output, "all files")
    assert (samples, seen, left_out) == (everybody * SAMPLES, everybody, 0)
    assert (opened, read) == (everybody * FILES, everybody * on_disk)
    assert len(batches) == ranks
    samples, seen, left_out, *batches, opened, read = row(run.output, "by file")
    assert (samples, seen, left_out, opened, read) == (SAMPLES, 1, 0, FILES, on_disk)
    if ranks > 1:
        assert len(set(batches)) > 1  # DDP would hang
    samples, seen, left_out, *batches, opened, read = row(run.output, "streams")
    assert (samples, seen, left_out) == (STEPS * BATCH, 1, SAMPLES - STEPS * BATCH)
    assert batches == [STEPS] * ranks
    # A file at the border of two streams is opened for both, and those left out for none.
    assert opened <= FILES + STREAMS - 1
    assert read < 1.5 * on_disk


def test_each_sample_once_an_epoch_in_another_order(runs):
    one = runs[1].numbers
    assert [len(batch) for batch in one] == [BATCH] * 2 * STEPS
    first, second = flat(one[:STEPS]), flat(one[STEPS:])
    assert len(set(first)) == len(set(second)) == STEPS * BATCH  # each once
    assert first != second
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 20  # 1 expected by chance
    assert set(first) != set(second)  # other samples are left out


def test_ranks_and_workers_do_not_change_the_global_batches(runs):
    assert runs[1].numbers == runs[2].numbers == runs[3].numbers


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_stop_in_mid_epoch_changes_nothing(runs, ranks):
    line = runs[ranks].output.splitlines()[-1]
    says = r"stopped after step 21, continued with \d worker\(s\): the same samples, max difference"
    difference = float(re.fullmatch(says + r" of parameters (\S+)", line)[1])
    # With three ranks, a + b + c is rounded as DDP's buckets lie, and these change after DDP's
    # first step. With two, a + b is b + a.
    assert difference <= (1e-6 if ranks > 2 else 0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_equals_a_plain_loop(runs, ranks):
    """The images are taken from scikit-learn, by the numbers of the samples."""
    run, (images, labels) = runs[ranks], digits()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for numbers, gradients in zip(run.numbers, run.gradients, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(images[numbers]), labels[numbers]).backward()
        expected = [p.grad for p in model.parameters()]
        # fp32 sums in another order, carried through the steps so far.
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-5)
        optimizer.step()
    parameters = list(run.model.values())
    torch.testing.assert_close(parameters, [*model.state_dict().values()], rtol=0, atol=1e-5)


def flat(lists) -> list:
    return list(itertools.chain.from_iterable(lists))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    rows, _ = train_test_split(range(1797), test_size=0.2, stratify=labels, random_state=0)
    images = torch.tensor(images[rows] / 16).float().view(-1, 1, 8, 8)
    return images, torch.tensor(labels[rows])


# ---- the dataset itself: other ranks and workers after a stop, workers that persist


def global_batches(streaming, files, ranks: int, workers: int, epoch: int, step: int, **options):
    """The samples of all ranks in each step from `step` on, as the loaders of `ranks` ranks say."""
    by_rank = []
    for rank in range(ranks):
        worker = SimpleNamespace(rank=rank, world_size=ranks)
        dataset = streaming.Streams(files, worker, STREAMS, BATCH)
        dataset.start_at(epoch, step)
        loader = DataLoader(dataset, batch_size=None, num_workers=workers, **options)
        batches = streaming.local_batches(loader, STREAMS // ranks)
        by_rank.append([batch[0].tolist() for batch in batches])
    return [flat(parts) for parts in zip(*by_rank, strict=True)]


@pytest.fixture(scope="module")
def files(runs):
    return [(path, len(np.load(path)["labels"])) for path in runs["files"]]


@pytest.mark.parametrize(
    ("ranks", "workers", "step"), [(1, 0, 5), (1, 2, 0), (2, 3, 5), (4, 1, 13), (12, 0, 0)]
)
def test_any_ranks_and_workers_continue_at_the_step(streaming, files, runs, ranks, workers, step):
    expected = runs[1].numbers[STEPS + step : 2 * STEPS]
    assert global_batches(streaming, files, ranks, workers, 1, step) == expected


def test_a_step_at_the_end_of_the_epoch_has_nothing_left(streaming, files):
    assert global_batches(streaming, files, 1, 0, 0, STEPS) == []


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_that_persist_see_the_new_epoch(streaming, files, runs, context):
    worker = SimpleNamespace(rank=0, world_size=1)
    dataset = streaming.Streams(files, worker, STREAMS, BATCH)
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": context}
    loader = DataLoader(dataset, batch_size=None, **options)
    seen = []
    for epoch, step in ((0, 0), (1, 4)):
        dataset.start_at(epoch, step)
        seen += [batch[0].tolist() for batch in streaming.local_batches(loader, STREAMS)]
    assert seen == runs[1].numbers[:STEPS] + runs[1].numbers[STEPS + 4 :]


def test_a_resumed_stream_opens_only_what_it_needs(streaming, files):
    worker = SimpleNamespace(rank=0, world_size=1)
    dataset = streaming.Streams(files, worker, STREAMS, BATCH)
    dataset.start_at(0, STEPS - 1)
    assert len(list(dataset)) == STREAMS
    assert dataset.reads[0, 0] <= 2 * STREAMS  # the last 8 samples of each stream


# ---- bad input


def test_a_run_of_one_step_has_no_place_to_stop():
    result = python(SCRIPT, "--epochs", 1, "--batch-size", 1200)
    assert result.returncode == 2
    assert "--batch-size 1200 leaves one step: no place to stop in it" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", 5], "--streams 12 is not a multiple of 2 rank(s) x 5 worker(s)"),
        (["--workers-after", 4], "--streams 12 is not a multiple of 2 rank(s) x 4 worker(s)"),
        (["--batch-size", 100], "--batch-size 100 is not a multiple of --streams 12"),
        (["--batch-size", 1440], "--batch-size 1440 exceeds the 1437 samples in the files"),
        (["--files", 2000], "--files must be at most 1437, not 2000"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, message):
    result = pool.run(SCRIPT, *arguments, ranks=2)
    assert result.returncode == 2
    assert result.output.count(message) == 1, result.output


def test_an_error_leaves_no_folder(tmp_path):
    result = python(SCRIPT, "--batch-size", 100, cold=True, TMPDIR=str(tmp_path))
    assert result.returncode == 2
    assert not list(tmp_path.iterdir())


def test_a_broken_index_is_named(tmp_path):
    (tmp_path / "index.json").write_text('{"digits_000.npz": 2')
    result = pool.run(SCRIPT, "--data-dir", tmp_path, ranks=2)
    assert result.returncode == 2
    assert result.output.count(f"{tmp_path}/index.json is broken: delete it") == 1, result.output


def test_a_file_that_is_missing_is_named(runs, tmp_path):
    for path in runs["files"][0].parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "digits_007.npz").unlink()
    result = pool.run(SCRIPT, "--data-dir", tmp_path, ranks=2)
    assert result.returncode == 2
    message = rf"rank 0 on \S+ does not see {tmp_path}/digits_007.npz: --data-dir must be"
    assert len(re.findall(message, result.output)) == 1, result.output
