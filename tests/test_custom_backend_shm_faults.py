"""custom_backend/shm: ranks that die, are late, make other calls, fork, leave; no compiler."""

import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pool
import pytest
import torch
import torch.distributed as dist
from helpers import REPEAT, ROOT, python
from torch.torch_version import TorchVersion

pytest.importorskip("shm", exc_type=RuntimeError)  # RuntimeError: no compiler
from shm import backend, build

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
    def left() -> set:
        names = Path("/proc/net/unix").read_text()
        return set(os.listdir("/dev/shm")) | set(re.findall(r"@[0-9a-f]{32}$", names, re.M))

    before = left()
    assert pool.run(WORKER, "all_die", tmp_path, ranks=3).returncode == -9
    assert 3.0 in saved(tmp_path, 3)
    assert left() <= before


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
        r"shm: time-out: rank 0 \(in all_reduce, its operation 1\) waited 500 ms in "
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
        assert rank["seconds"] < 30  # the time-out is 60


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_can_not_join_is_told_to_all(tmp_path, ranks):
    for rank in run("descriptors", tmp_path, ranks):
        assert rank["message"] == ("shm: rank 1 could not join: [Errno 24] Too many open files")
        assert rank["seconds"] < 30


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
        for name, message in rank["child"].items():
            assert "shm: this process was forked from one that uses shm" in message, name


def test_groups_one_after_the_other_leave_nothing(tmp_path):
    for rank in run("again", tmp_path, 3):
        counts = rank["counts"]
        assert counts[2] == counts[-1], counts


@pytest.mark.parametrize("how", ["destroys", "ends", "fails"])
@pytest.mark.timeout(120 + 10 * REPEAT)
def test_programs_end(how):
    """REPEAT=100 proves that no exit aborts."""
    result = python(EXITS, how, REPEAT, timeout=100 + 10 * REPEAT).check()
    expected = "fails 3 0" if how == "fails" else f"{how} 0 0"
    assert result.output.count(expected) == REPEAT, result.output


# ---- the build


def test_no_compiler_is_one_clear_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("SHM_BUILD_DIR", str(tmp_path / "builds"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        RuntimeError, match=r"^shm: c\+\+ and ninja not found\. .*apt install g\+\+"
    ):
        build.load()
    (tmp_path / "ninja").write_text("#!/bin/sh\n")
    (tmp_path / "ninja").chmod(0o755)
    with pytest.raises(RuntimeError, match=r"^shm: c\+\+ not found\."):
        build.load()


def test_an_old_torch_is_one_clear_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("SHM_BUILD_DIR", str(tmp_path / "builds"))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    with pytest.raises(RuntimeError, match=r"^shm: needs torch 2\.14 or newer, this is 2\.13\.0$"):
        build.load()


@pytest.fixture
def small_source(tmp_path, monkeypatch) -> Path:
    """A small source instead of the real ones, which compile for a minute."""
    if shutil.which("ninja") is None or shutil.which(build.compiler()) is None:
        pytest.skip("needs a C++ compiler and ninja")
    source = tmp_path / "small.cpp"
    source.write_text(
        "#include <Python.h>\n"
        'static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "shm_backend", nullptr, -1};\n'
        'extern "C" PyObject* PyInit_shm_backend() { return PyModule_Create(&definition); }\n'
    )
    monkeypatch.setattr(build, "SOURCES", [source])
    monkeypatch.setenv("SHM_BUILD_DIR", str(tmp_path / "builds"))
    return source


@pytest.mark.slow
def test_a_killed_build_does_not_block_the_next(small_source):
    directory = build.cache() / build.fingerprint()
    unfinished = directory / "unfinished"
    unfinished.mkdir(parents=True)
    (directory / "building").touch()
    (unfinished / "lock").touch()  # torch's own lock, on which its build waits forever
    (unfinished / "shm_backend.so").write_bytes(b"half")
    module = build.load()
    assert Path(module.__file__) == directory / "shm_backend.so"
    assert sorted(os.listdir(directory)) == ["building", "shm_backend.so"]
    # From now on neither a compiler nor ninja is needed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        build.load()


@pytest.mark.slow
def test_what_the_compiler_says_is_shown(small_source):
    small_source.write_text("int main() { return forty_two; }\n")
    with pytest.raises(
        RuntimeError, match=r"(?s)^shm: the backend could not be compiled:.*forty_two"
    ):
        build.load()
    assert not list(build.cache().glob("*/shm_backend.so"))


def test_other_systems_than_linux_are_one_clear_sentence(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        RuntimeError, match=r"^shm: needs Linux \(.*\), this is darwin\. Take gloo$"
    ):
        build.check_tools()


def test_a_process_that_waits_for_a_build_says_so(tmp_path, capsys):
    path, entered = tmp_path / "building", threading.Event()

    def second() -> None:
        with build.alone(path, "waiting for the first"):
            entered.set()

    thread = threading.Thread(target=second)
    with build.alone(path, "never printed"):
        thread.start()
        said = ""
        while not said:  # the limit of the test ends it
            said = capsys.readouterr().err
        assert said == "waiting for the first\n"
        assert not entered.is_set()
    thread.join(60)
    assert entered.is_set()


def test_python_m_builds_ahead():
    command = [sys.executable, "-m", "shm.build"]
    folder = ROOT / "custom_backend"
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)
    assert (result.stdout, result.stderr) == (f"{build.library()}\n", "")


def test_each_build_has_its_own_place(small_source, monkeypatch):
    fingerprints = {build.fingerprint()}
    monkeypatch.setattr(build, "FLAGS", ["-O0"])
    fingerprints.add(build.fingerprint())
    monkeypatch.setenv("CXX", "clang++")
    fingerprints.add(build.fingerprint())
    small_source.write_text("")
    fingerprints.add(build.fingerprint())
    assert len(fingerprints) == 4
    assert all(a != b for a, b in itertools.combinations(fingerprints, 2))
