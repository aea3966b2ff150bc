"""ddp_basics/train.py with a model of our own: other buffers, layouts, frozen and late layers."""

import re

import pool
import pytest
import torch
from helpers import ROOT
from workers.own_model import HALF, SAMPLES, STEPS, Odd, Own, data, plain

SCRIPT = ROOT / "tests/workers/own_tasks.py"
CASES = [(name, kind) for name in ("sgd", "momentum", "adamw") for kind in ("trainable", "frozen")]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(phase, ranks) -> what each rank has found."""
    folder = tmp_path_factory.mktemp("own")
    results = {}
    phases = ("halves,statistics,layouts,any_tensor,refused", 2), ("others", 3), ("others", 1)
    for names, ranks in phases:
        pool.run(SCRIPT, "ddp_basics", names, folder, ranks=ranks).check()
        for name in names.split(","):
            results[name, ranks] = torch.load(folder / f"{name}_{ranks}.pt")
    return results


def assert_close(actual: dict, expected: dict, first_step: int = 0) -> None:
    """The losses, norms and all tensors at the end, of fp32 sums in another order."""
    assert_losses(actual["losses"], expected["losses"][first_step:])
    assert_equal(actual["last"], expected["last"], 5e-6)


def assert_losses(actual: list, expected: list) -> None:
    """(loss, norm of the gradient) of each step."""
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=0, atol=2e-6)


def assert_equal(actual: dict, expected: dict, tolerance: float = 0) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        torch.testing.assert_close(
            actual[name], tensor, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


# ---- what can be saved can be continued


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_run_in_two_halves_equals_a_plain_loop(found, name, kind, ranks):
    """A layer gets its first gradient in the second half; another one is frozen in the first."""
    one = plain(name, frozen=kind == "frozen")
    parts = [rank[name, kind, "file"] for rank in found["halves", 2]]
    for number, part in enumerate(parts):
        assert_losses(part["part"]["losses"], one["losses"][:HALF])
        assert part["part"]["status"] == 15  # SIGTERM
        assert_equal(part["part"]["last"], parts[0]["part"]["last"])
        if ranks == 2:
            rest = part["rest"]
        else:
            rest = found["others", ranks][number % ranks][name, kind, "file"]
        assert rest["status"] == 0
        assert_equal(rest["first"], parts[0]["part"]["last"])
        assert_close(rest, one, HALF)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_the_halves_equal_the_whole_bit_for_bit(found, name):
    for rank in found["halves", 2]:
        case = rank[name, "trainable", "file"]
        assert case["part"]["losses"] + case["rest"]["losses"] == case["whole"]["losses"]
        assert_equal(case["rest"]["last"], case["whole"]["last"])


def test_the_cases_are_what_they_say(found):
    """Layers that are frozen or not used yet stay, and have no state; later they move."""
    for name, keys in {"sgd": 0, "momentum": 1, "adamw": 3}.items():
        for kind, still in {"trainable": {"late"}, "frozen": {"late", "second"}}.items():
            case = found["halves", 2][0][name, kind, "file"]
            for half, stay in {"part": still, "rest": set()}.items():
                first, last = case[half]["first"], case[half]["last"]
                assert moved(first, last) == {"first", "second", "late", "head"} - stay
            states = case["rest"]["first_state"]
            assert len(states) == (8 - 2 * len(still) if keys else 0)
            assert all(len(state) == keys for state in states.values())


def moved(first: dict, last: dict) -> set[str]:
    return {name.partition(".")[0] for name in first if not torch.equal(first[name], last[name])}


# ---- buffers


def test_a_run_begins_with_an_ordinarily_built_module_and_keeps_its_buffers(found):
    torch.manual_seed(0)
    model = Own()
    ordinary = dict(model.named_parameters()) | dict(model.named_buffers())
    buffers = dict(model.named_buffers())
    for (phase, _), ranks in found.items():
        for case in (case for rank in ranks for case in cases_of(phase, rank)):
            if "part" in case:
                assert_equal(case["part"]["first"], ordinary)
            for run in case.values():
                for tensors in (run["first"], run["last"]):
                    assert_equal({name: tensors[name] for name in buffers}, buffers)


def cases_of(phase: str, rank: dict) -> list[dict]:
    if phase == "halves":
        return list(rank.values())
    return [{"rest": run} for run in rank.values()] if phase == "others" else []


def test_running_statistics_are_the_mean_of_the_ranks_when_they_are_used(found):
    """By hand: BatchNorm is the first layer, so they are those of the inputs."""
    x, _ = data().tensors
    statistics = {rank: [torch.zeros(6), torch.ones(6)] for rank in (0, 1)}
    expected = []
    for epoch in (0, 1):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(12):
            for rank, (mean, var) in statistics.items():
                own = x[batch[rank::2]]
                mean += 0.1 * (own.mean(0) - mean)
                var += 0.1 * (own.var(0) - var)
        # Evaluated, then saved.
        expected += 2 * [[(a + b) / 2 for a, b in zip(*statistics.values(), strict=True)]]
    assert (statistics[0][0] - statistics[1][0]).abs().max() > 0.02  # the ranks' own differ
    for rank in found["statistics", 2]:
        assert len(rank["seen"]) == len(expected)
        for actual, pair in zip(rank["seen"], expected, strict=True):
            torch.testing.assert_close(list(actual), pair, rtol=0, atol=1e-6)
    first, second = (
        [torch.stack(pair) for pair in rank["seen"]] for rank in found["statistics", 2]
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- layouts


def test_slices_transposes_and_empty_parameters_are_trained_and_continued(found):
    one = plain("adamw", model=Odd)
    for rank in found["layouts", 2]:
        assert_losses(rank["part"]["losses"], one["losses"][:HALF])
        assert_equal(rank["rest"]["first"], found["layouts", 2][0]["part"]["last"])
        assert_close(rank["rest"], one, HALF)


def test_any_tensor_is_the_same_on_all_ranks_after_resuming(found):
    """Strides of all kinds, no elements, no dims, bf16, complex, bool, int64."""
    for rank in found["any_tensor", 2]:
        assert len(rank) == 7 + 3 + 7  # parameters, buffers, momentum
        assert [name for name, equal in rank.items() if not equal] == []


# ---- what ends with one sentence


REFUSED = {
    "length": r"rank 1 has other data than rank 0 \(lengths \[54, 15\] and \[48, 15\]\)",
    "numbers": r"rank 1 has other data than rank 0 \(lengths \[48, 15\] and \[48, 15\]\)",
    "no samples": r"there are no samples: load_data\(\) returned data sets of lengths \[0, 15\]",
    "past the wrapper": r"step 3: ranks 0 and 1 hold different numbers, first in first\.",
    "unfrozen": r"step 3: ranks 0 and 1 hold different .*, first in second\.weight: ",
    "a rank's own count": r"step 3: .* first in table: a buffer that follows a rank's own batches",
    "seed": r"step 3: ranks 0 and 1 hold different .*, first in first\.weight: ",
}


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_differ_are_named(found, case):
    for rank in found["refused", 2]:  # all say it, so that none waits for one that has left
        assert re.match(REFUSED[case], rank[case]), rank[case]


# ---- memory


def test_evaluation_runs_no_more_rows_than_training(found):
    for rank in found["halves", 2]:
        for case in rank.values():
            rows = case["part"]["rows"]
            assert {count for training, count in rows if training} == {6}
            assert max(count for training, count in rows if not training) <= 6
            assert len(case["rest"]["losses"]) == STEPS - HALF
