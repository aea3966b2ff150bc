"""ddp_basics/train.py: it learns, equals one process, and reports wrong arguments clearly."""

import gzip
import math
import struct

import evaluation
import numpy as np
import pool
import pytest
import torch
import train
from arguments import UserError
from config import Settings, parse_args
from data import load_dataset
from helpers import ROOT, learned, python, read_metrics, torchrun
from model import SmallCNN
from on_demand import OnDemand
from rows import Copy
from runtime import Worker
from torch.utils.data import TensorDataset
from workers.equivalence import CASES

TRAIN = ROOT / "ddp_basics/train.py"


def final_parameters(output_dir):
    last = max((output_dir / "checkpoints").glob("step_*.pt"))
    return torch.load(last, weights_only=True)["model"]


def lines_with(output_dir, name: str) -> list[dict]:
    return [line for line in read_metrics(output_dir) if name in line]


# ---- the equivalence matrix: train.py's step on 2 and 3 ranks against a bare model in one process


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    script, folder = "tests/workers/equivalence.py", tmp_path_factory.mktemp("matrix")

    def run(ranks: int) -> dict:
        pool.run(script, folder / str(ranks), ranks=ranks).check()
        return torch.load(folder / str(ranks), map_location="cpu")

    return OnDemand(run)


@pytest.mark.device
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_ddp_equals_one_process(matrix, case, ranks):
    # All in fp64 but the loss, whose rounding was seen as 2.5e-7 in itself, 4e-8 in gradients, and
    # 3.5e-7 in parameters: AdamW divides by the root of small squares, which magnifies it.
    one, many = matrix[1][case], matrix[ranks][case]
    assert len(one) == len(many) == 5
    for step, (expected, actual) in enumerate(zip(one, many, strict=True)):
        assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-6), step
        close(actual["norm"], expected["norm"], 1e-6)
        close(actual["norm before clipping"], expected["norm before clipping"], 1e-6)
        for kind, tolerance in (("gradients", 5e-7), ("parameters", 2e-6)):
            assert actual[kind].keys() == expected[kind].keys()
            for name, tensor in expected[kind].items():
                close(actual[kind][name], tensor, tolerance, f"{kind} {name} in step {step}")


def close(actual, expected, tolerance, what=""):
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.device
def test_matrix_compares_something(matrix):
    """The gradients are far above the tolerances, clipping clips, frozen and idle layers stay."""
    one = {case: matrix[1][case] for case in CASES}
    assert all(steps[0]["norm"] > 0.05 for steps in one.values())
    assert one["sgd, clip"][0]["norm"] == pytest.approx(0.1, rel=1e-4) != one["sgd"][0]["norm"]
    assert "net.0.weight" not in one["sgd, frozen"][0]["gradients"]
    assert not one["sgd, unused"][0]["gradients"]["idle.weight"].any()
    assert "second.weight" not in one["sgd, tied"][0]["parameters"]  # it is first.weight


def test_the_norm_and_the_limit_are_of_unscaled_gradients(monkeypatch):
    """With fp16's scaler: a step is that of a plain loop, which scales nothing."""
    monkeypatch.setattr(train.dist, "all_reduce", lambda total: None)
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8)
    one, other = SmallCNN(channels=8), SmallCNN(channels=8)
    other.load_state_dict(one.state_dict())
    settings = Settings(batch_size=8, optimizer="sgd", lr=0.1, clip=0.05)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    worker = Worker(0, 0, 1, torch.device("cpu"))
    _, norm = train.train_step(one, [images, labels], optimizer, scaler, settings, worker)
    torch.nn.functional.cross_entropy(other(images), labels).backward()
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert expected > 0.05  # so that there is something to clip
    close(norm, expected, 1e-6)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        close(ours, theirs, 1e-7)


