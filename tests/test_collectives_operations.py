"""collectives/: every operation compared with plain tensors; gradients, objects, planted hangs."""

import itertools
import json
import re
import sys

import pool
import pytest
import torch
from helpers import ROOT, torchrun

HERE = ROOT / "collectives"
WORKER = ROOT / "tests" / "workers" / "collectives_operations.py"
WORLDS, OPS = (2, 3, 4), ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
SHAPES = ((1,), (7,), (0,), (3, 5), (), (1025,))
ROWS = (0, 1, 3)


@pytest.fixture(scope="module")
def modules():
    """The files of collectives/ by name; afterwards their names are free for other directories."""
    before = set(sys.modules)
    names = ("autograd_collectives", "collectives", "hangs", "object_collectives", "reduce_ops")
    sys.path.insert(0, str(HERE))
    yield {name: __import__(name) for name in names}
    sys.path.remove(str(HERE))
    for name in set(sys.modules) - before:
        if (HERE / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> list[dict]:
    """What each of 4 ranks got in the groups of 2, 3 and 4 ranks."""
    folder = tmp_path_factory.mktemp("operations")
    pool.run(WORKER, folder, ranks=4).check()
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.fixture(params=WORLDS, ids=lambda world: f"{world}ranks")
def world(request) -> int:
    return request.param


@pytest.fixture
def got(saved, world) -> list[dict]:
    return [saved[rank][world] for rank in range(world)]


def given(world: int, rank: int, shape, dtype) -> torch.Tensor:
    """As in the worker."""
    generator = torch.Generator().manual_seed(1000 * world + rank)
    numbers = torch.randint(0, 8, shape, generator=generator)
    return numbers % 2 == 1 if dtype == torch.bool else numbers.to(dtype)


def equal(a, b) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a is b is None or (a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all()))


