"""fsdp_basics: bytes held and bytes sent by each strategy, against the formulas."""

import importlib
import itertools
import math
import re
import socket
import sys
import threading

import pool
import pytest
import torch
from helpers import ROOT

HERE = ROOT / "fsdp_basics"
NAMES = ("one process", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, offload")
WORLDS = [(world, name) for world in (2, 3) for name in NAMES[1:5]]
WORLDS += [(4, name) for name in (*NAMES, "HSDP")]
KINDS = ("parameters", "optimizer", "gathered", "activations", "gradients")

each_world = pytest.mark.parametrize(("world", "name"), WORLDS)


@pytest.fixture(scope="module")
def load():
    """Imports a file of fsdp_basics; afterwards its siblings' common names are free again."""
    before = set(sys.modules)
    sys.path.insert(0, str(HERE))
    yield importlib.import_module
    sys.path.remove(str(HERE))
    for name in set(sys.modules) - before:
        if (HERE / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    """What each of 4 ranks saw: world -> (what, model, strategy) -> measurements."""
    folder = tmp_path_factory.mktemp("costs")
    pool.run(ROOT / "tests/workers/fsdp_costs.py", folder, ranks=4, timeout=240).check()
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def rows(seen, world: int, *key: str) -> list:
    return [rank[world][key] for rank in seen[:world]]


def numbers(line: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"(?<![\w-])\d[\d,]*\.?\d*(?!\w)", line)]


# ---- the formulas themselves


def test_rows_are_cut_as_torch_does(load):
    rows_of = load("strategies").rows_of
    for ranks, length in itertools.product((1, 2, 3, 4, 7), range(1, 25)):
        chunks = [len(part) for part in torch.arange(length).chunk(ranks)]
        chunks += [0] * (ranks - len(chunks))
        shape = torch.Size([length, 3])
        found = [rows_of(shape, ranks, rank) for rank in range(ranks)]
        assert found == chunks, f"{length} rows over {ranks} ranks"


def test_formulas_of_a_model_worked_out_by_hand(load):
    """Two units: a block of (8, 4) and (8,), a root of (5,): 45 numbers, 180 bytes."""
    strategies = load("strategies")
    units = [[torch.Size([8, 4]), torch.Size([8])], [torch.Size([5])]]
    held = {n: strategies.expected_memory(n, units, 1, 2) for n in ("DDP", "ZeRO-2", "ZeRO-3")}
    assert held["DDP"] == {
        "parameters": 180, "gathered": 0, "gradients": 180, "optimizer": 372,
    }  # fmt: skip
    # A shard: (4, 4), (4,), and (3,) on rank 0, (2,) on rank 1, which has room for 3.
    assert held["ZeRO-3"] == {
        "parameters": 92, "gathered": 24, "gradients": 92, "optimizer": 8 * 22 + 12,
    }  # fmt: skip
    assert held["ZeRO-2"] == held["ZeRO-3"] | {"gathered": 184}
    sent = {n: strategies.expected_traffic(n, units, 2) for n in ("DDP", "ZeRO-1", "ZeRO-3")}
    assert sent["DDP"] == {"all_reduce": (0, 180)}
    assert sent["ZeRO-1"] == sent["DDP"] | {"broadcast": (3, 90)}
    assert sent["ZeRO-3"] == {"all_gather": (3, 80 + 12 + 80), "reduce_scatter": (2, 92)}


def test_zero_1_deals_to_the_poorest(load):
    sizes = [torch.Size([n]) for n in (1, 9, 5, 5, 3)]
    hands = load("strategies").deal(sizes, 2)
    assert [[shape[0] for shape in hand] for hand in hands] == [[9, 3], [5, 5, 1]]


# ---- bytes held


@pytest.mark.slow
def test_bytes_held_are_those_of_the_formula(seen):
    wrong = []
    for (world, name), case in itertools.product(WORLDS, ("even", "odd")):
        if world != 4 and case == "even":
            continue  # was not run
        kinds = [k for k in KINDS if case == "even" or k != "activations"]  # made for 10 classes
        for rank, row in enumerate(rows(seen, world, "memory", case, name)):
            wrong += [
                f"{world} ranks, {name}, {case}, rank {rank}, {kind}: "
                f"{row['measured'][kind]} bytes, not {row['formula'][kind]}"
                for kind in kinds
                if row["measured"][kind] != row["formula"][kind]
            ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.slow
@each_world
def test_what_is_there_when(seen, world, name):
    for row in rows(seen, world, "memory", "odd", name):
        between, forward, backward = row["moments"].values()
        sharded = name.startswith(("ZeRO-2", "ZeRO-3", "HSDP"))
        buckets = name in ("DDP", "ZeRO-1")
        for moment in (between, forward, backward):
            assert moment["parameters"] == between["parameters"] > 0
            assert moment["optimizer"] == between["optimizer"] > 0
        assert (between["activations"], between["gathered"]) == (0, 0)
        assert (backward["activations"], backward["gathered"]) == (0, 0)
        assert forward["activations"] > 0
        assert (forward["gathered"] > 0) == sharded
        assert backward["gradients"] == between["parameters"]
        expected = backward["gradients"] if buckets else 0
        assert between["gradients"] == forward["gradients"] == expected


@pytest.mark.parametrize(("held_for", "waited", "counted"), [(0.1, 60, 0), (60, 0.1, 4)])
def test_gradients_that_a_thread_still_holds(load, held_for, waited, counted):
    """As Gloo's does for a moment; what is not freed in time is counted."""
    parameter, let_go = torch.nn.Parameter(torch.ones(1)), threading.Event()
    parameter.grad = torch.ones(1)

    def hold(gradient):
        let_go.wait(held_for)

    inventory = load("tensor_memory").Inventory(
        torch.nn.ParameterList([parameter]), torch.optim.SGD([parameter])
    )
    inventory.remember_gradients()
    holder = threading.Thread(target=hold, args=(parameter.grad,))
    holder.start()
    parameter.grad = None
    inventory.wait_until_freed(waited)
    assert inventory.count()["gradients"] == counted
    let_go.set()
    holder.join()


@pytest.mark.slow
def test_the_ranks_together_hold_everything_once(seen, load):
    """16 bytes a parameter over all ranks; the rest is padding and step counts, here up to 3 %."""
    model = load("model").VisionTransformer(dim=24, depth=1)
    total = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    for name in ("ZeRO-2", "ZeRO-3", "ZeRO-3, offload"):
        measured = [row["measured"] for row in rows(seen, 4, "memory", "even", name)]
        held = sum(row[k] for row in measured for k in ("parameters", "gradients", "optimizer"))
        assert 1 <= held / (16 * total) < 1.03
        assert sum(row["optimizer"] for row in measured) == 8 * total + 4 * tensors * 4
    dealt = [row["measured"]["optimizer"] for row in rows(seen, 4, "memory", "even", "ZeRO-1")]
    assert sum(dealt) == 8 * total + 4 * tensors
    largest = max(p.numel() for p in model.parameters())
    assert max(dealt) <= 8 * total / 4 + 8 * largest + 4 * tensors  # the bound in the docstring


# ---- bytes sent


def test_the_kernel_counts_what_was_sent(load):
    bytes_sent = load("wire").bytes_sent
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as a, server.accept()[0] as b:
        before = bytes_sent()
        a.sendall(b"x" * 10_000)
        while len(b.recv(100_000, socket.MSG_PEEK)) < 10_000:
            pass
        assert bytes_sent() - before == 10_000


@pytest.mark.slow
def test_bytes_sent_are_those_of_the_formula(seen):
    wrong = []
    for (world, name), case in itertools.product(WORLDS, ("odd", "large")):
        if world != 3 and case == "odd":
            continue  # was not run
        for rank, row in enumerate(rows(seen, world, "communication", case, name)):
            wrong += [
                f"{world} ranks, {name}, {case}, rank {rank}: {x}" for x in other_traffic(row)
            ]
    assert not wrong, "\n" + "\n".join(wrong)


def other_traffic(row: dict) -> list[str]:
    if set(row["calls"]) != set(row["formula"]):
        return [f"calls {set(row['calls'])}, not {set(row['formula'])}"]
    return [
        f"{operation}: {row['calls'][operation]} calls, {row['sent'][operation]} bytes, "
        f"not {calls} and {sent}"
        for operation, (calls, sent) in row["formula"].items()
        if not (row["calls"][operation] == calls or calls == 0 < row["calls"][operation])
        or abs(row["sent"][operation] - sent) > len(row["calls"])  # rounded at the end
    ]


@pytest.mark.slow
def test_bytes_over_tcp(seen, load):
    """Within 1 %: each message has a header, and a barrier is counted too."""
    wrong, over_tcp = [], load("communication").over_tcp
    for world, name in WORLDS:
        measured = rows(seen, world, "communication", "large", name)
        mean = sum(row["tcp"] for row in measured) / world
        expected = over_tcp(measured[0]["formula"])
        if not (1 <= mean / expected < 1.01 if expected else mean < 2000):
            wrong.append(f"{world} ranks, {name}: {mean} bytes, not {expected}")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sharding_costs_half_as_much_again(seen, load, world):
    model = load("model").VisionTransformer(dim=132, depth=1)
    size = 4 * sum(p.numel() for p in model.parameters())
    part = (world - 1) / world
    for name, factor in (("DDP", 2), ("ZeRO-1", 3), ("ZeRO-2", 2), ("ZeRO-3", 3)):
        sent = sum(rows(seen, world, "communication", "large", name)[0]["sent"].values())
        assert math.isclose(sent, factor * part * size, rel_tol=0.01), name  # root, and padding


# ---- and all of them train alike


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), [case for case in WORLDS if case[0] > 2])
def test_every_strategy_trains_as_one_process_does(seen, world, name):
    """The difference is that of float32 sums in another order, after three steps of 1e-3."""
    reference = seen[0][4]["losses", "one process"], seen[0][4]["weights", "one process"]
    losses = rows(seen, world, "losses", name)
    mean = [sum(step) / world for step in zip(*losses, strict=True)]
    assert mean == pytest.approx(reference[0], abs=1e-5)
    for weights in rows(seen, world, "weights", name):
        assert weights.keys() == reference[1].keys()
        for key, value in weights.items():
            expected = reference[1][key]
            if key.endswith("query_key_value.bias"):
                # The softmax does not feel the keys' bias. Its gradient is rounding noise, of which
                # AdamW makes steps of full size.
                value, expected = (t.view(3, -1)[[0, 2]] for t in (value, expected))
            torch.testing.assert_close(value, expected, atol=2e-5, rtol=0)


