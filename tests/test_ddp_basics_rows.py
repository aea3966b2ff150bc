"""ddp_basics/: each row of "What usually goes wrong" is provoked in train.py, and cured."""

import inspect
import re
import signal

import pytest
import torch
import torch.distributed as dist
from helpers import python, read_metrics
from rows import Copy

pytestmark = pytest.mark.slow  # real jobs that fail, some of them by waiting

ROWS = {
    "`--batch-size 65 does not divide": "test_a_batch_that_does_not_divide",
    "`--backend NAME is not in this build": "test_a_backend_that_there_is_not",
    "needs its own cuda device": (
        "test_a_rank_without_a_gpu",
        "test_ddp_basics_runtime.py::test_too_few_devices_are_an_error_and_not_a_job_on_cpus",
    ),
    "`all ranks need the same flags": (
        "test_ddp_basics_runtime.py::test_different_flags_are_one_sentence",
        "test_ddp_basics_runtime.py::test_different_code_is_one_sentence",
        "test_ddp_basics_runtime.py::test_what_else_must_be_equal",
        "test_ddp_basics_runtime.py::test_equal_ranks_join",
    ),
    "the job hangs": (
        "test_a_rank_that_is_elsewhere",
        "test_ddp_basics_ideas.py::test_hang_is_bounded_and_reported_per_rank",
    ),
    "`Expected to have finished reduction": (
        "test_a_parameter_that_some_steps_do_not_use",
        "test_a_parameter_that_no_step_uses",
    ),
    "hold different numbers": "test_ranks_that_drift_apart",
    "has other data than rank 0": "test_other_data_on_one_rank",
    "`all ranks must shuffle the data": "test_an_order_for_each_rank",
    "`terminate called": (
        "test_ddp_basics_runtime.py::test_leaving_joins_the_threads_of_the_group",
        "test_ddp_basics_runtime.py::test_a_model_that_outlives_the_group_is_warned_of",
    ),
    "the same order": "test_an_order_for_all_epochs",
    "N times too large": "test_gradients_that_are_summed",
    "with the number of ranks": (
        "test_batch_norm",
        "test_a_batch_size_per_rank",
        "test_padded_samples",
    ),
    "torch 2.15 on GPUs": "test_the_variable_that_selects_the_earlier_nccl",
    "write the same file": "test_all_ranks_write_one_file",
    "`nan` from one step on": "test_ddp_basics_ideas.py::test_a_nan_of_one_rank",
}
STEPS = ("--batch-size", 240, "--epochs", 2, "--log-every", 1)  # 5 steps in an epoch
SGD = ("--optimizer", "sgd", "--lr", 0.05, "--clip", 0)


@pytest.fixture
def copy(tmp_path) -> Copy:
    return Copy("ddp_basics", tmp_path)


def train(copy: Copy, *args, ranks: int = 2) -> list[dict]:
    """Run train.py; the lines of its log, and in the last one what it saved, as "state"."""
    output = copy.path / f"runs/{len(list(copy.path.glob('runs/*')))}"
    copy.run("train.py", *STEPS, *args, "--output-dir", output, ranks=ranks).check()
    lines = read_metrics(output)
    (*_, newest) = sorted(output.rglob("*.pt"), key=lambda path: path.stat().st_mtime)
    lines[-1]["state"] = torch.load(newest, weights_only=True)["model"]
    return lines