def test_a_batch_whose_labels_are_all_masked_changes_nothing(monkeypatch):
    """Its loss has nothing to be divided by."""

    def masked_loss(model, batch):
        images, labels = batch
        loss_sum = torch.nn.functional.cross_entropy(model(images), labels, reduction="sum")
        return loss_sum, (labels != -100).sum(), {}

    for module in (train, evaluation):
        monkeypatch.setattr(module, "compute_loss", masked_loss)
        monkeypatch.setattr(module.dist, "all_reduce", lambda total: None)
    images, labels = torch.rand(8, 1, 8, 8), torch.full((8,), -100)
    model, worker = SmallCNN(channels=8), Worker(0, 0, 1, torch.device("cpu"))
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings, scaler = Settings(batch_size=8), torch.amp.GradScaler("cpu", enabled=False)
    loss, norm = train.train_step(model, [images, labels], optimizer, scaler, settings, worker)
    assert (loss, norm) == (0, 0)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert evaluation.evaluate(model, TensorDataset(images, labels), 8, 0, worker) == {"loss": 0}


def test_metrics_of_other_names_are_not_added_up(group, monkeypatch):
    names = iter(["cats", "dogs"])
    of_a_batch = lambda *_: (torch.tensor(1.0), 2, {next(names): 1})  # noqa: E731
    monkeypatch.setattr(evaluation, "compute_loss", of_a_batch)
    data, worker = (
        TensorDataset(torch.zeros(4), torch.zeros(4)),
        Worker(0, 0, 1, torch.device("cpu")),
    )
    with pytest.raises(UserError, match=r"returned \['loss', 'cats'\], then \['loss', 'dogs'\]"):
        evaluation.evaluate(torch.nn.ReLU(), data, 2, 0, worker)


def test_weights_that_sum_to_less_than_one_are_divided_by(monkeypatch):
    """A weighted mean, in training and evaluation: only a sum of exactly 0 is replaced."""
    torch.manual_seed(0)
    images, labels, weights = torch.rand(8, 1, 8, 8), torch.arange(8), torch.rand(8) / 1000

    def weighted_loss(model, batch):
        images, labels, weights = batch
        losses = torch.nn.functional.cross_entropy(model(images), labels, reduction="none")
        return (losses * weights).sum(), weights.sum(), {}

    for module in (train, evaluation):
        monkeypatch.setattr(module, "compute_loss", weighted_loss)
        monkeypatch.setattr(module.dist, "all_reduce", lambda total: None)
    one, other = SmallCNN(channels=8), SmallCNN(channels=8)
    other.load_state_dict(one.state_dict())
    optimizer, worker = torch.optim.SGD(one.parameters(), 0.1), Worker(0, 0, 1, torch.device("cpu"))
    settings, scaler = Settings(batch_size=8, clip=0), torch.amp.GradScaler("cpu", enabled=False)
    batch = [images, labels, weights]
    loss, _ = train.train_step(one, batch, optimizer, scaler, settings, worker)
    expected = torch.nn.CrossEntropyLoss(reduction="none")(other(images), labels) @ weights
    expected = expected / weights.sum()
    expected.backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    close(loss.float(), expected.detach(), 1e-6)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        close(ours.grad, theirs.grad, 1e-6)
        close(ours, theirs, 1e-6)
    found = evaluation.evaluate(one, TensorDataset(*batch), 3, 0, worker)["loss"]
    with torch.no_grad():
        losses = torch.nn.CrossEntropyLoss(reduction="none")(other(images), labels)
    assert found == pytest.approx(float(losses @ weights / weights.sum()), rel=1e-5)


def test_accumulation_communicates_once_per_step(matrix):
    assert matrix[2]["all_reduces"] == {1: 1, 2: 1, 4: 1}


# ---- the whole script, on any number of ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Output directory and output of the same short run on 1, 2 and 3 ranks, logged every step."""

    def run(ranks: int):
        folder = tmp_path_factory.mktemp(f"run{ranks}")
        args = ("--epochs", 3, "--batch-size", 96, "--log-every", 1, "--output-dir", folder)
        args += ("--accumulate", max(1, ranks - 1))
        return folder, pool.run(TRAIN, *args, ranks=ranks).check().output

    return OnDemand(run)


