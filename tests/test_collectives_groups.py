"""collectives/: hello_world, backends, init_methods, stores, process_groups.

The stores are tested twice: by 4 processes, in the job of workers/collectives_groups.py, and by 4
threads in the worst order of events. There, wrong versions of each function show that the check
would catch a race.
"""

import contextlib
import inspect
import json
import re
import sys
import textwrap
import threading
import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace

import backends
import init_methods
import pool
import process_groups
import pytest
import stores
import torch
import torch.distributed as dist
from helpers import ROOT, torchrun
from rows import Copy
from workers.collectives_groups import COUNTS, ROUNDS, SHORT, TASKS, TERMS

launches_ranks = pytest.mark.slow
HERE, WORKER = ROOT / "collectives", ROOT / "tests/workers/collectives_groups.py"
N = 4
KINDS = ("TCPStore", "FileStore", "PrefixStore")
# Up to torch 2.13 at least, split_group wanted a GPU; 2.15 splits groups of Gloo.
GLOO_SPLITS = "No device associated" not in inspect.getsource(dist.split_group)


def parts_of(output: str) -> dict[str, str]:
    """What each script printed, by name."""
    pieces = re.split(r"^== (\w+)\n", output, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def table(output: str, title: str) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table under the line that begins with `title`."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title)) + 1
    cells = []
    for line in lines[start:]:
        row = re.split(r" {2,}", line.strip())
        if not line.strip() or (cells and len(row) != len(cells[0])):
            break
        cells.append(row)
    return cells[0], cells[1:]


def column(output: str, title: str, name: str) -> list[str]:
    header, rows = table(output, title)
    return [row[header.index(name)] for row in rows]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("groups")
    output = pool.run(WORKER, folder, ranks=N).check().output
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(N)]
    return SimpleNamespace(
        printed=parts_of(output),
        output=output,
        stores=[rank["stores"] for rank in ranks],
        groups=[rank["groups"] for rank in ranks],
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, str]:
    """What the scripts print in a world of one."""
    output = pool.run(WORKER, tmp_path_factory.mktemp("alone"), "alone").check().output
    assert "Warning" not in output
    return parts_of(output)


# Four threads, in the worst order of events.


class MeetAfterReading:
    """A store for one of 4 threads. After its first get or check, a thread waits for all threads:
    all threads have read before any thread writes."""

    def __init__(self, store, meeting: threading.Barrier):
        self.store, self.meeting, self.has_read = store, meeting, False

    def __getattr__(self, name):
        method = getattr(self.store, name)

        def call(*args):
            value = method(*args)
            if name in ("get", "check") and not self.has_read:
                self.has_read = True
                with contextlib.suppress(threading.BrokenBarrierError):
                    self.meeting.wait(10)
            return value

        return call


