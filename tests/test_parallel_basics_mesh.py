"""parallel_basics: the pictures of device_mesh.py, the bytes and collectives of dtensor.py."""

import importlib
import re
import sys

import pool
import pytest
import torch
from helpers import ROOT, python, torchrun
from workers.parallel_mesh import EACH, SHAPES, SMALL_X, SMALL_Y, TRAINED, inputs

pytestmark = pytest.mark.slow  # each launch of ranks takes some seconds

HERE = ROOT / "parallel_basics"
MESH, DTENSOR = HERE / "device_mesh.py", HERE / "dtensor.py"
STRATEGIES = HERE / "dtensor_strategies.py"
each_table = pytest.mark.parametrize(("ranks", "sizes"), EACH, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("mesh") / "results.pt"
    pool.run(ROOT / "tests/workers/parallel_mesh.py", path, ranks=4, timeout=240).check()
    return torch.load(path, weights_only=False)


def module(name: str):
    return importlib.import_module(name)


# ---- device_mesh.py


def row(mesh: torch.Tensor, coordinate: tuple, axis: int) -> list[int]:
    """The ranks whose coordinate differs along `axis` only."""
    index = [slice(None) if i == axis else c for i, c in enumerate(coordinate)]
    return mesh[tuple(index)].tolist()


@each_shape
def test_coordinates_and_groups(results, shape):
    mesh = torch.arange(4).view(shape)
    names = module("device_mesh").NAMES[len(shape)]
    found = results["mesh", shape]
    for rank in range(4):
        coordinate = tuple((mesh == rank).nonzero()[0].tolist())
        groups = [row(mesh, coordinate, axis) for axis in range(len(shape))]
        assert found["ranks"][rank] == {"coordinate": coordinate, "groups": groups}
        expected = {f'mesh["{n}"]': g for n, g in zip(names, groups, strict=True)}
        if len(shape) == 3:
            plane = mesh[:, :, coordinate[2]]
            expected['mesh["replicate", "shard"]'] = plane.tolist()
        if len(shape) > 1:
            flat = mesh if len(shape) == 2 else plane
            expected[f"{names[0]} and {names[1]} flattened"] = flat.flatten().tolist()
        sums = {title: int(torch.tensor(ranks).sum()) for title, ranks in expected.items()}
        assert found["views"][rank] == {t: (expected[t], sums[t]) for t in expected}


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 1])
def test_flattening_equals_torchs_own(results, shape):
    for rank, (ours, theirs, local_rank) in enumerate(results["flatten", shape]):
        assert ours == theirs
        assert ours[local_rank] == rank


def test_refusals(results):
    assert results["refusals"] == [
        "--shape 3 x 2 is for 6 ranks, this job has 4",
        "a and c are not neighbours among ['a', 'b', 'c']",
    ]


@pytest.mark.parametrize(
    ("ranks", "shapes"),
    [
        (1, [(1,), (1, 1), (1, 1, 1)]),
        (2, [(2,), (1, 2), (1, 1, 2)]),
        (6, [(6,), (2, 3), (1, 2, 3)]),
        (7, [(7,), (1, 7), (1, 1, 7)]),
        (8, [(8,), (2, 4), (2, 2, 2)]),
        (12, [(12,), (3, 4), (2, 2, 3)]),
        (64, [(64,), (8, 8), (4, 4, 4)]),
    ],
)
def test_balanced_shapes(ranks, shapes):
    assert [module("device_mesh").balanced_shape(ranks, axes) for axes in (1, 2, 3)] == shapes


