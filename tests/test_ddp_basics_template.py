"""What the template adds to DDP: data that resume in place, SIGTERM, a log, one GPU per rank."""

import contextlib
import copy
import errno
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tracemalloc
from array import array
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import checkpoint
import data
import loading
import metrics
import numpy as np
import pool
import pytest
import stopping
import torch
from arguments import UserError
from config import Settings
from data import Shifted
from helpers import ROOT, Torchrun, python, read_metrics, torchrun
from loading import (
    Seeded,
    batches,
    check_same_data,
    digests,
    digests_of_samples,
    make_loader,
    split,
    to_device,
)
from PIL import Image
from replicas import checksum
from rows import Copy
from runtime import Worker
from stopping import StopRequests
from torch.utils.data import Dataset, IterableDataset, TensorDataset

TRAIN = ROOT / "ddp_basics/train.py"
CPU = torch.device("cpu")


# ---- data: the order, random numbers, continuing in the middle of an epoch


class Noisy(Dataset):
    """Like an augmenting data set: each sample draws from torch's global generator."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor(index), torch.rand(())


def test_a_batch_may_be_any_mapping():
    """A tokenizer of transformers returns a BatchEncoding, which is no dict."""
    batch = UserDict(ids=torch.arange(8).view(4, 2))
    assert to_device(batch | {"text": "x"}, torch.device("meta"))["ids"].is_meta
    assert [part["ids"].tolist() for part in split(batch, 2)] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]


class Pair(NamedTuple):
    x: torch.Tensor
    y: object


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    y: object


@pytest.mark.parametrize("kind", [Pair, Record])
def test_a_batch_keeps_its_type(kind):
    """A loss reads batch.x."""
    moved = to_device([kind(torch.arange(4), ("a", torch.arange(4)))], torch.device("meta"))[0]
    assert moved.x.is_meta
    assert moved.y[0] == "a"
    assert moved.y[1].is_meta
    parts = split(kind(torch.arange(4), None), 1) + split(kind(torch.arange(4), torch.ones(4)), 2)
    assert [part.x.tolist() for part in parts] == [[0, 1, 2, 3], [0, 1], [2, 3]]


def test_a_packed_sequence_moves_as_a_whole():
    """It is a namedtuple, whose batch_sizes stay on the CPU."""
    packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    (moved,) = to_device([packed], torch.device("meta"))
    assert moved.data.is_meta
    assert moved.batch_sizes.tolist() == [2, 2, 1]


HUNG = """
import multiprocessing, sys, time
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, sys.argv[2])
from stopping import obey_the_rank_only

class Hangs(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(1000 * index)
        return index

if __name__ == "__main__":
    told = {"num_workers": 1, "worker_init_fn": obey_the_rank_only, "batch_size": 1}
    batches = iter(DataLoader(Hangs(), multiprocessing_context=sys.argv[1], **told))
    next(batches)
    (process,) = multiprocessing.active_children()
    process.terminate()
    process.join(60)
    print("ended with", process.exitcode)
    process.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_worker_that_hangs_ends_when_its_rank_asks(method, tmp_path):
    """Under forkserver, the default of Python 3.14, its parent process is not the rank."""
    script = tmp_path / "hangs.py"
    script.write_text(HUNG)
    assert "ended with 0" in python(script, method, ROOT / "ddp_basics").check().output


class Graph:
    """As torch_geometric's: no tensor, and it moves its own."""

    def __init__(self, x):
        self.x = x

    def to(self, device, non_blocking=False):
        return Graph(self.x.to(device, non_blocking=non_blocking))


def test_a_batch_of_ones_own_type_moves_itself():
    moved = to_device({"graph": Graph(torch.ones(2)), "name": "a"}, torch.device("meta"))
    assert moved["graph"].x.is_meta
    assert moved["name"] == "a"


UNSPLIT = {
    "other type": (SimpleNamespace(ids=torch.arange(8)), "a SimpleNamespace"),
    "strings": ([torch.zeros(4, 2), torch.zeros(4), ["a", "b", "c", "d"]], "a str"),
    "two sizes": ([torch.zeros(4, 2), torch.zeros(5, 2)], r"sizes \[4, 5\]"),
    "a list of images": ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)], r"sizes \[3\]"),
    "number": ({"x": torch.zeros(4), "weight": torch.tensor(1.0)}, r"sizes \[1, 4\]"),
    "nothing": ({}, r"sizes \[\]"),
}


@pytest.mark.parametrize("case", UNSPLIT)
def test_a_batch_that_cannot_be_split_is_an_error(case):
    batch, found = UNSPLIT[case]
    with pytest.raises(UserError, match=f"^--accumulate 2 cannot split .*{found}: .*accumulate 1$"):
        split(batch, 2)
    assert split(batch, 1) == [batch]


