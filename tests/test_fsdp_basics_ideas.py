"""fsdp_basics, one idea per file: FSDP by hand, from FSDP1 to fully_shard, hybrid sharding."""

import importlib
import re
import sys

import pool
import pytest
import torch
from helpers import ROOT, torchrun
from workers.fsdp_ideas import CASES, RUNS, SHAPES, STEPS, WITH_TORCH, build

pytestmark = pytest.mark.slow  # each launch of ranks takes some seconds

HERE = ROOT / "fsdp_basics"
SCRATCH, FSDP1, HYBRID = (
    HERE / f"{name}.py" for name in ("fsdp_from_scratch", "fsdp1_to_fsdp2", "hybrid_sharding")
)
EACH = [(ranks, name) for ranks, names in RUNS.items() for name in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("ideas") / "results.pt"
    pool.run(ROOT / "tests/workers/fsdp_ideas.py", path, ranks=4, timeout=400).check()
    return torch.load(path, weights_only=False)


def numbers(line: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"-?\d[\d,]*\.?\d*(?:e[-+]\d+)?", line)]


def row_of(output: str, start: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(start))


# ---- fsdp_from_scratch.py


@pytest.mark.parametrize(("ranks", "name"), EACH)
def test_by_hand_equals_one_process(results, ranks, name):
    """Tolerances: fp32 sums in another order differ by some 1e-7; AdamW divides gradients by their
    own size, which enlarges the differences of tiny ones: a hundredth of lr = 1e-3 is allowed."""
    ours, one = (results[ranks, name, version] for version in ("by hand", "one process"))
    assert len(ours["steps"]) == len(one["steps"]) == STEPS
    for mine, expected in zip(ours["steps"], one["steps"], strict=True):
        torch.testing.assert_close(mine["loss"], expected["loss"], rtol=0, atol=1e-5)
        unreached = mine["gradients"].keys() - expected["gradients"].keys()
        assert bool(unreached) == ("unused" in name)
        for parameter in unreached:  # zero instead of None, as documented
            assert not mine["gradients"].pop(parameter).any()
        torch.testing.assert_close(mine["gradients"], expected["gradients"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine["parameters"], expected["parameters"], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours["output"], one["output"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("ranks", "name"), sorted(WITH_TORCH))
def test_by_hand_equals_fully_shard(results, ranks, name):
    """Two ranks: the same bits, since a + b = b + a. Three: sums in another order, so 1e-6."""
    ours, torchs = (results[ranks, name, version] for version in ("by hand", "fully_shard"))
    tolerance = {"rtol": 0, "atol": 0 if ranks == 2 else 1e-6}
    for mine, expected in zip(ours["steps"], torchs["steps"], strict=True):
        for key in ("gradients", "parameters"):
            torch.testing.assert_close(mine[key], expected[key], **tolerance)


@pytest.mark.parametrize(("ranks", "name"), EACH)
def test_nothing_whole_is_left(results, ranks, name):
    """Between steps: a padded share of each unit, no whole parameter, no whole gradient."""
    ours = results[ranks, name, "by hand"]
    assert ours["left"] == 0
    assert ours["local_gradients"] == []
    kind = CASES[name].get("kind", "plain")
    model = build(kind)
    expected = {}
    for unit, modules in {
        "blocks.0": [model.blocks[0]],
        "blocks.1": [model.blocks[1]],
        "root": [model.first, model.head],
    }.items():
        params = {p for module in modules for p in module.parameters()}
        sizes = [sum(p.numel() for p in params if p.requires_grad == t) for t in (True, False)]
        expected[unit] = sorted(-(-size // ranks) for size in sizes if size)
    found = {}
    for label, size in ours["shards"].items():
        found.setdefault(label.split()[0], []).append(size)
    assert {unit: sorted(sizes) for unit, sizes in found.items()} == expected


def test_order_of_events(results):
    def order(name):
        return [
            f"{e[0]} {e[1]}".strip() for e in results[3, name, "by hand"]["steps"][-1]["events"]
        ]

    backward = ["reduce blocks.1", "free blocks.1", "reduce blocks.0", "free blocks.0"]
    backward += ["reduce root", "free root"]
    whole = ["gather root", "gather blocks.0", "gather blocks.1", "backward", *backward]
    assert order("sgd, keep") == whole
    once = ["gather root", "gather blocks.0", "free blocks.0", "gather blocks.1", "free blocks.1"]
    again = ["backward", "gather blocks.1", *backward[:2], "gather blocks.0", *backward[2:]]
    assert order("sgd") == once + again
    assert order("sgd, checkpoint") == once + again  # running forward again gathers nothing more
    # Frozen: there is nothing to reduce. It goes when the gradient of its input is there.
    frozen = ["backward", "gather blocks.1", "gather blocks.0", "free blocks.1", *backward[2:]]
    assert order("sgd, frozen block") == once + frozen
    # Each call of a block gathers it, but it is reduced once, after the backward of the first call.
    twice = order("sgd, twice")
    assert twice.count("gather blocks.0") == 3
    assert twice[twice.index("backward") :][-4:] == backward[2:]
    # Nothing in the first block needs backward, so it is not gathered for it, or even kept.
    assert order("sgd, frozen start, keep").count("gather blocks.0") == 1
    assert order("sgd, frozen start, keep").index("free blocks.0") == 3


def test_a_parameter_of_two_units_is_refused(results):
    assert results["refusal"] == (
        "head.weight of unit root belongs to unit blocks.0, too, and would be freed by one while "
        "the other computes: leave both to one unit"
    )


def whole_model():
    return importlib.import_module("model").VisionTransformer()


def sizes_of_the_model() -> list[int]:
    """Numbers in the whole model and in one block."""
    model = whole_model()
    return [sum(p.numel() for p in module.parameters()) for module in (model, model.blocks[0])]


@pytest.fixture(scope="module")
def scratch():
    return pool.run(SCRATCH, ranks=2).check().output


def test_from_scratch_prints_what_is_true(scratch):
    one, theirs = (numbers(row_of(scratch, f"by hand to {n}")) for n in ("one", "fully_shard"))
    assert max(one[:2]) < 1e-5  # the fifth step begins with parameters that differ a little
    assert one[2] < 2e-4  # a tenth of AdamW's lr of 2e-3, for gradients that are nearly zero
    assert theirs == [0, 0, 0]  # two ranks: the same bits
    total, block, blocks = *sizes_of_the_model(), 4
    for rank in range(2):
        columns = numbers(row_of(scratch, f"rank {rank}"))[1:]
        assert columns[:3] == [4 * total, 2 * total, 2 * total]
        # Two moments per number; a count of 4 bytes for each tensor of which the optimizer knows.
        assert columns[5] == 2 * columns[2] + 4 * (blocks + 1)
        assert columns[3] == 2 * columns[0] + 4 * len(list(whole_model().parameters()))
    root = total - blocks * block
    assert numbers(row_of(scratch, "most that was whole")) == [4 * (root + block)]
    log = scratch.partition("order of events")[2]
    assert log.count("gather") == 2 * blocks + 1
    assert log.count("reduce") == blocks + 1
    assert log.count("free") == 2 * blocks + 1


# ---- hybrid_sharding.py


@pytest.mark.parametrize("shape", SHAPES)
def test_hybrid_equals_one_process(results, shape):
    found = results["hybrid", shape]
    assert len(found["steps"]) == 3
    for step, expected in zip(found["steps"], found["reference"], strict=True):
        assert step.keys() == expected.keys()
        assert len(step) > 50
        torch.testing.assert_close(step, expected, rtol=0, atol=2e-5)  # AdamW, lr 2e-3: a hundredth
        gradients = [name for name in step if name.startswith("gradient")]
        for name in gradients:
            torch.testing.assert_close(step[name], expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_hybrid_groups_and_bytes(results, shape):
    """Recounted here from the shapes of the model, rank by rank."""
    within = shape[1]
    torch.manual_seed(0)
    model = importlib.import_module("model").VisionTransformer(dim=20, depth=2)
    padded = {
        name: 4 * -(-p.shape[0] // within) * within * (p.numel() // p.shape[0])
        for name, p in model.named_parameters()
    }
    total = sum(padded.values())
    blocks = sum(size for name, size in padded.items() if name.startswith("blocks"))
    for rank, (counts, held) in enumerate(results["hybrid", shape]["ranks"]):
        row = tuple(range(rank // within * within, (rank // within + 1) * within))
        column = tuple(range(rank % within, 4, within))
        expected = {("all_reduce", column): [3, total // within]}
        if within > 1:  # a part that is the whole needs no gathering
            expected |= {
                ("all_gather", row): [5, total + blocks],
                ("reduce_scatter", row): [3, total],
            }
        assert counts == expected
        exact = sum(len(p.chunk(within)[rank % within].flatten()) for p in chunkable(model, within))
        assert held == exact


def chunkable(model, parts):
    """The parameters with rows appended until their first dim divides: empty ones count nothing."""
    return [p for p in model.parameters() if len(p.chunk(parts)) == parts]


@pytest.fixture(scope="module")
def hybrid():
    return pool.run(HYBRID, "--steps", 2, ranks=4).check().output


def test_hybrid_prints_what_is_true(hybrid):
    assert "node 0 (row 0 of the mesh): ranks 0 1\nnode 1 (row 1 of the mesh): ranks 2 3" in hybrid
    lines = hybrid.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("sharding  collective"))
    found = {}
    for line in lines[start + 1 : start + 6]:
        match = re.fullmatch(r"(\w+) +(\w+) +(in node|across): ([\d ]+?) {2,}(.*)", line)
        calls, counted, formula, sent = numbers(match[5])
        assert counted == formula, line
        ranks = len(match[4].split())
        factor = 2 if match[2] == "all_reduce" else 1
        assert sent == round(factor * (ranks - 1) / ranks * counted)
        found[match[1], match[2]] = (match[3], match[4], calls, sent)
    assert {key: value[:3] for key, value in found.items()} == {
        ("full", "all_gather"): ("across", "0 1 2 3", 9),
        ("full", "reduce_scatter"): ("across", "0 1 2 3", 5),
        ("hybrid", "all_gather"): ("in node", "0 1", 9),
        ("hybrid", "reduce_scatter"): ("in node", "0 1", 5),
        ("hybrid", "all_reduce"): ("across", "0 2", 5),
    }
    sent = {key: value[3] for key, value in found.items()}
    full = sent["full", "all_gather"] + sent["full", "reduce_scatter"]
    inside = sent["hybrid", "all_gather"] + sent["hybrid", "reduce_scatter"]
    across = sent["hybrid", "all_reduce"]
    assert numbers(row_of(hybrid, "full sharding: a rank")) == [full]
    assert numbers(row_of(hybrid, "hybrid:  ")) == [across, inside]
    assert numbers(row_of(hybrid, "with rings")) == [full, 2 * across]
    for name in ("full", "hybrid"):
        loss, gradient, parameter, held = numbers(row_of(hybrid, f"{name}   "))
        assert max(loss, gradient) < 1e-5
        assert parameter < 2e-4  # as above
        parts = {"full": 4, "hybrid": 2}[name]  # rank 0 has as many rows as any
        assert held == sum(
            4 * -(-p.shape[0] // parts) * (p.numel() // p.shape[0])
            for p in whole_model().parameters()
        )


def test_mesh_shapes(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    module = importlib.import_module("hybrid_sharding")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert module.mesh_shape(None, None, 4) == (2, 2)
    assert module.mesh_shape(None, None, 8) == (2, 4)  # two nodes
    assert module.mesh_shape(4, None, 4) == (4, 1)
    assert module.mesh_shape(None, 4, 4) == (1, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert module.mesh_shape(None, None, 3) == (1, 3)
    for shape in ((2, 3), (3, None), (None, 3)):
        with pytest.raises(
            ValueError, match=r"--replicate \d times --shard \d is \d, but .* 4 rank"
        ):
            module.mesh_shape(*shape, 4)


def test_bad_mesh_is_reported_once_per_job():
    result = pool.run(HYBRID, "--replicate", 2, "--shard", 3, ranks=2)
    message = "hybrid_sharding.py: error: --replicate 2 times --shard 3 is 6, but this job has 2"
    assert result.returncode == 2
    assert result.output.count(message) == 1, result.output


def test_hybrid_under_torchrun():
    """Two copies of the whole model: nothing to gather. That is data parallelism."""
    output = torchrun(HYBRID, "--replicate", 2, "--steps", 1).check().output
    kinds = [line.split()[1] for line in output.splitlines() if line.startswith("hybrid    ")]
    assert [kind for kind in kinds if kind.startswith(("all", "reduce"))] == ["all_reduce"]


# ---- fsdp1_to_fsdp2.py


@pytest.fixture(scope="module")
def fsdp1():
    return pool.run(FSDP1, timeout=240, ranks=2).check().output


@pytest.mark.release
def test_fsdp1_and_its_successors_agree(fsdp1):
    rows = [line for line in fsdp1.splitlines() if re.search(r"\de[-+]\d\d$", line)]
    options = [line[:31].strip() for line in rows]
    assert len(set(options)) == len(options) == 22
    for line in rows:
        values = [float(x) for x in re.findall(r"\d\.\de[-+]\d\d", line)]
        assert len(values) == (1 if "STATE_DICT" in line or "optim_state" in line else 3), line
        if "clip" in line:  # the norm of many shards is summed in another order than of flat ones
            assert values[0] <= 1e-6
            assert values[1] <= 1e-6
            assert values[2] <= 2e-5
        else:
            assert not any(values), line  # two ranks, the same sums: the same bits
    for option in ("FULL_SHARD", "SHARD_GRAD_OP", "MixedPrecision(bf16, fp32)", "no_sync()"):
        assert option in options
    assert "NO_SHARD is not run" in fsdp1
    assert "the hybrid mesh has 1 x 2 ranks" in fsdp1
    assert "Warning" not in fsdp1


def test_fsdp1_hybrid_on_four_ranks(results):
    found = dict(results["fsdp1"])
    assert found.pop("shape") == (2, 2)
    assert list(found) == ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    for values in found.values():
        assert max(values) < 1e-6


def test_fsdp1_needs_two_ranks():
    result = pool.run(FSDP1)
    assert result.returncode == 2
    assert "fsdp1_to_fsdp2.py: error: one rank has nothing to shard" in result.output


# ---- bad arguments, one process


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (SCRATCH, ["--steps", "0"], "--steps: must be an integer of at least 1, not 0"),
        (SCRATCH, ["--dim", "6"], "--dim must be a multiple of 4, not 6"),
        (HYBRID, ["--shard", "0"], "--shard: must be an integer of at least 1, not 0"),
        (HYBRID, ["--batch-size", "-1"], "--batch-size: must be an integer of at least 1, not -1"),
        (FSDP1, ["--steps", "0"], "--steps: must be an integer of at least 1, not 0"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, script, arguments, message):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(script.stem).parse_args()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"{script.name}: error: {message}\n"


def test_from_scratch_as_one_process():
    output = pool.run(SCRATCH, "--steps", 1, "--keep").check().output
    assert output.startswith("1 rank(s) on ")
    assert max(numbers(row_of(output, "by hand to one process"))) < 1e-6
    forward, backward = re.split(r"\nbackward", output.partition("\nforward")[2])
    assert "free" not in forward  # --keep
    assert "gather" not in backward
