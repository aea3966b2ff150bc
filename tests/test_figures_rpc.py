"""Pictures of chapter 23 refuse data under a wrong label."""

import sys

import matplotlib.pyplot as plt
import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

from figures import rpc

ONE_BY_ONE, TOGETHER = [(0, 1), (2, 3), (4, 5)], [(0.1, 1), (0, 1), (0.2, 2)]
PUSHES = [(1, 0), (1, 0), (2, 2), (1, 1), (2, 1)]
STALE = (0, 1, 2)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_right_data_is_drawn():
    rpc.calls({"rpc_async": TOGETHER, "rpc_sync": ONE_BY_ONE})
    rpc.staleness(PUSHES)
    rates = {0.1: (0.9, 0.9, 0.9), 1.0: (0.9, 0.2, 0.1)}
    rpc.accuracy(STALE, rates, lambda s: 1 / (s + 1), {(0.05, 0.9): (0.9, 0.9, 0.2)})


def test_rare_old_pushes_have_bars(monkeypatch):
    monkeypatch.setattr(rpc.figures, "show", lambda figure: None)  # which would close it
    pushes = [(1, 0), (2, 1), *[(2, 0)] * 130, (1, 131)]
    rpc.staleness(pushes)
    first, second = plt.gcf().axes
    counts = [[bar.get_height() for bar in ax.patches] for ax in (first, second)]
    assert counts == [[1, 0, 0, 0, 0, 0, 0, 0, 1], [130, 1, 0, 0, 0, 0, 0, 0, 0]]
    labels = [label.get_text() for label in first.get_xticklabels()]
    assert labels[:3] == ["0", "1", "2-3"]
    assert labels[-1] == "128-255"


@pytest.mark.parametrize(
    "ran",
    [
        {"rpc_sync": TOGETHER, "rpc_async": ONE_BY_ONE},
        {"rpc_sync": TOGETHER, "rpc_async": TOGETHER},
        {"rpc_sync": ONE_BY_ONE, "rpc_async": ONE_BY_ONE},
    ],
)
def test_exchanged_calls_are_refused(ran):
    with pytest.raises(AssertionError, match="ran "):
        rpc.calls(ran)


def test_staleness_of_another_trainer_is_refused():
    with pytest.raises(AssertionError, match="push 4 is 1 pushes old, and not 2"):
        rpc.staleness([*PUSHES[:-1], (2, 2)])


def test_exchanged_rates_are_refused():
    with pytest.raises(AssertionError, match="larger rates bear more staleness"):
        rpc.accuracy(STALE, {1.0: (0.9, 0.9, 0.9), 0.1: (0.9, 0.2, 0.1)}, lambda s: 1, {})


def test_momentum_counts():
    """A rate of 0.05 with a momentum of 0.9 is one of 0.5: it bears less staleness than 0.1."""
    with pytest.raises(AssertionError, match="larger rates bear more staleness"):
        rpc.accuracy(STALE, {0.1: (0.9, 0.9, 0.2)}, lambda s: 1, {(0.05, 0.9): (0.9, 0.9, 0.9)})
