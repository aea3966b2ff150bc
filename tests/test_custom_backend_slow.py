"""Slow links: the table, the schedule (with a fake clock), and delayed messages.

These tests do not depend on the speed of the machine: they only check that no message is early.
"""

import math
import re
import time
from datetime import timedelta

import pool
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT
from links import PRESETS, Links, Schedule, Speed, read_links, ring_seconds
from ring.group import RingGroup
from ring.wire import TAGGED
from slow_wire import SlowWire
from thread_groups import eventually, on_all, wire_threads

SCRIPT = ROOT / "custom_backend/slow_backend.py"

# The table.


def test_lines_of_links():
    text = """
    default 50us 10Gbit   # a comment
    nodes-of-2 .5us 100Gbit

    1-2 1ms unlimited
    3>0 2s 8KB
    """
    links = read_links(text)
    assert between(links, 0, 1) == between(links, 3, 2) == pytest.approx((0.5e-6, 12.5e9))
    assert between(links, 0, 2) == between(links, 0, 3) == pytest.approx((50e-6, 1.25e9))
    assert between(links, 1, 2) == between(links, 2, 1) == (1e-3, math.inf)
    assert between(links, 3, 0) == (2.0, 8000.0)
    slow = read_links("default 50us 10Gbit; slower 100")
    assert between(slow, 0, 1) == pytest.approx((5e-3, 12.5e6))
    assert between(read_links("default 0 unlimited"), 0, 1) == (0.0, math.inf)


def between(links: Links, a: int, b: int) -> tuple[float, float]:
    speed = links.between(a, b)
    return speed.latency, speed.rate