def values(lines: list[dict], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def difference(lines: list[dict], expected: list[dict]) -> float:
    """The largest of all losses and of all parameters and buffers at the end."""
    pairs = zip(values(lines, "loss"), values(expected, "loss"), strict=True)
    states = lines[-1]["state"], expected[-1]["state"]
    found = [(states[0][name] - states[1][name]).abs().max().item() for name in states[0]]
    return max(*found, *(abs(a - b) for a, b in pairs))


def test_a_batch_that_does_not_divide(copy):
    refused = copy.run("train.py", "--batch-size", 65)
    assert refused.returncode == 2
    assert "--batch-size 65 does not divide into 2 equal parts" in refused.output
    accumulate = ("--accumulate", 2, "--epochs", 1)
    assert copy.run("train.py", "--batch-size", 66, *accumulate).returncode == 2
    copy.run("train.py", "--batch-size", 68, *accumulate).check()


def test_a_backend_that_there_is_not(copy):
    refused = copy.run("train.py", *STEPS, "--backend", "nosuch")
    assert refused.returncode == 2
    assert "--backend nosuch is not in this build of torch" in refused.output
    copy.run("train.py", *STEPS, "--device", "cpu", "--backend", "gloo").check()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here is a GPU")
def test_a_rank_without_a_gpu(copy):
    refused = python(copy.path / "train.py", "--device", "cuda", cold=True)
    assert refused.returncode == 2
    assert "needs its own cuda device, but sees 0" in refused.output
    copy.run("train.py", *STEPS, "--device", "cpu").check()


@pytest.mark.parametrize(
    "mistake",
    [
        "            if worker.is_main:\n                dist.barrier()\n",
        "            try:\n"
        "                assert worker.is_main or step != 3\n"
        "            except AssertionError:\n"
        "                continue\n",
    ],
    ids=["if rank == 0", "an exception that is caught"],
)
def test_a_rank_that_is_elsewhere(copy, mistake):
    step = "            lr = set_learning_rate("
    copy.join_slowly()
    copy.edit("train.py", step, mistake + step)
    result = copy.run("train.py", *STEPS, "--timeout", 3)
    # A rank that is a step ahead sends a tensor that no rank expects, of another size.
    says = "Timed out waiting 3000ms for (recv|send) operation|op.preamble.length <= op.nbytes"
    assert result.returncode in (1, -signal.SIGABRT)
    assert re.search(says, result.output)
    copy.edit("train.py", mistake, "")
    copy.run("train.py", *STEPS).check()


SOMETIMES = '''

class Sometimes(nn.Module):
    """Every third training step leaves a layer out, on all ranks alike."""

    def __init__(self, model):
        super().__init__()
        self.model, self.extra, self.steps = model, nn.Linear(10, 10), 0

    def forward(self, images):
        self.steps += self.training
        logits = self.model(images)
        return logits if self.steps % 3 == 0 else self.extra(logits)
'''


def test_a_parameter_that_some_steps_do_not_use(copy):
    """Right is what one process computes."""
    model = "SmallCNN(image_size=IMAGE_SIZE[settings.dataset])"
    copy.edit("task.py", f"return {model}", f"return Sometimes({model})")
    path = copy.path / "task.py"
    path.write_text(path.read_text() + SOMETIMES)
    drifted = copy.run("train.py", *STEPS)  # the gradients of the third step are no averages
    assert "step 3: ranks 0 and 1 hold different numbers" in drifted.output
    message = "Expected to have finished reduction in the prior iteration"
    unnoticed = copy.run("train.py", *STEPS, "--log-every", 50)
    assert unnoticed.returncode == 1
    assert message in unnoticed.output

    expected = train(copy, *SGD, "--find-unused-parameters", ranks=1)
    assert difference(train(copy, *SGD, "--find-unused-parameters"), expected) < 1e-5
    use = "logits + 0 * self.extra(logits)"
    copy.edit("task.py", "return logits if", f"return {use} if")
    assert difference(train(copy, *SGD), train(copy, *SGD, ranks=1)) < 1e-5


def test_a_parameter_that_no_step_uses(copy):
    unused = "    model.unused = nn.Linear(2, 2)\n    return model\n\n\ndef compute_loss"
    copy.edit("task.py", "return SmallCNN(", "model = SmallCNN(")
    copy.edit("task.py", "\n\ndef compute_loss", unused)
    drifted = copy.run("train.py", *STEPS)
    assert "step 1: ranks 0 and 1 hold different numbers" in drifted.output
    unnoticed = copy.run("train.py", *STEPS, "--log-every", 50)
    assert "Expected to have finished reduction in the prior iteration" in unnoticed.output
    copy.run("train.py", *STEPS, "--find-unused-parameters").check()
    copy.edit("task.py", "nn.Linear(2, 2)", "nn.Linear(2, 2).requires_grad_(False)")
    copy.run("train.py", *STEPS).check()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "loss_sum, count, _ = compute_loss(ddp_model, part)",
            "loss_sum, count, _ = compute_loss(ddp_model.module, part)",
        ),
        (
            "    optimizer.zero_grad(set_to_none=True)\n",
            "    ddp_model.module.net[0].requires_grad_()\n"
            "    optimizer.zero_grad(set_to_none=True)\n",
        ),
        (
            "            lr = set_learning_rate(optimizer, step,",
            "            lr = set_learning_rate(optimizer, step + worker.rank,",
        ),
    ],
    ids=["past the wrapper", "unfrozen after wrapping", "by rank"],
)
def test_ranks_that_drift_apart(copy, right, wrong):
    if "requires_grad_" in wrong:
        copy.edit("task.py", "return SmallCNN(", "model = SmallCNN(")
        copy.edit(
            "task.py",
            "\n\ndef compute_loss",
            "    model.net[0].requires_grad_(False)\n    return model\n\n\ndef compute_loss",
        )
    copy.edit("train.py", right, wrong)
    result = copy.run("train.py", *STEPS)
    assert result.returncode == 2
    assert "ranks 0 and 1 hold different numbers, first in " in result.output
    copy.edit("train.py", wrong, right)
    copy.run("train.py", *STEPS).check()


