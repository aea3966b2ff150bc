"""fsdp_basics/train.py differs from DDP's in what FSDP is, and in nothing else."""

import ast
import math
import re

import pool
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ROOT, read_metrics, torchrun
from rows import Copy
from saves import newest, saves
from sharding import prefetch_blocks

TRAIN, DDP_TRAIN = (ROOT / folder / "train.py" for folder in ("fsdp_basics", "ddp_basics"))

# ---- what is the same as for DDP is tested there: data, log, SIGTERM, what stops a run


def function(path, name: str) -> str:
    """Its source."""
    text = path.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_source_segment(text, node)
    raise AssertionError(f"{path} has no {name}()")


PARTS = (  # of train(): from this line, to that one
    ("    stop = StopRequests", "    torch.set_float32_matmul_precision"),
    ("    # fp16 gradients underflow", "\n    step, saved_run"),
    ("    if worker.is_main and saved_run", "    metrics = Metrics"),
    ("    with make_profiler(", "            if saving:"),
    ("            if stopped_by:", "    metrics.close()"),
    ("        goodbye(", "    return 0"),
)


def test_main_and_loop_are_those_of_ddp():
    """All but the lines that build and wrap the model, and those that save it."""
    assert function(TRAIN, "main") == function(DDP_TRAIN, "main")
    ours, theirs = function(TRAIN, "train"), function(DDP_TRAIN, "train")
    wrapping = "    # Broadcasts rank 0's" + between(
        theirs, "    # Broadcasts rank 0's", "    metrics ="
    )
    theirs = theirs.replace(wrapping, "").replace("ddp_", "")
    ours = ours.replace("step, saved_run = 0, {}", "step, saved_run")
    since = "            if finish_save:  # the save from before"
    ours = ours.replace(since + between(ours, since, "            check_finite("), "")
    for since, until in PARTS:
        assert between(ours, since, until).rstrip() == between(theirs, since, until).rstrip()


def between(text: str, since: str, until: str) -> str:
    assert text.count(since) == text.count(until) == 1, (since, until)
    return text.partition(since)[2].partition(until)[0]


# ---- what is not


SPY = """
import sys
sys.path.insert(0, {directory!r})
import train
from communication import CountTraffic
train_step, prefetch_blocks = train.train_step, train.prefetch_blocks

def counted_step(*args):
    with CountTraffic() as count:
        result = train_step(*args)
    print("all_gathers", count.calls["all_gather"])
    return result

def noted_prefetch(blocks, count):
    print("prefetch", len(blocks), count, "without memory", next(blocks[0].parameters()).is_meta)
    prefetch_blocks(blocks, count)

train.train_step, train.prefetch_blocks = counted_step, noted_prefetch
train.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "all_gathers"), [((), 10), (("--keep-gathered",), 6)])
def test_what_a_step_gathers(tmp_path, flags, all_gathers):
    """Neither losses nor gradients tell whether a model is one unit or many, freed or kept."""
    script = tmp_path / "spy.py"
    script.write_text(SPY.format(directory=str(TRAIN.parent)))
    args = ("--epochs", 1, "--batch-size", 480, "--dim", 8, "--depth", 3, "--prefetch", 2, *flags)
    output = pool.run(script, *args, ranks=2).check().output
    # Patches, three blocks, norm and head, the root for forward; patches and blocks for backward.
    assert re.findall(r"all_gathers (\d+)", output) == [str(all_gathers)] * 4  # 2 steps, 2 ranks
    assert output.count("prefetch 5 2 without memory True\n") == 2


ALL_REDUCES = """
import sys
sys.path.insert(0, {directory!r})
import train
from communication import CountTraffic
train_step = train.train_step

def counted_step(*args):
    with CountTraffic() as count:
        result = train_step(*args)
    print("all_reduces", count.calls["all_reduce"])
    return result

train.train_step = counted_step
train.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
def test_replicas_reduce_once_per_step(tmp_path, accumulate):
    """Between nodes, as --dp-replicate is meant for, each micro-batch would send the gradients."""
    script = tmp_path / "spy.py"
    script.write_text(ALL_REDUCES.format(directory=str(TRAIN.parent)))
    args = ("--epochs", 1, "--batch-size", 480, "--dim", 8, "--dp-replicate", 2)
    output = pool.run(script, *args, "--accumulate", accumulate, ranks=2).check().output
    # Patches, three blocks, norm and head, the root; and the losses.
    assert re.findall(r"all_reduces (\d+)", output) == ["7"] * 4  # 2 steps, 2 ranks


BATCH_NORM = """return nn.Sequential(
        nn.BatchNorm2d(1), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(288, 10), nn.BatchNorm1d(10, affine=False),
    )
"""


