"""custom_backend/shm: ranks that die, are late, make other calls, fork, leave."""

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pool
import pytest
import torch.distributed as dist
from helpers import REPEAT, ROOT, python

pytest.importorskip("shm", exc_type=RuntimeError)  # RuntimeError: no compiler
from shm import backend

WORKER = ROOT / "tests" / "workers" / "shm_faults.py"
EXITS = ROOT / "tests" / "workers" / "shm_exits.py"
SOON = 5  # seconds; usually milliseconds, which test_a_killed_rank prints


def run(case: str, folder: Path, ranks: int) -> list:
    """The files that the ranks saved, None for a rank that saved none."""
    pool.run(WORKER, case, folder, ranks=ranks, timeout=100).check()
    return saved(folder, ranks)


def saved(folder: Path, ranks: int) -> list:
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


# ---- a rank dies


@pytest.mark.parametrize("call", ["all_reduce", "zero_copy", "barrier", "recv", "send", "future"])
@pytest.mark.slow
def test_a_killed_rank_is_named_at_once(tmp_path, call):
    milliseconds = []
    for turn in range(REPEAT):
        folder = tmp_path / str(turn)
        folder.mkdir()
        first, second, killed = run(f"dies:{call}", folder, 3)
        died = float((folder / "died").read_text())
        assert killed is None
        for rank in (first, second):
            assert re.search(
                r"shm: rank 2 \(.*\) has died; rank [01] .* noticed it", rank["message"]
            )
            assert rank["again"] == rank["message"]  # the group stays broken
            assert rank["noticed"] - died < SOON
        milliseconds.append(1000 * (max(first["noticed"], second["noticed"]) - died))
    print(f"{call}: {statistics.median(milliseconds):.1f} ms until the last rank had noticed it")


