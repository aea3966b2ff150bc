"""transformer_basics/: each row of "What usually goes wrong" is provoked in train.py, and cured."""

import re
from pathlib import Path

import pytest
from helpers import read_metrics
from rows import Copy

pytestmark = pytest.mark.slow  # real jobs that fail, some of them by waiting

ROWS = {
    "gradients are too large": "test_gradients_of_means_are_added",
    "`All operands ... must have the same mesh`": "test_one_norm_over_two_meshes",
    "clipping with `--tp` and `--dp-shard`": "test_shards_that_are_not_shard",
    "hangs at the first step": "test_ranks_that_build_different_meshes",
    "`--tp` changes the loss": "test_a_batch_for_each_tensor_parallel_rank",
    "with dropout and `--tp`": "test_a_mask_for_each_tensor_parallel_rank",
    "with masked targets": "test_a_mean_of_means_of_unequal_counts",
    "hold different numbers, first in": "test_a_part_of_the_gradient_of_an_adapter",
    "a pipeline is slow": (
        "test_parallel_basics_pipeline.py::test_from_scratch_prints_what_is_true"
    ),
    "the key's bias": (
        "test_transformer_basics.py::test_it_is_gpt2",
        "test_transformer_basics.py::test_init_from_has_the_same_logits",
    ),
}
TINY = "--layers 2 --heads 4 --dim 32 --block-size 16 --batch-size 8 --steps 2 --log-every 1"
FLAGS = (*TINY.split(), "--eval-every", 2, "--eval-batches", 1, "--sample", 0, "--timeout", 120)


@pytest.fixture
def copy(tmp_path) -> Copy:
    copy = Copy("transformer_basics", tmp_path)
    text = Path(re.__file__).read_text()[:9000]
    (copy.path / "text.txt").write_text(text)
    return copy


def log(copy: Copy, *args, ranks: int) -> dict[str, list[float]]:
    """Losses and gradient norms of the steps."""
    output = copy.path / f"runs/{len(list(copy.path.glob('runs/*')))}"
    flags = (*FLAGS, "--data", "text.txt", *args, "--output-dir", output)
    copy.run("train.py", *flags, ranks=ranks).check()
    lines = [line for line in read_metrics(output) if "loss" in line]
    return {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}