@pytest.mark.slow
def test_batch_norm_in_mixed_precision(tmp_path):
    """In no unit, first in one, alone in one. The weights stand still: what differs is rounding."""
    template = Copy("fsdp_basics", tmp_path)
    text = (template.path / "task.py").read_text()
    start, end = text.index("    image_size = IMAGE_SIZE"), text.index("def units(")
    template.edit("task.py", text[start:end], f"    {BATCH_NORM}\n\n")
    blocks = "[model.patches, *model.blocks, [model.norm, model.head]]"
    template.edit("task.py", blocks, "[[model[0], model[1]], model[5], model[6]]")
    losses, statistics = {}, {}
    for precision in ("fp32", "bf16", "fp16"):
        folder = tmp_path / precision
        args = ("--precision", precision, "--epochs", 1, "--lr", 1e-30, "--log-every", 1)
        args = (*args, "--output-dir", folder)
        template.run("train.py", *args).check()
        logged = [line for line in read_metrics(folder) if "loss" in line]
        losses[precision] = [line[name] for line in logged for name in ("loss", "grad_norm")]
        state = {"model": {"2.running_mean": torch.zeros(8), "2.running_var": torch.zeros(8)}}
        dcp.load(state, checkpoint_id=saves(folder / "checkpoints")[-1], no_dist=True)
        statistics[precision] = torch.cat(list(state["model"].values()))
    for precision in ("bf16", "fp16"):
        pairs = [p for p in zip(losses[precision], losses["fp32"], strict=True) if p[0] != math.inf]
        assert len(pairs) > 40  # of 44; fp16 skips steps until its scale fits
        assert all(half == pytest.approx(full, rel=1e-2) for half, full in pairs)
        assert statistics[precision].dtype == torch.float32
        assert torch.allclose(statistics[precision], statistics["fp32"], rtol=1e-2, atol=1e-3)


class Block:
    """Notes which blocks it is told to gather ahead of itself."""

    def set_modules_to_forward_prefetch(self, blocks):
        self.in_forward = blocks

    def set_modules_to_backward_prefetch(self, blocks):
        self.in_backward = blocks


def test_prefetch_looks_ahead_in_forward_and_in_backward():
    a, b, c, d = blocks = [Block() for _ in range(4)]
    prefetch_blocks(blocks, 2)
    assert [block.in_forward for block in blocks] == [[b, c], [c, d], [d], []]
    assert [block.in_backward for block in blocks] == [[], [a], [b, a], [c, b]]  # in its order


@pytest.mark.slow
def test_ranks_draw_their_own_numbers_and_every_save_but_two_goes(tmp_path):
    args = ("--epochs", 1, "--dim", 8, "--depth", 1, "--checkpoint-every", 5, "--keep", 2)
    args += ("--log-every", 7, "--workers", 1, "--augment", "--output-dir", tmp_path)
    output = torchrun(TRAIN, *args).check().output  # itself: loader processes end in their time
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000020", "step_00000022"]
    first, second = newest(tmp_path / "checkpoints")[1]["generators"]
    assert first["cpu"].tolist() != second["cpu"].tolist()
    logged = [line["step"] for line in read_metrics(tmp_path) if "grad_norm" in line]
    assert logged == [5, 7, 10, 14, 15, 20, 21, 22]  # where it is saved, too
    assert output.count("grad norm") == len(logged)  # a log file tells as much as the metrics


@pytest.mark.slow
def test_an_asynchronous_save_counts_although_the_next_loss_is_nan(tmp_path):
    args = ("--epochs", 1, "--optimizer", "sgd", "--lr", 1e30, "--clip", 0, "--warmup", 0)
    args = (*args, "--checkpoint-every", 1, "--log-every", 1, "--async-save")
    result = pool.run(TRAIN, *args, "--output-dir", tmp_path, ranks=2)
    assert re.search(r"step [23]: the loss is nan", result.output)
    saved = {save.name for save in (tmp_path / "checkpoints").iterdir()}
    assert saved
    assert saved <= {"step_00000001", "step_00000002"}  # none is unfinished


@pytest.mark.slow
def test_loss_that_is_no_number_stops_the_run(tmp_path):
    args = ("--optimizer", "sgd", "--lr", 1e30, "--clip", 0, "--warmup", 0, "--log-every", 3)
    args += ("--dim", 8, "--depth", 1, "--output-dir", tmp_path)
    result = pool.run(TRAIN, *args, ranks=2)
    assert result.returncode == 2
    assert result.output.count("train.py: error: step 3: the loss is nan") == 1
    assert not list(tmp_path.glob("checkpoints/*"))
