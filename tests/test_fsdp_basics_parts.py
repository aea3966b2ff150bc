"""fsdp_basics/checkpoint.py: several optimizers, their numbers, and parts that cannot be saved."""

import re

import pool
import pytest
import torch
from helpers import ROOT
from workers.counting_sgd import HALF, plain

SCRIPT = ROOT / "tests/workers/fsdp_parts.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(phase, ranks) -> what each rank has found."""
    folder = tmp_path_factory.mktemp("parts")
    results = {}
    for names, ranks in (("halves,frozen,refused", 2), ("others", 3), ("others", 1)):
        pool.run(SCRIPT, names, folder, ranks=ranks).check()
        for name in names.split(","):
            results[name, ranks] = torch.load(folder / f"{name}_{ranks}.pt")
    return results


def assert_is_rest(run: dict, one: dict) -> None:
    """The losses, every gradient, and all parameters and buffers of the second half."""
    assert run["step"] == HALF
    pairs = [(run["last"], one["last"])]
    pairs += zip(run["gradients"], one["gradients"][HALF:], strict=True)
    for actual, expected in pairs:
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=2e-6, msg=name)
    expected = torch.tensor(one["losses"][HALF:])
    torch.testing.assert_close(torch.tensor(run["losses"]), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_optimizers_and_their_numbers_are_continued(found, form, ranks):
    """One has moments, the other counts in its group and for each parameter."""
    one = plain()
    for rank in found["halves" if ranks == 2 else "others", ranks]:
        assert_is_rest(rank[form][1] if ranks == 2 else rank[form], one)


def test_a_frozen_parameter_that_no_optimizer_has_is_left_out(found):
    for rank in found["frozen", 2]:
        assert_is_rest(rank, plain(frozen_from=HALF))


SAYS = {
    "average": "part 'ema' holds shards, of which only rank 0's would be saved: ",
    "network": "part 'critic' holds shards, of which only rank 0's would be saved: ",
    "optimizer of a network": "part 'optimizer_critic' updates parameters that are not in part ",
    "list of shards": "part 'optimizer' has a list as 'history' of 0.weight, which cannot be ",
    "share": "part 'optimizer' has each rank's own numbers in the plain tensor 'mean', of which ",
    "dot": "part 'optimizer' has a state named 'ema.fast': use words without dots",
    "state dict": "part 'optimizer' has a state dict of its own, of which a save lacks a part",
    "entry": "part 'optimizer' has a device as 'device' of 0.weight, which cannot be saved: ",
    "shard": "part 'optimizer' has a DTensor as 'scale' of 0.weight, which cannot be saved: ",
}


@pytest.mark.parametrize("case", SAYS)
def test_what_cannot_be_saved_is_named_on_all_ranks(found, case):
    """By a save, and by a run that begins; nothing is written."""
    for rank in found["refused", 2]:
        for said in rank[case]["said"]:
            assert re.match(re.escape(SAYS[case]), said or ""), said
        assert rank[case]["files"] == 0


def test_texts_numbers_and_tensors_of_a_group_can_be_saved(found):
    for rank in found["refused", 2]:
        assert rank["fine"]["said"] == [None, None]
