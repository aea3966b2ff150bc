"""ddp_basics, one idea per file: uneven inputs, ZeRO, starting without torchrun, two devices."""

import importlib
import re
import runpy
import shutil
import signal
import sys
from types import SimpleNamespace

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import ROOT, Job, python
from sklearn.datasets import load_digits
from torch import nn

pytestmark = pytest.mark.slow  # each launch of ranks takes some seconds

HERE = ROOT / "ddp_basics"
WATCH_MINIMAL = ROOT / "tests/workers/watch_minimal.py"
MINIMAL = HERE / "minimal.py"
NAN = HERE / "nan_on_one_rank.py"
NAN_WAYS = ("no check", "one rank skips", "all ranks skip")
HANG = HERE / "uneven_inputs_hang.py"
JOIN = HERE / "uneven_inputs_join.py"
ALTERNATIVES = HERE / "uneven_inputs_alternatives.py"
COMPRESSION = HERE / "gradient_compression.py"
FROM_SCRATCH = HERE / "ddp_from_scratch.py"
ZERO = HERE / "zero_optimizer.py"
SPAWN = HERE / "spawn.py"
SPLIT = HERE / "ddp_with_model_parallel.py"


@pytest.fixture(scope="module")
def load():
    """Imports a file of ddp_basics; afterwards its siblings' common names are free again."""
    before = set(sys.modules)
    sys.path.insert(0, str(HERE))
    yield importlib.import_module
    sys.path.remove(str(HERE))
    for name in set(sys.modules) - before:
        if (HERE / f"{name}.py").exists():
            del sys.modules[name]


def numbers(line: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"-?\d[\d,]*\.?\d*(?:e[-+]\d+)?", line)]


def rows_after(output: str, header: str, count: int) -> list[str]:
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header)) + 1
    return lines[start : start + count]


def plain_training(load, optimizer_class, steps: int, **options):
    """SmallCNN trained by one process on the global batches of 48 that the scripts use."""
    images, labels = load("data").load_dataset("digits")[0][:]
    torch.manual_seed(0)
    model = load("model").SmallCNN()
    optimizer = optimizer_class(model.parameters(), **options)
    for step in range(steps):
        batch = slice(48 * step, 48 * (step + 1))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    return model, optimizer, loss.item()


def largest_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


# ---- minimal.py


def watch_minimal(script, ranks: int, folder) -> SimpleNamespace:
    """Run it on these ranks, with what each of them did in each step."""
    if ranks == 1:  # with its own imports, in its own order: one of them matters
        output = python(WATCH_MINIMAL, script, folder, timeout=240).check().output
    else:
        output = pool.run(WATCH_MINIMAL, script, folder, ranks=ranks).check().output
    seen = [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(ranks)]
    return SimpleNamespace(output=output, seen=seen)