@pytest.mark.parametrize("ranks", [2, 3])
def test_script_equals_one_process(runs, ranks):
    """1,437 training images divide neither by 2 nor by 3; 3 ranks also accumulate over 2 parts."""
    one, many = (learned(runs[r][0]) for r in (1, ranks))
    assert [line["step"] for line in one] == [line["step"] for line in many]
    assert sum("loss" in line for line in one) == 42  # every step: 14 full batches, 3 epochs
    # In fp32 rounding grows with the steps (in fp64 it does not): seen 2e-7 over the first epoch of
    # 14 steps, 1e-4 at the end. Other processors round in other places, hence the margins.
    for a, b in zip(one, many, strict=True):
        assert a == pytest.approx(b, abs=1e-5 if a["step"] < 10 else 2e-2), (a, b)
    expected, actual = (
        torch.cat([p.flatten() for p in final_parameters(runs[r][0]).values()]) for r in (1, ranks)
    )
    assert (actual - expected).norm() < 0.05 * expected.norm()


def test_first_weights_are_those_of_the_seed(tmp_path):
    args = ("--seed", 7, "--lr", 1e-30, "--epochs", 1, "--output-dir", tmp_path)  # it stands still
    pool.run(TRAIN, *args, ranks=2).check()
    torch.manual_seed(7)
    for name, expected in SmallCNN(image_size=8).state_dict().items():
        close(final_parameters(tmp_path)[name], expected, 1e-20, name)  # zeros move by lr


def test_no_image_is_repeated_to_fill_a_batch():
    """There are 1,437: a sampler that repeats one would make a batch of 719 for each of 2 ranks."""
    result = pool.run(TRAIN, "--batch-size", 1438, ranks=2)
    assert result.returncode == 2
    assert "--batch-size 1438 exceeds the 1437 training samples" in result.output


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_test_image_counts_once(runs, ranks):
    assert_scored(*runs[ranks], "digits")


def test_evaluation_is_of_a_share_and_leaves_no_trace(monkeypatch):
    """Sums would be as right if each rank did all of it; this model has no use for eval()."""
    seen = []

    class Model(torch.nn.Module):
        def forward(self, images):
            seen.append((images.flatten().tolist(), self.training, torch.is_grad_enabled()))
            return torch.zeros(len(images), 10)

    monkeypatch.setattr(evaluation.dist, "all_reduce", lambda total: None)
    numbers = torch.arange(361.0).view(-1, 1)
    test_set = TensorDataset(numbers, torch.zeros(361, dtype=torch.int64))
    model, generator = Model(), torch.get_rng_state()
    worker = Worker(1, 0, 2, torch.device("cpu"))  # the first rank of the second of two nodes
    found = evaluation.evaluate(model, test_set, 50, 0, worker)
    # 181 images are rank 0's, so that there are four batches; 180 are ours, and one is not counted.
    assert [len(images) for images, _, _ in seen] == [50, 50, 50, 30]
    assert [x for images, _, _ in seen for x in images] == list(range(1, 361, 2))
    assert not any(training or grad for _, training, grad in seen)
    assert found == pytest.approx({"loss": math.log(10), "accuracy": 1.0})
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)


def test_noise_in_the_test_set_does_not_depend_on_the_ranks(monkeypatch):
    class Noise(torch.utils.data.Dataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return torch.rand(())

    def sum_of(model, batch):
        return batch.double().sum(), len(batch), {}

    monkeypatch.setattr(evaluation, "compute_loss", sum_of)
    monkeypatch.setattr(evaluation.dist, "all_reduce", lambda total: None)

    def loss(rank: int, ranks: int) -> float:
        worker = Worker(rank, rank, ranks, torch.device("cpu"))
        torch.rand(1 + rank)  # what a model has drawn so far
        return evaluation.evaluate(torch.nn.ReLU(), Noise(), 2, 0, worker)["loss"]

    one = loss(0, 1)
    assert one == loss(0, 1) == pytest.approx((4 * loss(0, 2) + 3 * loss(1, 2)) / 7)


def test_evaluation_leaves_each_module_in_its_mode(monkeypatch):
    """A frozen BatchNorm is in eval mode while the rest trains."""
    monkeypatch.setattr(evaluation.dist, "all_reduce", lambda total: None)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(10), torch.nn.Dropout(), torch.nn.Identity())
    model[0].eval()
    before = [module.training for module in model.modules()]
    test_set = TensorDataset(torch.randn(20, 10), torch.zeros(20, dtype=torch.int64))
    evaluation.evaluate(model, test_set, 8, 0, Worker(0, 0, 1, torch.device("cpu")))
    assert [module.training for module in model.modules()] == before == [True, False, True, True]


