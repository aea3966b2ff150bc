"""Pictures of chapter 18 refuse data under a wrong label."""

import sys

import matplotlib.pyplot as plt
import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

from figures import traces


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def rank(load: float = 0.01, late: float = 0.0, messages: int = 2) -> dict:
    """Three steps of 0.3 s and the loading; every message is under way for as long as on others."""
    spans = {name: [] for name in (*traces.WORK, "aten", "wire")}
    for step in range(3):
        now = step * (0.3 + load)
        for name, seconds in zip(traces.WORK, (load, 0.1, 0.18, 0.02), strict=True):
            spans[name].append((now, now + seconds))
            if name != "load":
                spans["aten"].append((now, now + 0.9 * seconds))
            now += seconds
        end = now - 0.02  # of backward
        each = 0.1 / messages
        for k in range(messages):
            begin = end - 0.1 + k * each + late / messages
            spans["wire"].append((begin, end - 0.1 + (k + 1) * each))
    return spans


def part(**seconds: float) -> dict:
    names = {"load": "loading", "other": "waiting for the other rank"}
    names |= {"network": "waiting for the network", "computing": "computing"}
    return dict.fromkeys(traces.PARTS, 0.0) | {names[k]: v for k, v in seconds.items()}


HEALTHY = [rank(), rank(late=0.02)]
SLOW = [rank(load=0.15), rank(load=0.15)]


def loading(ranks: list) -> float:
    return max(end - begin for begin, end in ranks[0]["load"])


@pytest.mark.slow
def test_right_data_is_drawn():
    traces.step(HEALTHY, "title")
    traces.before_after(SLOW, HEALTHY, ("before", "after"), loading)
    well, slow = part(computing=0.3, network=0.02), part(computing=0.3, load=0.15)
    traces.fingerprints({"healthy": [well, well], "slow": [slow, slow]}, {"slow": "loading"})
    losses = [1 / (k + 1) for k in range(30)]
    traces.corruption({"nothing": losses, "bit 3": [*losses[:20], *[9] * 10]}, 20, 10)


def test_a_message_that_arrives_before_it_is_sent_is_refused():
    other = rank()
    other["wire"] = [(begin + 1, end + 1) for begin, end in other["wire"]]
    with pytest.raises(AssertionError, match="message 0 has arrived before all have sent it"):
        traces.step([rank(), other])


def test_exchanged_parts_of_a_step_are_refused():
    wrong = rank()
    wrong["forward"], wrong["backward"] = wrong["backward"], wrong["forward"]
    with pytest.raises(AssertionError, match=r"rank 1: .* are not in this order"):
        traces.step([rank(), wrong])


def test_exchanged_runs_are_refused():
    with pytest.raises(AssertionError, match=r"0\.01 before, 0\.15 after: are they"):
        traces.before_after(HEALTHY, SLOW, ("before", "after"), loading)


def test_the_step_of_middle_length_is_drawn():
    uneven = rank()
    uneven["optimizer"][0] = (uneven["optimizer"][0][0], uneven["optimizer"][0][1] + 5)
    uneven["optimizer"][1] = (uneven["optimizer"][1][0], uneven["optimizer"][1][1] + 2)
    assert traces.middle([uneven, rank()]) == 1
    assert [round(s, 2) for s in traces.lengths([uneven, rank()])] == [5.31, 2.31, 0.31]


def test_a_fault_under_another_name_is_refused():
    well, late = part(computing=0.3, network=0.02), part(computing=0.3, other=0.2)
    runs = {"healthy": [well, well], "uneven": [late, well]}
    with pytest.raises(AssertionError, match="uneven: loading does not stand out"):
        traces.fingerprints(runs, {"uneven": "loading"})


def test_a_curve_that_differs_before_the_flip_is_refused():
    losses = [1 / (k + 1) for k in range(30)]
    with pytest.raises(AssertionError, match="bit 3 differs before the flip"):
        traces.corruption({"nothing": losses, "bit 3": [*losses[:19], *[9] * 11]}, 20, 10)
