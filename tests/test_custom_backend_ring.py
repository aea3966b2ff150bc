"""ring/collectives.py over the sockets of ring/wire.py, called as PyTorch calls them.

Most tests run all ranks as threads of this process: they test the group, and starting processes
costs seconds. workers/custom_backend_ring.py runs processes that test DDP, FSDP2, DTensor, objects
and new_group on the group.
"""

import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import reduce
from types import SimpleNamespace

import checks
import pool
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT
from ring import collectives as ring
from ring import connecting
from ring.group import RingGroup
from ring.wire import COLLECTIVE, TAGGED, Wire
from thread_groups import eventually, on_all, wire_threads

OPS = dist.ReduceOp
SIZES = (0, 1, 3, 64, 1001)
each_world = pytest.mark.parametrize("size", [1, 2, 3, 4])


@pytest.fixture
def make_groups():
    """make(size): a group of `size` ranks in this process."""
    made = []

    def make(size: int) -> list[RingGroup]:
        store, names = dist.HashStore(), list(range(size))

        def join(rank: int) -> RingGroup:
            return RingGroup(Wire(store, rank, size, timedelta(seconds=20), names))

        groups = on_all(range(size), join)
        made.extend(groups)
        return groups

    yield make
    for group in made:
        group.abort()
    assert eventually(lambda: not wire_threads()), wire_threads()


def all_reduce(group, x, op=OPS.SUM):
    opts = dist.AllreduceOptions()
    opts.reduceOp = op
    group.allreduce([x], opts).wait()
    return x


# Results of the collectives.

DTYPES = {
    torch.float32: "SUM AVG PRODUCT MIN MAX",
    torch.float64: "SUM AVG PRODUCT MIN MAX",
    torch.bfloat16: "SUM AVG PRODUCT MIN MAX",
    torch.float16: "SUM AVG PRODUCT MIN MAX",
    torch.int64: "SUM PRODUCT MIN MAX BAND BOR BXOR",
    torch.uint8: "SUM PRODUCT MIN MAX BAND BOR BXOR",
    torch.bool: "SUM PRODUCT MIN MAX BAND BOR BXOR",
    torch.complex64: "SUM AVG PRODUCT",
}
PLAIN = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@pytest.mark.slow
@each_world
def test_all_reduce_of_every_type(make_groups, size):
    groups = make_groups(size)
    for dtype, names in DTYPES.items():
        for name in names.split():
            for numel in SIZES:
                every = [checks.mine(rank, numel, dtype) for rank in range(size)]
                expected = reduce(PLAIN[name], every)
                if name == "AVG":
                    expected = expected / size
                op = getattr(OPS, name)
                found = on_all(groups, lambda g, x=every, op=op: all_reduce(g, x[g.rank()], op))
                for got in found:
                    assert torch.equal(got, expected), (dtype, name, numel, got)


@each_world
def test_tensors_with_gaps_and_shapes(make_groups, size):
    def run(group):
        x = torch.zeros(6, 5)
        view = x.t()[1:4, ::2]
        view += group.rank() + 1
        all_reduce(group, view)
        leaf = torch.ones(2, 2, requires_grad=True)
        with torch.no_grad():
            all_reduce(group, leaf)
        with torch.inference_mode():
            inference = torch.ones(3)
        all_reduce(group, inference)
        return x, leaf, inference, all_reduce(group, torch.tensor(2.0))

    expected = torch.zeros(6, 5)
    expected.t()[1:4, ::2] = size * (size + 1) / 2
    for x, leaf, inference, scalar in on_all(make_groups(size), run):
        assert torch.equal(x, expected)
        assert torch.equal(leaf, torch.full((2, 2), float(size)))
        assert torch.equal(inference, torch.full((3,), float(size)))
        assert scalar == 2 * size


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_every_second_element(make_groups, dtype):
    """1-D with gaps, as input and as output: the elements between them stay."""

    def run(group):
        rank, x = group.rank(), torch.zeros(8, dtype=dtype)
        x[::2] = torch.tensor([1, 0, 0, 1]) if rank else torch.tensor([0, 0, 1, 1])
        outputs = torch.zeros(2, 8, dtype=dtype)
        group.allgather([[outputs[0, ::2], outputs[1, ::2]]], [x[::2]]).wait()
        options, gathered = dist.GatherOptions(), torch.zeros(2, 8, dtype=dtype)
        parts = [[gathered[0, ::2], gathered[1, ::2]]] if rank == 0 else []
        group.gather(parts, [x[::2]], options).wait()
        options, mine = dist.ScatterOptions(), torch.zeros(8, dtype=dtype)
        group.scatter([mine[::2]], [[x[::2], x[::2]]] if rank == 0 else [], options).wait()
        return outputs, gathered, mine

    expected = torch.zeros(2, 8, dtype=dtype)
    expected[0, ::2], expected[1, ::2] = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 0, 0, 1])
    for rank, (outputs, gathered, mine) in enumerate(on_all(make_groups(2), run)):
        assert torch.equal(outputs, expected)
        assert torch.equal(gathered, expected if rank == 0 else torch.zeros_like(expected))
        assert torch.equal(mine, expected[0])


