"""parallel_basics: context parallelism by hand (ring attention), compared with one process."""

import re
from types import SimpleNamespace

import pool
import pytest
import torch
import torch.nn.functional as F
from attention_ring import Ring
from compare_ring_attention import expected_flops
from helpers import ROOT, torchrun
from model import GPT, GPTConfig
from ring_attention import apply_ring_attention
from workers.parallel_context import ATTENTIONS, LENGTH, MODELS, RINGS, SIZES, STEPS, qkv

pytestmark = pytest.mark.slow  # each launch of ranks takes some seconds

SCRIPT = ROOT / "parallel_basics/ring_attention.py"
LAYOUTS = {"in order": False, "balanced": True}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """What each rank of the job found."""
    path = tmp_path_factory.mktemp("context")
    pool.run(ROOT / "tests/workers/parallel_context.py", path, ranks=4, timeout=280).check()
    return [torch.load(path / f"{rank}.pt", map_location="cpu") for rank in range(4)]


def positions(rank: int, size: int, balanced: bool, length: int = LENGTH) -> list[list[int]]:
    """The tokens of each chunk of a rank, computed independently."""
    if not balanced:
        n = length // size
        return [list(range(rank * n, (rank + 1) * n))]
    n = length // (2 * size)
    back = length - rank * n
    return [list(range(rank * n, (rank + 1) * n)), list(range(back - n, back))]


# ---- attention alone


def reference(kind: str, causal: bool) -> dict:
    """PyTorch's attention over full sequences, in float64."""
    q, k, v, dout = (t.double().requires_grad_() for t in qkv(kind))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kind == "grouped")
    out.backward(dout.detach())
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


@pytest.mark.device
@pytest.mark.gpu_per_rank(4)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("balanced", [True, False], ids=["balanced", "in order"])
@pytest.mark.parametrize(("kind", "size"), ATTENTIONS)
def test_attention(results, kind, size, balanced, causal):
    """Tolerances, relative to the largest number of a tensor: rounding of the compute dtype
    (float32 also for bf16, whose results and gradients are rounded to 8 bits in the end). Scores of
    up to a thousand have an error of 1e-4 in float32."""
    tolerance = {"float": 2e-6, "large": 1e-3, "bf16": 1e-2}.get(kind, 1e-13)
    right = reference(kind, causal)
    for rank, job_rank in enumerate(RINGS[size]):
        found = results[job_rank]["attention", kind, size, balanced, causal]
        mine = [p for chunk in positions(rank, size, balanced) for p in chunk]
        for name, expected in right.items():
            assert found[name].dtype == qkv(kind)[0].dtype
            error = (found[name].double() - expected[:, :, mine]).abs().max()
            assert error <= tolerance * expected.abs().max(), (rank, name)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("balanced", [True, False], ids=["balanced", "in order"])
@pytest.mark.parametrize("size", RINGS)
def test_blocks(results, size, balanced, causal):
    """The ring computes exactly the pairs of chunks in which a token may see another one."""
    work = torch.zeros(size, size, dtype=torch.long)  # of each rank in each step
    for rank, job_rank in enumerate(RINGS[size]):
        for step, found in enumerate(results[job_rank]["visible", size, balanced, causal]):
            mine, theirs = (positions(r % size, size, balanced) for r in (rank, rank - step))
            expected = [
                (i, j, causal and mine[i] == theirs[j])
                for i in range(len(mine))
                for j in range(len(theirs))
                if not causal or theirs[j][0] <= mine[i][-1]
            ]
            assert found == expected
            work[rank, step] = len(found)
    if causal and balanced:
        assert (work[:, 0] == 3).all()
        assert (work[:, 1:] == 2).all()  # equal work on all ranks, in each step
    elif causal:
        assert work.sum(1).tolist() == list(range(1, size + 1))


# ---- the model


