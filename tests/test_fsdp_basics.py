"""fsdp_basics/train.py: it learns, equals one process, and reports wrong arguments clearly."""

import math
import re
import shutil
from itertools import pairwise

import evaluation
import pool
import pytest
import torch
from arguments import UserError
from config import parse_args
from convert_checkpoint import read_model, write_model
from data import load_dataset
from helpers import ROOT, learned, python, read_metrics, torchrun
from model import VisionTransformer
from on_demand import OnDemand
from runtime import Worker
from safetensors.torch import load_file
from workers.fsdp_equivalence import CASES, HYBRID_RANKS, STEPS

TRAIN = ROOT / "fsdp_basics/train.py"


# ---- the equivalence matrix: train.py's step on 2, 3, 4 ranks against a bare model in one process


MATRIX = ROOT / "tests/workers/fsdp_equivalence.py"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")

    def run(job: str) -> dict:
        """job: "2", all cases on 2 ranks; "4 hybrid"; "4 others"."""
        ranks, _, which = job.partition(" ")
        names = [case for case in CASES if is_hybrid(case) == (which == "hybrid")] if which else []
        pool.run(MATRIX, folder / job, *names, ranks=int(ranks)).check()
        return torch.load(folder / job, map_location="cpu")

    return OnDemand(run)


def is_hybrid(case: str) -> bool:
    return "dp_replicate" in CASES[case]


def runs() -> list:
    """Each case on 2, 3 and 4 ranks; those on 4 for a release, but for the hybrid ones."""
    found = []
    for case in CASES:
        marks = [] if is_hybrid(case) else [pytest.mark.release]
        found += [pytest.param(case, ranks) for ranks in (2, 3) if not is_hybrid(case)]
        found.append(pytest.param(case, HYBRID_RANKS, marks=marks))
    return found


@pytest.mark.device
@pytest.mark.slow
@pytest.mark.parametrize(("case", "ranks"), runs())
def test_fsdp_equals_one_process(matrix, case, ranks):
    which = "" if ranks < HYBRID_RANKS else " hybrid" if is_hybrid(case) else " others"
    compare(matrix["1"][case], matrix[f"{ranks}{which}"][case], case)


@pytest.mark.device
def test_two_cases_on_two_ranks(tmp_path):
    """The quick run's part of the matrix."""
    cases = ("sgd, tied", "adamw, clip, accumulate")
    for ranks in (1, 2):
        pool.run(MATRIX, tmp_path / str(ranks), *cases, ranks=ranks).check()
    one, many = (torch.load(tmp_path / str(ranks), map_location="cpu") for ranks in (1, 2))
    assert one.keys() == many.keys() == set(cases)
    for case in cases:
        compare(one[case], many[case], case)


def compare(one: list[dict], many: list[dict], case: str) -> None:
    """Compare each step of one process with the same step on several ranks."""
    assert len(one) == len(many) == STEPS
    # fp32 sums in another order: about 1e-7 for numbers of order one, times 5 for other machines.
    # AdamW divides by the root of small squares, which magnifies that in the parameters. bf16 has 8
    # bits: an error of 4e-3 in each number on the way.
    tolerance = {"loss": 1e-2, "norm": 2e-2, "gradients": 2e-2, "parameters": 2e-3}
    if "bf16" not in case:
        tolerance = {"loss": 1e-6, "norm": 1e-6, "gradients": 1e-6, "parameters": 5e-6}
    tolerance["norm before clipping"] = tolerance["norm"]
    for step, (expected, actual) in enumerate(zip(one, many, strict=True)):
        assert actual.keys() == expected.keys()
        for kind, values in expected.items():
            if kind in ("loss", "norm", "norm before clipping"):
                close(actual[kind], values, tolerance[kind], f"{kind} in step {step}")
                continue
            assert actual[kind].keys() == values.keys()
            for name, tensor in values.items():
                close(actual[kind][name], tensor, tolerance[kind], f"{kind} {name} in step {step}")


def close(actual, expected, tolerance, what):
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.device
@pytest.mark.slow
def test_matrix_compares_something(matrix):
    """The gradients are far above the tolerances, clipping clips, frozen and idle layers stay."""
    one = {case: matrix["1"][case] for case in CASES}
    assert all(steps[0]["norm"] > 0.05 for steps in one.values())
    assert one["sgd, clip"][0]["norm"] == pytest.approx(0.1, rel=1e-4) != one["sgd"][0]["norm"]
    assert "patches.weight" not in one["sgd, frozen"][0]["gradients"]
    assert not one["sgd, unused"][0]["gradients"]["idle.weight"].any()
    assert all(len(steps[-1]["parameters"]) > 20 for steps in one.values())
    assert "other.weight" not in one["sgd, tied"][-1]["parameters"]  # it is head.weight
    assert matrix["3"]["sgd, bf16"][-1]["loss"] != matrix["3"]["sgd"][-1]["loss"]