@each_world
def test_all_ranks_hold_the_same_bits(make_groups, size):
    """Each part is added up in one order, so no two ranks differ in the last bit."""

    def run(group):
        generator = torch.Generator().manual_seed(group.rank())
        return all_reduce(group, torch.randn(1001, generator=generator))

    first, *others = on_all(make_groups(size), run)
    every = [torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    exact = reduce(torch.add, [x.double() for x in every])
    # Each of size - 1 additions rounds by at most half a unit in the last place of its result.
    limit = (
        (size - 1) * torch.finfo(torch.float32).eps * reduce(torch.add, [x.abs() for x in every])
    )
    assert all(torch.equal(first, other) for other in others)
    assert ((first.double() - exact).abs() <= limit).all()


@each_world
def test_bytes_are_those_of_the_formula(make_groups, size):
    groups = make_groups(size)
    for numel in (0, 1, 12, 1201):
        before = [group.wire.bytes_sent for group in groups]
        on_all(groups, lambda g, n=numel: all_reduce(g, torch.zeros(n)))
        sent = [g.wire.bytes_sent - b for g, b in zip(groups, before, strict=True)]
        assert sum(sent) == 2 * (size - 1) * numel * 4  # p ranks, 2 (p-1)/p n each
        assert max(sent) - min(sent) <= 2 * 4  # unequal parts differ by one element


def test_pieces_of_a_broadcast(make_groups, monkeypatch):
    monkeypatch.setattr(ring, "PIECE", 40)  # 10 elements, so 104 elements are 11 pieces
    opts, reduce_opts = dist.BroadcastOptions(), dist.ReduceOptions()
    opts.rootRank = reduce_opts.rootRank = 1

    def run(group):
        x, y = torch.arange(104.0) + group.rank(), torch.ones(104)
        group.broadcast([x], opts).wait()
        group.reduce([y], reduce_opts).wait()
        return x, y

    found = on_all(make_groups(3), run)
    for rank, (x, y) in enumerate(found):
        assert torch.equal(x, torch.arange(104.0) + 1)
        assert torch.equal(y, torch.full((104,), 3.0 if rank == 1 else 1.0))


@each_world
def test_empty_tensors(make_groups, size):
    def run(group):
        empty = torch.empty(0)
        group.all_gather_single(empty, empty).wait()
        group.reduce_scatter_single(torch.empty(0, 3), torch.empty(0, 3)).wait()
        group.all_to_all_single(empty, empty, [], []).wait()
        group.barrier().wait()
        return all_reduce(group, torch.empty(0, 4)).shape

    assert on_all(make_groups(size), run) == [(0, 4)] * size


# The order of calls.


def test_all_reduce_and_send_in_any_order(make_groups):
    """Rank 0: async all_reduce, then send. Rank 1: recv, then all_reduce."""

    def run(group):
        x, message = torch.ones(3), torch.full((2,), 7.0)
        if group.rank() == 0:
            work = group.allreduce([x])
            group.send([message], 1, 0).wait()
            work.wait()
        else:
            message.zero_()
            group.recv([message], 0, 0).wait()
            group.allreduce([x]).wait()
        return x.tolist(), message.tolist()

    assert on_all(make_groups(2), run) == [([2.0] * 3, [7.0] * 2)] * 2


def test_groups_do_not_wait_for_each_other(make_groups):
    one, other = make_groups(2), make_groups(2)
    pairs = list(zip(one, other, strict=True))

    def run(group):
        a, b = pairs[group.rank()]
        x, y = torch.ones(1), torch.ones(1)
        if group.rank() == 0:
            work = a.allreduce([x])
            b.allreduce([y]).wait()
            work.wait()
        else:
            work = b.allreduce([y])
            a.allreduce([x]).wait()
            work.wait()
        return float(x + y)

    assert on_all(one, run) == [4.0, 4.0]


def test_many_at_once_end_in_order(make_groups):
    def run(group):
        tensors = [torch.full((50,), float(i)) for i in range(40)]
        works = [group.allreduce([x]) for x in tensors]
        for work in reversed(works):
            work.wait()
        return [x[0].item() for x in tensors]

    assert on_all(make_groups(3), run) == [[3.0 * i for i in range(40)]] * 3


@pytest.mark.slow
def test_all_send_before_anybody_receives(make_groups):
    """4 MB each, more than the socket buffers hold. The reading threads take the messages."""

    def run(group):
        to, source = (group.rank() + 1) % 3, (group.rank() - 1) % 3
        for tag in range(4):
            group.send([torch.full((1 << 20,), float(tag))], to, tag).wait()
        got = torch.empty(1 << 20)
        found = []
        for tag in reversed(range(4)):  # receives may use the tags in another order
            group.recv([got], source, tag).wait()
            found.append(got.unique().tolist())
        return found

    assert on_all(make_groups(3), run) == [[[3.0], [2.0], [1.0], [0.0]]] * 3


def test_from_any_source(make_groups):
    def run(group):
        if group.rank() > 0:
            group.send([torch.full((2,), float(group.rank()))], 0, 5).wait()
            return None
        found = {}
        for _ in range(2):
            x = torch.empty(2)
            work = group.recv_anysource([x], 5)
            work.wait()
            found[work.source_rank()] = x.tolist()
        return found

    assert on_all(make_groups(3), run)[0] == {1: [1.0, 1.0], 2: [2.0, 2.0]}


def test_work_says_how_it_is(make_groups):
    zero, one = make_groups(2)
    x = torch.ones(2)
    work = zero.allreduce([x])
    future = work.get_future()
    assert not work.is_completed()
    assert not future.done()
    assert not work.is_success()
    with pytest.raises(dist.DistBackendError, match=r"all_reduce float32 SUM.*after 0.05 s"):
        work.wait(timedelta(seconds=0.05))
    one.allreduce([torch.ones(2)]).wait()
    assert future.wait()[0] is x  # DDP needs the tensors
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert x.tolist() == [2.0, 2.0]


# Failures.


def give_up_after(seconds: float, groups: list) -> list:
    """From now on: to join may take longer than that, on a busy machine."""
    for group in groups:
        group.set_timeout(timedelta(seconds=seconds))
    return groups


def messages(found: list) -> list[str]:
    assert all(isinstance(error, dist.DistBackendError) for error in found), found
    return [str(error) for error in found]


def test_a_missing_rank_is_named(make_groups):
    """On a ring every rank waits for its neighbour; the late rank is another one."""
    groups = make_groups(4)
    on_all(groups, lambda g: all_reduce(g, torch.ones(3)))
    give_up_after(0.5, groups)
    found = messages(on_all(groups[:2] + groups[3:], lambda g: g.barrier().wait()))
    for rank, text in zip((0, 1, 3), found, strict=True):
        assert text == (
            f"rank {rank}, barrier (collective number 1 of this group): not done after 0.5 s. "
            "rank 2 has not begun it (its last: all_reduce float32 SUM, number 0)"
        )


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named(make_groups, monkeypatch):
    """Within running.PATIENCE; the others do, also on a busy machine."""
    groups = give_up_after(0.5, make_groups(3))
    monkeypatch.setattr(groups[1].wire, "arrive", lambda message: None)  # as if it were stopped
    found = messages(on_all(groups[::2], lambda g: g.barrier().wait()))
    assert all(text.endswith("rank 1 does not answer") for text in found), found


def test_a_slow_network_is_told_from_a_missing_rank(make_groups, monkeypatch):
    groups = give_up_after(0.5, make_groups(2))
    arrive = groups[1].wire.arrive
    collectives_get_lost = lambda m: None if m.kind == COLLECTIVE else arrive(m)  # noqa: E731
    monkeypatch.setattr(groups[1].wire, "arrive", collectives_get_lost)
    found = messages(on_all(groups[1:], lambda g: (groups[0].barrier(), g.barrier().wait())))
    assert "All ranks have begun it" in found[0]


def test_receive_names_who_sends_nothing(make_groups):
    groups = give_up_after(0.2, make_groups(2))
    found = on_all(groups[:1], lambda g: g.recv([torch.empty(1)], 1, 3).wait())
    assert messages(found) == ["receive from rank 1, tag 3: not done after 0.2 s"]


def test_a_dead_rank_is_named_at_once(make_groups):
    groups = make_groups(4)

    def run(group):
        if group.rank() == 2:
            group.abort()  # its connections end, as when the kernel closes them
        return group.barrier().wait()

    found = messages(on_all(groups[:2] + groups[3:] + groups[2:3], run)[:3])
    assert all(
        "barrier" in text and "rank 2 is gone: its connection has ended" in text for text in found
    ), found
    found = messages(on_all(groups[:1], lambda g: g.send([torch.ones(1 << 20)], 2, 0).wait()))
    assert re.match(r"send to rank 2, tag 0: rank 2 is gone", found[0])
    found = messages(on_all(groups[:1], lambda g: g.recv([torch.ones(1)], 2, 0).wait()))
    assert re.match(r"receive from rank 2, tag 0: rank 2 is gone", found[0])


def test_the_first_death_is_named_also_by_who_hears_of_the_second_first(make_groups, monkeypatch):
    """Rank 1 dies, then rank 2 because of it, before rank 0 sees the end of rank 1's connection."""
    lose, tell, told = Wire.lose, Wire.tell_others, []
    monkeypatch.setattr(
        Wire, "lose", lambda w, peer, why: (w.rank, peer) == (0, 1) or lose(w, peer, why)
    )
    monkeypatch.setattr(
        Wire, "tell_others", lambda w, dead, why: told.append((w.rank, dead)) or tell(w, dead, why)
    )
    groups = make_groups(3)
    waits = [group.barrier() for group in (groups[0], groups[2])]
    groups[1].abort()
    found = messages(on_all([waits[1]], lambda work: work.wait()))
    groups[2].abort()
    found += messages(on_all([waits[0]], lambda work: work.wait()))
    for rank, text in zip((2, 0), found, strict=True):
        assert re.match(rf"rank {rank}, barrier .*: rank 1 is gone: its connection has ended", text)
    assert eventually(
        lambda: not any(reader.is_alive() for reader in groups[1].wire.readers.values())
    )
    assert told == [(2, 1)]  # rank 2 tells once; aborting and told ranks do not


def test_who_has_left_is_missed_only_by_those_who_want_something(make_groups):
    groups = make_groups(3)
    groups[2].send([torch.ones(1)], 0, 0)
    groups[2].shutdown()
    assert eventually(lambda: all(g.wire.inbox.why_lost(2) for g in groups[:2]))
    x = torch.zeros(1)
    groups[0].recv([x], 2, 0).wait()  # messages sent before still arrive
    assert x == 1
    works = [groups[0].send([x], 1, 0), groups[1].recv([x], 0, 0)]
    assert all(work.wait() for work in works)
    found = messages(on_all(groups[:1], lambda g: g.barrier().wait()))
    assert found[0].endswith("rank 2 has left the group")


def test_who_leaves_has_no_thread_any_more(make_groups):
    """Other ranks continue. A thread inside PyTorch when Python exits would abort the process."""
    groups = make_groups(3)
    on_all(groups, lambda group: group.barrier().wait())
    groups[2].shutdown()
    wire = groups[2].wire
    threads = [groups[2].thread, *wire.writers, *wire.readers.values()]
    assert [thread.name for thread in threads if thread.is_alive()] == []
    works = [groups[0].send([torch.ones(1)], 1, 0), groups[1].recv([torch.zeros(1)], 0, 0)]
    assert all(work.wait() for work in works)


def test_who_leaves_finishes_what_it_has_begun(make_groups):
    def run(group):
        x = torch.ones(1 << 20)
        work = group.allreduce([x])
        group.shutdown()
        assert work.wait()
        with pytest.raises(dist.DistBackendError, match="barrier: this rank has left the group"):
            group.barrier()
        return x.unique().tolist()

    assert on_all(make_groups(3), run) == [[3.0]] * 3


def test_other_operations_are_told_apart(make_groups):
    def run(group):
        if group.rank() == 0:
            return all_reduce(group, torch.ones(4))
        return all_reduce(group, torch.ones(4, dtype=torch.int32), OPS.MAX)

    found = messages(on_all(make_groups(2), run))
    assert found[0].endswith("rank 1 has called all_reduce int32 MAX instead")
    assert found[1].endswith("rank 0 has called all_reduce float32 SUM instead")


def test_other_sizes_are_told_apart(make_groups):
    found = on_all(make_groups(2), lambda g: all_reduce(g, torch.ones(4 + 2 * g.rank())))
    assert messages(found)[0].endswith("rank 1 has sent 12 bytes, 8 were expected")
    assert messages(found)[1].endswith("rank 0 has sent 8 bytes, 12 were expected")


@pytest.mark.slow
def test_a_rank_that_found_an_error_is_named_after_the_timeout(make_groups):
    """Of 3 and 4 numbers, rank 0 gets a part of the right size, and waits for the next one."""
    groups = give_up_after(2, make_groups(2))
    found = messages(on_all(groups, lambda g: all_reduce(g, torch.ones(3 + g.rank()))))
    assert found[0].endswith("not done after 2 s. rank 1 has failed in it: read its own error")
    assert found[1].endswith("rank 0 has sent 4 bytes, 8 were expected")


def test_wrong_receives(make_groups):
    groups = make_groups(2)
    groups[0].send([torch.ones(3)], 1, 0)
    groups[0].send([torch.ones(3)], 1, 1)
    found = on_all(groups[1:], lambda g: g.recv([torch.empty(3, dtype=torch.int32)], 0, 0).wait())
    assert "has sent torch.float32, expected was torch.int32" in messages(found)[0]
    found = on_all(groups[1:], lambda g: g.recv([torch.empty(2)], 0, 1).wait())
    assert "rank 0 has sent 12 bytes, 8 were expected" in messages(found)[0]


def test_an_error_reaches_the_future(make_groups):
    zero, one = make_groups(2)
    future = zero.allreduce([torch.ones(1)]).get_future()
    one.abort()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        future.wait()


def test_what_cannot_be_done_is_said_at_once(make_groups):
    (group,) = make_groups(1)
    with pytest.raises(ValueError, match=r"AVG of torch.int64"):
        all_reduce(group, torch.ones(1, dtype=torch.int64), OPS.AVG)
    with pytest.raises(ValueError, match="the ring knows SUM, AVG"):
        group.allreduce([torch.ones(1)], SimpleNamespace(reduceOp="PREMUL_SUM"))
    two = make_groups(2)[0]
    with pytest.raises(ValueError, match="3 elements or rows for 2 ranks"):
        two.all_gather_single(torch.ones(3), torch.ones(1))
    with pytest.raises(ValueError, match="3 rows for 2 ranks"):
        two.all_to_all_single(torch.ones(3, 2), torch.ones(3, 2), [], [])


# Connecting the ranks.


def test_a_rank_that_does_not_join_is_named():
    store, names = dist.HashStore(), [10, 11, 12]
    seconds = timedelta(seconds=0.3)
    with pytest.raises(dist.DistBackendError, match=r"rank 10 did not join the group within 0.3 s"):
        Wire(store, 1, 3, seconds, names)
    with pytest.raises(dist.DistBackendError, match=r"no connection from rank\(s\) \[11, 12\]"):
        Wire(dist.HashStore(), 0, 3, seconds, names)


def test_an_address_of_nobody():
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store.set("address_0", f"127.0.0.1 {port} secret")  # an address left by an earlier job
    with pytest.raises(dist.DistBackendError, match=r"rank 1 cannot reach rank 0 at 127.0.0.1"):
        Wire(store, 1, 2, timedelta(seconds=5), [0, 1])


def test_strangers_are_sent_away(make_groups, monkeypatch):
    monkeypatch.setattr(connecting, "PATIENCE", 0.5)
    store, seconds = dist.HashStore(), timedelta(seconds=20)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Wire, store, 0, 2, seconds, [0, 1])
        store.wait(["address_0"], seconds)
        host, port, _ = store.get("address_0").decode().split()
        for greeting in (b"", b"GET / HTTP/1.0", bytes(40)):
            with socket.create_connection((host, int(port)), 10) as stranger:
                stranger.sendall(greeting)
        with socket.create_connection((host, int(port)), 10) as stranger:  # hangs up with a reset
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        silent = socket.create_connection((host, int(port)), 10)
        second = threads.submit(Wire, store, 1, 2, seconds, [0, 1])
        wires = [first.result(30), second.result(30)]
    wires[0].send(1, TAGGED, 0, torch.arange(3))
    assert wires[1].expect(0, TAGGED, 0).result(20).data.view(torch.int64).tolist() == [0, 1, 2]
    for wire in wires:
        wire.cut()
    silent.close()