# ---- the scripts


@pytest.mark.slow
def test_memory_script(tmp_path):
    plot = tmp_path / "memory.png"
    output = pool.run(HERE / "memory.py", "--plot", plot, ranks=2).check().output
    assert "Warning" not in output
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("bytes on the fullest"))
    table = lines[start + 2 : start + 2 + 2 * len(NAMES)]
    for name, measured, formula in zip(NAMES, table[::2], table[1::2], strict=True):
        assert measured.startswith(name)
        *expected, ratio = numbers(formula)
        assert numbers(measured.removeprefix(name)) == expected
        assert ratio == 1
    start = next(i for i, line in enumerate(lines) if line.startswith("MB on the fullest"))
    peaks = {}
    for name, line in zip(NAMES, lines[start + 1 : start + 1 + len(NAMES)], strict=True):
        assert line.startswith(name)
        between, forward, backward, peaks[name], left = numbers(line.removeprefix(name))
        # Python's own memory and small blocks, which come and go, are not in the sums.
        assert peaks[name] > max(between, forward, backward) - 10
        assert left < 15
    assert peaks["ZeRO-3"] < peaks["DDP"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_communication_script():
    output = pool.run(HERE / "communication.py", ranks=2).check().output
    assert "Warning" not in output
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("calls"))
    calls = {
        name: numbers(line.removeprefix(name))
        for name, line in zip(NAMES, lines[start + 1 : start + 1 + len(NAMES)], strict=True)
    }
    assert calls["one process"] == [0, 0, 0, 0]
    assert calls["ZeRO-2"] == [5, 5, 0, 0]  # four blocks and the root
    assert calls["ZeRO-3"] == calls["ZeRO-3, offload"] == [9, 5, 0, 0]
    assert calls["DDP"][:2] == calls["ZeRO-1"][:2] == [0, 0]
    start = next(i for i, line in enumerate(lines) if line.startswith("bytes sent"))
    size = numbers(next(line for line in lines if line.startswith("P =")))[0]
    for name, line in list(zip(NAMES, lines[start + 1 :], strict=False))[1:]:
        assert line.startswith(name)
        counted, formula, ratio, multiple, tcp, wire, wire_ratio = numbers(line.removeprefix(name))
        assert (counted, ratio) == (formula, 1)
        assert multiple == pytest.approx(counted / size, abs=6e-4)
        assert 1 <= tcp / wire < 1.01
        assert wire_ratio == pytest.approx(tcp / wire, abs=6e-5)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["memory", "communication"])
def test_one_process_is_a_world_of_one(script):
    options = ("--dim", "16", "--depth", "1", "--device", "cpu")
    output = pool.run(HERE / f"{script}.py", *options).check().output
    assert all(name in output for name in NAMES)
    assert "Warning" not in output


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        ("memory", ("--dim", "30"), "--dim must be a multiple of 4, not 30"),
        ("memory", ("--batch-size", "0"), "--batch-size: must be an integer of at least 1, not 0"),
        ("memory", ("--plot", "x.txt"), "--plot x.txt must end in .png"),
        ("memory", ("--plot", "none/x.png"), "there is no folder none"),
        ("communication", ("--depth", "0"), "--depth: must be an integer of at least 1, not 0"),
        ("communication", ("--dim", "2"), "--dim: must be an integer of at least 4, not 2"),
    ],
)
def test_bad_arguments_are_named(script, options, says):
    result = pool.run(HERE / f"{script}.py", *options)
    assert result.returncode == 2
    assert says in result.output
    assert "Traceback" not in result.output
