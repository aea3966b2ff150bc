"""parallel_basics, pipelines: by hand and by torch, equal to one process; bubbles; memory."""

import importlib
import re
import sys
from contextlib import nullcontext

import compare_pipelines
import pipeline_from_scratch as by_hand
import pipeline_parallel as by_torch
import pipeline_stages
import pipeline_timelines as timelines_of
import pool
import pytest
import torch
from helpers import ROOT, python
from workers.parallel_pipeline import BY_HAND, BY_TORCH, CONFIG, SECONDS, STEPS

HERE = ROOT / "parallel_basics"
SCRATCH, PARALLEL = (HERE / f"pipeline_{name}.py" for name in ("from_scratch", "parallel"))
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 8, 32)]
slow = pytest.mark.slow  # each launch of ranks takes some seconds


def numbers(line: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"-?\d[\d,]*\.?\d*(?:e[-+]\d+)?", line)]


def table(output: str, title: str) -> dict[tuple, list[float]]:
    """The rows "name m values" of the table with this title: (name, m) -> values."""
    lines = output[output.index(title) :].split("\n\n")[0].splitlines()[2:]
    rows = [re.fullmatch(r"(\w+) +(\d+) +(.*)", line) for line in lines]
    return {(row[1], int(row[2])): numbers(row[3].replace("%", "")) for row in rows if row}


# ---- schedules: pure functions


def orders(schedule, p: int, m: int) -> list[list[tuple]]:
    return [[(kind, stage, i) for kind, i in schedule(stage, p, m)] for stage in range(p)]


def wrong_actions(schedule, p: int, m: int) -> list[str]:
    found = []
    for stage in range(p):
        actions = schedule(stage, p, m)
        if sorted(actions) != sorted((kind, i) for kind in "FB" for i in range(m)):
            found.append(f"stage {stage} does not do everything once: {actions}")
        elif any(actions.index(("F", i)) > actions.index(("B", i)) for i in range(m)):
            found.append(f"stage {stage} has a backward before its forward: {actions}")
        elif by_hand.alive(actions) != (m if schedule is by_hand.gpipe else min(p - stage, m)):
            found.append(f"stage {stage} keeps {by_hand.alive(actions)} micro-batches")
    return found


def wrong_times(schedule, p: int, m: int) -> list[str]:
    found, idle = [], (p - 1) / (m + p - 1)
    for backward in (1.0, 2.0, 3.0):  # the formula holds for any, if all stages take equally long
        seconds = lambda kind, stage, b=backward: 1.0 if kind == "F" else b  # noqa: E731
        timelines = timelines_of.simulate(orders(schedule, p, m), seconds)
        measured = timelines_of.span(timelines), timelines_of.idle_share(timelines)
        if measured != pytest.approx(((m + p - 1) * (1 + backward), idle)):
            found.append(f"a backward of {backward}: span and bubble fraction are {measured}")
    return found if timelines_of.expected_idle(p, m) == idle else [*found, "expected_idle()"]


