"""fsdp_basics/: each row of "What usually goes wrong" is provoked in train.py, and cured."""

import re
import signal
import sys

import pytest
import torch
from helpers import read_metrics
from rows import Copy

pytestmark = pytest.mark.slow  # real jobs that fail, some of them by waiting

ROWS = {
    "hangs in evaluation": "test_a_rank_that_does_not_take_part",
    "hangs at a checkpoint": "test_a_rank_that_does_not_take_part",
    "updates parameters that are not in": "test_an_optimizer_that_was_made_before",
    "shards come from different initial weights": "test_another_seed_on_each_rank",
    "`have gradients for different parameters`": (
        "test_other_parameters_on_each_rank",
        "test_other_parameters_in_a_step_that_is_not_logged",
    ),
    "`got mixed torch.Tensor and DTensor`": "test_a_method_other_than_forward",
    "not smaller than with DDP": "test_one_unit_for_the_whole_model",
    "grows with `--accumulate`": "test_fsdp_basics.py::test_what_is_reduced_per_step",
    "(RSS) does not shrink": "test_memory_that_malloc_keeps",
    "`Cannot access accelerator device": "test_offloading_without_a_gpu",
    "`--offload does not work with": "test_offloading_in_fp16",
    "during `dcp.async_save`": "test_a_thread_that_saves_in_the_group_of_training",
    "`No backend type associated": "test_a_group_without_a_backend_for_the_cpu",
    "tied weights drift apart": (
        "test_t5_finetuning_rows.py::test_memory_before_sharding_unties",
        "test_t5_finetuning_rows.py::test_units_that_split_the_tie",
    ),
    "the loss differs": "test_a_mean_of_means",
    "`something still holds": "test_a_model_that_outlives_the_job",
}
STEPS = ("--batch-size", 240, "--epochs", 2, "--log-every", 1, "--depth", 2, "--dim", 32)
SGD = ("--optimizer", "sgd", "--lr", 0.05, "--clip", 0)


@pytest.fixture
def copy(tmp_path) -> Copy:
    return Copy("fsdp_basics", tmp_path)


def losses(copy: Copy, *args, ranks: int = 2) -> list[float]:
    """Of a run of train.py, one per step, and the test's at the end of each epoch."""
    output = copy.path / f"runs/{len(list(copy.path.glob('runs/*')))}"
    copy.run("train.py", *STEPS, *SGD, *args, "--output-dir", output, ranks=ranks).check()
    return [
        value for line in read_metrics(output) for name, value in line.items() if "loss" in name
    ]