def plain_minimal(epochs: int) -> SimpleNamespace:
    """What minimal.py is to compute, without a distributed line."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16).float(), torch.tensor(labels)
    train_indices, test_indices = torch.randperm(len(images)).split([1440, 357])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    expected = SimpleNamespace(gradients=[], parameters=[], accuracies=[])
    for epoch in range(epochs):
        order = torch.randperm(1440, generator=torch.Generator().manual_seed(epoch))
        for batch in train_indices[order].split(120):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            expected.gradients.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            expected.parameters.append([p.detach().clone() for p in model.parameters()])
        correct = model(images[test_indices]).argmax(1) == labels[test_indices]
        expected.accuracies.append(correct.float().mean().item())
    return expected


def check_minimal(run: SimpleNamespace, expected: SimpleNamespace) -> None:
    for seen in run.seen:
        # fp32 sums in another order: 1e-7. AdamW divides gradients by their own size, which
        # enlarges the differences of tiny ones: a hundredth of lr = 3e-3 is allowed.
        torch.testing.assert_close(seen["gradients"], expected.gradients, rtol=0, atol=1e-5)
        torch.testing.assert_close(seen["parameters"], expected.parameters, rtol=0, atol=3e-5)
        assert seen["calls"] == ["init_process_group", "barrier", "destroy_process_group"]
    assert run.output.count(f"{len(run.seen)} rank(s) on cpu, gloo\n") == 1
    lines = [line for line in run.output.splitlines() if line.startswith("epoch")]
    assert lines == [  # once each, not once per rank
        f"epoch {epoch}: test accuracy {accuracy:.2%}"
        for epoch, accuracy in enumerate(expected.accuracies, start=1)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_minimal_equals_plain_training(ranks, tmp_path):
    check_minimal(watch_minimal(MINIMAL, ranks, tmp_path), plain_minimal(epochs=2))


@pytest.mark.skipif(torch.accelerator.current_accelerator() is None, reason="a CPU-only torch")
@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(1, ("gloo", None, "cpu", [])), (2, ("nccl", 1, "cuda:1", [torch.device("cuda", 1)]))],
)
def test_minimal_takes_a_gpu_per_process_or_the_cpu(monkeypatch, gpus, expected):
    """It binds the group to the GPU: otherwise barrier() warns that it has to guess."""
    chosen, joined = [], []
    for name, value in {"RANK": 3, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))  # rank 3 is on the second node
    monkeypatch.setattr(sys, "argv", ["minimal.py"])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, device_id: joined.append((name, device_id))
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)

    def model_moves(self, device):
        raise InterruptedError(str(device))  # here it has decided

    monkeypatch.setattr(nn.Module, "to", model_moves)
    with pytest.raises(InterruptedError) as decided:
        runpy.run_path(str(MINIMAL), run_name="__main__")
    backend, bound_to, device, set_devices = expected
    assert joined == [(backend, bound_to)]
    assert (str(decided.value), chosen) == (device, set_devices)


# ---- uneven_inputs_*.py

RANKS = 3  # one leaves after another
UNEVEN_SIZES = [249, 332, 416]  # 997 images, 3 : 4 : 5
UNEVEN_BATCHES = [8, 11, 13]  # of 32 images


def test_hang_is_bounded_and_reported_per_rank():
    output = pool.run(HANG, ranks=RANKS).check().output
    for rank, row in enumerate(rows_after(output, "rank  batches done", RANKS)):
        match = re.fullmatch(r" +(\d+) +(\d+) of (\d+)  (\w+ ?\w*) +([\d.]+)  (.*)", row)
        assert match, row
        assert [int(match[i]) for i in (1, 2, 3)] == [rank, 8, UNEVEN_BATCHES[rank]]
        assert match[4].strip() == ("final barrier" if rank == 0 else "backward")
        # The first rank to give up closes its connections, and the others may see that first.
        assert re.match("Timed out waiting|Connection closed|Read error", match[6]), row
        assert float(match[5]) > 3, row


def test_join_equals_the_plain_sum():
    output = pool.run(JOIN, ranks=RANKS).check().output
    for part, fixed in enumerate((True, False)):
        text = output.split("\ndivide_by_initial_world_size=")[part + 1]
        assert text.startswith(f"{fixed}\n")
        rows = [numbers(row.replace("-", " ", 1)) for row in rows_after(text, "ranks with data", 3)]
        assert [row[:3] for row in rows] == [[3, 1, 8], [2, 9, 11], [1, 12, 13]]
        for ranks, _, _, divisor, difference in rows:
            assert divisor == (RANKS if fixed else ranks)
            assert difference < 1e-6  # fp32 sums in another order; gradients of order 0.1 to 1
        assert "images trained on: 997\n" in text
        line = next(x for x in text.splitlines() if x.startswith("max difference from one process"))
        parameters, momentum = numbers(line)
        assert parameters < 2e-6  # the error of all steps together
        assert momentum > 1e-2  # the trap that the script warns of is really there
        assert numbers(re.search(r"after a broadcast from rank \d+: (.*)", text)[1])[0] < 2e-6


def test_the_plain_sum_is_right(load):
    """Its rule, checked by autograd on the weighted sum of losses, with 2, then 1 rank left."""
    module = load("uneven_inputs_join")
    generator = torch.Generator().manual_seed(0)
    data = [(torch.rand(n, 1, 8, 8, generator=generator), torch.arange(n) % 10) for n in (4, 4, 3)]
    for fixed, last_divisor in ((True, 2), (False, 1)):
        result = module.train_plainly([data[:1], data[1:]], fixed, "cpu")
        model, optimizer = module.make_model("cpu")
        for step, (batches, divisor) in enumerate([(data[:2], 2), (data[2:], last_divisor)]):
            optimizer.zero_grad()
            sum(F.cross_entropy(model(x), y) / divisor for x, y in batches).backward()
            expected = torch.cat([p.grad.flatten() for p in model.parameters()])
            torch.testing.assert_close(result["gradients"][step], expected, rtol=0, atol=1e-6)
            optimizer.step()


def test_what_the_alternatives_cost():
    output = pool.run(ALTERNATIVES, ranks=RANKS).check().output
    ranks, batches, total = RANKS, UNEVEN_BATCHES, 997
    padded, dropped, full = -(-total // ranks), total // ranks, total // ranks // 32
    idle = round(100 * sum(max(batches) - b for b in batches) / (max(batches) * ranks))
    used = sum(min(size, 32 * min(batches)) for size in UNEVEN_SIZES)
    expected = [  # steps, idle, lost, repeated
        [max(batches), idle, 0, 0],
        [min(batches), 0, total - used, 0],
        [-(-padded // 32), 0, 0, padded * ranks - total],
        [-(-dropped // 32), 0, total - dropped * ranks, 0],
        [full, 0, total - full * 32 * ranks, 0],
    ]
    rows = rows_after(output, "way ", 5)
    assert [numbers(row[27:]) for row in rows] == expected


# ---- zero_optimizer.py


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    """straight: 12 steps on 2 ranks; two, three: 6 steps on 2 ranks, then 6 more on 2 or 3."""
    folder = tmp_path_factory.mktemp("zero")
    runs = {"straight": pool.run(ZERO, "--output-dir", folder / "straight", ranks=2)}
    pool.run(ZERO, "--steps", 6, "--output-dir", folder / "two", ranks=2).check()
    shutil.copytree(folder / "two", folder / "three")
    for ranks, name in ((2, "two"), (3, "three")):
        runs[name] = pool.run(ZERO, "--output-dir", folder / name, ranks=ranks)
    output = {name: run.check().output for name, run in runs.items()}
    last = {name: folder / name / "checkpoints" / "step_00000012.pt" for name in runs}
    states = {name: torch.load(file, weights_only=True) for name, file in last.items()}
    return SimpleNamespace(folder=folder, states=states, output=output)


def test_zero_equals_adamw(zero, load):
    for name, tolerance in (("straight", 0), ("two", 0), ("three", 2e-5)):
        line = next(x for x in zero.output[name].splitlines() if x.startswith("max difference"))
        # Bit for bit with the same number of ranks. With another, sums round differently, and Adam
        # divides small gradients by their own size: up to 1e-2 of a step of 2e-3.
        assert numbers(line.split(":")[1])[0] <= tolerance, line
    model, optimizer, _ = plain_training(load, torch.optim.AdamW, 12, lr=2e-3)
    saved = zero.states["straight"]
    assert largest_difference(saved["model"], model.state_dict()) < 2e-5
    restored = torch.optim.AdamW(model.parameters(), lr=2e-3)
    restored.load_state_dict(saved["optimizer"])  # the consolidated state is plain AdamW's
    for parameter, state in optimizer.state.items():
        assert largest_difference(restored.state[parameter], state) < 1e-6


def test_zero_checkpoint_round_trip(zero):
    straight, two, three = (zero.states[name] for name in ("straight", "two", "three"))
    assert "after step 6" in zero.output["two"]
    assert "after step 6" in zero.output["three"]
    assert straight["step"] == two["step"] == three["step"] == 12
    for name, tolerance in (("two", 0), ("three", 2e-5)):
        state = zero.states[name]
        assert largest_difference(state["model"], straight["model"]) <= tolerance
        assert len(state["optimizer"]["state"]) == 12
        for index, moments in straight["optimizer"]["state"].items():
            assert moments["step"] == 12
            assert largest_difference(state["optimizer"]["state"][index], moments) <= tolerance


@pytest.mark.parametrize(("name", "ranks"), [("straight", 2), ("three", 3)])
def test_zero_bytes_per_rank(zero, name, ranks):
    sizes = sorted((p.numel() for p in zero.states[name]["model"].values()), reverse=True)
    shares = [[] for _ in range(ranks)]
    for size in sizes:  # the largest first, each to the rank that has least
        min(shares, key=sum).append(size)
    for rank, row in enumerate(rows_after(zero.output[name], "rank  tensors", ranks)):
        mine = shares[rank]
        expected = 8 * sum(mine) + 4 * len(mine)
        assert numbers(row)[:6] == [rank, len(mine), sum(mine), mine[0], expected, expected]
        assert numbers(row)[6] == round(expected * ranks / (8 * sum(sizes)), 2)
    assert f"plain AdamW: {8 * sum(sizes) + 4 * len(sizes):,} bytes" in zero.output[name]


# ---- spawn.py


@pytest.mark.release
def test_three_ways_to_start_give_the_same_bits(load, tmp_path):
    steps = ("--steps", 5)
    runs = {
        "torchrun": pool.run(SPAWN, *steps, "--output", tmp_path / "torchrun", ranks=2),
        "spawn": python(SPAWN, "--how", "spawn", *steps, "--output", tmp_path / "spawn"),
        "environment": python(
            SPAWN, "--how", "environment", *steps, "--output", tmp_path / "environment"
        ),
    }
    lines = {run.check().output.splitlines()[-1] for run in runs.values()}
    assert len(lines) == 1, lines  # the digest that readers compare
    first, *others = (torch.load(tmp_path / name, weights_only=True) for name in runs)
    for other in others:
        assert other["loss"] == first["loss"]
        assert largest_difference(other["parameters"], first["parameters"]) == 0
    options = {"lr": 0.05, "momentum": 0.9}
    model, _, loss = plain_training(load, torch.optim.SGD, 5, **options)
    # fp32 sums in another order: 3e-8 was seen after 5 steps. Only 5: from step 6 on, rounding is
    # magnified, to 6e-3 after 20 steps (in one process that sums two half-batches, too); in float64
    # the same 20 steps agree to 2e-16.
    assert first["loss"] == pytest.approx(loss, abs=1e-6)
    assert largest_difference(first["parameters"], dict(model.named_parameters())) < 1e-6


@pytest.mark.parametrize("how", ["spawn", pytest.param("environment", marks=pytest.mark.release)])
def test_dead_rank_ends_the_job(how):
    with Job([SPAWN, "--how", how, "--kill-rank", 1], fork=0) as job:
        result = job.wait(90)
        assert not job.left_running(), job.output
    assert result.returncode == 1, result.output
    last = result.output.splitlines()[-1]
    assert re.fullmatch(r"spawn.py: rank 1 failed: .*(SIGKILL|-9); .* were stopped", last), last


@pytest.mark.parametrize("how", ["spawn", "environment"])
def test_sigterm_stops_all_ranks(how):
    with Job([SPAWN, "--how", how, "--steps", 10**9], fork=0) as job:
        job.wait_until(lambda: "2 rank(s)" in job.output)
        job.process.send_signal(signal.SIGTERM)
        result = job.wait(60)
        assert not job.left_running(), job.output
    assert result.returncode == 128 + signal.SIGTERM, result.output


def test_spawn_shows_the_childs_traceback():
    result = python(SPAWN, "--how", "spawn", "--raise-rank", 0)
    assert result.returncode == 1
    assert "RuntimeError: rank 0 was told to fail in step 10" in result.output


# ---- ddp_with_model_parallel.py


@pytest.mark.parametrize("ranks", [1, 2])
def test_split_model_equals_the_whole(ranks):
    run = pool.run(SPLIT, "--device", "cpu", ranks=ranks)
    rows = rows_after(run.check().output, "rank  half", 2 * ranks)
    assert f"the halves of {ranks} rank(s) on cpu, gloo\n" in run.output
    for i, row in enumerate(rows):
        rank, count, difference = numbers(row)
        assert (rank, count) == (i // 2, (19_008, 34_186)[i % 2])
        assert difference < 1e-6  # fp32 sums in another order; gradients of order 0.1
    line = run.output.splitlines()[-1]
    assert line.startswith("max difference of parameters after 5 steps")
    assert numbers(line.split(":")[1])[0] < 2e-6  # the error of 5 steps together


def test_halves_live_on_their_devices(load):
    """The meta device stands for a second GPU: it computes shapes only."""
    devices = torch.device("cpu"), torch.device("meta")
    model = load("ddp_with_model_parallel").TwoHalves(devices)
    for half, device in zip((model.first, model.second), devices, strict=True):
        assert {p.device for p in half.parameters()} == {device}
    assert model(torch.rand(2, 1, 8, 8)).device == devices[1]


def test_a_group_of_two_gpus_per_rank_has_the_nccl_that_takes_them(load):
    """The nccl of torch 2.15 binds a group to one device."""
    backend = load("ddp_with_model_parallel").choose_backend
    assert backend("cpu") == "gloo"
    assert backend("cuda") == ("nccl" if torch.__version__ < "2.15" else "nccl-legacy")


def test_device_choice(load, monkeypatch):
    module, chosen = load("ddp_with_model_parallel"), []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    pair, cpus = ["xpu:2", "xpu:3"], ["cpu", "cpu"]
    assert module.own_devices("auto", local_rank=1) == module.own_devices("xpu", 1) == pair
    assert module.own_devices("cpu", 1) == cpus
    assert module.own_devices("auto", 2) == []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert module.own_devices("auto", 1) == []  # no silent job on CPUs
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert module.own_devices("auto", 1) == ["xpu:0", "xpu:1"]  # Slurm: --gpus-per-task=2
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert module.own_devices("auto", 1) == cpus
    assert module.own_devices("cuda", 1) == []

    def choose(*pairs, ids=("", "")):
        """On rank 3, the second of the second node."""
        of_ranks = [(pair, ids) for pair in pairs]
        monkeypatch.setattr(dist, "all_gather_object", lambda found, own: found.extend(of_ranks))
        worker = SimpleNamespace(rank=3, local_rank=1, world_size=0)
        return [str(device) for device in module.choose_devices("auto", worker)]

    assert choose(["xpu:0", "xpu:1"], pair, ["xpu:0", "xpu:1"], pair) == pair
    assert chosen == [2]
    assert choose(cpus, cpus, cpus, cpus) == cpus
    with pytest.raises(ValueError, match="rank 1 needs two devices of its own: start one rank per"):
        choose(pair, [], pair, pair)
    with pytest.raises(ValueError, match="rank 1 needs two devices of its own"):
        choose(pair, pair, ids=("uuid of one", "uuid of another"))  # two ranks on one pair
    with pytest.raises(ValueError, match="some ranks are on cpu and some on xpu"):
        choose(pair, pair, cpus, cpus)


# ---- bad arguments


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (JOIN, ["--images", "0"], "--images: must be an integer of at least 1, not 0"),
        (HANG, ["--batch-size", "0"], "--batch-size: must be an integer of at least 1, not 0"),
        (HANG, ["--timeout", "nan"], "--timeout: must be a number above 0, not nan"),
        (COMPRESSION, ["--keep", "2"], "--keep must be above 0 and at most 1, not 2.0"),
        (COMPRESSION, ["--epochs", "1"], "14 steps are too few to measure: more --epochs"),
        (FROM_SCRATCH, ["--channels", "6"], "--channels must be a multiple of 4, not 6"),
        (FROM_SCRATCH, ["--repeats", "1"], "--repeats: must be an integer of at least 2, not 1"),
        (ZERO, ["--channels", "6"], "--channels must be a multiple of 4, not 6"),
        (ZERO, ["--lr", "-1"], "--lr: must be a number above 0, not -1"),
        (SPAWN, ["--ranks", "0"], "--ranks: must be an integer of at least 1, not 0"),
        (SPAWN, ["--ranks", "5"], "--batch-size 48 does not divide over 5 rank(s)"),
        (SPAWN, ["--kill-rank", "2"], "--kill-rank must be from 0 to 1, not 2"),
        (SPLIT, ["--steps", "0"], "--steps: must be an integer of at least 1, not 0"),
    ],
)
def test_bad_arguments(load, monkeypatch, capsys, script, arguments, message):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as exit_:
        load(script.stem).main.__wrapped__()  # without @record
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"{script.name}: error: {message}\n"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (ZERO, ["--batch-size", 49], "--batch-size 49 does not divide over 2 rank(s)"),
        (JOIN, ["--images", 1], "--images 1 leaves some of 2 ranks none"),
        (ALTERNATIVES, ["--images", 1438], "--images must be at most 1437, not 1438"),
    ],
)
def test_bad_arguments_are_reported_once_per_job(script, arguments, message):
    result = pool.run(script, *arguments, ranks=2)
    assert result.returncode == 2
    assert result.output.count(message) == 1, result.output


# ---- nan_on_one_rank.py


def test_a_nan_of_one_rank(load, tmp_path):
    """Losses and ends of each way; the models, next to a plain loop that leaves out the batch."""
    saved = tmp_path / "models.pt"
    said = pool.run(NAN, "--output", saved, ranks=2).check().output
    rows = {way: rows_after(said, way, 3)[1:] for way in NAN_WAYS}
    for way in NAN_WAYS:  # only the last rank's own loss says where it began
        assert [row.split()[1] == "nan" for row in rows[way]] == [False, True]
    assert all(row.split()[2] == "nan" for row in rows["no check"])
    assert re.search("Timed out.* in step 30;", rows["one rank skips"][0])
    assert "trained in step 30; step 5: skipped" in rows["one rank skips"][1]
    assert all("step 5: skipped, rank(s) [1]" in row for row in rows["all ranks skip"])
    assert len({row.split()[3] for row in rows["all ranks skip"]}) == 1

    images, labels = load("data").load_dataset("digits")[0][:]
    torch.manual_seed(0)
    net = load("small_net").SmallNet(nn.Identity())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    for step in [0, 1, 2, 3, *range(5, 30)]:
        batch = torch.arange(120 * step, 120 * (step + 1)) % len(images)
        optimizer.zero_grad()
        F.cross_entropy(net(images[batch].flatten(1)), labels[batch]).backward()
        optimizer.step()
    ended = torch.load(saved)
    assert largest_difference(ended["all ranks skip"], net.state_dict()) < 1e-5
    assert all(tensor.isnan().all() for tensor in ended["no check"].values())


def test_running_statistics_keep_a_nan():
    norm = nn.BatchNorm1d(2)
    norm(torch.tensor([[float("inf"), 0.0], [1.0, 2.0]]))
    norm(torch.randn(4, 2))
    assert norm.running_mean[0].isnan() or norm.running_mean[0].isinf()