def test_other_data_on_one_rank(copy):
    returned = "return Shifted(train_set) if settings.augment else train_set, test_set"
    rank = "__import__('os').environ.get('RANK', '0')"
    fewer = (
        f"    if {rank} == '1':\n        train_set = Subset(train_set, range(1400))\n    {returned}"
    )
    copy.edit("task.py", f"    {returned}", fewer)
    copy.edit("task.py", "import Dataset", "import Dataset, Subset")
    result = copy.run("train.py", *STEPS)
    assert result.returncode == 2
    assert (
        "rank 1 has other data than rank 0 (lengths [1400, 360] and [1437, 360])" in result.output
    )
    copy.edit("task.py", f"    if {rank} == '1':\n", "    if True:\n")
    copy.run("train.py", *STEPS).check()


def test_an_order_for_each_rank(copy):
    """A rank that shuffles with a seed of its own takes samples that another rank has, too."""
    copy.edit("train.py", "local_batch, settings.seed", "local_batch, settings.seed + worker.rank")
    result = copy.run("train.py", *STEPS)
    assert result.returncode == 2
    assert "error: all ranks must shuffle the data with one seed, not with [0, 1]" in result.output


def test_an_order_for_all_epochs(copy):
    """What the first rank reads first in each epoch."""
    begins = "        for batch in loader:\n"
    copy.edit(
        "loading.py", begins, "        print('first', next(iter(loader.sampler))[1])\n" + begins
    )

    def first_of_epochs() -> list[str]:
        return re.findall(
            r"^first (\d+)$", copy.run("train.py", *STEPS, ranks=1).check().output, re.M
        )

    assert len(set(first_of_epochs())) == 2
    copy.edit("loading.py", "        loader.sampler.set_epoch(epoch)", "        #")
    assert len(first_of_epochs()) == 2
    assert len(set(first_of_epochs())) == 1


def test_gradients_that_are_summed(copy):
    """AdamW divides each gradient by its own size: its losses look right."""
    optimizers = {"sgd": SGD, "adamw": ("--optimizer", "adamw", "--clip", 0)}
    expected = {name: train(copy, *flags, ranks=1) for name, flags in optimizers.items()}
    assert difference(train(copy, *SGD), expected["sgd"]) < 1e-5
    mean = "factor = settings.batch_size / count"
    copy.edit("train.py", mean, f"{mean} * worker.world_size")
    for name, flags in optimizers.items():
        wrong, right = train(copy, *flags), expected[name]
        norms = values(wrong, "grad_norm"), values(right, "grad_norm")
        assert norms[0][0] / norms[1][0] == pytest.approx(2, rel=1e-3)
        losses = zip(values(wrong, "loss"), values(right, "loss"), strict=True)
        off = max(abs(a - b) for a, b in losses)
        assert off > 0.1 if name == "sgd" else off < 0.01


NORM = "nn.GroupNorm(4, channels)"


def test_batch_norm(copy):
    expected = train(copy, *SGD, ranks=1)
    assert difference(train(copy, *SGD), expected) < 1e-5  # GroupNorm
    copy.edit("model.py", NORM, "nn.BatchNorm2d(channels)")
    alone = train(copy, *SGD, ranks=1)
    assert difference(train(copy, *SGD), alone) > 5e-4


def test_a_batch_size_per_rank(copy):
    expected = values(train(copy, ranks=1), "test_accuracy")
    assert values(train(copy), "test_accuracy") == expected
    path = copy.path / "train.py"
    share = "settings.batch_size // worker.world_size"
    path.write_text(path.read_text().replace(share, "settings.batch_size"))
    assert values(train(copy), "test_accuracy")[-1] < expected[-1] - 0.05  # half as many steps


def test_padded_samples(copy):
    """360 images on 7 ranks, of which 4 would count twice."""
    step = ("--batch-size", 210, "--epochs", 1, *SGD)
    alone = values(train(copy, *step, ranks=1), "test_loss")
    assert values(train(copy, *step, ranks=7), "test_loss") == pytest.approx(alone, abs=1e-6)
    ours = "own = range(worker.rank, len(dataset), worker.world_size)"
    padded = "torch.utils.data.DistributedSampler(dataset, worker.world_size, worker.rank, False)"
    copy.edit("evaluation.py", ours, f"own = list({padded})")
    assert values(train(copy, *step, ranks=7), "test_loss") != pytest.approx(alone, abs=1e-4)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="the backend nccl is another one")
def test_the_variable_that_selects_the_earlier_nccl():
    """The overlap itself needs two GPUs."""
    assert "TORCH_DIST_USE_NCCL2" in inspect.getsource(dist.distributed_c10d)


def test_all_ranks_write_one_file(copy):
    steps = values(train(copy, "--epochs", 1), "loss")
    for guard in ("if output_dir is None or not worker.is_main:", "if not self.worker.is_main:"):
        copy.edit(
            "metrics.py", guard, "if output_dir is None:" if "output" in guard else "if False:"
        )
    wrong = values(train(copy, "--epochs", 1), "loss")
    assert len(wrong) > len(steps)