def off(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("what", ["evaluation", "a checkpoint"])
def test_a_rank_that_does_not_take_part(copy, what):
    returned = "return Shifted(train_set) if settings.augment else train_set, test_set"
    copy.join_slowly()
    copy.edit("task.py", returned, "return train_set, Subset(test_set, range(359))")
    copy.edit("task.py", "import Dataset", "import Dataset, Subset")
    flags = (*STEPS, "--batch-size", 358, "--timeout", 3, "--output-dir", copy.path / "runs/0")
    file, right, wrong = {
        "evaluation": ("evaluation.py", "math.ceil(len(dataset) / worker.world_size)", "len(own)"),
        "a checkpoint": ("train.py", "if saving:", "if saving and worker.is_main:"),
    }[what]
    copy.edit(file, right, wrong)
    result = copy.run("train.py", *flags)
    # At a checkpoint, the others go on to a collective of another size.
    assert result.returncode in (1, -signal.SIGABRT)
    says = "Timed out waiting 3000ms|Connection closed by peer|Read error|op.preamble.length"
    assert re.search(says, result.output)
    copy.edit(file, wrong, right)
    copy.run("train.py", *flags).check()


def test_an_optimizer_that_was_made_before(copy):
    shards = "    shard(model, place, settings, worker)\n"
    makes = "    optimizer = make_optimizer(model, settings)"
    copy.edit("train.py", shards + makes, makes + "\n" + shards + "    #")
    result = copy.run("train.py", *STEPS, *SGD, "--output-dir", copy.path / "runs/0")
    assert result.returncode == 2
    assert "part 'optimizer' updates parameters that are not in part 'model'" in result.output


@pytest.mark.release
def test_another_seed_on_each_rank(copy):
    def of_minimal(ranks: int) -> list[float]:
        output = copy.run("minimal.py", ranks=ranks).check().output
        return [float(loss) for loss in re.findall(r"loss (\S+)", output)]

    alone = of_minimal(1)
    assert off(of_minimal(2), alone) < 2e-4  # four digits are printed
    copy.edit("minimal.py", "torch.manual_seed(0)", "torch.manual_seed(rank)")
    assert off(of_minimal(2), alone) > 2e-3
    expected = losses(copy)
    copy.edit(
        "train.py",
        "torch.manual_seed(settings.seed)",
        "torch.manual_seed(settings.seed + dist.get_rank())",
    )
    assert off(losses(copy), expected) < 1e-6  # rank 0's values for all


def test_other_parameters_on_each_rank(copy):
    """A block with two layers of one shape, as experts are; each rank takes one of them."""
    copy.edit("model.py", "nn.Linear(4 * dim, dim)\n", "nn.Linear(4 * dim, dim)\n        #\n")
    two = "self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))"
    copy.edit("model.py", "        #\n", f"        {two}\n")
    copy.edit(
        "model.py",
        "        return x + self.contract",
        "        #\n        return x + self.contract",
    )
    own = "x = x + self.experts[torch.distributed.get_rank()](x)"
    copy.edit("model.py", "        #\n", f"        {own}\n")
    result = copy.run("train.py", *STEPS)
    assert result.returncode == 2
    assert (
        "step 1: ranks 0 and 1 have gradients for different parameters, first "
        "blocks.0.experts.0.weight: " in result.output
    )
    whole = "0 * sum(p.sum() for p in self.experts.parameters())"
    copy.edit("model.py", own, f"{own} + {whole}")
    copy.run("train.py", *STEPS).check()


def test_other_parameters_in_a_step_that_is_not_logged(copy):
    """Both experts in each step but the third; the log is written after the fifth."""
    copy.edit("model.py", "nn.Linear(4 * dim, dim)\n", "nn.Linear(4 * dim, dim)\n        #\n")
    two = "self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))"
    copy.edit("model.py", "        #\n", f"        {two}\n        self.steps = 0\n")
    copy.edit(
        "model.py",
        "        return x + self.contract",
        "        self.steps += 1\n"
        "        both = list(self.experts)\n"
        "        rank = torch.distributed.get_rank()\n"
        "        for expert in both if self.steps != 3 else both[rank : rank + 1]:\n"
        "            x = x + expert(x)\n"
        "        return x + self.contract",
    )
    folder = copy.path / "runs/0"
    flags = (*STEPS, "--epochs", 1, "--log-every", 50, "--output-dir", folder)
    result = copy.run("train.py", *flags)
    assert result.returncode == 2
    says = "step 3: ranks 0 and 1 have gradients for different parameters, first blocks.0.experts.0"
    assert says in result.output
    assert list(folder.glob("checkpoints/step_*")) == []  # what has mixed gradients is not saved
    copy.edit("model.py", "if self.steps != 3 else both[rank : rank + 1]", "")
    copy.run("train.py", *flags).check()


def test_a_method_other_than_forward(copy):
    copy.edit("task.py", "model(images).float()", "model.logits(images).float()")
    copy.edit(
        "task.py",
        "    model = VisionTransformer(",
        "    VisionTransformer.logits = VisionTransformer.forward\n    model = VisionTransformer(",
    )
    result = copy.run("train.py", *STEPS)
    assert result.returncode == 1
    assert "got mixed torch.Tensor and DTensor" in result.output
    shards = "    shard(model, place, settings, worker)\n"
    copy.edit("train.py", shards, shards + '    register_fsdp_forward_method(model, "logits")\n')
    copy.edit("train.py", "import fully_shard", "import fully_shard, register_fsdp_forward_method")
    copy.run("train.py", *STEPS).check()


def test_one_unit_for_the_whole_model(copy):
    shards = "    shard(model, place, settings, worker)\n"
    hook = """    from torch.distributed.tensor import DTensor
    def gathered(*_):
        whole = [p.numel() for p in model.parameters() if not isinstance(p, DTensor)]
        print("gathered", sum(whole))
    model.blocks[1].register_forward_pre_hook(gathered)
"""
    copy.edit("train.py", shards, shards + hook)

    def gathered() -> float:
        output = copy.run("train.py", *STEPS, "--depth", 6).check().output
        total = int(re.search(r"^([\d,]+) parameters", output, re.M)[1].replace(",", ""))
        return int(re.search(r"^gathered (\d+)", output, re.M)[1]) / total

    assert gathered() < 0.3
    copy.edit("task.py", "[model.patches, *model.blocks, [model.norm, model.head]]", "[]")
    assert gathered() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="malloc of Linux, read from /proc")