def assert_scored(folder, output, *dataset):
    """Loss and accuracy are those of the saved model on the whole test set."""
    images, labels = map(torch.stack, zip(*load_dataset(*dataset)[1], strict=True))
    model = SmallCNN(image_size=images.shape[-1])
    model.load_state_dict(final_parameters(folder))
    with torch.no_grad():
        logits = model(images)
    correct, count = (logits.argmax(1) == labels).sum().item(), len(labels)
    last = read_metrics(folder)[-1]
    assert last["test_accuracy"] * count == pytest.approx(correct, abs=1e-9)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert last["test_loss"] == pytest.approx(loss, abs=1e-5)
    assert f"test accuracy {correct / count:.4f}   of {count} samples" in output


def accuracy(result) -> float:
    return float(result.output.rpartition("test accuracy ")[2].split()[0])


@pytest.mark.slow
def test_default_run_reaches_97_percent():
    result = torchrun(TRAIN).check()
    assert accuracy(result) >= 0.97
    assert result.output.count("2 rank(s) on cpu") == 1  # once, not per rank


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_follows_fp32(runs, tmp_path, precision):
    args = ("--epochs", 3, "--batch-size", 96, "--log-every", 1, "--output-dir", tmp_path)
    pool.run(TRAIN, *args, "--precision", precision).check()
    fp32, low = ([line["loss"] for line in lines_with(f, "loss")] for f in (runs[1][0], tmp_path))
    # The first loss, 2.3, differs by rounding alone (8 bits in bf16, 11 in fp16; averaged over 96
    # images). Then AdamW lets differences grow: 0.02 was seen where the loss falls fastest.
    assert low[0] == pytest.approx(fp32[0], abs=2e-3)
    assert low == pytest.approx(fp32, abs=0.06)
    assert low != fp32  # the option does something


@pytest.mark.slow
def test_compiled_model_gives_the_same(tmp_path):
    """In float64: fused kernels round in other places, by 1e-16 of numbers of order one."""
    copy, found = Copy("ddp_basics", tmp_path), []
    copy.edit("task.py", "IMAGE_SIZE[settings.dataset])", "IMAGE_SIZE[settings.dataset]).double()")
    copy.edit("task.py", "model(images).float()", "model(images.double())")
    for flags in ((), ("--compile",)):
        folder = tmp_path / f"run{len(found)}"
        args = ("--epochs", 3, "--batch-size", 96, "--log-every", 1, "--output-dir", folder)
        copy.torchrun("train.py", *args, *flags, timeout=280).check()
        found.append((learned(folder), final_parameters(folder)))
    (lines, parameters), (compiled_lines, compiled) = found
    assert len(lines) > 42
    for a, b in zip(compiled_lines, lines, strict=True):
        assert a == pytest.approx(b, abs=1e-9)
    assert compiled.keys() == parameters.keys()
    for name, tensor in parameters.items():
        assert tensor.dtype == torch.float64
        close(compiled[name], tensor, 1e-9, name)


def test_schedule_warms_up_and_decays(runs):
    rates = [line["lr"] for line in lines_with(runs[1][0], "lr")]
    assert rates[:4] == pytest.approx([0.5e-3, 1e-3, 1.5e-3, 2e-3])  # a tenth of 42 steps
    cosine = [2e-3 * math.cos(math.pi / 2 * done / 38) ** 2 for done in range(38)]
    assert rates[4:] == pytest.approx(cosine)


