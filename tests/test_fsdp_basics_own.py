"""fsdp_basics/train.py with a model of our own: its buffers, layouts, frozen and late layers."""

import re

import pool
import pytest
import torch
from helpers import ROOT
from materialize import build_on_meta, materialize
from runtime import Worker
from torch.distributed.fsdp import fully_shard
from workers.own_model import HALF, SAMPLES, Odd, Own, data, plain

SCRIPT = ROOT / "tests/workers/own_tasks.py"
CASES = [
    (name, kind, form)
    for name in ("sgd", "momentum", "adamw")
    for kind in ("trainable", "frozen")
    for form in ("sharded", "async")
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(phase, ranks) -> what each rank has found."""
    folder = tmp_path_factory.mktemp("own")
    results = {}
    phases = (
        ("halves,statistics,layouts,refused,memory", 2), ("others", 3), ("others", 1), ("copies", 4)
    )  # fmt: skip
    for names, ranks in phases:
        pool.run(SCRIPT, "fsdp_basics", names, folder, ranks=ranks).check()
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
@pytest.mark.parametrize(("name", "kind", "form"), CASES)
def test_a_run_in_two_halves_equals_a_plain_loop(found, name, kind, form, ranks):
    """A layer gets its first gradient in the second half; another one is frozen in the first."""
    one = plain(name, frozen=kind == "frozen")
    for number, rank in enumerate(found["halves", 2]):
        part, rest = rank[name, kind, form]["part"], rank[name, kind, form]["rest"]
        assert_losses(part["losses"], one["losses"][:HALF])
        assert part["status"] == 15  # SIGTERM
        if ranks != 2 and form == "async":
            continue  # the same files
        if ranks != 2:
            rest = found["others", ranks][number % ranks][name, kind, form]
        assert rest["status"] == 0
        assert_equal(rest["first"], part["last"])
        assert_close(rest, one, HALF)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("form", ["sharded", "async"])
def test_the_halves_equal_the_whole_bit_for_bit(found, name, form):
    for rank in found["halves", 2]:
        case = rank[name, "trainable", form]
        assert case["part"]["losses"] + case["rest"]["losses"] == case["whole"]["losses"]
        assert_equal(case["rest"]["last"], case["whole"]["last"])


def test_the_cases_are_what_they_say(found):
    """Layers that are frozen or not used yet stay, and have no state; later they move."""
    for name, keys in {"sgd": 0, "momentum": 1, "adamw": 3}.items():
        for kind, still in {"trainable": {"late"}, "frozen": {"late", "second"}}.items():
            case = found["halves", 2][0][name, kind, "sharded"]
            for half, stay in {"part": still, "rest": set()}.items():
                first, last = case[half]["first"], case[half]["last"]
                assert moved(first, last) == {"first", "second", "late", "head"} - stay
            states = case["rest"]["first_state"]
            assert len(states) == (8 - 2 * len(still) if keys else 0)
            assert all(len(state) == keys for state in states.values())


def moved(first: dict, last: dict) -> set[str]:
    return {name.partition(".")[0] for name in first if not torch.equal(first[name], last[name])}


def test_copies_of_shards_equal_a_plain_loop(found):
    """--dp-replicate 2 on four ranks; continued as four shards."""
    one = plain("adamw")
    for rank in found["copies", 4]:
        assert_losses(rank["part"]["losses"], one["losses"][:HALF])
        assert_equal(rank["rest"]["first"], rank["part"]["last"])
        assert_close(rank["rest"], one, HALF)


# ---- buffers


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_modules_share_gets_its_values_in_each(group, persistent):
    """A rotary table that the model gives to every block."""

    def build():
        table, blocks = torch.rand(4), [torch.nn.Linear(4, 4) for _ in range(2)]
        for block in blocks:
            block.register_buffer("table", table, persistent=persistent)
        return torch.nn.Sequential(*blocks)

    model = fully_shard(build_on_meta(build))
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    materialize(model, build, cpu, Worker(0, 0, 1, cpu))
    torch.manual_seed(0)
    expected = torch.rand(4)
    assert all(torch.equal(block.table, expected) for block in model)


def test_a_run_begins_with_an_ordinarily_built_module_and_keeps_its_buffers(found):
    """Fresh on 2 and 4 ranks, resumed on 1, 2, 3, 4; also what is not in the state dict."""
    torch.manual_seed(0)
    model = Own()
    ordinary = dict(model.named_parameters()) | dict(model.named_buffers())
    buffers = dict(model.named_buffers())
    assert buffers.keys() > model.state_dict().keys() & buffers.keys()
    for (phase, _), ranks in found.items():
        for case in (case for rank in ranks for case in cases_of(phase, rank)):
            if "part" in case:
                assert_equal(case["part"]["first"], ordinary)
            for run in case.values():
                for tensors in (run["first"], run["last"]):
                    assert_equal({name: tensors[name] for name in buffers}, buffers)


def cases_of(phase: str, rank: dict) -> list[dict]:
    if phase == "copies":
        return [{half: rank[half] for half in ("part", "rest")}]
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
    first, second = (rank["seen"] for rank in found["statistics", 2])
    for pairs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


# ---- layouts


def test_slices_and_transposes_are_trained_and_continued(found):
    one = plain("adamw", model=lambda: Odd(empty=False))
    for rank in found["layouts", 2]:
        assert_losses(rank["part"]["losses"], one["losses"][:HALF])
        assert_equal(rank["rest"]["first"], rank["part"]["last"])
        assert_close(rank["rest"], one, HALF)


# ---- what ends with one sentence


REFUSED = {
    "length": r"rank 1 has other data than rank 0 \(lengths \[54, 15\] and \[48, 15\]\)",
    "numbers": r"rank 1 has other data than rank 0 \(lengths \[48, 15\] and \[48, 15\]\)",
    "no samples": r"there are no samples: load_data\(\) returned data sets of lengths \[0, 15\]",
    "constant": "second has a tensor 'constant' that is neither a parameter nor a buffer, ",
    "constants": "second has a tensor 'constant' that is neither a parameter nor a buffer, ",
    "rates": r"the model is built on the meta device, .* make a tensor whose numbers you read in ",
    "scalar": r"the parameter second\.constant has the shape \(\), which FSDP does not shard: ",
    "empty": r"the parameter second\.constant has the shape \(0, 3\), which FSDP does not shard: ",
    "vanished": r"cannot save to .*vanished/checkpoints: rank 0 does not see __1_0\.distcp, which ",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_ends_with_one_sentence(found, case):
    for rank in found["refused", 2]:  # all say it, so that none waits for one that has left
        assert re.match(REFUSED[case], rank[case]), rank[case]


def test_a_copy_that_differs_is_named(found):
    """In shards of the second half of the rows: ranks 1 and 3 have them."""
    sentence = r"step 3: ranks 1 and 3 hold different numbers, first in second\.weight: "
    for rank in found["copies", 4]:
        assert re.match(sentence, rank["spoiled"]), rank["spoiled"]


# ---- memory


def test_no_unsharded_gradients_are_kept(found):
    """In parts of the model's size: half of it is a rank's shards; with --reduce-once all of it."""
    for rank in found["memory", 2]:
        assert rank["default"] == pytest.approx([0.5] * 3, abs=0.02)
        assert rank["reduce once"] == pytest.approx([1.0] * 3, abs=0.02)


def test_a_run_that_continues_never_builds_the_model_off_the_meta_device(found):
    for number, rank in enumerate(found["halves", 2]):
        for case in rank.values():
            assert case["part"]["built"] == (["meta", "cpu"] if number == 0 else ["meta"])
            assert case["rest"]["built"] == ["meta"]


def test_evaluation_runs_no_more_rows_than_training(found):
    for rank in found["halves", 2]:
        for case in rank.values():
            rows = case["part"]["rows"]
            assert {count for training, count in rows if training} == {6}
            assert max(count for training, count in rows if not training) <= 6