def test_schedules_do_everything_once_and_their_idle_share_is_the_formula():
    wrong = [
        f"{schedule.__name__}, p = {p}, m = {m}: {what}"
        for schedule in (by_hand.gpipe, by_hand.one_f_one_b)
        for p, m in SIZES
        for what in wrong_actions(schedule, p, m) or wrong_times(schedule, p, m)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_a_slow_stage_sets_the_pace():
    seconds = lambda kind, stage: 3.0 if stage == 1 else 1.0  # noqa: E731
    timelines = timelines_of.simulate(orders(by_hand.gpipe, 3, 8), seconds)
    assert timelines_of.span(timelines) == 2 * (1 + 8 * 3 + 1)
    busy = [sum(end - start for *_, start, end in line) for line in timelines]
    assert busy == [16, 48, 16]


def test_a_deadlock_is_found():
    wrong = orders(by_hand.one_f_one_b, 3, 4)
    wrong[0].insert(0, wrong[0].pop(wrong[0].index(("B", 0, 0))))
    with pytest.raises(ValueError, match=r"rank 0 at .'B', 0, 0., rank 1 at .'F', 1, 0., rank 2"):
        timelines_of.simulate(wrong, lambda *_: 1.0)


def test_weights_wait_for_the_gradient_of_their_output_only():
    order = [[("F", 0, 0), ("I", 0, 0), ("W", 0, 0)], [("F", 1, 0), ("I", 1, 0), ("W", 1, 0)]]
    timelines = timelines_of.simulate(order, lambda kind, stage: {"F": 1, "I": 2, "W": 4}[kind])
    assert [start for *_, start, _ in timelines[1]] == [1, 2, 4]
    assert [start for *_, start, _ in timelines[0]] == [0, 4, 6]  # not after W of stage 1, at 8


def test_what_is_sent_holds_no_graph(monkeypatch):
    """A graph would keep the saved activations alive while the message is in flight."""
    sent = []
    monkeypatch.setattr(by_hand.dist, "isend", lambda tensor, **_: sent.append(tensor))
    stage = by_hand.Pipeline.__new__(by_hand.Pipeline)  # the first of two, without its group
    stage.is_first, stage.is_last, stage.stage, stage.down = True, False, 0, None
    stage.model, stage.inputs = torch.nn.Linear(2, 2), [torch.ones(1, 2)]
    stage.computed, stage.sends, stage.record = {}, {}, lambda *_: nullcontext()
    stage.forward(0)
    assert stage.computed[0][1].requires_grad
    assert not sent[0].requires_grad


def test_few_gradients_are_held_until_they_have_arrived(monkeypatch):
    """A Work holds its tensor until wait(): memory must not grow with the micro-batches."""
    held = []

    class Sent:
        def __init__(self, tensor, **_):
            held.append(self)

        def wait(self):
            assert self is held.pop(0), "messages arrive in order"

    monkeypatch.setattr(by_hand.dist, "isend", Sent)
    stage = by_hand.Pipeline.__new__(by_hand.Pipeline)  # the last of three, without its group
    stage.is_first, stage.is_last, stage.stage, stage.stages, stage.up = False, True, 2, 3, None
    stage.computed, stage.gradient_sends, stage.record = {}, [], lambda *_: nullcontext()
    for i in range(16):
        x = torch.ones(2, requires_grad=True)
        stage.computed[i] = x, x.sum()
        stage.backward(i)
        assert len(held) == min(i + 1, 3)


def test_drawing():
    seconds = lambda kind, stage: 1.0 if kind == "F" else 2.0  # noqa: E731
    drawn = [
        timelines_of.draw(timelines_of.simulate(orders(schedule, 2, 3), seconds), 1.0)
        for schedule in (by_hand.gpipe, by_hand.one_f_one_b)
    ]
    assert drawn == [
        "rank 0  012...aabbcc\nrank 1  .012aabbcc..",
        "rank 0  01..aa2bb.cc\nrank 1  .0aa1bb2cc..",
    ]


def test_stages_have_all_blocks():
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            parts = pipeline_stages.split_layers(layers, stages)
            assert [i for part in parts for i in part] == list(range(layers))
            sizes = [len(part) for part in parts]
            assert len(sizes) == stages
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1


def test_stages_that_only_wait_are_on_the_device(monkeypatch):
    """PipelineStage does not move its module: on GPUs the input would be on another device."""

    def pipeline(name, m, build, loss_fn, device):
        raise InterruptedError([parameter.device for parameter in build(0, 2).parameters()])

    monkeypatch.setattr(by_torch, "Pipeline", pipeline)
    gpu = torch.device("meta")  # stands for one
    with pytest.raises(InterruptedError) as built:
        by_torch.timer_timelines("1F1B", 2, CONFIG, batch=None, device=gpu)
    assert built.value.args == ([gpu],)


# ---- equal to one process


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """case -> what each rank found, in rank order."""
    path = tmp_path_factory.mktemp("pipeline") / "results"
    pool.run(ROOT / "tests/workers/parallel_pipeline.py", path, ranks=4, timeout=400).check()
    of_ranks = [
        torch.load(f"{path}.{rank}", map_location="cpu", weights_only=False) for rank in range(4)
    ]
    keys = {key for found in of_ranks for key in found}
    return {key: [found[key] for found in of_ranks if key in found] for key in keys}


EACH = [("by hand", *case) for case in BY_HAND] + [("by torch", *case) for case in BY_TORCH]


@pytest.mark.device
@pytest.mark.gpu_per_rank(4)
@slow
@pytest.mark.parametrize(("how", "p", "name", "m", "optimizer"), EACH)
def test_equals_one_process(results, how, p, name, m, optimizer):
    """Tolerances: a mean over micro-batches adds the same numbers in another order, some 1e-7.
    AdamW divides gradients by their size, which enlarges the differences of tiny gradients: a
    fiftieth of lr = 1e-3 is allowed. A gradient that is wrong by a factor m or p fails clearly."""
    (one,), ranks = results["one process", optimizer], results[how, p, name, m]
    assert len(ranks) == p
    assert len(one["steps"]) == STEPS
    names = [name for found in ranks for name in found["sizes"]]
    assert sorted(names) == sorted(one["sizes"])  # each parameter on one rank
    for step, (loss, *expected) in enumerate(one["steps"]):
        of_ranks = [found["steps"][step] for found in ranks]
        losses = [loss for loss, *_ in of_ranks]
        torch.testing.assert_close(sum(losses), loss, rtol=0, atol=1e-5)
        assert sum(map(bool, losses)) == 1  # 0 but on the rank with the last stage
        for kind, tolerance in enumerate((1e-6, 2e-5)):
            whole = {}
            for found, (_, *flat) in zip(ranks, of_ranks, strict=True):
                whole |= by_name(found["sizes"], flat[kind])
            whole_of_one = by_name(one["sizes"], expected[kind])
            torch.testing.assert_close(whole, whole_of_one, rtol=1e-5, atol=tolerance)


def by_name(sizes: dict[str, int], flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(sizes, flat.split(list(sizes.values())), strict=True))


@slow
def test_the_reference_learns(results):
    for optimizer in ("sgd", "adamw"):
        (one,) = results["one process", optimizer]
        assert one["steps"][-1][0] < one["steps"][0][0] - 0.02
        gradients = by_name(one["sizes"], one["steps"][0][1])
        assert min(g.abs().max() for g in gradients.values()) > 1e-5  # ten times the tolerance


@pytest.mark.device
@pytest.mark.gpu_per_rank(4)
@slow
def test_gradients_are_added_until_zero_grad(results):
    pairs = [pair for gradients in results["accumulated"] for pair in gradients.values()]
    assert len(pairs) == 2 * (2 + 15 * CONFIG.layers + 3)  # by hand, and torch's schedule
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.device
@pytest.mark.gpu_per_rank(4)
@slow
def test_a_frozen_first_stage_and_another_dtype(results):
    """In float64 the loss is computed in float32: some 1e-8 of gradients of 1e-3 to 1."""
    first, *later = results["double"]
    assert {ours for ours, _ in first.values()} == {None}
    for name, (ours, expected) in (pair for found in later for pair in found.items()):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7, msg=name)


