"""custom_backend/: layers.py and its hooks; minimal.py."""

import re
import socket
from collections import Counter
from types import SimpleNamespace

import pool
import pytest
import sequence
import source_map
import torch
import torch.distributed as dist
import traffic
from helpers import ROOT
from recording_store import RecordingStore
from sequence import Message

HERE = ROOT / "custom_backend"
BYTES = 4000
LINE = re.compile(r" *(\d+)  (.+?) +-> (.+?)  +(.+?)(?:  +(\d+))?")


def messages(output: str, title: str) -> list[SimpleNamespace]:
    lines = output[output.index(title) :].split("\n\n")[0].splitlines()[2:]
    found = [LINE.fullmatch(line).groups() for line in lines]
    names = ("at", "sender", "receiver", "what", "took")
    return [
        SimpleNamespace(
            **dict(zip(names, (int(at), sender, to, what, int(took or 0)), strict=True))
        )
        for at, sender, to, what, took in found
    ]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> SimpleNamespace:
    picture = tmp_path_factory.mktemp("layers") / "layers.png"
    command = (HERE / "layers.py", "--device", "cpu", "--picture", picture)
    output = pool.run(*command, ranks=2).check().output
    return SimpleNamespace(
        output=output,
        picture=picture,
        meeting=messages(output, "1. init_process_group"),
        call=messages(output, "2. dist.all_reduce"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_meet_in_the_store(job, rank):
    """Each rank writes its address under its own key, waits for the peer's key, and reads it."""
    mine = [m for m in job.meeting if m.sender == f"rank {rank}"]
    assert mine[0].what.startswith("rendezvous: connect to 127.0.0.1:")
    assert mine[1].what == 'init_process_group("gloo")'
    assert mine[-1].what.startswith("joined")
    asked = {re.sub(r", \d+ bytes", "", m.what): m for m in mine}
    (own,) = [what[4:] for what in asked if what.startswith("set ")]
    other = own[:-1] + str(1 - rank)
    assert own.endswith(f"/{rank}")
    (theirs,) = [m for m in job.meeting if m.what.startswith(f"set {other}, ")]
    assert theirs.sender == f"rank {1 - rank}"
    wait, read = asked[f"wait {other}"], asked[f"get {other}"]
    assert wait.at <= read.at
    assert wait.at + wait.took >= theirs.at  # it had to wait for the peer to write
    assert read.what.removeprefix("get") == theirs.what.removeprefix("set")  # key and size


def test_the_call_passes_all_layers(job):
    """Down through the layers, and back with a Work; a thread of the backend completes it."""
    paths = Counter((m.sender, m.receiver) for m in job.call)
    for path in (
        ("script", "distributed_c10d.py"),
        ("distributed_c10d.py", "ProcessGroup"),
        ("ProcessGroup", "dispatcher"),
        ("dispatcher", "ProcessGroupGloo"),
        ("dispatcher", "ProcessGroup"),
        ("distributed_c10d.py", "script"),
    ):
        assert paths[path] == 1, path
    at = {m.what: m.at for m in job.call}
    down = ["allreduce()", "c10d.allreduce_.default", "gloo:all_reduce", "tensors, Work", "Work"]
    down += ["wait()", "wait() returns"]
    assert [at[what] for what in down] == sorted(at[what] for what in down)
    (done,) = [m for m in job.call if m.what == "done"]
    assert done.sender != "thread python"
    assert re.search(r"\nthe backend for cpu +ProcessGroupGloo\n", job.output)
    assert re.search(r"\nits kernel +for the key CPU, from Ops.cpp:\d+\n", job.output)


def test_bytes_on_the_wire(job):
    """On a ring of two, each rank sends the tensor once, plus a few bytes of Gloo."""
    (sent,) = [m for m in job.call if m.receiver == "rank 1"]
    (received,) = [m for m in job.call if m.sender == "rank 1"]
    for message in (sent, received):
        size = int(message.what.partition(" ")[0].replace(",", ""))
        assert BYTES <= size < 1.3 * BYTES


def test_picture(job):
    assert f"saved {job.picture}" in job.output
    assert job.picture.read_bytes().startswith(b"\x89PNG")
    assert job.picture.stat().st_size > 50_000


def test_a_world_of_one():
    output = pool.run(HERE / "layers.py", "--elements", "3", "--device", "cpu").check().output
    assert "1 rank(s) on cpu, gloo\n" in output
    assert "rendezvous: connect to itself" in output
    assert "2. dist.all_reduce of 12 bytes, rank 0" in output


def test_messages_are_drawn_where_they_belong():
    import matplotlib.pyplot as plt

    said = [Message(2.0, "b", "c", "later"), Message(1.0, "a", "b", "first", took=5e-6)]
    figure, ax = plt.subplots()
    sequence.draw_one(ax, "who", said)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0 us", "1,000,000 us"]
    arrows = [(text.xyann, text.xy) for text in ax.texts if hasattr(text, "xyann")]
    assert arrows == [((0, 0), (1, 0)), ((1, 1), (2, 1))]  # from, to: (column, line)
    words = [text.get_text() for text in ax.texts if text.get_text()]
    assert words == ["first, 5 us", "later"]
    plt.close(figure)


def test_table_is_in_the_order_of_time(capsys):
    said = [Message(2.0, "bb", "c", "later"), Message(1.0, "a", "bb", "first", took=5e-6)]
    sequence.print_sequence("who", said)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "who",
        "time (us)  from    to  what   took (us)",
        "        0  a    -> bb  first          5",
        "  1000000  bb   -> c   later",
    ]


def test_store_hears_what_cpp_asks():
    """PrefixStore is C++, and calls the Python methods of the store that it was given."""
    store = RecordingStore(dist.HashStore(), "me")
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("key", "value")
    assert prefixed.get("key") == b"value"
    assert prefixed.add("count", 2) == 2
    prefixed.wait(["key"])
    assert [m.what for m in store.messages] == [
        "set p/key, 5 bytes",
        "get p/key, 5 bytes",
        "add p/count",
        "wait p/key",
    ]
    assert all(m.took >= 0 and m.sender == "me" for m in store.messages)


def test_wire_counts_bytes():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client, server.accept()[0] as other:
            before = traffic.traffic()
            client.sendall(b"x" * 1234)
            other.recv(1234, socket.MSG_WAITALL)
            other.sendall(b"y" * 10)
            client.recv(10, socket.MSG_WAITALL)
            found = traffic.by_peer(before, traffic.traffic(), {address: "server"})
            assert found == {"server": (1234, 10)}


def test_source_map():
    rows = source_map.source_map()
    assert len(rows) >= 12
    if torch.__version__.startswith("2.15"):  # older versions may have other files
        assert [name for name, lines, _ in rows if not lines] == []
    lines = next(n for name, n, _ in rows if name == "distributed/distributed_c10d.py")
    source = dist.distributed_c10d.__file__
    with open(source, encoding="utf-8") as file:
        assert lines == len(file.readlines())


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_minimal(ranks):
    output = pool.run(HERE / "minimal.py", ranks=ranks).check().output
    found = re.search(rf"^{ranks} ranks, store: gradients off by (\S+)$", output, re.MULTILINE)
    assert float(found[1]) < 1e-6


@pytest.mark.parametrize("operation", ["MAX", "AVG", "PRODUCT"])
def test_minimal_refuses_what_is_no_sum(operation, tmp_path):
    """It computes sums only: another result would be wrong, without an error."""
    script = tmp_path / "other.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import torch, torch.distributed as dist\n"
        "from minimal import StoreGroup\n"
        "dist.Backend.register_backend('store', StoreGroup, devices=['cpu'])\n"
        "dist.init_process_group('store')\n"
        f"dist.all_reduce(torch.ones(2), dist.ReduceOp.{operation})\n"
    )
    result = pool.run(script, ranks=2)
    assert result.returncode == 1
    assert "AssertionError: store: all_reduce knows SUM only" in result.output