def total(xs: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the tensors' dtype, exact for small integers. For bools: OR."""
    return torch.stack([x.double() for x in xs]).sum(0).to(xs[0].dtype)


def reduced(xs: list[torch.Tensor], op: str) -> torch.Tensor:
    dtype = xs[0].dtype
    if op in ("BAND", "BOR", "BXOR"):
        result = xs[0]
        for x in xs[1:]:
            result = getattr(torch, f"bitwise_{op[1:].lower()}")(result, x)
        return result
    stack = torch.stack([x.double() for x in xs])
    result = {
        "SUM": stack.sum(0),
        "PRODUCT": stack.prod(0),
        "MIN": stack.amin(0),
        "MAX": stack.amax(0),
        "AVG": stack.mean(0),
    }[op]
    return (result % 256 if dtype == torch.uint8 else result).to(dtype)  # uint8 wraps around


def refusal(op: str, dtype: torch.dtype) -> str | None:
    if op == "AVG" and not dtype.is_floating_point:
        return "can't be cast to the desired output type"
    if op.startswith("B") and dtype.is_floating_point:
        return f"Cannot use ReduceOp.{op} with non-integral dtype"
    return None


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@each_dtype
@pytest.mark.slow
def test_one_to_all_and_all_to_one(got, world, dtype):
    for shape, root in itertools.product(SHAPES, (0, world - 1)):
        xs = [given(world, rank, shape, dtype) for rank in range(world)]
        for rank in range(world):
            key = (str(dtype), shape, root)
            mine = rank == root
            assert equal(got[rank]["broadcast", *key], xs[root]), key
            assert equal(got[rank]["gather", *key], xs if mine else None), key
            assert equal(got[rank]["reduce", *key], total(xs) if mine else None), key


@each_dtype
@pytest.mark.slow
def test_all_to_all_ranks(got, world, dtype):
    for shape in SHAPES:
        xs, key = [given(world, rank, shape, dtype) for rank in range(world)], (str(dtype), shape)
        for rank in range(world):
            assert equal(got[rank]["all_gather", *key], xs), key
            assert equal(got[rank]["input", *key], xs[rank]), f"{key}: the input was changed"
            for op in OPS:
                result, wanted = got[rank]["all_reduce", *key, op], refusal(op, dtype)
                if wanted:
                    assert isinstance(result, str), (key, op, result)
                    assert wanted in result
                elif op == "AVG" or dtype == torch.bfloat16:  # these round
                    tolerance = {torch.bfloat16: 0.02, torch.float32: 1e-6, torch.float64: 1e-15}
                    expected, rtol = reduced(xs, op), tolerance[dtype]
                    torch.testing.assert_close(result, expected, rtol=rtol, atol=0)
                else:
                    assert equal(result, reduced(xs, op)), (key, op)


@each_dtype
def test_parts(got, world, dtype):
    for rows in ROWS:
        xs = [given(world, rank, (rows * world, 2), dtype) for rank in range(world)]
        parts = [list(x.split(rows) if rows else [x] * world) for x in xs]
        uneven = [given(world, rank, (rows * rank, 2), dtype) for rank in range(world)]
        for rank in range(world):
            column = [p[rank] for p in parts]
            expected = {
                "scatter": parts[world - 1][rank],
                "reduce_scatter": total(column),
                "reduce_scatter_single": total(column),
                "all_gather_single": torch.cat(xs),
                "all_to_all": column,
                "all_to_all, older Gloo": column,
                "all_to_all_single": torch.cat(column),
                "all_gather_uneven": uneven,
            }
            for name, value in expected.items():
                assert equal(got[rank][name, str(dtype), rows], value), (name, rows, rank)


@each_dtype
def test_uneven_all_to_all(got, world, dtype):
    def sends(rank):
        return [(rank + 2 * to) % 3 for to in range(world)]

    for rows in ROWS:
        sizes = [[rows * n for n in sends(rank)] for rank in range(world)]
        xs = [given(world, rank, (sum(sizes[rank]), 2), dtype) for rank in range(world)]
        pieces = [x.split(size) for x, size in zip(xs, sizes, strict=True)]
        for rank in range(world):
            received, counts = got[rank]["all_to_all_uneven", str(dtype), rows]
            assert counts == [size[rank] for size in sizes]
            assert equal(received, torch.cat([p[rank] for p in pieces]))


def test_rows_that_do_not_add_up_are_refused(got, world):
    for rank, found in enumerate(got):
        rows = ROWS[-1] * sum((rank + 2 * to) % 3 for to in range(world))
        assert found["too many rows"] == f"send says {(rows + 1) * world} rows, x has {rows}"


def test_no_rank_leaves_a_barrier_early(saved):
    assert [one["barriers"] for one in saved] == [True] * 4


def test_alternatives_to_missing_operations(got, world):
    xs = [given(world, rank, (7,), torch.int64) for rank in range(world)]
    for one in got:
        assert equal(one["average_integers"], total(xs) // world)
        assert equal(one["premul_sum"], total(xs) * 0.25)
        assert one["premul refused"] == "refused: Cannot use ReduceOp.PREMUL_SUM with Gloo"
        matrices = [given(world, rank, (3, 4), torch.int64) for rank in range(world)]
        for op in ("and", "or", "xor"):
            assert equal(one[op], reduced(matrices, f"B{op.upper()}")), op


def test_broadcast_json(got, world):
    sent = {"from": world - 1, "text": "\u00e4" * 100, "list": [1, None, 0.5]}
    assert [one["broadcast_json"] for one in got] == [sent] * world


NAMES = ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("name", NAMES)
def test_gradients(got, world, name, modules):
    """First and second derivatives of the sum of all losses, against one process: float64."""
    file = modules["autograd_collectives"]
    assert tuple(file.COLLECTIVES) == NAMES
    xs = [x.clone().requires_grad_() for x in file.inputs(world, 1, "cpu")]
    ys = file.in_one_process(name, xs)
    loss = sum(file.loss_of(y, rank) for rank, y in enumerate(ys))
    first = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    sum(g.square().sum() for g in first).backward()
    for rank, one in enumerate(got):
        mine = one["gradient", name]
        torch.testing.assert_close(mine["first"], first[rank].detach(), rtol=0, atol=1e-13)
        torch.testing.assert_close(mine["first"], mine["numeric"], rtol=0, atol=1e-7)
        second = torch.zeros_like(xs[rank]) if xs[rank].grad is None else xs[rank].grad
        torch.testing.assert_close(mine["second"], second, rtol=0, atol=1e-12)


def test_ddp_needs_no_factor_for_a_loss_that_all_ranks_compute(got, world):
    """The gathered features of all ranks in one loss: DDP's division undoes the sum over losses."""
    weight = torch.eye(3, 4, dtype=torch.float64).requires_grad_()
    rows = torch.cat([given(world, rank, (2, 4), torch.float64) for rank in range(world)])
    features = rows @ weight.T
    torch.logsumexp(features @ features.T / 10, dim=1).mean().backward()
    for one in got:
        torch.testing.assert_close(one["contrastive"], weight.grad, rtol=1e-12, atol=1e-12)


# Float sums, without ranks.


def test_orders_of_addition(modules):
    ops = modules["reduce_ops"]
    lost = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    assert [f(lost).item() for f in (ops.in_rank_order, ops.as_tree, ops.as_ring)] == [1, 0, 1]
    for count, world_size in itertools.product((0, 1, 5, 1000), (1, 2, 3, 5, 8)):
        values = ops.random_values(world_size, count)
        exact = values.double().sum(0)
        size = values.abs().double().sum(0)
        for f in (ops.in_rank_order, ops.as_tree, ops.as_ring):
            off = (f(values).double() - exact).abs()
            assert (off <= size * world_size * 2**-24).all(), f
            if world_size == 2:
                assert torch.equal(f(values), values[0] + values[1])
    values = torch.tensor([[0.1, 0.1], [0.2, 0.2], [0.3, 0.3]])  # a piece of the ring starts later
    assert ops.as_ring(values)[1] == (values[1, 1] + values[2, 1]) + values[0, 1]


# Unpickling an object, without ranks.


def test_unpickling_runs_code(modules, monkeypatch):
    file = modules["object_collectives"]
    monkeypatch.delenv("VISITOR", raising=False)
    data = file.pickle.dumps(file.Innocent({"lr": 0.1}))
    assert "VISITOR" not in file.os.environ
    assert file.pickle.loads(data) == {"lr": 0.1}
    assert file.os.environ.pop("VISITOR").endswith("ran here")
    with pytest.raises(file.pickle.UnpicklingError):
        file.safe_load(file.Innocent({"lr": 0.1}))
    with pytest.raises(TypeError):
        json.dumps(file.Innocent({}))
    assert "VISITOR" not in file.os.environ
    assert torch.equal(file.safe_load({"x": torch.arange(3)})["x"], torch.arange(3))


# The scripts.


def table(output: str, title: str) -> list[list[str]]:
    """The cells of the table below a title, the header first."""
    block = output.split(title, 1)[1].partition("\n")[2]
    lines = list(itertools.takewhile(lambda line: line.strip(), block.splitlines()))
    return [re.split(r" {2,}", line.strip()) for line in lines]


@pytest.mark.slow
def test_collectives_script():
    output = pool.run(HERE / "collectives.py", ranks=3).check().output
    xs = [[10 * r + i for i in range(3)] for r in range(3)]
    sums, flat = [30, 33, 36], [n for x in xs for n in x]
    after = {
        "broadcast:": [xs[0]] * 3,
        "scatter:": [[0], [1], [2]],
        "gather:": [xs, "-", "-"],
        "all_gather:": [xs] * 3,
        "all_gather_single:": [flat] * 3,
        "all_gather_uneven:": [[[0], [10, 11], [20, 21, 22]]] * 3,
        "reduce:": [sums, "-", "-"],
        "all_reduce:": [sums] * 3,
        "reduce_scatter:": [[30], [33], [36]],
        "reduce_scatter_single:": [[30], [33], [36]],
        "all_to_all:": [[[10 * r + i] for r in range(3)] for i in range(3)],
        "all_to_all_single:": [[10 * r + i for r in range(3)] for i in range(3)],
        "all_to_all_single, uneven": [[10, 20, 21], [0, 1, 22], [2, 11, 12]],
    }
    for title, expected in after.items():
        rows = table(output, f"\n{title}")
        assert [row[-1] for row in rows[1:4]] == [str(e) for e in expected], title
    assert "dist.all_gather of 1, 2, ... numbers, gloo: allgather: invalid tensor size" in output
    assert re.search(r"all_reduce +\[30, 33, 36\]\nreduce_scatter.*\[30, 33, 36\]\n", output)
    rows = table(output, "barrier: every rank waits")
    assert all(float(late) + float(waits) >= 0.19 for _, late, waits in rows[1:])
    assert "arning" not in output


def test_one_collective_on_one_process():
    output = pool.run(HERE / "collectives.py", "--only", "all_reduce").check().output
    assert table(output, "all_reduce:")[1:] == [["0", "[0]", "[0]"]]
    assert "gather" not in output


@pytest.mark.slow
def test_reduce_ops_script(modules):
    output = pool.run(HERE / "reduce_ops.py", ranks=3).check().output
    ops = modules["reduce_ops"]
    xs = [ops.sample(rank, torch.int64) for rank in range(3)]
    rows = {row[0]: row[1:] for row in table(output, "before:")[1:10]}
    assert tuple(rows) == ops.OPS
    for op, cells in rows.items():
        for dtype, cell in zip(ops.DTYPES, cells, strict=True):
            if op == "PREMUL_SUM" or refusal(op, dtype):
                note = output.split(f"\n{cell} refused: ")[1].splitlines()[0]
                assert (refusal(op, dtype) or "PREMUL_SUM with Gloo") in note
            else:
                expected = reduced([x.to(dtype) for x in xs], op).double().tolist()
                tolerance = 4e-3  # four digits are printed; bfloat16 has eight bits
                assert [float(n) for n in cell.split()] == pytest.approx(expected, tolerance), op
    orders = table(output, "2. 100,000 float32 sums")
    shares = [[float(cell.rstrip("%")) for cell in row[1:3]] for row in orders[1:6]]
    assert shares[0] == [0, 0]
    assert all(20 < ring < 90 for ring, _ in shares[1:])
    assert "same bits on all ranks: yes; in a second call: yes" in output
    assert "arning" not in output


@pytest.mark.slow
def test_object_collectives_script():
    output = pool.run(HERE / "object_collectives.py", "--repeats", 3, ranks=2).check().output
    costs = table(output, "2. all_gather on 2 ranks")[1:]
    assert [row[2] for row in costs] == ["1", "2"] * 3 + ["2"]
    sizes = [int(row[3].replace(",", "")) for row in costs]
    assert sizes[:5:2] == [8, 8_000, 8_000_000]
    assert sizes[1] > 50 * sizes[0]  # a pickled tensor carries more than its numbers
    assert sizes[6] > 2_000_000  # 1 MB from rank 0; rank 1's byte is padded to 1 MB
    sent, received = table(output, "3. broadcast_object_list of settings")[1:]
    assert sent[2:] == ["not set", "(sent it)", "not set"]
    assert received[2:] == ["not set", "{'lr': 0.1}", f"code of process {sent[1]} ran here"]
    assert "JSON refuses it" in output
    assert "weights_only=True refuses it: UnpicklingError" in output
    assert "arning" not in output


@pytest.mark.slow
def test_autograd_collectives_script():
    output = pool.run(HERE / "autograd_collectives.py", "--count", 1, ranks=2).check().output
    rows = table(output, "Largest gradient")[1:]
    assert tuple(row[0] for row in rows) == NAMES
    for _, size, one, numeric in rows:
        assert float(size) > 0.5
        assert float(one) < 1e-13
        assert float(numeric) < 1e-7
    ours, plain, cut, maximum = table(output, "x = (rank + 1) / 2")[1:]
    e0, e1 = torch.tensor([0.5, 1.0]).exp().tolist()
    assert ours[1:] == [f"{2 * e0:.4f}", f"{2 * e0:.4f}", "nothing"]
    assert plain[1:] == [f"{2 * e0:.4f}", f"{e0 + e1:.4f}", "a warning"]
    assert cut[2] == "none"
    assert "does not require grad" in cut[3]
    assert maximum[1:] == ["0.0000", f"{e0:.4f}", "nothing"]  # wrong, and in silence


# The planted failures.

TIMED_OUT = r"Timed out waiting 1500ms for (recv|send) operation to complete"
GONE = r"Read error|Connection (closed|reset) by peer"  # one rank gave up a moment earlier


@pytest.fixture(scope="module")
def hangs() -> str:
    return pool.run(HERE / "hangs.py", ranks=2, timeout=300).check().output


@pytest.mark.slow
def test_a_rank_that_skips_is_named(hangs):
    rows = table(hangs, "skipped: one rank skips the collective")
    assert [row[1] for row in rows[1:3]] == ["all_reduce", "skips it"]
    assert re.fullmatch(TIMED_OUT, rows[1][2])
    assert 1.4 < float(rows[1][3]) < 10
    said = re.search(r"monitored_barrier before the all_reduce says: (.*)", hangs)[1]
    assert said == "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 750 ms"


def mismatch(output: str, title: str) -> str:
    said = output.split(title, 1)[1].split("DETAIL says: ", 1)[1].splitlines()[0]
    return said.removeprefix("Detected mismatch between collectives on ranks. Rank 0 is running ")


@pytest.mark.slow
def test_shapes_that_differ_go_unnoticed_without_detail(hangs):
    rows = table(hangs, "shapes: as many elements")
    assert [row[2].partition(",")[0] for row in rows[1:3]] == ["no error: [[2.0"] * 2
    said = mismatch(hangs, "shapes: as many elements")
    wanted = "collective: ALLREDUCE [2, 3], but Rank 1 is running collective: ALLREDUCE [3, 2]"
    assert said == wanted


@pytest.mark.slow
def test_sizes_that_differ_abort_a_process(hangs):
    rows = table(hangs, "sizes: one rank has fewer elements")[1:3]
    aborted = [row for row in rows if "SIGABRT" in row]
    assert aborted, rows
    assert re.fullmatch(r"op\.preamble\.length <= op\.nbytes\. \d+ vs \d+", aborted[0][-1])
    assert float(rows[0][3]) < 10
    said = mismatch(hangs, "sizes: one rank has fewer elements")
    assert said == "collective: ALLREDUCE [1000], but Rank 1 is running collective: ALLREDUCE [2]"


@pytest.mark.slow
def test_operations_that_differ_wait_for_each_other(hangs):
    rows = table(hangs, "operations: one rank calls another collective")[1:3]
    assert [row[1] for row in rows] == ["all_reduce", "broadcast"]
    assert all(re.fullmatch(f"{TIMED_OUT}|{GONE}", row[2]) for row in rows)
    said = mismatch(hangs, "operations: one rank calls another collective")
    assert said == "collective: ALLREDUCE [2], but Rank 1 is running collective: BROADCAST [2]"


MIXED = """
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
x = torch.arange(1.0, 7) * (rank + 1)
if rank == 0:
    dist.all_reduce(x)
else:
    shard = torch.empty(2)
    names = "reduce_scatter_single", "reduce_scatter_tensor"  # torch 2.15, and before
    next(getattr(dist, name) for name in names if hasattr(dist, name))(shard, x)
    x = shard
extreme = torch.tensor([1.0, 2.0, 4.0])[rank]
dist.all_reduce(extreme, op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
print(f"rank {rank}: {x.tolist()}, {extreme.item():g}", flush=True)
dist.destroy_process_group()
"""


def test_some_operations_that_differ_do_not_wait(tmp_path):
    """Chapter 3, "When it hangs": what Gloo makes of the same messages is not told apart."""
    script = tmp_path / "mixed.py"
    script.write_text(MIXED)
    said = pool.run(script, ranks=3).check().output
    assert "rank 0: [6.0, 12.0, 18.0, 24.0, 30.0, 36.0]" in said
    assert "rank 1: [18.0, 24.0]" in said
    assert "rank 2: [30.0, 36.0]" in said
    assert len(re.findall(r"\], [4567]$", said, re.MULTILINE)) == 3  # no error; not always a sum


@pytest.mark.slow
def test_the_stacks_show_a_barrier_of_rank_0_alone(hangs):
    rows = table(hangs, "rank0-barrier: a barrier inside")[1:3]
    assert rows[0][1] == "dist.barrier(group)"
    assert rows[1][1] == "dist.all_reduce(torch.ones(2), group=group)"
    assert all(re.fullmatch(f"{TIMED_OUT}|{GONE}", row[2]) for row in rows)


@pytest.mark.slow
def test_a_slow_rank_still_beats(hangs):
    waiting, late = table(hangs, "slow: one rank is late")[1:3]
    assert re.fullmatch(TIMED_OUT, waiting[2])
    first, then = map(int, waiting[4].split(", then "))
    assert 0 < first < then
    assert float(late[-1]) < float(waiting[-1])


@pytest.mark.slow
def test_a_dead_rank_is_known_by_its_exit_status(hangs):
    left, dead = table(hangs, "dead: one rank is killed")[1:3]
    assert dead[-1] == "SIGKILL"
    assert re.fullmatch(GONE, left[2]), left
    assert float(left[3]) < 1.5  # at once, not after the timeout
    assert left[-1] == "0"


def test_hangs_need_two_ranks():
    result = pool.run(HERE / "hangs.py")
    assert result.returncode == 2
    assert "start 2 or more ranks" in result.output


@pytest.mark.parametrize(
    ("name", "option", "value", "says"),
    [
        ("hangs", "--timeout", "0.1", "must be a number from 0.5 to 60, not 0.1"),
        ("hangs", "--case", "none", "invalid choice: 'none'"),
        ("collectives", "--only", "none", "invalid choice: 'none'"),
        ("object_collectives", "--repeats", "0", "must be an integer of at least 1, not 0"),
        ("autograd_collectives", "--count", "0", "must be an integer of at least 1, not 0"),
    ],
)
def test_wrong_arguments(modules, monkeypatch, capsys, name, option, value, says):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", option, value])
    with pytest.raises(SystemExit) as left:
        modules[name].parse_args()
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{name}.py: error: ")
    assert error.count("\n") == 1
    assert option in error
    assert says in error


def test_messages_are_shortened(modules):
    shorten = modules["hangs"].shorten
    message = (
        "[/pytorch/gloo/tcp/pair.cc:537] Read error [127.0.0.1]:15580: Connection reset by peer. "
        "This is typically caused by a remote worker hanging."
    )
    assert shorten(message) == "Read error"
    assert (
        shorten(
            "[/x/y.h:7] Timed out waiting 5000ms for recv operation to complete. This may "
            "indicate that"
        )
        == "Timed out waiting 5000ms for recv operation to complete"
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["autograd_collectives", "collectives", "object_collectives", "reduce_ops"]
)
def test_on_a_gpu(name):
    output = torchrun(HERE / f"{name}.py", "--device", "cuda", ranks=1).check().output
    assert "1 rank(s) on cuda, cpu:gloo,cuda:nccl" in output
    if name == "reduce_ops":
        assert "Cannot use ReduceOp.BAND with NCCL" in output
