"""Pictures of chapters 5 to 7 refuse data under a wrong label."""

import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

from figures import ddp, machine, nodes

FORMULAS = {"DP": lambda tokens: 2 * tokens, "PP": lambda width: 24 * width}


def test_third_roof_refuses_exchanged_labels():
    machine.third_roof(FORMULAS, {"DP": (64, 128.0), "PP": (64, 1536.0)}, {"a machine": 500.0})
    with pytest.raises(AssertionError, match="DP: 1536"):
        machine.third_roof(FORMULAS, {"DP": (64, 1536.0), "PP": (64, 128.0)}, {})


def test_roofline_refuses_what_cannot_be():
    machine.roofline({"add": (1e6, 1e7, 1e-3), "product": (1e9, 1e6, 1e-2)}, 1e11, 1e10)
    with pytest.raises(AssertionError, match="add"):
        machine.roofline({"add": (1e9, 1e7, 1e-3)}, 1e11, 1e9)


def test_three_speeds_computes_its_labels():
    machine.three_speeds("a device", 1e12, 1e12, {"fast": 1e11, "slow": 1e9})


def test_a_node_refuses_exchanged_wires():
    nodes.bytes_on_wires({"ring": {"dp": (7, 1)}, "two axes": {"tp": (9, 0), "dp": (0, 2)}}, (9, 1))
    with pytest.raises(AssertionError, match="dp: no ring sends so"):
        nodes.bytes_on_wires({"ring": {"dp": (1, 7)}, "alone": {"dp": (0, 8)}}, (9, 1))


def test_data_parallel_wants_each_sample_once():
    ddp.data_parallel([[0, 2], [1, 3]])
    with pytest.raises(AssertionError):
        ddp.data_parallel([[0, 2], [1, 2]])


def trial(order=(0, 1), backward=0.5):
    events = [(n, kind, 0.1 + 0.2 * i) for i, n in enumerate(order) for kind in ("start", "end")]
    return [{"backward": backward, "all": 0.6, "buckets": events}] * 2


def test_buckets_refuses_exchanged_buckets():
    ddp.buckets(trial(), frames=2)
    with pytest.raises(AssertionError, match="wrong numbers"):
        ddp.buckets(trial(order=(1, 0)), frames=2)
    with pytest.raises(AssertionError, match="after backward"):
        ddp.buckets(trial(backward=0.2), frames=2)