@pytest.mark.slow
def test_what_is_reduced_per_step(matrix):
    """Patches, two blocks, norm and head, the root; per micro-batch, or with --reduce-once."""
    assert matrix["2"]["reduce_scatters"] == [5, 15, 5]


# ---- the whole script, on any number of ranks


ARGS = ("--epochs", 2, "--batch-size", 96, "--log-every", 1, "--dim", 64, "--depth", 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Output directory and output of the same short run on 1, 2 and 3 ranks, logged every step."""

    def run(ranks: int):
        folder = tmp_path_factory.mktemp(f"run{ranks}")
        args = (*ARGS, "--output-dir", folder, "--accumulate", max(1, ranks - 1))
        return folder, pool.run(TRAIN, *args, ranks=ranks).check().output

    return OnDemand(run)


def saved_model(folder) -> dict[str, torch.Tensor]:
    return read_model(folder / "checkpoints")


def lines_with(folder, name: str) -> list[dict]:
    return [line for line in read_metrics(folder) if name in line]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_script_equals_one_process(runs, ranks):
    """1,437 training images divide neither by 2 nor by 3; 3 ranks also accumulate over 2 parts."""
    one, many = (learned(runs[r][0]) for r in (1, ranks))
    assert [line["step"] for line in one] == [line["step"] for line in many]
    assert sum("loss" in line for line in one) == 28  # every step: 14 full batches, 2 epochs
    # In fp32 rounding grows with the steps (in fp64 it does not). Other processors round in other
    # places, hence the margins.
    for a, b in zip(one, many, strict=True):
        assert a == pytest.approx(b, abs=1e-5 if a["step"] < 10 else 2e-2), (a, b)
    expected, actual = (
        torch.cat([p.flatten() for p in saved_model(runs[r][0]).values()]) for r in (1, ranks)
    )
    assert (actual - expected).norm() < 0.05 * expected.norm()


@pytest.mark.slow
def test_each_rank_holds_its_shards(runs):
    held = {}
    for ranks in (1, 2, 3):
        _, output = runs[ranks]
        total, own = re.search(r"([\d,]+) parameters in 7 units, ([\d,]+) on", output).groups()
        held[ranks] = int(total.replace(",", "")), int(own.replace(",", ""))
    count = sum(p.numel() for p in VisionTransformer().parameters())
    assert held[1] == (count, count)
    assert held[2] == (count, count // 2)  # every first dimension is even
    # Rank 0 of 3 holds the larger part of each first dimension d: ceil(d / 3) rows.
    rows = [(p.shape[0], p[0].numel()) for p in VisionTransformer().parameters()]
    assert held[3] == (count, sum(math.ceil(d / 3) * row for d, row in rows))


@pytest.mark.slow
def test_first_weights_are_those_of_the_seed(tmp_path):
    args = ("--seed", 7, "--lr", 1e-30, "--epochs", 1, "--output-dir", tmp_path)  # it stands still
    pool.run(TRAIN, *args, "--dim", 8, "--depth", 1, ranks=2).check()
    torch.manual_seed(7)
    expected, actual = VisionTransformer(dim=8, depth=1).state_dict(), saved_model(tmp_path)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        close(actual[name], tensor, 1e-20, name)  # zeros move by lr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_test_image_counts_once(runs, ranks):
    """360 test images: at 2 and 3 ranks all in one global batch."""
    assert_scored(*runs[ranks])


def assert_scored(folder, output):
    """Loss and accuracy are those of the saved model on the whole test set."""
    images, labels = load_dataset("digits")[1].tensors
    model = VisionTransformer()
    model.load_state_dict(saved_model(folder))
    with torch.no_grad():
        logits = model(images)
    correct, count = (logits.argmax(1) == labels).sum().item(), len(labels)
    last = read_metrics(folder)[-1]
    assert last["test_accuracy"] * count == pytest.approx(correct, abs=1e-9)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert last["test_loss"] == pytest.approx(loss, abs=1e-5)
    assert f"test accuracy {correct / count:.4f}   of {count} samples" in output


def test_a_rank_without_test_images_takes_part(monkeypatch):
    """513 images in batches of 128 on 2 ranks: the last one goes to rank 0, rank 1 counts none."""
    images, labels = torch.rand(513, 1, 8, 8), torch.randint(10, (513,))
    test_set = torch.utils.data.TensorDataset(images, labels)
    model, totals, rows = VisionTransformer(dim=8, depth=1), [], []
    model.register_forward_pre_hook(lambda module, args: rows.append((len(*args), module.training)))
    monkeypatch.setattr(evaluation.dist, "all_reduce", lambda total: totals.append(total.clone()))
    generator = torch.get_rng_state()
    for rank in (0, 1):
        evaluation.evaluate(model, test_set, 128, 0, Worker(rank, 0, 2, torch.device("cpu")))
    # The last one of rank 1 does not count.
    assert rows == 2 * [(128, False), (128, False), (1, False)]
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)
    with torch.no_grad():
        logits = model(images)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    correct = (logits.argmax(1) == labels).sum().item()
    assert [total[0].item() for total in totals] == [257, 256]
    assert sum(totals).tolist() == pytest.approx([513, expected, correct], rel=1e-5)


def accuracy(result) -> float:
    return float(result.output.rpartition("test accuracy ")[2].split()[0])


@pytest.mark.slow
def test_run_learns():
    """A third of the default run: that reaches 96 % in 45 s."""
    result = pool.run(TRAIN, "--epochs", 7, ranks=2).check()
    assert accuracy(result) >= 0.7  # 82 % was seen
    assert result.output.count("2 rank(s) on cpu") == 1  # once, not per rank


OPTIONS = {
    "bf16": ("--precision", "bf16"),
    "fp16": ("--precision", "fp16"),
    "everything": (
        "--keep-gathered", "--activation-checkpointing", "--offload", "--prefetch", 2,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_options_follow_the_plain_run(runs, tmp_path, option):
    pool.run(TRAIN, *ARGS, "--output-dir", tmp_path, *OPTIONS[option], ranks=2).check()
    plain, other = (
        [line["loss"] for line in lines_with(f, "loss")] for f in (runs[2][0], tmp_path)
    )
    # In bf16 and fp16 the first loss, 2.3, differs by rounding alone (8 bits, 11 bits); then AdamW
    # lets differences grow. The other options change where numbers lie, not what they are.
    half = option in ("bf16", "fp16")
    assert other[0] == pytest.approx(plain[0], abs=2e-2 if half else 1e-6)
    assert other == pytest.approx(plain, abs=0.1 if half else 2e-2)
    assert not half or other != plain  # the option does something
    # The norm is that of the gradients, not of the gradients times the scale of the loss.
    norms = [lines_with(f, "grad_norm")[0]["grad_norm"] for f in (runs[2][0], tmp_path)]
    assert norms[1] == pytest.approx(norms[0], rel=5e-2 if half else 1e-4)


@pytest.mark.release
def test_compiled_model_gives_the_same(runs, tmp_path):
    # One rank: FSDP's hooks run there too, and two would compile the same twice.
    python(TRAIN, *ARGS, "--output-dir", tmp_path, "--compile", timeout=280).check()
    for a, b in zip(learned(tmp_path), learned(runs[1][0]), strict=True):
        # Fused kernels round in other places; 28 steps of AdamW let that grow.
        assert a == pytest.approx(b, abs=2e-3 if a["step"] <= 14 else 5e-2)


# ---- wrong arguments: exit status 2, one sentence, once


BAD_ARGUMENTS = [  # the flags of DDP's template are tested there: config.py says them alike
    (("--no-such-flag",), "--no-such-flag"),
    (("--epochs", "0"), "--epochs: must be an integer of at least 1, not 0"),
    (("--batch-size", "64", "--accumulate", "3"), "--batch-size 64 does not divide into 3"),
    (("--lr", "nan"), "--lr: must be a number above 0, not nan"),
    (("--dim", "30"), "--dim: 30 does not divide into 4 attention heads"),
    (("--dim", "0"), "--dim: must be an integer of at least 4, not 0"),
    (("--depth", "0"), "--depth: must be an integer of at least 1"),
    (("--dp-replicate", "2"), "--dp-replicate 2 does not divide 1 rank(s)"),
    (("--prefetch", "-1"), "--prefetch: must be an integer of at least 0"),
    (("--keep", "0"), "--keep: must be an integer of at least 1"),
    (("--precision", "fp8"), "fp8"),
    (("--offload", "--precision", "fp16"), "--offload does not work with --precision fp16"),
    (("--tensorboard",), "--tensorboard needs an --output-dir to write to"),
    (("--async-save",), "--async-save needs an --output-dir to write to"),
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


def test_bad_argument_is_said_once():
    result = pool.run(TRAIN, "--batch-size", "2000", ranks=2)
    assert result.returncode != 0
    assert result.output.count("train.py: error: ") == 1
    assert "--batch-size 2000 exceeds the 1437 training samples" in result.output


# ---- convert_checkpoint.py


def test_a_folder_that_is_not_there_is_said_before_the_model_is_read(tmp_path):
    script, target = ROOT / "fsdp_basics/convert_checkpoint.py", tmp_path / "no/model.pt"
    result = python(script, tmp_path, target)
    assert result.returncode == 2
    assert f"there is no folder {target.parent}" in result.output


@pytest.mark.slow
def test_conversions_there_and_back(runs, tmp_path):
    """Sharded by 3 ranks -> safetensors -> sharded -> torch.save: the same bits, and whole ones."""
    script, source = ROOT / "fsdp_basics/convert_checkpoint.py", runs[3][0] / "checkpoints"
    chain = (source, tmp_path / "a.safetensors", tmp_path / "sharded", tmp_path / "b.pt")
    for one, next_one in pairwise(chain):
        result = pool.run(script, one, next_one).check()
        assert "read again, equal bit for bit: True" in result.output
    expected = read_model(source)
    model = VisionTransformer()
    model.load_state_dict(torch.load(chain[-1], weights_only=True))  # all names and shapes fit
    assert all(torch.equal(expected[name], p) for name, p in model.state_dict().items())
    assert expected.keys() == model.state_dict().keys() == load_file(chain[1]).keys()


@pytest.mark.slow
def test_convert_refuses_a_save_with_a_flipped_bit(runs, tmp_path):
    """Named itself, not as the newest of a run: torch would load it."""
    save = shutil.copytree(sorted((runs[3][0] / "checkpoints").iterdir())[-1], tmp_path / "save")
    file = max(save.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"\.distcp is broken$"):
        read_model(save)


@pytest.mark.parametrize("name", ["none", "none.pt", "broken.safetensors", "broken.pt"])
def test_convert_says_what_it_cannot_read(tmp_path, name):
    if name.startswith("broken"):
        (tmp_path / name).write_bytes(b"not a model")
    with pytest.raises(UserError, match=f"cannot read a model from .*{name}: "):
        read_model(tmp_path / name)


def test_convert_takes_the_model_of_a_ddp_checkpoint(tmp_path):
    one, other = tmp_path / "step_00000022.pt", tmp_path / "model.safetensors"
    model = {"weight": torch.rand(3, 2).t(), "tied": torch.rand(3)}
    model["again"] = model["tied"]
    torch.save({"model": model, "optimizer": {"state": {}}, "step": 22}, one)
    write_model(other, read_model(one))
    found = load_file(other)
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("content", [{"optimizer": {}}, {"model": {"x": "y"}}, {"model": 1}, [1]])
def test_convert_refuses_what_is_no_model(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"cannot read a model from .*other\.pt: .*state dict"):
        read_model(tmp_path / "other.pt")


def test_convert_overwrites_nothing(tmp_path):
    (tmp_path / "a.pt").write_text("mine")
    with pytest.raises(UserError, match=r"a\.pt exists"):
        write_model(tmp_path / "a.pt", {"x": torch.zeros(1)})
    assert (tmp_path / "a.pt").read_text() == "mine"


# ---- async_checkpoint.py


@pytest.mark.slow
def test_async_save_is_of_its_moment():
    result = pool.run(ROOT / "fsdp_basics/async_checkpoint.py", "--saves", 2, ranks=2).check()
    assert "at the moment of the save, while steps went on: True" in result.output
    # 4 blocks of 12 x 256^2 parameters, 3 numbers each (AdamW), half of them on this rank
    assert float(re.search(r"([\d.]+) MB on this rank", result.output)[1]) == pytest.approx(
        4 * 12 * 256**2 * 3 * 4 / 2 / 1e6, rel=0.1
    )


# ---- one GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ((), 5e-3),
        (("--precision", "bf16"), 1e-1),
        (("--precision", "fp16"), 1e-1),
        (("--compile",), 1e-2),
        (("--activation-checkpointing", "--prefetch", 1), 5e-3),
        (("--offload",), 5e-3),
    ],
)
def test_gpu_loss_equals_cpu(tmp_path, runs, options, tolerance):
    args = (*ARGS, "--output-dir", tmp_path, "--device", "cuda", *options)
    result = torchrun(TRAIN, *args, ranks=1, timeout=280).check()
    assert "1 rank(s) on cuda, cpu:gloo,cuda:nccl" in result.output
    gpu = [line["loss"] for line in lines_with(tmp_path, "loss")]
    assert all(math.isfinite(x) for x in gpu)
    cpu = [line["loss"] for line in lines_with(runs[1][0], "loss")]
    assert gpu == pytest.approx(cpu, abs=tolerance)