def test_links_from_a_file_and_by_name(tmp_path):
    (tmp_path / "links.txt").write_text("default 1ms 1Mbit\n")
    assert read_links(str(tmp_path / "links.txt")).default == Speed(1e-3, 125e3)
    for name, text in PRESETS.items():
        assert read_links(name) == read_links(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("default 1ms", "WHERE LATENCY RATE, not 'default 1ms'"),
        ("default 1 1Gbit", "a number above 0 with one of s, ms, us, ns, not '1'"),
        ("default 1ms 1G", "with one of Gbit"),
        ("default -1ms 1Gbit", "not '-1ms'"),
        ("default 1ms 0Gbit", "not '0Gbit'"),
        ("0_1 1ms 1Gbit", "default, nodes-of-N, A-B or A>B, not '0_1'"),
        ("nodes-of-0 1ms 1Gbit", "not 'nodes-of-0'"),
        ("slower fast", "a number above 0 alone, not 'fast'"),
        ("nowhere.txt", "a file of links, or two-level, slow, not nowhere.txt: No such file"),
    ],
)
def test_wrong_lines(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        read_links(text)


# The schedule.

LINKS = read_links("default 10ms 1MB; 0-1 1ms 10MB")


@pytest.mark.parametrize("nbytes", [0, 1000, 10**6])
def test_one_message(nbytes):
    left, due = Schedule(LINKS).book(0, 2, nbytes, now=5.0)
    assert left == pytest.approx(5.0 + nbytes / 1e6)
    assert due == pytest.approx(5.0 + 10e-3 + nbytes / 1e6)
    assert due - 5.0 == pytest.approx(LINKS.between(0, 2).seconds(nbytes))


def test_messages_wait_for_those_before_them_on_the_same_link_only():
    schedule = Schedule(LINKS)
    assert schedule.book(0, 2, 10**6, now=0.0) == pytest.approx((1.0, 1.01))
    assert schedule.book(0, 2, 10**6, now=0.5) == pytest.approx((2.0, 2.01))  # behind the first
    assert schedule.book(0, 2, 10**6, now=3.0) == pytest.approx((4.0, 4.01))  # the link is free
    assert schedule.book(2, 0, 10**6, now=0.0) == pytest.approx((1.0, 1.01))  # the other direction
    assert schedule.book(0, 1, 10**6, now=0.0) == pytest.approx((0.1, 0.101))  # another link


def test_rings_of_equal_links():
    alpha, beta = 2e-3, 5e6
    cases = [(size, nbytes) for size in (1, 2, 3, 4, 7) for nbytes in (0, 1000, 10**7)]
    found = {case: ring_seconds(Links(Speed(alpha, beta)), *case) for case in cases}
    formula = {(n, b): 2 * (n - 1) * (alpha + b / (n * beta)) for n, b in cases}
    assert found == pytest.approx(formula)


def test_a_ring_is_as_fast_as_its_slowest_link():
    """Large messages: each link carries 2 (p-1) parts one after another."""
    rate, nbytes = 1e6, 4e6
    links = read_links("default 0 100MB; 1>2 0 1MB")
    carried = 2 * 3 * nbytes / 4 / rate
    assert carried <= ring_seconds(links, 4, nbytes) <= 1.05 * carried


# Messages over sockets take the time of the table, or longer on a busy machine.


@pytest.fixture
def make_groups():
    made = []

    def make(size: int, text: str) -> list[RingGroup]:
        store, names, links = (
            dist.HashStore(),
            [10 + rank for rank in range(size)],
            read_links(text),
        )

        def join(rank: int) -> RingGroup:
            timeout, schedule = timedelta(seconds=30), Schedule(links)
            return RingGroup(SlowWire(store, rank, size, timeout, names, schedule=schedule))

        groups = on_all(range(size), join)
        made.extend(groups)
        return groups

    yield make
    for group in made:
        group.abort()
    assert eventually(lambda: not wire_threads()), wire_threads()


@pytest.mark.parametrize("nbytes", [0, 1000, 50_000])
def test_a_message_is_not_early(make_groups, nbytes):
    zero, one = make_groups(2, "10-11 30ms 1MB")  # global ranks, not ranks in the group
    begun = time.monotonic()
    sent = zero.send([torch.arange(nbytes, dtype=torch.uint8)], 1, 0)
    x = torch.empty(nbytes, dtype=torch.uint8)
    received = one.recv([x], 0, 0)
    sent.wait()
    assert time.monotonic() - begun >= nbytes / 1e6
    received.wait()
    assert time.monotonic() - begun >= 30e-3 + nbytes / 1e6
    assert torch.equal(x, torch.arange(nbytes, dtype=torch.uint8))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_all_reduce_is_not_early(make_groups, size):
    groups = make_groups(size, "default 10ms 1MB")
    numel = 1000 * size
    begun = time.monotonic()
    found = on_all(groups, lambda g: g.allreduce([torch.ones(numel)]).get_future().wait()[0])
    formula = 2 * (size - 1) * (10e-3 + 4 * numel / (size * 1e6))
    assert time.monotonic() - begun >= formula
    for x in found:
        assert torch.equal(x, torch.full((numel,), float(size)))


def test_groups_share_a_link():
    store, schedule = dist.HashStore(), Schedule(read_links("default 0 1MB"))

    def join(place):
        rank, name = place
        prefixed = dist.PrefixStore(name, store)
        return SlowWire(prefixed, rank, 2, timedelta(seconds=30), [0, 1], schedule)

    wires = on_all([(0, "a"), (1, "a"), (0, "b"), (1, "b")], join)
    begun = time.monotonic()
    for wire in wires[::2]:
        wire.send(1, TAGGED, 0, torch.zeros(50_000, dtype=torch.uint8))
    for wire in wires[1::2]:
        wire.expect(0, TAGGED, 0).result(30)
    assert time.monotonic() - begun >= 2 * 50_000 / 1e6
    for wire in wires:
        wire.cut()


def test_who_leaves_is_not_gone_before_its_last_message(make_groups):
    """A connection may end long before its messages are due."""
    groups = make_groups(2, "default 0 unlimited; 11>10 200ms unlimited")

    def leave(group):
        group.barrier().wait()
        group.shutdown()

    assert on_all(groups, leave) == [None, None]


def test_a_dead_rank_is_named(make_groups):
    groups = make_groups(2, "default 5ms 1MB")
    groups[1].abort()
    with pytest.raises(dist.DistBackendError, match="rank 11 is gone"):
        groups[0].barrier().wait()


# The script.

USES_IT = """
import sys, time
import links, torch, torch.distributed as dist
dist.init_process_group("gloo")
sub = dist.new_group(backend="gloo")
x = torch.ones(1)
dist.barrier()
begun = time.monotonic()
dist.all_reduce(x, group=sub)
slow = time.monotonic() - begun >= 0.02  # the second half is sent after ours has arrived
if dist.get_rank() == 0:
    print(dist.get_backend(), dist.get_backend(sub), x.item(), links.WHOSE, sys.argv[1:], slow)
dist.barrier()
dist.destroy_process_group()
"""


def test_any_script_runs_on_slow_links(tmp_path):
    (tmp_path / "script.py").write_text(USES_IT)
    (tmp_path / "links.py").write_text("WHOSE = 'of the script'\n")
    options = ("--links", "default 20ms unlimited", tmp_path / "script.py", "--links", "3")
    output = pool.run(SCRIPT, *options, ranks=2).check().output
    assert "slow slow 2.0 of the script ['--links', '3'] True" in output


def test_training_is_the_same_on_slow_links():
    script = ROOT / "ddp_basics/minimal.py"
    plain = pool.run(script, "--epochs", 1, ranks=2).check().output.splitlines()
    links = ("--links", "default 1ms 1Gbit")
    result = pool.run(SCRIPT, *links, script, "--epochs", 1, ranks=2).check()
    slow = result.output.splitlines()
    assert (plain[0], slow[0]) == ("2 rank(s) on cpu, gloo", "2 rank(s) on cpu, slow")
    assert slow[1:] == plain[1:]


def test_the_script_measures():
    options = ("--links", "default 1ms 100MB", "--repeats", 1)
    lines = pool.run(SCRIPT, *options, ranks=2).check().output.splitlines()
    assert "1. One message, rank 0 to 1: latency 1 ms, 100 MB/s" in lines
    assert "2. all_reduce of n bytes on a ring of 2" in lines
    rows = [line.replace(",", "").split() for line in lines]
    rows = [[float(word) for word in row] for row in rows if len(row) == 4 and row[0].isdigit()]
    formulas = [1 + n / 1e5 for n in (10**3, 10**5, 10**6, 4 * 10**6)]
    assert [row[1] for row in rows] == pytest.approx(
        formulas + [2 * (1 + n / 2e5) for n in (10**3, 10**5, 10**6, 4 * 10**6)], abs=0.006
    )
    assert all(row[2] >= row[1] - 0.01 for row in rows)  # printed with two digits


def test_wrong_links_are_one_sentence():
    result = pool.run(SCRIPT, "--links", "default 1ms fast")
    assert result.returncode == 2
    assert result.output.startswith(
        "slow_backend.py: error: --links: must be a number above 0 with"
    )
    assert result.output.count("\n") == 1