@pytest.mark.slow
def test_tensorboard_holds_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = ("--epochs", 2, "--output-dir", tmp_path, "--tensorboard")
    pool.run(TRAIN, *args).check()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    board = {e.step: e.value for e in events.Scalars("loss")}
    lines = {line["step"]: line["loss"] for line in lines_with(tmp_path, "loss")}
    assert board == pytest.approx(lines)


# ---- MNIST, on files in its format


def write_mnist(folder, train=120, test=31):
    """The four IDX files that torchvision reads, with random images of 28 x 28 pixels."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    written = {}
    for part, count in (("train", train), ("t10k", test)):
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.numpy().tobytes())
        header = struct.pack(">II", 0x801, count)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.numpy().tobytes())
        written[part] = images, labels
    return written


def test_mnist_loader_reads_idx_files(tmp_path):
    written = write_mnist(tmp_path)
    for dataset, part in zip(load_dataset("mnist", tmp_path), ("train", "t10k"), strict=True):
        images, labels = map(torch.stack, zip(*dataset, strict=True))
        assert images.shape == (len(labels), 1, 28, 28)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert torch.equal((images[:, 0] * 255).round().to(torch.uint8), written[part][0])
        assert torch.equal(labels.to(torch.uint8), written[part][1])


@pytest.mark.slow
def test_mnist_trains_and_counts_an_odd_test_set(tmp_path):
    """31 test images on 2 ranks: 16 and 15, none counted twice. A loader process reads the data."""
    write_mnist(tmp_path)
    args = ("--dataset", "mnist", "--data-dir", tmp_path, "--epochs", 1, "--batch-size", 40)
    args += ("--workers", 1, "--output-dir", tmp_path / "run")
    result = torchrun(TRAIN, *args).check()
    assert "steps 3 of 3" in result.output
    assert_scored(tmp_path / "run", result.output, "mnist", tmp_path)


@pytest.mark.slow
def test_mnist_that_cannot_be_downloaded(tmp_path):
    """The name of its host is refused here as it is on a machine without a network."""
    (tmp_path / "sitecustomize.py").write_text(
        "import socket, urllib.error\n"
        "def refuse(*a, **k): raise socket.gaierror('no network')\n"
        "socket.getaddrinfo = refuse\n"
    )
    args = ("--dataset", "mnist", "--data-dir", tmp_path / "none")
    result = python(TRAIN, *args, PYTHONPATH=str(tmp_path))
    assert_one_sentence(result, "MNIST is not in", "--dataset digits")


def test_mnist_is_mapped_not_held(tmp_path):
    write_mnist(tmp_path)
    for dataset in load_dataset("mnist", tmp_path):
        assert isinstance(dataset.images, np.memmap)
        assert isinstance(dataset.labels, np.memmap)


@pytest.mark.parametrize("damage", ["truncate", "wrong magic", "gzip", "empty"])
def test_mnist_broken_file(tmp_path, damage):
    write_mnist(tmp_path)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    content = path.read_bytes()
    broken = {
        "truncate": content[: len(content) // 2],
        "wrong magic": b"\x00\x00\x00\x00" + content[4:],
        "gzip": gzip.compress(content),
        "empty": b"",
    }[damage]
    path.write_bytes(broken)
    with pytest.raises(UserError, match="cannot read MNIST below"):
        load_dataset("mnist", tmp_path)


# ---- wrong arguments: exit status 2, one sentence, once


def assert_one_sentence(result, *parts):
    """One line of ours, no traceback of ours. (torchrun adds its own summary.)"""
    lines = [line for line in result.output.splitlines() if line.startswith("train.py: error: ")]
    assert len(lines) == 1, result.output
    for part in parts:
        assert part in lines[0]
    assert 'ddp_basics/train.py", line' not in result.output, result.output


BAD_ARGUMENTS = [
    (("--no-such-flag",), "--no-such-flag"),
    (("--epochs", "many"), "many"),
    (("--epochs", "0"), "--epochs: must be an integer of at least 1, not 0"),
    (("--batch-size", "-4"), "--batch-size: must be an integer of at least 1, not -4"),
    (("--batch-size", "64", "--accumulate", "3"), "--batch-size 64 does not divide into 3"),
    (("--accumulate", "0"), "--accumulate: must be an integer of at least 1"),
    (("--lr", "nan"), "--lr: must be a number above 0, not nan"),
    (("--lr", "-1"), "--lr: must be a number above 0"),
    (("--warmup", "1.5"), "--warmup: must be a number from 0 to 1"),
    (("--clip", "-1"), "--clip: must be a number of at least 0"),
    (("--clip", "nan"), "--clip: must be a number of at least 0"),
    (("--workers", "-1"), "--workers: must be an integer of at least 0"),
    (("--checkpoint-every", "-1"), "--checkpoint-every: must be an integer of at least 0"),
    (("--log-every", "0"), "--log-every: must be an integer of at least 1"),
    (("--dataset", "cifar"), "cifar"),
    (("--precision", "fp8"), "fp8"),
    (("--device", "tpu"), "tpu"),
    (("--keep", "0"), "--keep: must be an integer of at least 1"),
    (("--timeout", "0"), "--timeout: must be a number above 0"),
    (("--weight-decay", "-1"), "--weight-decay: must be a number of at least 0"),
    (("--tensorboard",), "--tensorboard needs an --output-dir to write to"),
    (("--profile",), "--profile needs an --output-dir to write to"),
    (("--checkpoint-every", "5"), "--checkpoint-every needs an --output-dir to write to"),
    (("--seed", "-1"), "--seed: must be an integer of at least 0, not -1"),
    (("--seed", "9" * 20), f"--seed: must be below 2^63, not {'9' * 20}"),
    (("--output-dir", "/dev/null/run"), "--output-dir /dev/null/run cannot be made"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD_ARGUMENTS, ids=lambda x: " ".join(x))
def test_bad_argument(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        parse_args()
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: error: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_bad_argument_in_a_process():
    result = python(TRAIN, "--batch-size", "2000")
    assert result.returncode == 2
    assert_one_sentence(result, "--batch-size 2000 exceeds the 1437 training samples")


@pytest.mark.slow
def test_bad_argument_is_said_once_under_torchrun():
    result = torchrun(TRAIN, "--batch-size", "65")
    assert result.returncode != 0  # torchrun turns every failure of a worker into 1
    assert_one_sentence(result, "--batch-size 65", "2 rank(s)")
    assert "exitcode  : 2" in result.output


def test_cuda_with_too_few_gpus_is_refused():
    gpus = torch.cuda.device_count()
    result = pool.run(TRAIN, "--device", "cuda", ranks=gpus + 1)
    assert result.returncode == 2
    assert_one_sentence(result, f"rank {gpus} on ", f"its own cuda device, but sees {gpus}: ")


# ---- one GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        # Other kernels sum in another order (and may use TF32 in convolutions): 42 steps apart.
        ((), 5e-3),
        (("--precision", "bf16"), 5e-2),
        (("--precision", "fp16"), 2e-2),
        (("--compile",), 5e-3),
    ],
)
def test_gpu_loss_equals_cpu(tmp_path, runs, options, tolerance):
    args = ("--epochs", 3, "--batch-size", 96, "--log-every", 1, "--output-dir", tmp_path)
    result = torchrun(TRAIN, *args, "--device", "cuda", *options, ranks=1, timeout=280).check()
    assert "1 rank(s) on cuda, cpu:gloo,cuda:nccl" in result.output
    gpu = [line["loss"] for line in lines_with(tmp_path, "loss")]
    cpu = [line["loss"] for line in lines_with(runs[1][0], "loss")]
    assert gpu == pytest.approx(cpu, abs=tolerance)
    assert all(math.isfinite(x) for x in gpu)