def in_threads(function, store=None) -> list:
    """function(store, rank) in 4 threads; what each returned. Raises what a thread raised."""
    store, meeting = store or dist.HashStore(), threading.Barrier(N)
    results, errors = [None] * N, []

    def run(rank):
        try:
            results[rank] = function(MeetAfterReading(store, meeting), rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(N)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


def check_counting(count) -> None:
    store, meeting = dist.HashStore(), threading.Barrier(N)
    store.set("key", "0")
    in_threads(lambda store, rank: count(rank)(store, "key", lambda: meeting.wait(10)), store)
    value = int(store.get("key").split()[0])
    assert value == N, f"{N} ranks added 1, the counter says {value}"


def check_election(elect) -> None:
    for _ in range(5):
        leaders = in_threads(lambda store, rank: elect(store, rank))
        assert len(set(leaders)) == 1, f"leaders: {leaders}"


def check_barrier(barrier) -> None:
    reached = [0] * 12

    def cross(store, rank):
        for turn in range(len(reached)):
            if rank == turn % N:
                time.sleep(0.004)  # another rank is late in each turn
            with lock:
                reached[turn] += 1
            barrier(store, N)
            assert reached[turn] == N, f"turn {turn} was left when {reached[turn]} had come"

    lock = threading.Lock()
    in_threads(cross)


def check_queue(take) -> None:
    store = dist.HashStore()
    for task in range(20):
        stores.put(store, str(task).encode())
    stores.close(store, N)

    def work(store, rank):
        return [int(task) for task in iter(lambda: take(store), None)]

    taken = sorted(task for mine in in_threads(work, store) for task in mine)
    assert taken == list(range(20)), f"tasks taken: {taken}"


def elect_by_check_and_set(store, rank):
    if not store.check(["leader"]):
        store.set("leader", str(rank))
        return rank
    return int(store.get("leader"))


def barrier_that_opens_once(store, world_size):
    if store.add("arrived", 1) == world_size:
        store.set("open", "")
    store.wait(["open"], stores.PATIENCE)


def take_by_get_and_set(store):
    store.add("head", 0)  # makes the key, without a race; the race is between the next two lines
    place = int(store.get("head")) + 1
    store.set("head", str(place))
    task = store.get(f"tasks/{min(place, 24)}")
    return None if task == stores.END else task


RIGHT = {
    "add": lambda: check_counting(lambda rank: stores.count_by_add),
    "compare_set": lambda: check_counting(
        lambda rank: lambda *args: stores.count_by_compare_set(*args, sign=f"by {rank}")
    ),
    "elect": lambda: check_election(stores.elect),
    "barrier": lambda: check_barrier(stores.barrier),
    "take": lambda: check_queue(stores.take),
}
WRONG = {
    "get, set": (lambda: check_counting(lambda rank: stores.count_by_get_and_set), "says 1"),
    "unsigned": (lambda: check_counting(lambda rank: stores.count_by_compare_set), "says 1"),
    "check, set": (lambda: check_election(elect_by_check_and_set), "leaders"),
    "opens once": (lambda: check_barrier(barrier_that_opens_once), "was left when"),
    "get, set head": (lambda: check_queue(take_by_get_and_set), "tasks taken"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_store_functions_at_the_worst_moment(name):
    RIGHT[name]()


@pytest.mark.parametrize("name", WRONG)
def test_a_race_would_be_caught(name):
    check, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        check()


def test_barrier_leaves_no_keys_behind():
    store = dist.HashStore()
    for _ in range(50):
        stores.barrier(store, 1)
    assert store.num_keys() == 2  # the counter and the last turn


def test_barrier_and_take_give_up():
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match=r"^1 of 3 ranks arrived at 'barrier'$"):
        stores.barrier(store, 3, timeout=timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="imeout"):
        stores.take(store, timeout=timedelta(seconds=0.1))


def test_depose_only_the_current_leader():
    store = dist.HashStore()
    assert [stores.elect(store, rank) for rank in (2, 0)] == [2, 2]
    assert stores.depose(store, 1, old=0) == 2  # not the leader any more, or never
    assert stores.depose(store, 1, old=2) == 1
    assert stores.elect(store, 3) == 1
    assert stores.depose(dist.HashStore(), 1, old=0) == 0  # as the comment warns


# Four processes.


@launches_ranks
@pytest.mark.parametrize("kind", KINDS)
def test_four_processes_count(job, kind):
    for rank in job.stores:
        said = rank[kind]["count"]
        assert said["added"] == said["signed"] == N * COUNTS
        everything = sorted(str(r) for r in range(N) for _ in range(COUNTS))
        if kind == "FileStore":  # its append is a get and a set, and loses what comes in between
            assert not Counter(said["appended"]) - Counter(everything)
        else:
            assert said["appended"] == everything


@launches_ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", range(1, N + 1))
def test_no_rank_leaves_a_barrier_early(job, kind, world_size):
    for rank in job.stores[:world_size]:
        assert rank[kind]["barriers"][str(world_size)] == [world_size] * ROUNDS


@launches_ranks
@pytest.mark.parametrize("kind", KINDS)
def test_four_processes_elect_one(job, kind):
    views = [rank[kind]["elections"] for rank in job.stores]
    assert views == [views[0]] * N
    assert len(views[0]) == TERMS
    for leader, successor in views[0]:
        assert 0 <= leader < N
        assert 0 <= successor < N
        assert leader != successor


@launches_ranks
@pytest.mark.parametrize("kind", KINDS)
def test_four_processes_share_a_queue(job, kind):
    said = [rank[kind]["queue"] for rank in job.stores]
    assert sorted(task for rank in said for task in rank["taken"]) == list(range(TASKS))
    assert [rank["left"] for rank in said] == [[]] * N


@launches_ranks
def test_missing_ranks_are_counted_and_named(job):
    said = [rank["missing"] for rank in job.stores]
    assert said == ["3 of 4 ranks arrived at 'lonely'", "absent", said[0], said[0]]
    assert [r["roll call"] for r in job.stores] == ["4 of 6 ranks arrived; missing: rank 4, 5"] * N


# Groups.


@pytest.mark.parametrize(
    ("world_size", "shape"),
    [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (6, (2, 3)), (7, (1, 7)), (8, (2, 4))],
)
def test_make_grid(world_size, shape):
    grid = process_groups.make_grid(world_size)
    assert tuple(grid.shape) == shape
    assert grid.flatten().tolist() == list(range(world_size))


def test_make_grid_refuses():
    for columns in (0, -2, 4):
        with pytest.raises(ValueError, match=f"6 .* rows of {columns}$"):
            process_groups.make_grid(6, columns)


@launches_ranks
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_sums_stay_in_rows_and_columns(job, columns):
    grid = torch.arange(N).view(-1, columns)
    for rank, said in enumerate(job.groups):
        for axis, lists in (("row", grid.tolist()), ("column", grid.T.tolist())):
            members = next(ranks for ranks in lists if rank in ranks)
            expected = [members, members.index(rank), sum(10**r for r in members)]
            assert said[f"{axis} of {columns}"] == expected


@launches_ranks
def test_every_rank_must_make_every_group(job):
    for rank, said in enumerate(job.groups):
        if rank != 1:
            assert re.match(r"wait timeout after 3000ms, keys: \S+/1$", said["left out"])
            assert 2.5 < said["left out, seconds"] < 30
        assert said["the next one"] != "made", "one rank is a call behind"
        assert said["world"] == 1111


@launches_ranks
def test_groups_by_members_need_equal_counts(job):
    assert [said["members alone"] for said in job.groups] == [None, None, [2, 3], [2, 3]]
    assert "made" not in [said["unequal counts"] for said in job.groups]


# What the scripts print.


@launches_ranks
def test_minimal_prints_what_one_process_computes():
    output = torchrun(HERE / "minimal.py", ranks=3).check().output
    own = torch.arange(3)
    total, running = own.sum(), own.cumsum(0)
    expected = [
        f"rank {rank} of 3: all_reduce [{total}], broadcast [7, 8, 9], passed on [{running[rank]}]"
        for rank in range(3)
    ]
    assert [line for line in output.splitlines() if line.startswith("rank ")] == expected


@launches_ranks
def test_hello_world_prints(job, alone):
    for printed, n in ((job.printed["hello_world"], N), (alone["hello_world"], 1)):
        greetings = re.findall(r"^hello from rank (\d) of (\d)$", printed, flags=re.MULTILINE)
        assert sorted(greetings) == [(str(r), str(n)) for r in range(n)]
        for name, expected in (
            ("rank", [str(r) for r in range(n)]),
            ("local rank", [str(r) for r in range(n)]),
            ("world size", [str(n)] * n),
            ("backend", ["gloo"] * n),
        ):
            assert column(printed, "One row per rank", name) == expected
        assert len(set(column(printed, "One row per rank", "process"))) == n
        total = n * (n - 1) // 2
        assert f"sum of all ranks: {total}.0 by all_reduce, {total} by" in printed


@launches_ranks
def test_backends_prints(job, alone):
    lacks = {  # of Gloo
        "all_reduce, AVG of int64": "result type Float can't be cast",
        "all_reduce, PREMUL_SUM": "Cannot use ReduceOp.PREMUL_SUM with Gloo",
        "all_gather, uneven sizes": "ProcessGroupGloo::allgather: invalid tensor size",
    }
    if torch.__version__ < "2.12":  # torch's own class compares the numbers, not the letters
        lacks["all_to_all"] = "Backend gloo does not support alltoall"
    if not GLOO_SPLITS:
        lacks["split_group"] = "No device associated with the default pg"
    for printed, n in ((job.printed["backends"], N), (alone["backends"], 1)):
        assert table(printed, "1. Backends")[1][0] == ["gloo", "cpu, cuda", "yes"]
        said = {row[0]: row[1] for row in table(printed, "2. Operations")[1]}
        assert len(said) >= 24
        pairs = {"isend, irecv", "receive from any source"}
        for name, answer in said.items():
            if n == 1 and name in pairs:
                assert answer == "needs two ranks"
            elif n == 1 and name == "all_gather, uneven sizes":
                assert answer == "yes"  # one rank has one size
            else:
                assert answer.startswith(lacks.get(name, "yes")), name
        assert set(lacks) < set(said)
        header, rows = table(printed, "3. One group")
        both = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
        assert both["gloo"]["get_backend_config"] == "cpu:gloo,cuda:gloo"
        on_cpu = "all_reduce of a CPU tensor"
        assert both["cpu:gloo"][on_cpu] == "yes"
        assert both["cuda:gloo"][on_cpu] == "No backend type associated with device type cpu"
        assert table(printed, "4. Which backend")[1][0] == ["on the CPU", "gloo", "yes"]


def test_an_operation_with_a_wrong_result_is_reported():
    assert backends.attempt(lambda: True) == "yes"
    assert backends.attempt(lambda: False) == "WRONG RESULT"
    error = RuntimeError("[a/pair.cc:1] no such thing. Try another\nat frame 0")
    assert backends.reason(error) == "no such thing"


@launches_ranks
def test_stores_prints(job, alone):
    printed = job.printed["stores"]
    header, rows = table(printed, "1. What the calls return")
    said = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    for call, value in {
        "append('a', 'yz'), get('a')": "xyz",
        "add('n', -2)": "3",
        "compare_set('c', '', '1')": "1",
        "compare_set('c', '0', '2')": "1",
        "compare_set('c', '1', '2')": "2",
        "compare_set('new', '0', '2')": "0",  # returned, but not stored:
        "check(['a', 'new'])": "False",
        "wait(['a'])": "None",
    }.items():
        assert list(said[call].values()) == [value] * 4, call
    own = {"TCPStore": 3, "FileStore": 4, "HashStore": 3, "PrefixStore": 3}
    assert said["num_keys()"] == {kind: str(n) for kind, n in own.items()}
    assert said["num_keys() now"] == {kind: str(n - 1) for kind, n in own.items()}
    for kind in own:
        calls = ("len('q')", "pop('q')", "pop('q', False)", "pop('q', False) again")
        queue = [said[f"queue_{call}"][kind] for call in calls]
        lacks = ["NotImplementedError"] * 4
        works = ["2", "first", "second", "QueueEmptyError"]
        assert queue == (lacks if kind == "FileStore" else works)
        assert said["delete_key('a')"][kind] == "True"
        late = "RuntimeError" if kind == "FileStore" else "DistStoreError"
        assert said["wait(['new'], 0.1 s)"][kind] == late
    header, rows = table(printed, "2. How many")
    assert header[1:] == [*own, "TCPStore, key mine/seen/0"]
    assert rows == [[str(rank), "4", "4", "1", "4", "True"] for rank in range(N)]
    counted = {row[0]: row[1:] for row in table(printed, "3. 4 rank(s) add 1")[1]}
    right = {"add", "compare_set with rank"}
    assert counted == {
        by: [str(N if by in right else 1)] * 3
        for by in ("get, set", "add", "compare_set", "compare_set with rank")
    }
    for kind in KINDS:
        title = f"4. Barrier, election and work queue on a {kind}: 20 tasks"
        leaders, then = (column(printed, title, name) for name in ("leader", "then"))
        assert len(set(leaders)) == 1
        assert then[int(leaders[0])] == "deposed"
        assert len(set(then) - {"deposed", leaders[0]}) == 1
        assert sum(map(int, column(printed, title, "tasks"))) == 20
    assert printed.count("every task done exactly once: True") == 3
    assert alone["stores"].count("every task done exactly once: True") == 3


@launches_ranks
def test_process_groups_prints(job, alone):
    printed = job.printed["process_groups"]
    rows = table(printed, "1. A grid of 2 x 2: [[0, 1], [2, 3]]")[1]
    assert rows[3] == ["3", "(1, 1)", "[2, 3]", "1", "5", "[1, 3]", "1", "4"]
    made = {row[0]: row[1:] for row in table(printed, "2. Calls that make groups")[1]}
    rows, columns = ["[0, 1]", "[2, 3]"], ["[0, 2]", "[1, 3]"]
    assert made == {
        "new_subgroups(group_size)": rows,
        "new_subgroups_by_enumeration": columns,
        "init_device_mesh, row": rows,
        "init_device_mesh, column": columns,
        "split_group": rows if GLOO_SPLITS else ["missing", "missing"],
        "new_group by members alone": rows,
    }
    assert ("\nsplit_group is missing on gloo: No device" in printed) == (not GLOO_SPLITS)
    wrong = "Global rank 0 is not part of group"
    assert table(printed, "3. The upper half, [2, 3]")[1] == [
        ["0", "outside", "-", "-", "-"],
        ["1", "outside", "-", "-", "-"],
        ["2", "0", wrong, "2", "2"],
        ["3", "1", wrong, "2", "2"],
    ]
    assert table(printed, "4. A backend per group")[1][1][1] == "gloo"
    rows = table(printed, "5. Rank 3 skips a new_group")[1]
    assert [row[0] for row in rows] == list("0123")
    # The key ends in 3, unless a busy machine has made another rank late.
    assert all(re.match("wait timeout after 500ms, keys: .*//0/[0-3]$", row[2]) for row in rows[:3])
    assert rows[3][2] == "makes no group"
    assert "1. A grid of 1 x 1: [[0]]" in alone["process_groups"]


@launches_ranks
def test_init_methods_prints(alone):
    """cold: a fork has torch already, and so torch's warnings, which the script turns off."""
    script = HERE / "init_methods.py"
    output = torchrun(script, "--device", "cpu", ranks=2, cold=True).check().output
    assert "[W" not in output  # a line of rank 1 between two lines of a table
    for printed, n in ((output, 2), (alone["init_methods"], 1)):
        assert f"{n} rank(s) on cpu, gloo, torch" in printed
        header, rows = table(printed, "1. Join")
        assert header[:4] == ["method", "is_initialized", "get_backend", "sum"]
        assert [row[:4] for row in rows] == [
            [method, "False -> True -> False", "gloo", str(n)]
            for method in ("env://", "tcp://", "file://", "store")
        ]
        assert [row[:2] for row in table(printed, "2. Two groups")[1]] == [
            ["first", str(n)],
            ["second", str(n)],
        ]
        first, second = map(int, column(printed, "2. Two", "keys in the store after destroy"))
        assert 0 < first < second  # destroy_process_group leaves a group's keys in the store
        assert "trying to initialize the default process group twice" in printed
        said = {tuple(row[:2]): row[2:] for row in table(printed, f"4. {n + 1} ranks")[1]}
        seconds, error = said["tcp://", "0"]
        assert f"{n}/{n + 1} clients joined" in error  # says how many, but only to rank 0
        assert 0.3 < float(seconds) < 10
        missing = f"{n} of {n + 1} ranks arrived; missing: rank {n}"
        assert said["roll call", "all"][1] == missing
        for method in ("tcp://", "file://", "store"):
            for rank in range(n):
                assert re.search("imed? ?out", said[method, str(rank)][1]), said
    rows = table(output, "3. A timeout of 0.5 s; the default is 0:30:00")[1]
    assert rows[0][2] == "Timed out waiting 500ms for recv operation to complete"
    assert 0.4 < float(rows[0][1]) < 10
    assert rows[1] == ["1", "0.0", "skips the all_reduce"]


@launches_ranks
@pytest.mark.parametrize(
    ("script", "file", "ends"),
    [
        ("init_methods.py", "rendezvous", "    if dist.is_initialized():\n        dist.destroy"),
        ("stores.py", "store", "        stores.clear()"),
    ],
    ids=["init_methods", "stores"],
)
def test_the_file_of_a_file_store_outlives_the_store(script, file, ends, tmp_path):
    """Its destructor opens the file. Without the folder it would try for a minute, then abort.

    Rank 1 ends its store late, and looks for the file before.
    """
    copy = Copy("collectives", tmp_path)
    indent = " " * (len(ends) - len(ends.lstrip()))
    late = f"""
if os.environ["RANK"] == "1":
    time.sleep(1)
    print("files:", len(list(Path(tempfile.gettempdir()).glob("*/{file}"))))
"""
    copy.edit(script, ends, textwrap.indent(late, indent) + ends)
    ours = f"import tempfile\nfrom pathlib import Path\ntempfile.tempdir = {str(tmp_path)!r}\n"
    copy.edit(script, "import tempfile\n", ours)
    output = copy.run(script, "--device", "cpu").check().output
    assert "files: 1" in output


def test_roll_call_in_process():
    store = dist.HashStore()
    for rank in (0, 2):
        store.set(f"here/{rank}", "")
    with pytest.raises(TimeoutError, match=r"^3 of 5 ranks arrived; missing: rank 1, 4$"):
        init_methods.roll_call(store, 3, 5, timedelta(seconds=0.05))
    store.set("here/1", "")
    init_methods.roll_call(store, 4, 5, SHORT)


@pytest.mark.parametrize(
    ("module", "arguments", "says"),
    [
        (stores, ["--tasks", "-1"], "--tasks: must be an integer of at least 0, not -1"),
        (process_groups, ["--timeout", "0"], "--timeout: must be a number above 0, not 0"),
        (init_methods, ["--timeout", "nan"], "--timeout: must be a number above 0, not nan"),
        (init_methods, ["--device", "tpu"], "--device: invalid choice: 'tpu'"),
    ],
)
def test_bad_arguments(module, arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as end:
        module.parse_args()
    assert end.value.code == 2
    assert says in capsys.readouterr().err


@launches_ranks
def test_columns_that_do_not_divide():
    result = pool.run(HERE / "process_groups.py", "--device", "cpu", "--columns", "3")
    assert result.returncode == 2
    assert "process_groups.py: error: --columns: 1 rank(s) do not fill rows of 3" in result.output


@launches_ranks
@pytest.mark.parametrize("script", ["stores.py", "init_methods.py"])
def test_what_several_hosts_do_not_share(script):
    result = pool.run(HERE / script, "--device", "cpu", ranks=2, nodes=2)
    assert result.returncode == 2
    assert result.output.count("start all of them on one host") == 2  # each host says so