@pytest.mark.device
@pytest.mark.gpu_per_rank(4)
@pytest.mark.quick
@pytest.mark.parametrize("case", sorted(MODELS), ids=str)
def test_model(results, case):
    """Loss, every gradient, every parameter in each of several steps, on every rank.

    Tolerances of gradients are relative to their largest number, because those of query and key are
    small. In float32 rounding adds up over the steps, and AdamW enlarges it where a gradient is
    nearly zero: a tenth of its lr = 1e-3 is allowed. In float64 the tolerance hides no mistake.
    """
    size, _, how = case
    double = "double" in how
    limits = {"loss": 1e-5, "gradient": 1e-4, "value": 1e-5}
    if "adamw" in how:
        limits = {"loss": 1e-5, "gradient": 1e-3, "value": 1e-4}
    if double:
        limits = {"loss": 1e-12, "gradient": 1e-9, "value": 1e-9}
    expected = results[0]["one process", how]
    for job_rank in range(4) if "data" in how else RINGS[size]:
        steps = results[job_rank]["model", case]
        assert len(steps) == len(expected) == STEPS
        for step, right in zip(steps, expected, strict=True):
            assert step.keys() == right.keys()
            assert len(step) > 50
            for name, value in right.items():
                kind = name.split()[0]
                unit = value.abs().max() if kind == "gradient" else 1
                assert value.dtype == (torch.float64 if double else torch.float32)
                error = (step[name] - value).abs().max()
                assert error <= limits[kind] * unit, (job_rank, name, error / unit)


def test_attention_matters_in_this_model(results):
    """Gradients of queries that are nearly zero would prove nothing."""
    first = results[0]["one process", "sgd"][0]
    largest = {name: g.abs().max() for name, g in first.items() if name.startswith("gradient")}
    assert largest["gradient of blocks.0.attention.query.weight"] > 1e-3
    assert largest["gradient of blocks.1.attention.key.weight"] > 1e-3
    assert not first["gradient of position_embedding.weight"][LENGTH:].any()  # never used


@pytest.mark.parametrize("case", sorted(MODELS), ids=str)
def test_all_ranks_have_the_same_model(results, case):
    """The same bits, or the ranks would drift apart."""
    ranks = range(4) if "data" in case[2] else RINGS[case[0]]
    first, *others = (results[rank]["model", case][-1] for rank in ranks)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


# ---- what it costs


@pytest.mark.parametrize("balanced", [True, False], ids=["balanced", "in order"])
def test_counts_on_four_ranks(results, balanced):
    """Computed here from the sizes: 2 products per block in forward, 5 in backward."""
    heads, width = SIZES.batch_size * SIZES.heads, SIZES.dim // SIZES.heads
    chunk = SIZES.length // (8 if balanced else 4)
    own = 4 * heads * width * SIZES.length // 4  # bytes of a rank's queries, or keys, or values
    for rank, found in enumerate(results):
        counts = found["counts", balanced]
        blocks = 9 if balanced else 1 + rank
        assert counts["flops"] == 7 * blocks * 2 * heads * chunk * chunk * width
        # Keys and values three times; back again three times, and their gradients four times.
        assert counts["sends"] == (3, 7)
        assert counts["sent"] == (3 * 2 * own, 7 * 2 * own)
        assert counts["largest"] == max(4 * heads * chunk * chunk, 2 * own)
        # Queries, keys, values, output, and one number for each query: no scores.
        assert counts["kept"] == 4 * own + own // width


def test_counts_of_one_process(results):
    heads, width = SIZES.batch_size * SIZES.heads, SIZES.dim // SIZES.heads
    own, scores = 4 * heads * width * SIZES.length, 4 * heads * SIZES.length**2
    plain, fused = (results[0]["counts", kind] for kind in ("softmax(q k) v", "fused kernel"))
    assert plain["largest"] == scores
    assert plain["kept"] == 3 * own + scores + SIZES.length**2  # the mask, one byte per score
    assert fused["largest"] == own
    assert fused["kept"] == 4 * own + own // width


def test_refusals(results):
    for found in results:
        assert found["refusals"] == [
            "10 tokens do not divide into 8 chunks",
            "3 tokens on a rank do not divide into two chunks",
        ]


# ---- the script


def numbers(line: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"-?\d[\d,]*\.?\d*(?:e[-+]\d+)?", line)]


def rows_of(output: str, start: str) -> list[list[float]]:
    """The numbers of the lines that begin with `start`, without those in it."""
    lines = [line for line in output.splitlines() if line.startswith(start)]
    return [numbers(line.removeprefix(start)) for line in lines]