def test_gradients_of_means_are_added(copy):
    flags = ("--accumulate", 4, "--clip", 0)
    alone = log(copy, *flags, ranks=1)
    staged = log(copy, *flags, "--pp", 2, ranks=2)
    assert staged["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    copy.edit("pipeline.py", "scale_grads=True", "scale_grads=False")
    wrong = log(copy, *flags, "--pp", 2, ranks=2)
    assert wrong["loss"][0] == pytest.approx(alone["loss"][0], rel=1e-5)
    assert wrong["grad_norm"][0] == pytest.approx(4 * alone["grad_norm"][0], rel=1e-3)
    copy.edit("step.py", "part = part / tokens", "part = part / y.numel()")
    wrong = log(copy, *flags, ranks=1)
    assert wrong["grad_norm"][0] == pytest.approx(4 * alone["grad_norm"][0], rel=1e-3)


def test_a_mean_of_means_of_unequal_counts(copy):
    text = (copy.path / "text.txt").read_text()
    names = [f"{i}.txt" for i in range(150)]
    for i, name in enumerate(names):  # many short documents, whose borders count in no loss
        (copy.path / name).write_text(text[i : i + (400 if i % 5 == 0 else 2 + i % 5)])
    flags = ("--document-masks", "--data", *names)
    alone, both = (log(copy, *flags, ranks=ranks) for ranks in (1, 2))
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert both["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    copy.edit("packing.py", "dist.all_reduce(count)", "count = count * dist.get_world_size()")
    wrong = log(copy, *flags, ranks=2)
    assert abs(wrong["grad_norm"][0] / alone["grad_norm"][0] - 1) > 1e-3


def test_one_norm_over_two_meshes(copy):
    ours = "clip_gradients(model, settings.clip or math.inf, mesh)"
    torchs = "torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf)"
    copy.edit("step.py", f"grad_norm = {ours}", f"grad_norm = {torchs}")
    result = copy.run("train.py", *FLAGS, "--data", "text.txt", "--tp", 2)
    assert result.returncode == 1
    assert re.search("All operands .* must have the same mesh", result.output)
    copy.edit("step.py", f"grad_norm = {torchs}", f"grad_norm = {ours}")
    log(copy, "--tp", 2, ranks=2)


def test_shards_that_are_not_shard(copy):
    alone = log(copy, ranks=1)
    mesh = ("--tp", 2, "--dp-shard", 2)
    assert log(copy, *mesh, ranks=4)["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    copy.edit("step.py", "if not placement.is_replicate())", "if placement.is_shard())")
    wrong = log(copy, *mesh, ranks=4)
    assert wrong["loss"][0] == pytest.approx(alone["loss"][0], rel=1e-5)
    assert wrong["grad_norm"][0] < 0.99 * alone["grad_norm"][0]


def test_ranks_that_build_different_meshes(copy):
    shape = "settings.mesh_shape(), mesh_dim_names=AXES)\n"
    file = next(f for f in ("parallelize.py", "train.py") if shape in (copy.path / f).read_text())
    turned = shape.replace("shape()", "shape()[:: 1 if dist.get_rank() else -1]")
    copy.edit(file, shape, turned)
    text = (copy.path / file).read_text()
    if "import torch.distributed as dist" not in text:
        copy.edit(file, "import torch\n", "import torch\nimport torch.distributed as dist\n")
    flags = (*FLAGS, "--data", "text.txt", "--tp", 2)
    result = copy.run("train.py", *flags, "--timeout", 20)
    assert result.returncode != 0
    ends = "Timed out waiting|Connection closed by peer|Read error|IndexError: Target"
    assert re.search(f"{ends}|Received data size doesn't match", result.output)
    copy.edit(file, turned, shape)
    copy.run("train.py", *flags).check()


def test_a_batch_for_each_tensor_parallel_rank(copy):
    """Not even the ranks differ afterwards: the sums over them mix the batches."""
    alone = log(copy, ranks=1)["loss"]
    assert log(copy, "--tp", 2, ranks=2)["loss"] == pytest.approx(alone, rel=1e-5)
    part = "part, parts = batch_part(mesh)"
    copy.edit("data.py", part, "part, parts = mesh.get_rank(), mesh.size()")
    assert log(copy, "--tp", 2, ranks=2)["loss"][0] != pytest.approx(alone[0], rel=1e-4)


def test_a_part_of_the_gradient_of_an_adapter(copy):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 16, "vocab_size": 256}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False)).save_pretrained(
        copy.path / "base"
    )
    flags = ("--init-from", "base", "--lora-rank", 2, "--timeout", 300)
    alone = log(copy, *flags, ranks=1)
    both = log(copy, *flags, "--tp", 2, ranks=2)
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert both["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    b, added = "self.lora_b", "[Partial() if p.is_replicate() else p for p in {b}.placements]"
    own = "DTensor.from_local({b}.to_local(), {b}.device_mesh, {b}.placements, grad_placements={p})"
    own = own.replace("{p}", added).replace("{b}", b)
    copy.edit("lora.py", f"F.linear(x, self.lora_a), {b})", f"F.linear(x, self.lora_a), {own})")
    copy.edit("lora.py", "import DTensor, Replicate", "import DTensor, Partial, Replicate")
    result = copy.run("train.py", *FLAGS, "--data", "text.txt", *flags, "--tp", 2)
    assert result.returncode == 2
    assert re.search(r"hold different numbers, first in blocks\.0\..*lora_b", result.output)


def test_a_mask_for_each_tensor_parallel_rank(copy):
    """torch's dropout, seeded by rank; then by all coordinates but tp; then ours."""
    flags = ("--dropout", 0.2, "--timeout", 100, "--tp", 2)
    ours = "x_BTC.masked_fill(is_dropped, 0) / (1 - rate)"
    torchs = "torch.nn.functional.dropout(x_BTC, rate)"
    seeds, by_rank = "seed_generators(settings.seed, mesh)", "torch.manual_seed(worker.rank)"
    copy.edit("dropout.py", ours, torchs)
    copy.edit("train.py", seeds, by_rank)
    result = copy.run("train.py", *FLAGS, "--data", "text.txt", *flags)
    assert result.returncode not in (0, None)
    assert "ranks 0 and 1 hold different numbers" in result.output
    copy.edit("train.py", by_rank, seeds)
    drawn = log(copy, *flags, ranks=2)
    alone = log(copy, *flags[:4], ranks=1)
    assert drawn["loss"][0] == pytest.approx(alone["loss"][0], rel=0.05)
    copy.edit("dropout.py", torchs, ours)
    equal = [log(copy, *flags[:4], *mesh, ranks=len(mesh) or 1) for mesh in ((), ("--tp", 2))]
    assert equal[0]["grad_norm"] == pytest.approx(equal[1]["grad_norm"], rel=1e-4)
