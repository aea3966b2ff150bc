"""Pictures of chapter 19 refuse data under a wrong label."""

import json
import sys

import matplotlib.pyplot as plt
import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

from figures import clusters

PREFIX = "torch.rendezvous.a.0/"
A, B = "10.0.0.1", "10.0.0.2"


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def state(value: bytes):
    return json.loads(value)


def recorded(counts=(1, 2), begins=(0, 1)) -> list:
    """B comes first, A gets number 0; what is read in one look has one time."""
    writes = [
        (0.0, "agents", "torch.rendezvous.a", json.dumps([{B: 0}, False]).encode()),
        (1.0, "agents", "torch.rendezvous.a", json.dumps([{A: 0, B: 1}, True]).encode()),
        (1.0, "agents", f"{PREFIX}MASTER_PORT", b"1"),
        (1.0, "agents", f"{PREFIX}MASTER_ADDR", b"here"),
    ]
    for number in (0, 1):
        ranks = json.dumps({"local_world_size": counts[number]}).encode()
        begin = json.dumps([begins[number], 3, 0, 0]).encode()
        assigned = f"{PREFIX}torchelastic/assigned_ranks/{number}"
        writes.append((1.5, "agents", assigned, begin))  # found before what it follows from
        writes.append((1.5, "agents", f"{PREFIX}torchelastic/role_info/{number}", ranks))
    return writes + [(2.0 + k, "ranks", f"0//cpu//0/{k}", b"address") for k in range(3)]


def test_a_rendezvous_is_told_in_the_order_of_causes():
    told = clusters.told(recorded(), PREFIX, state)
    assert [(write.agent, write.what) for write in told] == [
        (B, "I am here"),
        (A, "so am I: complete"),
        (A, "MASTER_ADDR"),
        (A, "MASTER_PORT"),
        (A, "role_info/0: 1 rank(s)"),
        (B, "role_info/1: 2 rank(s)"),
        (A, "assigned_ranks/0: from 0, of 3"),
        (A, "assigned_ranks/1: from 1, of 3"),
        (A, "rank 0 listens at ..."),
        (B, "rank 1 listens at ..."),
        (B, "rank 2 listens at ..."),
    ]
    clusters.rendezvous(told, first=A)


def test_exchanged_agents_are_refused():
    with pytest.raises(AssertionError, match="agent 1 begins at rank 2"):
        clusters.told(recorded(begins=(0, 2)), PREFIX, state)
    told = clusters.told(recorded(), PREFIX, state)
    with pytest.raises(AssertionError, match="the agents are"):
        clusters.rendezvous(told, first="10.0.0.3")
    with pytest.raises(AssertionError, match="a rank wrote before all agents had"):
        clusters.rendezvous(told[::-1], first=A)
    with pytest.raises(AssertionError, match="not in the order in which it came"):
        clusters.rendezvous([told[1], told[0], *told[2:]], first=A)


def test_a_lab_is_drawn_with_its_cables():
    shown = "host0   10.77.0.1   300mbit\nhost1   10.77.0.2   cut\n"
    texts, lines = [], []
    keep = clusters.figures.show
    clusters.figures.show = lambda figure: (
        texts.extend(text.get_text() for text in figure.axes[0].texts),
        lines.extend(line.get_linestyle() for line in figure.axes[0].lines),
    )
    try:
        clusters.lab(shown)
    finally:
        clusters.figures.show = keep
    assert texts == ["switch", "host0\n10.77.0.1", "300mbit", "host1\n10.77.0.2", "cut"]
    assert lines == ["-", ":"]  # what is cut is dotted
    with pytest.raises(AssertionError, match="no host in ''"):
        clusters.lab("")


def run(ranks, first=1, begin=0.0) -> list[dict]:
    return [
        {"step": first + k, "loss": 1 / (first + k), "ranks": n, "time": begin + k}
        for k, n in enumerate(ranks)
    ]


def test_coming_and_going():
    one = run([1] * 12)
    elastic = run([1] * 4) + run([2] * 4, 5, 10.0) + run([1] * 6, 7, 20.0)  # two steps made again
    clusters.coming_and_going(elastic, one)
    elastic[5]["loss"] += 0.01
    with pytest.raises(AssertionError, match=r"a loss is 0\.01 off"):
        clusters.coming_and_going(elastic, one)


def test_intervals():
    def goodput(tau):
        return 1 - 60 / tau - tau / 20_000

    best = (60 * 20_000) ** 0.5
    simulated = {tau: goodput(tau) + 0.005 for tau in (300, 2400)}
    clusters.intervals(60, 10_000, goodput, simulated, best)
    with pytest.raises(AssertionError, match="beside the simulation"):
        clusters.intervals(60, 10_000, goodput, {300: 0.5, 2400: 0.6}, best)
    with pytest.raises(AssertionError, match="better than the best"):
        clusters.intervals(60, 10_000, goodput, {best: goodput(best), 400: goodput(400)}, 100)