class OpensAFile(Dataset):
    """Each process opens it at its first sample."""

    opened = False

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.opened = True
        return torch.tensor(index)


def test_with_workers_no_sample_is_read_in_the_rank():
    dataset = OpensAFile()
    found = digests_of_samples(dataset, 2)
    assert not dataset.opened
    assert found == digests_of_samples(dataset, 0)
    assert dataset.opened
    assert found == digests([torch.tensor(index) for index in (0, 2, 3)])


@pytest.mark.parametrize(
    ("label", "other", "is_exact"),
    [
        (3, 4, True),
        (True, False, True),
        (np.int64(3), np.int64(4), True),
        (array("b", [3]), array("b", [4]), False),
        (np.str_("a"), np.str_("b"), False),
        (torch.tensor(3), torch.tensor(4), True),
        ({"label": [1, 2]}, {"label": [1, 3]}, True),
        ({"path": ["a", "b"]}, {"path": ["a", "c"]}, False),
        (b"1", b"2", False),
        (0.5, 0.75, False),
        (np.float32(0.5), np.float32(0.75), False),
        (torch.tensor(0.5).bfloat16(), torch.tensor(0.75).bfloat16(), False),
        (Image.new("L", (2, 2), 0), Image.new("L", (2, 2), 9), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_labels_of_any_type_are_compared(label, other, is_exact):
    """ImageFolder and many others return labels that are no tensors."""
    x = torch.zeros(2)
    one, two = digests([(x, label)]), digests([(x, other)])
    assert one[0] != two[0]
    assert (one[1] != two[1]) == is_exact
    assert digests([(x, copy.deepcopy(label))]) == one


class Jittered(Dataset):
    """Its transform draws from Python's generator, which each process seeds by itself."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(random.random())


def test_ranks_whose_transforms_draw_other_numbers_are_told_of_transforms(monkeypatch):
    def two_ranks(by_rank, own):
        by_rank[:] = own, [(4, *digests_of_samples(Jittered(), 0))]

    monkeypatch.setattr(loading.dist, "all_gather_object", two_ranks)
    with pytest.raises(UserError, match=r"transforms .* torch's generator"):
        check_same_data([Jittered()], 0, Worker(0, 0, 2, CPU))


def test_a_stream_is_sent_to_the_script_for_streams():
    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1)

    with pytest.raises(UserError, match=r"IterableDataset.*streaming_data\.py"):
        check_same_data([Stream()], 0, Worker(0, 0, 1, CPU))


def read(rank=0, ranks=1, workers=0, step=0, seed=0):
    """[(epoch, (numbers, noise))] of two epochs, as a rank gets them, 3 samples in a batch."""
    worker = Worker(rank, rank, ranks, CPU)
    loader = make_loader(Noisy(), None, 3, seed, workers, worker)
    return list(batches(loader, step, 24 // ranks // 3, 2, CPU))


def test_each_epoch_has_its_own_order_and_all_ranks_share_it():
    """Without set_epoch every epoch would have the order of the first: no loss shows that."""
    by_rank = [read(rank, 2) for rank in (0, 1)]
    for epoch in (0, 1):
        generator = torch.Generator().manual_seed(0 + epoch)
        expected = torch.randperm(24, generator=generator).tolist()
        seen = [[n for e, (x, _) in found if e == epoch for n in x.tolist()] for found in by_rank]
        assert seen == [expected[0::2], expected[1::2]]


@pytest.mark.parametrize("step", [1, 4, 5, 7, 8])
def test_resumed_order_is_the_same_and_nothing_is_read_twice(step, monkeypatch):
    whole = read(1, 2)
    reads = []
    get = Noisy.__getitem__
    monkeypatch.setattr(Noisy, "__getitem__", lambda self, i: reads.append(i) or get(self, i))
    rest = read(1, 2, step=step)
    assert numbers(rest) == numbers(whole[step:])
    assert len(reads) == 3 * len(rest)


def numbers(found) -> list:
    return [(epoch, x.tolist(), noise.tolist()) for epoch, (x, noise) in found]


def test_reading_leaves_the_global_generator_as_it_was():
    """That is the model's, for dropout; its state is in the checkpoint."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    read()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sample_draws_the_same_for_any_rank_process_and_resumption():
    """What it draws depends on the seed, the epoch and the sample, and on nothing else."""

    def seen(**how):
        found = {}
        for rank in range(how.get("ranks", 1)):
            for epoch, (x, noise) in read(rank, **how):
                found |= {(epoch, i): n for i, n in zip(x.tolist(), noise.tolist(), strict=True)}
        assert len(found) == 48 - 3 * how.get("step", 0)
        return found

    whole = seen()
    for how in ({"ranks": 2}, {"step": 5}, {"ranks": 4, "workers": 1}):
        other = seen(**how)
        assert other == {key: whole[key] for key in other}, how
    assert len({*whole.values(), *seen(seed=1).values()}) == 2 * 48  # all are different


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.slow
def test_loader_processes_live_on_and_draw_what_one_process_draws(tmp_path, start):
    """In the second epoch they have not been told its number but with each index."""
    script = tmp_path / "loads.py"
    script.write_text(LOADS.format(directory=str(TRAIN.parent), start=start))
    assert "equal True, processes 2, noise 48\n" in python(script, cold=True).check().output


LOADS = """
import os, sys
sys.path.insert(0, {directory!r})
import torch
from loading import batches, make_loader
from runtime import Worker
from torch.utils.data import Dataset

class Noisy(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return torch.tensor(index), torch.rand(()), torch.tensor(os.getpid())

def read(workers, step=0):
    cpu = torch.device("cpu")
    loader = make_loader(Noisy(), None, 3, 0, workers, Worker(0, 0, 1, cpu))
    return [batch for _, batch in batches(loader, step, 8, 2, cpu)]

def numbers(found):
    return [(x.tolist(), noise.tolist()) for x, noise, _ in found]

if __name__ == "__main__":
    torch.multiprocessing.set_start_method({start!r})
    one, two, rest = read(0), read(2), read(2, step=5)  # in mid-epoch
    equal = numbers(two) == numbers(one) and numbers(rest) == numbers(one[5:])
    processes = {{p for _, _, pids in two for p in pids.tolist()}}
    noise = {{n for _, noise, _ in two for n in noise.tolist()}}
    print(f"equal {{equal}}, processes {{len(processes)}}, noise {{len(noise)}}")
"""


def test_shifted_images_are_moved_and_nothing_but_moved():
    images = TensorDataset(torch.rand(24, 1, 8, 8), torch.arange(24))
    shifted = Seeded(Shifted(images), seed=0)
    first, second = ([shifted[epoch, i] for i in range(24)] for epoch in (0, 1))
    assert [label.item() for _, label in first] == list(range(24))
    assert sum(not torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True)) > 12
    assert sum(not torch.equal(first[i][0], images[i][0]) for i in range(24)) > 12
    found = set()
    for i in range(24):
        moves = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
        equal = [m for m in moves if torch.equal(first[i][0], images[i][0].roll(m, (1, 2)))]
        assert len(equal) == 1
        found.add(equal[0])
    assert {y for y, _ in found} == {x for _, x in found} == {-1, 0, 1}  # in both directions


@pytest.mark.slow
def test_augmented_run_learns_and_resumes_the_same(tmp_path):
    args = ("--augment", "--epochs", 2, "--checkpoint-every", 15, "--log-every", 1, "--keep", 9)
    whole, part = tmp_path / "whole", tmp_path / "part"
    pool.run(TRAIN, *args, "--output-dir", whole, ranks=2).check()
    (part / "checkpoints").mkdir(parents=True)
    middle = "checkpoints/step_00000030.pt"  # in the second epoch
    (part / middle).write_bytes((whole / middle).read_bytes())
    output = pool.run(TRAIN, *args, "--output-dir", part, ranks=2).check().output
    assert "after step 30" in output
    losses = [{m["step"]: m["loss"] for m in read_metrics(f) if "loss" in m} for f in (whole, part)]
    assert list(losses[1]) == list(range(31, 45))
    assert all(losses[0][step] == loss for step, loss in losses[1].items())


def test_mnist_that_another_node_fetches_at_the_same_time(tmp_path, monkeypatch):
    """Two nodes share a disk: each downloads into a folder of its own, and the first one counts."""
    import torchvision.datasets

    def download(folder, download):
        (tmp_path / "MNIST/raw").mkdir(parents=True, exist_ok=True)
        (tmp_path / "MNIST/raw/images").write_text("of the other node")
        os.makedirs(f"{folder}/MNIST/raw")
        with open(f"{folder}/MNIST/raw/images", "w") as file:
            file.write("ours")

    monkeypatch.setattr(torchvision.datasets, "MNIST", download)
    data.download_mnist(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["MNIST"]
    assert (tmp_path / "MNIST/raw/images").read_text() == "of the other node"


# ---- SIGTERM


SLOW_STEPS = """
import sys, time
sys.path.insert(0, {directory!r})
import train
step = train.train_step
def slow_step(*args):
    print("a step of 4 s begins", flush=True)
    time.sleep(4)
    return step(*args)
train.train_step = slow_step
sys.argv[0] = {path!r}
train.main()
"""


@pytest.mark.slow
def test_sigterm_is_heard_when_steps_take_4_seconds(tmp_path):
    """torchrun kills 30 s after it has passed the signal on; --log-every would be 200 s."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_STEPS.format(directory=str(TRAIN.parent), path=str(TRAIN)))
    folder = tmp_path / "run"
    with Torchrun(script, "--log-every", 50, "--output-dir", folder) as job:
        job.wait_until(lambda: "a step of 4 s begins" in job.output)
        job.process.terminate()
        result = job.wait(60)
    assert "stopped by SIGTERM after step" in result.output
    saved = [path.name for path in (folder / "checkpoints").iterdir()]
    assert saved in (["step_00000001.pt"], ["step_00000002.pt"])
    assert "SIGKILL" not in result.output


AGREE = """
import os, signal, sys, time
sys.path.insert(0, {directory!r})
import torch, torch.distributed as dist
from runtime import distributed_worker
from stopping import StopRequests
with distributed_worker("cpu") as worker:
    stop, calls, looks = StopRequests(worker), 0, []
    all_reduce = dist.all_reduce
    def counted(*args, **kwargs):
        looks.append(step)
        return all_reduce(*args, **kwargs)
    dist.all_reduce = counted
    for step in range(1, 100_000):
        time.sleep(0.001)
        if step == 600 and worker.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop.agreed(step):
            break
    dist.all_reduce = all_reduce
    found = [None, None]
    dist.all_gather_object(found, (step, looks))
    if worker.is_main:
        print("FOUND", found)
"""


NOHUP = """
import os, signal, sys
sys.path.insert(0, {directory!r})
from runtime import distributed_worker
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
from stopping import StopRequests
with distributed_worker("cpu") as worker:
    stop = StopRequests(worker)
    os.kill(os.getpid(), signal.SIGHUP)
    print("asked:", stop.agreed(1))
"""


SERVED = """
import multiprocessing, os, subprocess, sys
sys.path.insert(0, {directory!r})
import torch
from loading import make_loader
from runtime import distributed_worker
from stopping import StopRequests
if __name__ == "__main__":
    os.setpgrp()  # a group for the signal
    multiprocessing.set_start_method("forkserver")
    with distributed_worker("cpu") as worker:
        stop = StopRequests(worker)
        data = torch.utils.data.TensorDataset(torch.arange(400))
        loader = make_loader(data, None, 2, 0, 1, worker)
        for step, _ in enumerate(loader, 1):
            if step == 3:
                subprocess.run(["kill", "-TERM", "--", "-" + str(os.getpgrp())])  # as torchrun does
        print("batches:", step, "asked:", stop.agreed(step))
"""


def test_loader_workers_outlive_a_signal_to_all(tmp_path):
    """Under forkserver, the default of Python 3.14, a server that has started them gets it, too."""
    script = tmp_path / "served.py"
    script.write_text(SERVED.format(directory=str(TRAIN.parent)))
    assert "batches: 200 asked: 15" in python(script, cold=True).check().output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_a_large_sample_is_compared_without_a_list_of_its_numbers(dtype):
    """Numbers of Python take 32 bytes each: a volume of an MRI scanner would take gigabytes."""
    volume = torch.ones(100, 100, 100, dtype=dtype).transpose(0, 2)
    tracemalloc.start()
    one = digests([volume])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * volume.nbytes + 10**6
    other = volume.clone()
    other[99, 5, 0] = 0
    assert digests([other]) != one == digests([volume.clone()])
    assert digests([volume.flatten()]) != one
    if dtype == torch.float32:
        assert digests([volume.numpy()]) == one


def test_nohup_outlives_the_terminal(tmp_path):
    script = tmp_path / "nohup.py"
    script.write_text(NOHUP.format(directory=str(TRAIN.parent)))
    assert "asked: 0" in python(script).check().output


def test_ranks_agree_on_a_step_without_asking_at_every_step(tmp_path):
    script = tmp_path / "agree.py"
    script.write_text(AGREE.format(directory=str(TRAIN.parent)))
    output = pool.run(script, ranks=2).check().output
    (ours, looks), theirs = eval(output.split("FOUND ")[1])  # a list that the script printed
    assert theirs == (ours, looks)
    assert 600 <= ours == looks[-1]


def test_ranks_ask_once_a_second(monkeypatch):
    """By a clock on which a step takes an eighth of a second."""
    stop = StopRequests.__new__(StopRequests)  # without its signals
    stop.asked, stop.last_look, stop.next_look, stop.interval = 0, None, 0, 1
    looks = []
    monkeypatch.setattr(stopping.dist, "all_reduce", lambda notes, op: looks.append(step))
    for step in range(1, 41):
        monkeypatch.setattr(stopping.time, "perf_counter", lambda: step / 8)  # noqa: B023
        stop.agreed(step)
    assert looks == [1, 2, 4, 8, 16, 24, 32, 40]


@pytest.mark.parametrize("slow_from", range(1000, 1100, 9))
def test_ranks_hear_of_a_signal_in_time_if_steps_become_slow(monkeypatch, slow_from):
    """torchrun kills them after 30 seconds. First a step takes 10 ms, later a second."""
    stop = StopRequests.__new__(StopRequests)  # without its signals
    stop.asked, stop.last_look, stop.next_look, stop.interval = 0, None, 0, 1
    step, now = 0, 0.0
    monkeypatch.setattr(stopping.dist, "all_reduce", lambda notes, op: None)
    monkeypatch.setattr(stopping.time, "perf_counter", lambda: now)
    while not stop.agreed(step):
        step += 1
        if step == slow_from:
            stop._ask(signal.SIGTERM, None)
        now += 0.01 if step < slow_from else 1
    assert slow_from <= step < slow_from + 20


STUCK = """
import os, sys, time
sys.path.insert(0, {directory!r})
import torch, torch.distributed as dist
from runtime import distributed_worker
from stopping import StopRequests
with distributed_worker("cpu") as worker:
    StopRequests(worker)
    if worker.rank == 2:
        print("about to die", flush=True)
        os._exit(1)
    dist.recv(torch.zeros(1), src=1 - worker.rank)  # neither sends: no handler can run in here
"""


@pytest.mark.slow
def test_rank_that_waits_for_ever_leaves_when_a_neighbour_has_died(tmp_path):
    """Else torchrun waits 30 s for it and says SIGKILL: at every restart."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK.format(directory=str(TRAIN.parent)))
    result = torchrun(script, ranks=3, cold=True)  # as forks they end another way
    assert result.returncode == 1
    assert "about to die" in result.output
    assert "Sending process" in result.output  # torchrun's SIGTERM to the survivors
    assert "SIGKILL" not in result.output


# ---- what a run says


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    args = ("--epochs", 2, "--log-every", 10, "--output-dir", folder)
    return folder, pool.run(TRAIN, *args, ranks=2).check().output


@pytest.mark.slow
def test_ranks_draw_their_own_numbers(short):
    """As dropout would: this model draws nothing, so that no loss could show it."""
    newest = max((short[0] / "checkpoints").iterdir())
    first, second = torch.load(newest, weights_only=True)["generators"]
    assert first["cpu"].tolist() != second["cpu"].tolist()


def test_log_lines_appear_off_a_terminal(short):
    lines = [line for line in short[1].splitlines() if "loss" in line and "grad norm" in line]
    assert [line.split()[1] for line in lines] == [f"{n}/44" for n in (10, 20, 22, 30, 40, 44)]
    for line in lines:
        for word in ("epoch", "loss", "lr", "grad norm", "samples/s", "memory MB"):
            assert word in line


def test_log_lines_tell_what_is_in_the_file(short):
    for line in read_metrics(short[0]):
        if "loss" in line:
            assert 100 < line["memory_mb"] < 20_000
            assert line["samples_per_second"] > 0
            assert line["grad_norm"] > 0


@pytest.mark.slow
def test_memory_in_the_log_is_a_peak(monkeypatch):
    """On a GPU of this rank's tensors: not of the whole card, and not at the moment of the log."""
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 3e6)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: 5e6)
    gpu = torch.device("cuda", 1)
    assert metrics.peak_memory(gpu) == {"memory_mb": 3.0, "reserved_mb": 5.0}
    before = metrics.peak_memory(CPU)["memory_mb"]
    block = torch.ones(int(before * 1e6) // 4)  # as much again as the process has ever had
    del block
    assert metrics.peak_memory(CPU)["memory_mb"] > 1.2 * before


COUNTED = """
import sys
sys.path.insert(0, {directory!r})
import train
from metrics import Throughput
calls = []

def counted(name, function):
    return lambda *args: calls.append(name) or function(*args)

train.evaluate = counted("evaluate", train.evaluate)
Throughput.start = counted("start", Throughput.start)
Throughput.stop = counted("stop", Throughput.stop)
try:
    train.main()
finally:
    print("calls:", *calls)
"""


def test_the_last_evaluation_is_not_done_twice(tmp_path):
    script = tmp_path / "counted.py"
    script.write_text(COUNTED.format(directory=str(TRAIN.parent)))
    output = pool.run(script, "--epochs", 2, "--log-every", 1000).check().output
    assert "calls: start stop evaluate start stop evaluate start\n" in output  # no time of theirs


def test_full_disk_is_one_sentence(tmp_path):
    log = metrics.Metrics(tmp_path, 0, 9, Worker(0, 0, 1, CPU))
    with open("/dev/full", "a", buffering=1) as log.file:
        with pytest.raises(UserError, match=r"^cannot write /dev/full: No space left on device$"):
            log.log(1, 0, loss=0.5)
        with contextlib.suppress(OSError):  # what is left in the buffer
            log.file.close()


def test_a_log_without_a_reader_does_not_end_the_run(tmp_path, monkeypatch):
    """`train.py | tee log` and Ctrl-C: tee is gone, and the run has to save."""
    reader, writer = os.pipe()
    os.close(reader)
    log = metrics.Metrics(tmp_path, 0, 9, Worker(0, 0, 1, CPU))
    with monkeypatch.context() as patch:
        out = os.fdopen(writer, "w")
        patch.setattr(sys, "stdout", out)
        log.log(1, 0, loss=0.5)
    with contextlib.suppress(BrokenPipeError):
        out.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_throughput_is_of_training_alone(monkeypatch):
    clock = iter([0.0, 2.0, 50.0, 53.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    throughput = metrics.Throughput(step=7)
    assert throughput.stop(11) == 2.0  # 4 steps in 2 s
    throughput.start(11)  # 48 s of evaluation and saving were in between
    assert throughput.stop(17) == 2.0
    assert throughput.steps_per_second == 2.0


def test_a_run_goes_on_after_a_line_that_a_kill_has_cut(tmp_path):
    """Twice: nothing of the cut line may be left before the next one."""
    file, worker = tmp_path / "metrics.jsonl", Worker(0, 0, 1, CPU)
    file.write_text('{"step": 22, "epoch": 0, "loss": 1.0}\n{"step": 44, "ep')
    for step, following in ((22, 44), (44, 66)):
        log = metrics.Metrics(tmp_path, step, 88, worker)
        log.log(following, 0, loss=0.5)
        log.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [22, 44, 66]


def test_loss_that_is_no_number_stops_the_run(tmp_path):
    args = ("--optimizer", "sgd", "--lr", 1e30, "--clip", 0, "--warmup", 0, "--log-every", 3)
    result = pool.run(TRAIN, *args, "--output-dir", tmp_path, ranks=2)
    assert result.returncode == 2
    assert result.output.count("train.py: error: step 3: the loss is nan") == 1
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize("grad_norm", [math.inf, math.nan])
def test_steps_that_fp16_skips_may_not_go_on_for_ever(grad_norm):
    def scaler(scale):
        return torch.amp.GradScaler("cpu", init_scale=scale)

    metrics.check_finite(3, 1.0, grad_norm, scaler(2.0**16))
    metrics.check_finite(3, 1.0, grad_norm, scaler(1.0))
    off = torch.amp.GradScaler("cpu", enabled=False)
    for scaling in (scaler(0.5), scaler(0.0), off, None):
        with pytest.raises(UserError, match=r"^step 3: the loss is 1\.0, the gradient norm "):
            metrics.check_finite(3, 1.0, grad_norm, scaling)
    with pytest.raises(UserError, match=r"^step 3: the loss is nan"):
        metrics.check_finite(3, math.nan, 1.0, scaler(2.0**16))


@pytest.mark.slow
def test_fp16_with_gradients_that_never_are_numbers_ends(tmp_path):
    template = Copy("ddp_basics", tmp_path)
    right = "    return loss_sum, len(labels)"
    root = "    loss_sum = loss_sum + (0 * logits.sum()).square().sqrt()  # the root's slope at 0\n"
    template.edit("task.py", right, root + right)
    result = template.run("train.py", "--precision", "fp16", "--output-dir", tmp_path / "run")
    assert result.returncode == 2
    assert re.search(r"error: step (22|44): the loss is 2\.3.*gradient norm nan", result.output)


def test_a_profile_needs_twelve_steps(tmp_path, capsys):
    asked = Settings(profile=True, output_dir=tmp_path)
    with pytest.raises(UserError, match=r"^--profile traces steps 10 to 12, and the run has 11$"):
        metrics.make_profiler(asked, 0, 11, Worker(0, 0, 1, CPU))
    capsys.readouterr()
    with metrics.make_profiler(asked, 10, 21, Worker(0, 0, 1, CPU)) as profiler:
        assert profiler is None
    says = "--profile: no trace, since it needs 12 steps, and 11 are left\n"
    assert capsys.readouterr().out == says
    with metrics.make_profiler(asked, 10, 22, Worker(0, 0, 1, CPU)) as profiler:
        assert profiler


@pytest.mark.slow
def test_run_can_be_made_longer(short, tmp_path):
    folder = shutil.copytree(short[0], tmp_path / "longer")
    args = ("--epochs", 3, "--log-every", 1, "--output-dir", folder)
    output = pool.run(TRAIN, *args, ranks=2).check().output
    assert "planned for 44 steps, now for 66: from here on the learning rate follows" in output
    rates = {m["step"]: m["lr"] for m in read_metrics(folder) if "lr" in m and m["step"] > 44}
    # Half a cosine over 66 steps, of which a tenth were for warming up.
    plan = {s: 1e-3 * (1 + math.cos(math.pi * (s - 1 - 7) / (66 - 7))) for s in range(45, 67)}
    assert rates == pytest.approx(plan)
    before = (folder / "metrics.jsonl").read_bytes()
    result = pool.run(TRAIN, "--epochs", 2, *args[2:])
    assert result.returncode == 2
    assert (
        "checkpoints is at step 66, beyond the 44 steps of --epochs 2: choose more epochs, or"
        in result.output
    )
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_profile_has_three_steps_of_each_rank(tmp_path):
    pool.run(TRAIN, "--epochs", 1, "--profile", "--output-dir", tmp_path, ranks=2).check()
    for rank in (0, 1):
        events = json.loads((tmp_path / f"trace_{rank}.json").read_text())["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert len({name for name in names if name.startswith("ProfilerStep#")}) == 3
        assert any("all_reduce" in name for name in names)


# ---- replicas


GROWN = """
import sys
sys.path.insert(0, {directory!r})
import torch
from arguments import UserError
from replicas import average_buffers, check_replicas
from runtime import distributed_worker
with distributed_worker("cpu") as worker:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    model.register_buffer("table", torch.ones(4 * worker.rank))
    average_buffers(model)
    try:
        check_replicas(model, 7, worker)
    except UserError as error:
        print(error)
"""


def test_a_buffer_that_has_grown_on_one_rank_is_named(tmp_path):
    """A sum of buffers of other sizes would end the job without a name, or add up other numbers."""
    script = tmp_path / "grown.py"
    script.write_text(GROWN.format(directory=str(TRAIN.parent)))
    output = pool.run(script, ranks=2).check().output
    says = "step 7: ranks 0 and 1 hold different numbers, first in table: a buffer that follows"
    assert output.count(says) == 2


VALUES = {
    "float32": torch.randn(6, 4),
    "float64": torch.randn(6, 4, dtype=torch.float64),
    "bfloat16": torch.randn(6, 4).bfloat16(),
    "float8": torch.randn(6, 4).to(torch.float8_e4m3fn),
    "complex": torch.randn(6, 4, dtype=torch.complex64),
    "bool": torch.rand(6, 4) < 0.5,
    "int64": torch.randint(-(2**62), 2**62, (6, 4)),
    "uint8": torch.randint(256, (6, 4), dtype=torch.uint8),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_checksum_is_of_the_numbers_whatever_the_strides(kind):
    """One that is another changes it: the lowest bit, the sign of a zero."""
    value = VALUES[kind]
    whole = checksum(value).item()
    assert checksum(value.t()).item() == whole
    assert checksum(value[::2]).item() == checksum(value[::2].clone()).item()
    assert checksum(value[:, 1:3].t()).item() == checksum(value[:, 1:3].clone()).item()
    parts = [checksum(row).item() for row in value]
    assert (sum(parts) - whole) % 2**64 == 0
    assert checksum(value[2, 2]).item() == checksum(value[2:3, 2]).item()  # without dims
    assert checksum(value[:0]).item() == 0
    for place in (0, 23):
        other = value.clone()
        other.view(-1)[place : place + 1].view(torch.uint8)[0] ^= 1
        assert checksum(other).item() != whole


def test_a_checksum_knows_nan_and_minus_zero():
    nan = torch.tensor([1.0, torch.nan])
    assert checksum(nan).item() == checksum(nan.clone()).item()
    assert checksum(torch.tensor([0.0])).item() != checksum(torch.tensor([-0.0])).item()
    conjugate = torch.tensor([1 + 2j]).conj()
    assert checksum(conjugate).item() == checksum(torch.tensor([1 - 2j])).item()


# ---- checkpoints


def test_state_is_sent_tensor_by_tensor(short, tmp_path):
    folder, seen = short[0], tmp_path / "seen.pt"
    script = ROOT / "tests/workers/ddp_resume.py"
    pool.run(script, folder / "checkpoints", seen, ranks=2).check()
    ours, theirs = torch.load(seen, weights_only=False)
    saved = torch.load(max((folder / "checkpoints").iterdir()), weights_only=True)
    assert ours["step"] == theirs["step"] == saved["step"]
    assert ours["run"] == theirs["run"] == saved["run"]
    for found in (ours, theirs):
        for name, tensor in saved["model"].items():
            assert torch.equal(found["model"][name], tensor)
        for index, values in saved["optimizer"]["state"].items():
            for name, tensor in values.items():
                assert torch.equal(found["optimizer"]["state"][index][name], tensor)
    size = sum(t.nbytes for t in saved["model"].values())
    assert size > 200_000
    assert max(ours["objects"]) < 20_000  # pickled: forms, not numbers


GENERATORS = """
import sys
sys.path.insert(0, {directory!r})
from pathlib import Path
import torch
from checkpoint import resume, save_checkpoint
from runtime import distributed_worker
folder = Path(sys.argv[1])
with distributed_worker("cpu") as worker:
    parts = {{"model": torch.nn.Linear(2, 2)}}
    torch.manual_seed(worker.rank)
    save_checkpoint(folder, parts, 1, {{}}, worker)
    expected = torch.rand(3)
    torch.manual_seed(9)
    resume(folder, parts, {{}}, worker)
    same = torch.equal(torch.rand(3), expected)
    print(f"rank {{worker.rank}} draws the same: {{same}}\\n", end="")
"""


def test_each_rank_continues_with_its_own_random_numbers(tmp_path):
    """On two nodes: a rank's number is not its local rank."""
    script = tmp_path / "generators.py"
    script.write_text(GENERATORS.format(directory=str(TRAIN.parent)))
    output = pool.run(script, tmp_path / "saves", ranks=4, nodes=2).check().output
    for rank in range(4):
        assert f"rank {rank} draws the same: True\n" in output


def growing() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(8), persistent=False)
    model.register_buffer("scale", torch.zeros(1), persistent=False)
    return model


def test_a_buffer_that_grows_in_forward_is_computed_again(tmp_path, group):
    """Such as a cache of rotary embeddings, which is not in the state dict."""
    worker, grown, fresh = Worker(0, 0, 1, CPU), growing(), growing()
    grown.table, grown.scale = torch.ones(16), torch.ones(1)
    checkpoint.save_checkpoint(tmp_path, {"model": grown}, 3, {}, worker)
    step, _ = checkpoint.resume(tmp_path, {"model": fresh}, {}, worker)
    assert step == 3
    assert torch.equal(fresh.weight, grown.weight)
    assert fresh.table.tolist() == [0.0] * 8
    assert fresh.scale.tolist() == [1.0]


def test_a_part_that_no_run_could_load_again_is_refused(tmp_path, group):
    """torch.save writes a scalar of NumPy, and torch.load(weights_only=True) refuses it."""
    best = SimpleNamespace(state_dict=lambda: {"loss": np.float64(0.5)})
    parts = {"model": torch.nn.Linear(2, 2), "best": best}
    with pytest.raises(UserError, match=r"^cannot save: no run could .* \(.*numpy.*scalar"):
        checkpoint.save_checkpoint(tmp_path, parts, 1, {}, Worker(0, 0, 1, CPU))
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_with_another_order_of_parameters_is_refused(tmp_path, group):
    """torch finds their state by position: equal shapes would get each other's moments."""
    worker, order = Worker(0, 0, 1, CPU), []
    for names in (("a", "b"), ("b", "a")):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})
        optimizer = torch.optim.AdamW(model.parameters())
        order.append({"model": model, "optimizer": optimizer})
    checkpoint.save_checkpoint(tmp_path, order[0], 1, {}, worker)
    assert checkpoint.resume(tmp_path, order[0], {}, worker)[0] == 1
    with pytest.raises(UserError, match=r"by an optimizer with other parameters, or in another "):
        checkpoint.resume(tmp_path, order[1], {}, worker)


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.ENOSPC, 1), (errno.ESTALE, 1), (errno.EIO, 1), (errno.EACCES, 2), (errno.EROFS, 2)],
)
def test_a_disk_that_may_be_well_again_is_another_status(tmp_path, monkeypatch, number, status):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint.Path, "touch", fail)
    with pytest.raises(UserError, match=rf"^cannot save to .*: {os.strerror(number)}$") as caught:
        checkpoint.check_writable(tmp_path)
    assert caught.value.status == status


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, group):
    (tmp_path / "checkpoints").write_text("a file")
    parts = {"model": torch.nn.Linear(2, 2)}
    with pytest.raises(UserError, match=r"^cannot save to .*checkpoints: .*File exists"):
        checkpoint.save_checkpoint(tmp_path / "checkpoints", parts, 1, {}, Worker(0, 0, 1, CPU))


@pytest.mark.parametrize("step", [3, 4])
def test_two_runs_in_one_folder_are_noticed(tmp_path, group, step):
    """The other run's save stays; without the check, --keep would remove this run's own saves."""
    worker, parts = Worker(0, 0, 1, CPU), {"model": torch.nn.Linear(2, 2)}
    checkpoint.save_checkpoint(tmp_path, parts, step, {}, worker)
    of_the_other = (tmp_path / f"step_{step:08}.pt").read_bytes()
    with pytest.raises(UserError, match=rf"^another run wrote step_{step:08}.pt to .*: choose"):
        checkpoint.save_checkpoint(tmp_path, parts, 3, {}, worker)
    assert [file.name for file in tmp_path.iterdir()] == [f"step_{step:08}.pt"]
    assert (tmp_path / f"step_{step:08}.pt").read_bytes() == of_the_other


def test_only_the_newest_are_kept(tmp_path):
    args = ("--epochs", 1, "--checkpoint-every", 5, "--keep", 3, "--output-dir", tmp_path)
    pool.run(TRAIN, *args).check()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000015.pt", "step_00000020.pt", "step_00000022.pt"]