def test_a_rank_killed_at_any_moment(tmp_path):
    """Ten moments with REPEAT=4 or more; no rank hangs."""
    for seed in range(min(3 * REPEAT, 10)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        *others, killed = run(f"dies_any_time:{seed}", folder, 3)
        assert killed is None
        for rank in others:
            assert "rank 2" in rank["message"]
            assert "has died" in rank["message"]


def test_nothing_is_left_when_all_are_killed(tmp_path):
    """Of what the ranks had open or mapped. (Other tests have files in /dev/shm, too.)"""
    assert pool.run(WORKER, "all_die", tmp_path, ranks=3).returncode == -9
    held = saved(tmp_path, 3)
    assert [rank["sum"] for rank in held] == [3.0] * 3
    for rank in held:
        assert any("memfd:torch shm" in file for file in rank["files"]), rank  # it was looked at
        assert [file for file in rank["files"] if os.path.exists(file)] == []
    sockets = Path("/proc/net/unix").read_text().split()
    assert not {inode for rank in held for inode in rank["sockets"]} & {*sockets}


# ---- an operation fails on one rank (test_custom_backend_shm_failures.py: at every place)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_failure_on_one_rank_is_an_error_on_all(tmp_path, ranks):
    for rank in run("unmapped", tmp_path, ranks):
        for message in rank["messages"]:
            assert re.match(
                r"shm: rank 1 failed in all_reduce \(its operation 1\): mapping \d+ MiB of shared "
                r"memory failed: Cannot allocate memory",
                message,
            ), rank
        assert rank["y"] == 1  # the later call did not begin


def test_inference_mode_reaches_the_thread_of_an_asynchronous_call(tmp_path):
    for rank in run("inference", tmp_path, 2):
        assert rank == [[2.0] * 6] * 4


def test_a_future_completes_before_the_next_operation_begins(tmp_path):
    assert run("called_back", tmp_path, 2) == ["", ""]


def test_a_callback_may_hold_the_last_reference_to_its_group(tmp_path):
    assert run("last_reference", tmp_path, 2) == [[2.0] * 3] * 2


def test_memory_that_a_late_rank_may_still_write_is_never_used_again(tmp_path):
    (given_up, next_one), _ = run("pinned", tmp_path, 2)
    assert given_up != next_one


# ---- a rank is late, or makes another call


@pytest.mark.slow
def test_a_timeout_names_who_is_missing_and_where(tmp_path):
    """Rank 2 is in recv. Any rank may time out first; all raise the same message."""
    calls = run("late", tmp_path, 3)
    for name in calls[0]:
        messages = {rank[name] for rank in calls if rank[name]}
        assert len(messages) == 1, messages
        message = messages.pop()
        if name in ("all_reduce", "zero_copy", "barrier", "future"):
            where = "barrier" if name == "barrier" else "all_reduce"
            one = rf"rank [01] \(in {where}, its operation 1\) gave up waiting for .*"
            one += r"rank 2 \(in recv, after its operation 0\)"
            two = (
                rf"rank 2 gave up waiting in recv from rank 0 \(in {where}, its operation 1\), 0 of"
            )
            assert re.search(f"shm: timeout: ({one}|{two})", message), message
        else:
            assert re.search("shm: timeout: rank [012] gave up waiting in (send|recv) ", message)


def test_wait_with_a_time_out_raises_and_the_operation_goes_on(tmp_path):
    first, second = run("wait", tmp_path, 2)
    assert re.match(
        r"shm: timeout: rank 0 \(in all_reduce, its operation 1\) waited 500 ms in "
        r"Work.wait\(timeout\) for shm:all_reduce; the operation goes on",
        first["message"],
    )
    assert 0.5 <= first["seconds"] < SOON
    assert first["again"] == ""
    assert first["x"] == second["x"] == [3, 3]


def test_recv_from_any_rank_ends_when_all_others_have_left(tmp_path):
    first, *_ = run("nobody_left", tmp_path, 3)
    for message in first["messages"]:
        assert "waits for a message from any rank, but all other ranks have left" in message
    assert first["seconds"] < SOON


WHAT = {
    "operation": ("all_reduce(float32, 48 bytes, SUM)", "barrier("),
    "dtype": ("float32", "int32"),
    "float8": ("broadcast(float8_e4m3fn,", "broadcast(float8_e5m2,"),
    "size": ("48 bytes", "44 bytes"),
    "size of large": ("400000 bytes", "399996 bytes"),
    "small and large": ("400000 bytes", "48 bytes"),
    "root": ("root 0", "root 1"),
    "ReduceOp": ("SUM", "MAX"),
    "factor": ("PREMUL_SUM by 2", "PREMUL_SUM by 3"),
    "parts": ("24 bytes", "in parts of other sizes"),
    "split": ("sends 16 bytes to rank 1", "expects 8"),
    "message": ("rank 0 sent 12 bytes", "rank 1 receives 16 bytes"),
}


@pytest.fixture(scope="module")
def mismatched(tmp_path_factory) -> list:
    return run("mismatch", tmp_path_factory.mktemp("mismatch"), 3)


@pytest.mark.parametrize("name", WHAT)
def test_calls_that_do_not_match_are_errors_on_every_rank(mismatched, name):
    for rank in mismatched:
        for words in WHAT[name]:
            assert words in rank[name]["message"]
        assert "rank 1" in rank[name]["message"]
        assert rank[name]["again"] == rank[name]["message"]
        assert rank[name]["ms"] < 1000 * SOON


# ---- hosts, users, processes


def test_ranks_on_two_hosts_are_refused(tmp_path):
    for rank in run("hosts", tmp_path, 2):
        message = rank["message"]
        assert message.startswith("shm connects ranks of one host: rank ")
        assert "Take gloo, or nccl, between hosts" in message
        assert "\n" not in message


def test_two_network_namespaces_of_one_host_are_refused_at_once(tmp_path):
    """As in two containers. The kernel's sockets do not connect them."""
    for rank in run("network", tmp_path, 2):
        if rank["message"] == "no new network":
            pytest.skip("only root can make a network namespace")
        assert re.match(
            "shm connects ranks of one network namespace: rank [01] and rank [01] have two, like "
            r"two containers of one host\. .*or take gloo$",
            rank["message"],
        )
        assert rank["seconds"] < 30  # the timeout is 60


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_can_not_join_is_told_to_all(tmp_path, ranks):
    for rank in run("descriptors", tmp_path, ranks):
        assert rank["message"] == ("shm: rank 1 could not join: [Errno 24] Too many open files")
        assert rank["seconds"] < 30


def test_a_rank_that_does_not_join_is_named_after_the_timeout_of_the_group():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))  # of the job
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^shm: rank 1 did not join the group: "):
        backend.create_backend(store, 0, 2, timedelta(seconds=0.3))
    assert time.monotonic() - began < 30