@slow
def test_the_ranks_of_a_pipeline_ascend(results):
    assert set(results["not in order"]) == {"the ranks [1, 0] of a pipeline do not ascend"}


def ranks_of_each(results):
    """(how, p, name, m), rank, what it found: for each rank of each case."""
    for *case, _ in EACH:
        for rank, result in enumerate(results[tuple(case)]):
            yield tuple(case), rank, result


@slow
def test_the_schedule_gets_contiguous_micro_batches(results):
    """Also of a batch that is a view of longer sequences: torch 2.11 refuses such views."""
    wrong = [
        f"{case}, rank {rank}: {result['contiguous']}"
        for case, rank, result in ranks_of_each(results)
        if case[0] == "by torch"
        and not (len(result["contiguous"]) >= case[-1] and all(result["contiguous"]))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_batches_are_contiguous():
    assert all(tensor.is_contiguous() for tensor in compare_pipelines.text_batch(0, 4, 8, "cpu"))


# ---- the order of actions, and memory


@slow
def test_ranks_follow_the_schedule(results):
    """Also torch's schedules of the same name."""
    wrong = []
    for (how, p, name, m), rank, result in ranks_of_each(results):
        found = [(kind, i) for kind, _, i, _, _ in result["timeline"]]
        if name in by_hand.SCHEDULES and found != by_hand.SCHEDULES[name](rank, p, m):
            wrong.append(f"{how}, {p} ranks, {name}, {m} micro-batches, rank {rank}: {found}")
    assert not wrong, "\n" + "\n".join(wrong)


@slow
def test_every_action_came_after_what_it_needs(results):
    """All ranks read the clock of this machine."""
    wrong = [f"{case[:4]}: {what}" for case in EACH for what in too_early(results, *case[:4])]
    assert not wrong, "\n" + "\n".join(wrong)


def too_early(results, how: str, p: int, name: str, m: int) -> list[str]:
    events = [event for result in results[how, p, name, m] for event in result["timeline"]]
    ends = {("G" if kind in "BI" else kind, s, i): end for kind, s, i, _, end in events}
    starts = {("G" if kind in "BI" else kind, s, i): start for kind, s, i, start, _ in events}
    stages, found = max(stage for _, stage, *_ in events) + 1, []
    if stages != p * (1 if name in ("GPipe", "1F1B") else 2):
        found.append(f"{stages} stages")
    if sum(kind == "F" for kind, *_ in events) != stages * m:
        found.append("not one forward per stage and micro-batch")
    for kind, stage, i in starts:
        needs = {"F": ("F", stage - 1, i), "G": ("G", stage + 1, i), "W": ("G", stage, i)}[kind]
        if needs in ends and ends[needs] > starts[kind, stage, i]:
            found.append(f"{kind, stage, i} began before the end of {needs}")
        if not (kind == "W" or needs in ends or stage in (0, stages - 1)):
            found.append(f"{kind, stage, i} began without {needs}")
    if any(kind in "IW" for kind, *_ in events) != ("Zero" in name):
        found.append("split backwards, or none")
    return found


@slow
@pytest.mark.parametrize("p", [2, 4])
def test_1f1b_keeps_p_micro_batches_where_gpipe_keeps_all(results, p):
    """Bytes that autograd saves, for p - rank micro-batches with 1 of 12 sequences each. The
    tolerance is for what does not depend on the size of a micro-batch, such as its loss."""
    for rank in range(p):
        gpipe, one = (results["by hand", p, n, 12][rank]["kept"] for n in ("GPipe", "1F1B"))
        whole = results["by hand", p, "GPipe", 1][rank]["kept"]
        assert gpipe == pytest.approx(whole, rel=0.05)
        assert one / gpipe == pytest.approx((p - rank) / 12, rel=0.05)


@slow
def test_nothing_is_kept_after_the_step(results):
    wrong = [
        f"{case}, rank {rank}: {result['kept']} bytes kept, {result['left']} of them at the end"
        for case, rank, result in ranks_of_each(results)
        if not (result["kept"] > 0 and result["left"] == 0)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@slow
def test_smaller_gaps_cost_memory(results):
    """The sum over all ranks: more micro-batches are saved for backward."""
    kept = {
        name: [result["kept"] for result in results["by torch", 4, name, 12]]
        for name in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    }
    for name, of_ranks in kept.items():
        if name != "1F1B":
            assert sum(of_ranks) > 1.2 * sum(kept["1F1B"])


@slow
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_measured_idle_share(results, name):
    """4 ranks that sleep. A busy machine wakes them late, hence the fastest of 3 steps and a wide
    margin above. But no machine makes the step shorter than the schedule does."""
    steps = zip(*results["timers", name], strict=True)
    timelines = min(steps, key=timelines_of.span)
    share, formula = timelines_of.idle_share(timelines), timelines_of.expected_idle(4, 4)
    assert share < formula + 0.25
    begin, end = min(line[0][3] for line in timelines), max(line[-1][4] for line in timelines)
    assert end - begin > 0.99 * (4 + 3) * 3 * SECONDS
    slept = sum(end - start for line in timelines for _, _, _, start, end in line)
    assert share == pytest.approx(1 - slept / (4 * (end - begin)))
    for kind, _, _, start, end in (event for line in timelines for event in line):
        assert end - start >= 0.99 * SECONDS * (1 if kind == "F" else 2)


# ---- the scripts


@pytest.fixture(scope="module")
def scratch():
    return pool.run(SCRATCH, ranks=2).check().output


@slow
def test_from_scratch_prints_what_is_true(scratch):
    assert "Warning" not in scratch
    runs = [(name, m) for name in ("GPipe", "1F1B") for m in (1, 2, 8)]
    differences = table(scratch, "largest difference")
    assert list(differences) == runs
    for loss, gradient, parameter in differences.values():
        assert loss < 1e-5
        assert gradient < 2e-6
        assert parameter < 1e-4  # AdamW's lr is 1e-3
    idle = table(scratch, "bubble fraction")
    assert list(idle) == runs
    for (_, m), (formula, waits, computes) in idle.items():
        assert formula == round(100 / (m + 1), 1)
        assert 0 < waits < 100  # test_measured_idle_share compares it with the formula
        assert 0 < computes < 100
    kept = table(scratch, "peak saved for backward")
    for (name, m), (count0, mb0, count1, mb1) in kept.items():
        assert [count0, count1] == ([m, m] if name == "GPipe" else [min(2, m), 1])
        for count, mb, whole in (
            (count0, mb0, kept["GPipe", 1][1]),
            (count1, mb1, kept["GPipe", 1][3]),
        ):
            assert mb == pytest.approx(whole * count / m, rel=0.02)
    for name in ("GPipe", "1F1B"):
        rows = scratch.partition(f"\n{name}\nrank 0  ")[2].split("\n\n")[0].splitlines()[:2]
        for row in rows:
            assert {"0", "1", "2", "3", "a", "b", "c", "d", "."} <= set(row)


@pytest.fixture(scope="module")
def parallel():
    return pool.run(PARALLEL, ranks=2).check().output


@slow
def test_pipeline_parallel_prints_what_is_true(parallel):
    assert "Warning" not in parallel
    names = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
    runs = [(name, 4) for name in names]
    differences = table(parallel, "largest difference")
    assert list(differences) == runs
    for loss, gradient, parameter in differences.values():
        assert loss < 1e-5
        assert gradient < 2e-6
        assert parameter < 1e-4
    idle = table(parallel, "bubble fraction")
    assert list(idle) == runs
    played = {}
    for (name, m), values in idle.items():
        if "Zero" in name:
            values.insert(0, values[0])
        formula, played[name, m], measured, *kept = values
        assert played[name, m] == formula  # torch's recorded order gives the formula's fraction
        parts = 1 if name in ("GPipe", "1F1B") else 2
        assert "Zero" in name or formula == round(100 / (parts * m + 1), 1)
        assert 0 < measured < 100  # a clock's: the machine decides
        assert len(kept) == 2
    assert played["InterleavedZeroBubble", 4] < played["Interleaved1F1B", 4] < played["1F1B", 4]
    assert played["ZBVZeroBubble", 4] < played["Interleaved1F1B", 4]
    assert parallel.count("\nrank 1  ") == len(names)


@slow
def test_from_scratch_as_one_process():
    args = ("--steps", 1, "--microbatches", 1, 2, "--optimizer", "sgd")  # AdamW magnifies rounding
    output = pool.run(SCRATCH, *args).check().output
    assert output.startswith("1 rank(s) on ")
    for values in table(output, "largest difference").values():
        assert max(values) < 2e-6
    assert all(values[0] == 0 for values in table(output, "bubble fraction").values())


@pytest.mark.gpu
def test_from_scratch_on_a_gpu():
    output = python(SCRATCH, "--device", "cuda", "--steps", 2).check().output
    assert output.startswith("1 rank(s) on cuda, cpu:gloo,cuda:nccl")
    for values in table(output, "largest difference").values():
        assert max(values) < 1e-4


# ---- what does not fit


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (SCRATCH, "--layers 1", "--layers 1 are too few for 2 stages: one each at least"),
        (SCRATCH, "--microbatches 3", "--batch-size 8 does not divide into 3 micro-batches"),
        (PARALLEL, "--layers 3", "--layers 3 are too few: 2 ranks with two stages each"),
        (PARALLEL, "--microbatches 1", "1 micro-batches do not fill 2 stages: at least as many"),
        (PARALLEL, "--batch-size 6", "--batch-size 6 does not divide into 8 micro-batches"),
        (PARALLEL, "--microbatches 5", "interleaved schedules take the micro-batches in 2 rounds"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_rank_waits(script, arguments, message):
    module = importlib.import_module(script.stem)
    options = dict(zip(arguments.split()[::2], arguments.split()[1::2], strict=True))
    layers, size = int(options.get("--layers", 4)), int(options.get("--batch-size", 8))
    counts = [int(options["--microbatches"])] if "--microbatches" in options else [2, 8]
    with pytest.raises(ValueError, match=re.escape(message)):
        module.check(layers, size, counts, 2)


@slow
@pytest.mark.parametrize(
    ("script", "ranks", "arguments", "message"),
    [
        (SCRATCH, 2, ["--batch-size", 9], "--batch-size 9 does not divide into 2 micro-batches"),
        (PARALLEL, 2, ["--microbatches", 1], "1 micro-batches do not fill 2 stages"),
        (PARALLEL, 1, [], "one rank is no pipeline: start at least two with torchrun"),
    ],
)
def test_it_is_reported_once_per_job(script, ranks, arguments, message):
    result = pool.run(script, *arguments, ranks=ranks, timeout=60)
    assert result.returncode == 2
    assert result.output.count(f"{script.name}: error: {message}") == 1, result.output


AT_LEAST_1 = "must be an integer of at least 1"


@pytest.mark.parametrize("script", [SCRATCH, PARALLEL], ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", f"--steps: {AT_LEAST_1}, not 0"),
        ("--batch-size -4", f"--batch-size: {AT_LEAST_1}, not -4"),
        ("--microbatches 2 0", f"--microbatches: {AT_LEAST_1}, not 0"),
        ("--dim 30", "--dim must be a multiple of 4, not 30"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, script, arguments, message):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments.split()])
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(script.stem).parse_args()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"{script.name}: error: {message}\n"


def test_micro_batches_that_do_not_divide_are_refused():
    pipeline = by_hand.Pipeline.__new__(by_hand.Pipeline)
    pipeline.stage, pipeline.stages = 0, 2
    x, y = compare_pipelines.text_batch(0, 4, 8, "cpu")
    with pytest.raises(ValueError, match="4 sequences do not divide into 3 micro-batches"):
        pipeline.step(by_hand.gpipe(0, 2, 3), x, y)
