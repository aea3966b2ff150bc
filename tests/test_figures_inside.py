"""Pictures of chapter 22 refuse data under a wrong label."""

import sys
from typing import NamedTuple

import matplotlib.pyplot as plt
import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

import figures
from figures import inside


class Message(NamedTuple):
    at: float
    sender: str
    receiver: str
    what: str
    took: float | None = None


CALL = [
    Message(0, "script", "distributed_c10d.py", "all_reduce(), line 1"),
    Message(1, "distributed_c10d.py", "ProcessGroup", "allreduce()"),
    Message(2, "ProcessGroup", "dispatcher", "c10d.allreduce_.default"),
    Message(3, "dispatcher", "ProcessGroupGloo", "gloo:all_reduce", 5),
    Message(4, "distributed_c10d.py", "script", "Work"),
    Message(5, "script", "Work", "wait()"),
    Message(6, "thread pt_gloo_runloop", "Future", "done"),
    Message(7, "Work", "script", "wait() returns"),
    Message(7, "thread pt_gloo_runloop", "rank 1", "4,576 bytes, in total"),
]
MEETING = [
    Message(0, "rank 1", "store", "set g/1, 170 bytes", 1),
    Message(2, "rank 1", "store", "wait g/0", 8),
    Message(5, "rank 0", "store", "set g/0, 170 bytes", 1),
    Message(11, "rank 1", "store", "get g/0, 170 bytes", 1),
]


@pytest.fixture(autouse=True)
def drawn(monkeypatch) -> list[list[str]]:
    """The texts of each picture that was shown."""
    pictures = []

    def show(figure):
        texts = [text for ax in figure.axes for text in ax.texts]
        pictures.append([text.get_text() for text in texts if text.get_text()])  # arrows have ""
        figures.page._render(figure)  # refuses small letters, and closes it

    monkeypatch.setattr(figures, "show", show)
    yield pictures
    plt.close("all")


def exchanged(messages: list[Message], one: str, other: str) -> list[Message]:
    names = {one: other, other: one}
    return [
        m._replace(sender=names.get(m.sender, m.sender), receiver=names.get(m.receiver, m.receiver))
        for m in messages
    ]


def test_all_reduce_names_each_message(drawn):
    inside.all_reduce(CALL)
    (texts,) = drawn
    assert {m.what for m in CALL} - {"gloo:all_reduce"} <= set(texts)
    assert "gloo:all_reduce (5,000,000 us)" in texts
    assert "Process\nGroup\nGloo" in texts


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_all_reduce_refuses_exchanged_layers(number):
    """One call of the chain has its sender and receiver exchanged."""
    message = CALL[number]
    turned = message._replace(sender=message.receiver, receiver=message.sender)
    with pytest.raises(AssertionError, match="was not called by"):
        inside.all_reduce([*CALL[:number], turned, *CALL[number + 1 :]])


def test_all_reduce_refuses_exchanged_operations():
    """The labels of two arrows exchanged, the arrows left where they are."""
    first, second = CALL[1], CALL[2]
    wrong = [CALL[0], first._replace(what=second.what), second._replace(what=first.what), *CALL[3:]]
    with pytest.raises(AssertionError, match="was not called by"):
        inside.all_reduce(wrong)


def test_all_reduce_refuses_a_script_that_completes_its_own_operation():
    with pytest.raises(AssertionError, match="script has completed"):
        inside.all_reduce(exchanged(CALL, "script", "thread pt_gloo_runloop"))


def test_meeting_puts_the_store_between_the_ranks(drawn):
    inside.meeting(MEETING)
    (texts,) = drawn
    assert texts[:3] == ["rank 0", "store", "rank 1"]
    assert "wait g/0 (8,000,000 us)" in texts


def test_meeting_refuses_an_answer_before_the_key_was_set():
    early = [m._replace(took=1) if m.what.startswith("wait") else m for m in MEETING]
    with pytest.raises(AssertionError, match="rank 1 was told g/0 before"):
        inside.meeting(early)
    nobody = [m for m in MEETING if not m.what.startswith("set g/0")]
    with pytest.raises(AssertionError, match="g/0"):
        inside.meeting(nobody)


def test_latencies_are_sorted_and_refuse_exchanged_columns(drawn):
    inside.latencies({"slow": (100.0, 1375.0), "fast": (1.0, 1.5)}, "title")
    assert drawn == [["1 us, median 1.5", "100 us, median 1,380"]]
    with pytest.raises(AssertionError, match="slow: the best is 120"):
        inside.latencies({"slow": (120.0, 100.0)}, "title")


def test_chunks_names_the_caches(drawn):
    inside.chunks({2**k: 1e9 for k in range(13, 20)}, {"L2 (1024K)": 2**20})
    assert drawn == [["half of L2 (1024K)"]]


COUNTED = {"all read all": [(1.0, 3.0)] * 4, "each its part": [(1.0, 1.5)] * 4}
FORMULAS = {"all read all": (1, 3), "each its part": (1, 1.5)}


def test_traffic_refuses_exchanged_labels(drawn):
    inside.traffic(COUNTED, FORMULAS)
    assert drawn == [["4 ", "2.5 "]]
    wrong = dict(zip(COUNTED, reversed(COUNTED.values()), strict=True))
    with pytest.raises(AssertionError, match="all read all: counted"):
        inside.traffic(wrong, FORMULAS)


HISTORY = [
    (0, "set data", frozenset()),
    (0, "set flag", frozenset()),
    (0, "( flag arrives )", frozenset({"flag"})),
    (1, "await flag", frozenset({"flag"})),
    (1, "look data", frozenset({"flag"})),
    (0, "( data arrives )", frozenset({"flag", "data"})),
]


def test_interleaving_refuses_exchanged_steps(drawn):
    inside.interleaving(HISTORY, ["writer", "reader"])
    (texts,) = drawn
    assert texts[:3] == ["writer", "reader", "memory"]
    assert texts[-2] == "data = 1, flag = 1"
    wrong = list(HISTORY)
    wrong[2], wrong[5] = (0, HISTORY[5][1], HISTORY[2][2]), (0, HISTORY[2][1], HISTORY[5][2])
    with pytest.raises(AssertionError, match="has not brought"):
        inside.interleaving(wrong, ["writer", "reader"])