@pytest.mark.release
def test_memory_that_malloc_keeps(copy):
    """MB that a process has more than before, after all that it held is gone."""

    def left(*args) -> float:
        output = copy.run("memory.py", *args).check().output
        return float(re.search(r"^one process .* (\d+\.\d)$", output, re.M)[1])

    assert left() < 15
    assert left("--malloc", "default") > 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="pins memory for the GPU that is here")
def test_offloading_without_a_gpu(copy):
    copy.edit("sharding.py", "CPUOffloadPolicy(pin_memory=pinned)", "CPUOffloadPolicy()")
    result = copy.run("train.py", *STEPS, "--offload")
    assert result.returncode == 1
    # The first without CUDA, the second from torch's build for it.
    says = "Cannot access accelerator device when none is available|Found no NVIDIA driver"
    assert re.search(says, result.output)
    copy.edit("sharding.py", "CPUOffloadPolicy()", "CPUOffloadPolicy(pin_memory=pinned)")
    copy.run("train.py", *STEPS, "--offload").check()


def test_offloading_in_fp16(copy):
    refused = copy.run("train.py", *STEPS, "--offload", "--precision", "fp16")
    assert refused.returncode == 2
    assert refused.output.count("error: --offload does not work with --precision fp16") == 1
    copy.run("train.py", *STEPS, "--offload", "--precision", "bf16").check()


def test_a_thread_that_saves_in_the_group_of_training(copy):
    copy.edit("async_checkpoint.py", ", process_group=saving_group", "")
    try:  # SIGABRT, or the two wait for each other's messages
        status = copy.run("async_checkpoint.py", timeout=60).returncode
    except TimeoutError:
        status = "no end"
    assert status in ("no end", -signal.SIGABRT)
    without = "            sharded_state(parts), storage_writer=writer"
    copy.edit("async_checkpoint.py", without, f"{without}, process_group=saving_group")
    assert "while steps went on: True" in copy.run("async_checkpoint.py").check().output


def test_a_group_without_a_backend_for_the_cpu(copy):
    """Gloo plays NCCL: it gets no tensors on the CPU, for which the group has no backend."""
    names_devices = '        by_device, devices = name, [part.partition(":")[0]'
    copy.edit("runtime.py", names_devices, "        return name\n" + names_devices)  # as asked for
    begins = "    stop = StopRequests(worker)\n"
    copy.edit("train.py", begins, "    dist.all_reduce(torch.ones(1))\n" + begins)
    result = copy.run("train.py", *STEPS, "--backend", "cuda:gloo")
    assert result.returncode == 1
    assert "No backend type associated with device type cpu" in result.output
    copy.run("train.py", *STEPS, "--backend", "cpu:gloo,cuda:gloo").check()


def test_a_mean_of_means(copy):
    whole = 'loss_sum = F.cross_entropy(logits, labels, reduction="sum")'
    copy.edit(
        "task.py",
        whole,
        'loss_sum = F.cross_entropy(logits, labels, ignore_index=0, reduction="sum")',
    )
    copy.edit("task.py", "return loss_sum, len(labels), ", "return loss_sum, (labels != 0).sum(), ")
    alone = losses(copy, ranks=1)
    assert off(losses(copy), alone) < 1e-5
    copy.edit("task.py", ', ignore_index=0, reduction="sum")', ", ignore_index=0) * len(labels)")
    copy.edit("task.py", "return loss_sum, (labels != 0).sum(), ", "return loss_sum, len(labels), ")
    assert off(losses(copy), alone) > 1e-4


def test_a_model_that_outlives_the_job(copy):
    closes = "    metrics.close()\n"
    copy.edit("train.py", closes, f"{closes}    KEPT.append(model)\n")
    copy.edit("train.py", "\n\n@record", "\nKEPT = []\n\n\n@record")
    says = "warning: something still holds the process group"
    assert copy.run("train.py", *STEPS).check().output.count(says) == 2  # on each rank
    copy.edit("train.py", "    KEPT.append(model)\n", "")
    assert says not in copy.run("train.py", *STEPS).check().output