def check_output(output: str, ranks: int, optimizer: str = "sgd", length: int = 512) -> None:
    """batch 2, 4 heads, dim 64: the script's defaults."""
    assert "Warning" not in output
    for name, balanced in LAYOUTS.items():
        (differences,) = rows_of(output, f"tokens {name}")
        assert max(differences) < (1e-5 if optimizer == "sgd" else 1e-3)
        chunk = length // (2 * ranks if balanced else ranks)
        blocks = [2 * ranks + 1] * ranks if balanced else range(1, ranks + 1)
        million = [7 * 2 * 2 * 64 * chunk**2 * n / 1e6 for n in blocks]
        work = [rows_of(output, f"rank {rank} ")[0] for rank in range(ranks)]
        assert [row[2 * balanced] for row in work] == pytest.approx(million, abs=0.006)  # counted
        assert [row[2 * balanced + 1] for row in work] == pytest.approx(million, abs=0.006)
        ratio = rows_of(output, "most / mean")[0][balanced]
        assert ratio == pytest.approx(max(million) / (sum(million) / ranks), abs=0.006)
    kv = 2 * 4 * 2 * length // ranks * 64
    forward, backward = (rows_of(output, f"{phase}  ") for phase in ("forward", "backward"))
    assert forward == [[ranks - 1, kv * (ranks - 1), kv * (ranks - 1)]]
    sends = 2 * ranks - 1 if ranks > 1 else 0
    assert backward == [[sends, kv * sends, kv * sends]]
    ((_, plain), (_, fused), in_order, balanced) = (
        rows_of(output, name)[0]
        for name in ("1 rank, softmax(q k) v", "1 rank, fused kernel", "ring, in order", "ring, ba")
    )
    assert plain > 4 * 2 * 4 * length**2
    assert in_order == [max(4 * 2 * 4 * (length // ranks) ** 2, kv), fused / ranks]
    assert balanced == [max(4 * 2 * 4 * (length // (2 * ranks)) ** 2, kv), fused / ranks]


def test_work_above_the_diagonals_tiles_is_left_out(group):
    """A chunk of 1100 tokens is of two tiles of 512 and a smaller one."""
    args = SimpleNamespace(batch_size=3, dim=8, length=1100)
    for balanced, length in ((False, 1100), (True, 2200)):
        ring, args.length = Ring(balanced=balanced), length
        size = 0
        for rows, columns, _ in ring.tiles(0, length):
            size += (rows.stop - rows.start) * (columns.stop - columns.start)
        assert expected_flops(args, 0, 1, balanced) == 7 * 2 * 3 * 8 * size


def test_a_model_with_a_window_is_refused(group):
    """The ring has the causal mask only: its logits would be those of a model without a window."""
    model = GPT(GPTConfig(heads=2, dim=16, layers=1, window=3))
    with pytest.raises(ValueError, match="ring attention has no window, and this model"):
        apply_ring_attention(model)


def test_script_on_two_ranks():
    check_output(pool.run(SCRIPT, ranks=2).check().output, ranks=2)


def test_script_on_three_ranks_with_adamw():
    result = pool.run(SCRIPT, "--length", 384, "--steps", 3, "--optimizer", "adamw", ranks=3)
    check_output(result.check().output, ranks=3, optimizer="adamw", length=384)


def test_script_as_one_process():
    check_output(pool.run(SCRIPT, "--steps", 1).check().output, ranks=1)


@pytest.mark.gpu
def test_script_on_a_gpu():
    output = torchrun(SCRIPT, "--device", "cuda", ranks=1).check().output
    for name in LAYOUTS:
        # A GPU adds in another order, and fused attention adds in another order than ours.
        assert max(rows_of(output, f"tokens {name}")[0]) < 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "0"], "--length: must be an integer of at least 1, not 0"),
        (["--batch-size", "-1"], "--batch-size: must be an integer of at least 1, not -1"),
        (["--dim", "6"], "--dim 6 does not divide into 4 heads"),
        (
            ["--length", "15"],
            "--length 15 does not divide into 2 chunks, two for each of 1 rank(s)",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    result = pool.run(SCRIPT, *arguments)
    assert result.returncode == 2
    assert f"ring_attention.py: error: {message}" in result.output


def test_a_length_that_does_not_divide_is_reported_once():
    result = pool.run(SCRIPT, "--length", 510, ranks=2)
    assert result.returncode == 2
    assert result.output.count("--length 510 does not divide into 4 chunks, two for each of 2") == 1