class FakeModule:
    """The functions of the compiled part that a Meeting calls."""

    def __init__(self, name: str):
        self.heap = os.memfd_create(name)

    def heap_fd(self) -> int:
        return self.heap

    def segment_bytes(self, size: int) -> int:
        return 4096 * size

    def prepare_segment(self, descriptor: int, size: int) -> None:
        os.pwrite(descriptor, b"segment", 0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing_and_disturbs_nobody():
    store, modules = dist.HashStore(), [FakeModule(f"heap {rank}") for rank in range(2)]
    strangers = []

    def rank(number: int, found: dict) -> None:
        meeting = backend.Meeting(store, number, 2, timedelta(seconds=60))
        with meeting:
            if number == 1:  # before this rank connects to rank 0
                strangers.append(call_as_nobody(meeting.ranks[0]["socket"]))
            found[number] = meeting.exchange(modules[number])

    found = {}
    threads = [threading.Thread(target=rank, args=(number, found)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert strangers == ["b''"]
    segments, heaps = zip(*(found[number] for number in range(2)), strict=True)
    assert heaps[0][0] == heaps[1][1] == -1
    for descriptor in (*segments, heaps[0][1], heaps[1][0]):
        assert not os.get_inheritable(descriptor)
    assert [os.pread(segment, 7, 0) for segment in segments] == [b"segment"] * 2
    assert os.readlink(f"/proc/self/fd/{heaps[0][1]}") == "/memfd:heap 1 (deleted)"
    for descriptor in (*segments, heaps[0][1], heaps[1][0], *(m.heap for m in modules)):
        os.close(descriptor)


def call_as_nobody(name: str) -> str:
    program = (
        "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(20);"
        f"s.connect(chr(0) + {name!r}); print(s.recv(100))"
    )
    command = [sys.executable, "-S", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()


def test_a_forked_child_is_told_and_the_parent_goes_on(tmp_path):
    for rank in run("fork", tmp_path, 2):
        assert rank["status"] == 0
        assert rank["sum"] == 2
        kept = rank["child"].pop("kept")
        assert kept == [7] * 5
        assert rank["kept"] == [9, 7, 7, 7, 7]  # the child shares the pages of the heap
        assert rank["large"] == [7, 7]  # but frees none of them
        for name, message in rank["child"].items():
            assert "shm: this process was forked from one that uses shm" in message, name


def test_groups_one_after_the_other_leave_nothing(tmp_path):
    for rank in run("again", tmp_path, 3):
        *counts, second_life = rank["counts"]  # of files, threads and mappings
        for early, late in zip(counts[2], counts[-1], strict=True):
            assert late <= early, counts  # less: a thread from the start of the process ended
        # A group starts its second thread when a send has to wait for the first time.
        files, threads, mappings = counts[2]
        for most, late in zip((files, threads + 1, mappings), second_life, strict=True):
            assert late <= most, second_life


@pytest.mark.parametrize("how", ["destroys", "ends", "fails"])
@pytest.mark.timeout(120 + 10 * REPEAT)
def test_programs_end(how):
    """REPEAT=100 proves that no exit aborts."""
    result = python(EXITS, how, REPEAT, timeout=100 + 10 * REPEAT).check()
    expected = "fails 3 0" if how == "fails" else f"{how} 0 0"
    assert result.output.count(expected) == REPEAT, result.output