# PyTorch on top of it: "ring" as the backend of a job of 4 processes.

WORKER = ROOT / "tests/workers/custom_backend_ring.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    """What each of 4 ranks recorded, in rank order."""
    folder = tmp_path_factory.mktemp("ring")
    pool.run(WORKER, folder, ranks=4, timeout=150).check()
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def test_operations_in_groups(seen):
    for rank in seen:
        for (members, numel), found in rank["operations"].items():
            wrong = [operation for operation, right in found.items() if not right]
            assert not wrong, (members, numel)
            assert len(found) == 10 + (len(members) > 1)
    assert {len(members) for rank in seen for members, _ in rank["operations"]} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    "what", ["objects", "batch", "coalesced", "functional", "dtensor", "names"]
)
def test_what_pytorch_builds_on_groups(seen, what):
    for rank in seen:
        assert rank[what] == rank[f"{what}, expected"], what


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_is_that_of_gloo(seen, strategy, world):
    """The last gradients and the parameters after 4 steps of SGD with momentum.

    On two ranks they are bit-identical, since a + b = b + a. On more ranks each backend adds in
    another order, which may change the last bit of a gradient (about 0.1 here, so 1e-8); 4 steps
    add that up.
    """
    limit = 0.0 if world <= 2 else 1e-7
    for rank in seen[:world]:
        ours, gloo = (rank["training"][strategy, world, backend] for backend in ("ring", "gloo"))
        assert ours.keys() == gloo.keys()
        assert len(ours) == 4 + 5  # parameters and gradients; one parameter is unused
        for name in ours:
            assert (ours[name] - gloo[name]).abs().max() <= limit, name
            assert gloo[name].abs().max() > 1e-3, name  # not all zeros


def test_the_script():
    script = ROOT / "custom_backend/ring_backend.py"
    output = pool.run(script, "--numel", 1001, "--steps", 2, ranks=2).check().output
    assert output.count("yes, on all ranks") == 11
    assert "rank 1: 4,004\n" in output
    assert "formula 2 (p-1)/p n: 4,004.0" in output
    assert output.count("0.0e+00") == 2


def test_a_process_that_dies_is_named():
    """A rank exits inside DDP without a message, which looks like kill -9 to other ranks.

    The error passes through DDP's C++ code, which would take a Python object for a result.
    """
    output = pool.run(WORKER, "dies", ranks=3, timeout=60).check().output
    for survivor in (0, 2):
        what = rf"rank {survivor}, all_reduce float32 SUM .*: rank 1 is gone"
        assert re.search(rf"rank {survivor} has seen: .*{what}", output), output