def test_ranks_per_node(monkeypatch):
    args = type("Args", (), {"ranks_per_node": None})
    for ranks, here, expected in ((8, 8, 4), (2, 2, 2), (3, 3, 3), (16, 8, 8), (1, 1, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        assert module("device_mesh").ranks_per_node(args, ranks) == expected
    args.ranks_per_node = 5
    assert module("device_mesh").ranks_per_node(args, 8) == 5


PICTURE_OF_8 = """\
mesh of replicate 2, shard 2, tp 2
replicate 0     tp 0     tp 1
  shard 0     rank 0   rank 1
  shard 1     rank 2   rank 3
replicate 1     tp 0     tp 1
  shard 0     rank 4   rank 5
  shard 1     rank 6   rank 7
axis       groups                 stride  nodes of 4
replicate  0 4 | 1 5 | 2 6 | 3 7       4  across
shard      0 2 | 1 3 | 4 6 | 5 7       2  inside
tp         0 1 | 2 3 | 4 5 | 6 7       1  inside
"""


def test_the_picture_is_drawn_from_what_ranks_say():
    """In one process: coordinates as ranks report them, also out of order."""
    code = module("device_mesh")
    mesh = torch.arange(8).view(2, 2, 2)
    ranks = []
    for rank in range(8):
        at = tuple((mesh == rank).nonzero()[0].tolist())
        ranks.append({"coordinate": at, "groups": [row(mesh, at, axis) for axis in range(3)]})
    names = code.NAMES[3]
    table = code.groups_table(ranks, names, 4)
    assert code.draw(ranks, names) + "\n" + table + "\n" == PICTURE_OF_8
    ranks[0], ranks[7] = ranks[7], ranks[0]
    swapped = code.draw(ranks, names).splitlines()
    assert swapped[2].split() == ["shard", "0", "rank", "7", "rank", "1"]
    assert swapped[6].split() == ["shard", "1", "rank", "6", "rank", "0"]


def test_mesh_under_torchrun():
    output = torchrun(MESH).check().output
    assert [line for line in output.splitlines() if line.startswith("mesh of")] == [
        "mesh of dp 2",
        "mesh of dp 1, tp 2",
        "mesh of replicate 1, shard 1, tp 2",
    ]
    assert re.search(r"^tp +0 1 +1 +inside$", output, flags=re.MULTILINE)
    table = output.partition("their sum by all_reduce\n")[2].splitlines()
    assert (
        re.split(r" {3,}", table[1])
        == ["0", "0  sum 0", "0  sum 0", "0 1  sum 1"] + ["0  sum 0"] * 2
    )
    assert len(table) == 3
    assert "Warning" not in output


@pytest.mark.parametrize("script", [MESH, DTENSOR, STRATEGIES], ids=lambda path: path.stem)
def test_a_world_of_one(script):
    output = pool.run(script).check().output
    assert "1 rank(s) on cpu" in output
    assert "WRONG" not in output


# ---- dtensor.py

S = {  # collectives of a redistribution: forward, backward
    ("R", "S0"): ("-", "all_gather"),
    ("R", "S1"): ("-", "all_gather"),
    ("S0", "R"): ("all_gather", "-"),
    ("S0", "S1"): ("all_gather", "all_gather"),  # GPUs: all_to_all
    ("S1", "R"): ("all_gather", "-"),
    ("S1", "S0"): ("all_gather", "all_gather"),
    ("P", "R"): ("all_reduce", "-"),
    ("P", "S0"): ("reduce_scatter", "all_gather"),
    ("P", "S1"): ("reduce_scatter", "all_gather"),
}


@each_table
def test_redistribution(results, ranks, sizes):
    """Collectives and values of forward and backward; bytes counted, and by two formulas."""
    table = results["redistribute", ranks, sizes]
    assert {(r["from"], r["to"]): (r["collective"], r["in backward"]) for r in table} == S
    for r in table:
        assert r["values"] == "right", r
        assert r["counted"] == r["formula"], r
        if not any(size % ranks for size in sizes[:2]):
            passes = {"-": 0, "all_reduce": 2}.get(r["collective"], 1)
            assert r["counted"] == passes * (ranks - 1) * 4 * sizes[0] * sizes[1] // ranks


FREE = {"R R", "R S0", "R S1", "R P", "S0 R", "S1 R", "S1 S0", "P R"}


@each_table
def test_matmul(results, ranks, sizes):
    table = results["matmul", ranks, sizes]
    assert len(table) == 16
    for r in table:
        assert r["values"] == "right", r
        assert r["counted"] == r["formula"], r
    assert {f"{r['x']} {r['y']}" for r in table if r["collective"] == "-"} == FREE
    found = {(r["x"], r["y"]): r["x @ y"] for r in table}
    rules = {("R", "R"): "R", ("S0", "R"): "S0", ("R", "S1"): "S1", ("S1", "S0"): "P"}
    assert rules.items() <= (found | {("S1", "R"): "P"}).items()


def test_what_moves_depends_on_the_sizes(results):
    """S0 x S1: the smaller one is all-gathered, so the product is sharded like the larger one."""
    small_x, small_y = (results["matmul", 4, sizes] for sizes in (SMALL_X, SMALL_Y))
    placements = [
        next(r["x @ y"] for r in table if (r["x"], r["y"]) == ("S0", "S1"))
        for table in (small_x, small_y)
    ]
    assert placements == ["S1", "S0"]


@each_table
def test_gradients_of_matmul(results, ranks, sizes):
    """All pairs of placements. Tolerance: sums of up to 240 products in another order."""
    x, y, z = inputs(sizes)
    found = results["gradients", ranks, sizes]
    assert len(found) == 16
    for pair, (x_grad, y_grad) in found.items():
        torch.testing.assert_close(x_grad, z @ y.T, rtol=1e-5, atol=1e-4, msg=str(pair))
        torch.testing.assert_close(y_grad, x.T @ z, rtol=1e-5, atol=1e-4, msg=str(pair))


RESULTS = ["P", "P", "S0", "S0", "P", "P", "S1", "R", "P", "P(avg)", "S0", "P(max)", "S0"]


@each_table
def test_operators(results, ranks, sizes):
    table = results["operators", ranks, sizes]
    for r in table:
        assert r["values"] == "right", r
        assert r["counted"] == r["formula"], r
    expected = RESULTS.copy()
    if sizes[0] % ranks:
        expected[RESULTS.index("P(avg)")] = "R"  # parts of unequal size: not the mean of means
    assert [r["result"] for r in table][: len(expected)] == expected


CALLS = {  # forward, backward, gradients
    "data parallel": ({}, {}, {"all_reduce": 2}),
    "FSDP": ({"all_gather": 2}, {"reduce_scatter": 2}, {}),
    "tensor parallel": ({"all_reduce": 1}, {}, {}),
    "  output left Partial": ({"all_reduce": 1}, {"all_reduce": 1}, {}),
    "  wrong shard dims": ({"all_reduce": 1}, {"all_reduce": 1}, {}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("ranks", "optimizer"), TRAINED)
def test_a_model_equals_one_process(results, ranks, name, optimizer):
    """Tolerances: fp32 sums in another order; AdamW's lr is 2e-3, a hundredth of it is allowed."""
    code = module("dtensor_strategies")
    found = results["train", ranks, name, optimizer]
    expected, _ = code.train(None, code.STRATEGIES[name], optimizer)
    assert len(found["history"]) == len(expected) == 5
    for step, one in zip(found["history"], expected, strict=True):
        assert step.keys() == one.keys()
        assert {k.split()[0] for k in one} == {"loss", "gradient", "parameter"}
        for key, value in one.items():
            atol = {"loss": 1e-6, "gradient": 1e-7, "parameter": 2e-5}[key.split()[0]]
            torch.testing.assert_close(step[key], value, rtol=1e-5, atol=atol, msg=key)
    assert tuple(found["calls"].values()) == CALLS[name]
    assert found["bytes"] == code.strategy_bytes(name, ranks)


def test_bytes_of_the_strategies():
    """By hand: 96 tokens, weights of 48 x 256 and 256 x 48, 4 ranks."""
    sent = module("dtensor_strategies").strategy_bytes
    assert sent("data parallel", 4) == sent("FSDP", 4) == 2 * 3 / 4 * 4 * 2 * 48 * 256
    assert sent("tensor parallel", 4) == 2 * 3 / 4 * 4 * 96 * 48
    assert sent("  wrong shard dims", 4) == 2 * 2 * 3 / 4 * 4 * 96 * 256


def check_counted(rows: list[list[str]]) -> None:
    """In each line of a table "counted" equals "formula". The first line is the header."""
    header = rows[0]
    where = header.index("counted") - len(header)
    for row in rows[1:]:
        assert len(row) == len(header), row
        assert row[where] == row[where + 1], row


def test_dtensor_prints_what_is_true():
    printed = pool.run(DTENSOR, ranks=2).check().output
    tables = re.split(r"\n\d\. ", printed)[1:]
    assert len(tables) == 3
    for table, count in zip(tables, (9, 16, 17), strict=True):
        rows = [re.split(r" {2,}", line) for line in table.strip().splitlines()[1:]]
        assert len(rows) == 1 + count
        assert {row[-1] for row in rows[1:]} == {"right"}
        check_counted(rows)
    assert "x is 256 x 512: 524,288 bytes" in printed
    assert re.search(r"^P +R +all_reduce +524,288 +524,288 +- +right$", printed, re.MULTILINE)
    assert "Warning" not in printed
    assert "alltoall" not in printed


def test_strategies_print_what_is_true():
    printed = pool.run(STRATEGIES, ranks=2).check().output
    lines = printed[printed.index("strategy ") :].splitlines()
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    assert [row[0] for row in rows[1:]] == [name.strip() for name in CALLS]
    for row in rows:  # the columns after the strategy's letters: forward, backward, ...
        assert len(row) == len(rows[0])
        assert row is rows[0] or max(map(float, row[-3:])) < 1e-4
    where = rows[0].index("counted")
    assert all(row[where] == row[where + 1] for row in rows[1:])
    assert "Warning" not in printed


@pytest.mark.gpu
@pytest.mark.parametrize("script", [MESH, DTENSOR, STRATEGIES], ids=lambda path: path.stem)
def test_on_a_gpu(script):
    output = python(script, "--device", "cuda").check().output
    assert "1 rank(s) on cuda" in output
    assert "WRONG" not in output


# ---- bad arguments, one process

NOT_0 = "must be an integer of at least 1, not 0"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (MESH, ["--shape", "0"], f"--shape: {NOT_0}"),
        (MESH, ["--names", "a"], "--names needs --shape"),
        (MESH, ["--shape", "1", "1", "--names", "a"], "--names gives 1 for the 2 axes of --shape"),
        (MESH, ["--shape", "1", "1", "--names", "a", "a"], "--names must differ: a a"),
        (MESH, ["--shape", "1", "1", "1", "1"], "--shape with 4 axes needs --names"),
        (
            MESH,
            ["--ranks-per-node", "0"],
            f"--ranks-per-node: {NOT_0}",
        ),
        (DTENSOR, ["--sizes", "4", "0", "4"], f"--sizes: {NOT_0}"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, script, arguments, message):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [script.name, *arguments])
    with pytest.raises(SystemExit) as caught:
        module(script.stem).parse_args()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"{script.name}: error: {message}\n"


def test_a_mesh_of_another_size_is_reported_once_per_job():
    result = pool.run(MESH, "--shape", 3, 2, ranks=2)
    assert result.returncode == 2
    message = "device_mesh.py: error: --shape 3 x 2 is for 6 ranks, this job has 2"
    assert result.output.count(message) == 1, result.output
