"""tests/helpers.py: what a job prints is read whole, while it runs too."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pool
import psutil
import pytest
from helpers import ROOT, Job, before_others, began, installed, python, read_metrics, those
from on_demand import OnDemand

LINES = 100_000
PRINT_LINES = f"""
for number in range({LINES}):
    print(number)  # unbuffered, as in every job: one write each
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "print_lines.py"
    path.write_text(PRINT_LINES)
    return path


def test_reading_does_not_disturb_the_child(script):
    """A parent that moves the offset that it shares with the child loses what the child writes."""
    polls = 0
    with Job([sys.executable, script]) as job:
        while job.process.poll() is None:
            _ = job.output
            polls += 1
        result = job.wait(60)
    assert polls > 10  # or nothing was tried
    assert result.output.splitlines() == [str(number) for number in range(LINES)]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts from its own start")
def test_a_clock_that_is_set_loses_no_process(monkeypatch):
    """A job looks for its processes by their number and by when they began."""
    before = began(os.getpid())
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1.0)  # as after a new time of day
    assert psutil.Process().create_time() < 1e9
    assert began(os.getpid()) == before


def test_two_children_share_the_log(tmp_path):
    """Ranks write to one log: each line of each must be in it."""
    script = tmp_path / "fork.py"
    script.write_text(
        "import os\nname = 'child' if os.fork() == 0 else 'parent'\n"
        "for number in range(5000):\n    os.write(1, f'{name} {number}\\n'.encode())\n"
        "name == 'parent' and os.wait()\n"
    )
    lines = python(script).check().output.splitlines()
    assert sorted(lines) == sorted(f"{n} {i}" for n in ("child", "parent") for i in range(5000))


def test_a_line_that_is_half_written_is_not_read(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert read_metrics(tmp_path) == []
    log.write_text('{"step": 1}\n{"st')
    assert read_metrics(tmp_path) == [{"step": 1}]
    log.write_text('{"step": 1}\n{"step": 2}\n')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_a_process_that_ends_soon_after_its_parent_is_not_left():
    with Job(["sh", "-c", "sleep 60 & true"]) as job:
        job.wait(60).check()
        while not job.processes():
            pass  # for a moment, while it becomes `sleep`, it has no mark
        (helper,) = job.processes()
        end = threading.Timer(0.7, helper.terminate)
        end.start()
        assert not job.left_running()
        end.join()


@pytest.mark.slow
def test_a_process_that_does_not_end_is_left_and_killed():
    with Job(["sh", "-c", "sleep 60 & true"]) as job:
        job.wait(60).check()
        assert job.left_running(patience=0.5)
        assert not job.processes()


@pytest.mark.slow
def test_a_script_that_leaves_a_process_behind(tmp_path):
    (tmp_path / "leave.py").write_text(LEAVES)
    with pytest.raises(AssertionError, match=r"left running: .*sleep"):
        python(tmp_path / "leave.py")


LEAVES = "import subprocess\nsubprocess.Popen(['sleep', '99'], start_new_session=True)\n"


ONE_FAILS = """
import os, signal, sys, time
def say(*_):
    print("lost a connection", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, say)
if os.environ["RANK"] != "2":
    time.sleep(600)
print("no such file", flush=True)
sys.exit(3)
"""


def test_the_first_rank_to_fail_is_named(tmp_path):
    script = tmp_path / "one_fails.py"
    script.write_text(ONE_FAILS)
    result = pool.run(script, ranks=4)
    assert (result.returncode, result.failed) == (3, 2)
    assert result.output == "no such file\n"
    with pytest.raises(AssertionError) as error:
        result.check()
    # Both ends of a long report are read: the first lines, and what CI shows last.
    said = f"exit status 3 of rank 2, the first to fail, of\n{result.command}"
    assert str(error.value).startswith(said)
    assert str(error.value).endswith(said)


def test_a_session_with_the_number_of_an_ended_one_is_not_ours(tmp_path):
    """Numbers of processes are used again, on some machines after minutes."""
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(600)")
    with Job([script], fork=0) as job:
        (leader,) = job.leaders
        job.wait_until(job.processes)  # it has a session of its own a moment after its start
        assert [process.pid for process in job.processes()] == [leader]
        known = job.leaders[leader]
        job.leaders[leader] = known - 60  # that of one which began, and ended, before
        assert not job.processes()
        job.leaders[leader] = known
        assert [process.pid for process in job.kill()] == [leader]


@pytest.mark.slow
def test_without_time_only_quick_tests_begin():
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--budget", "0"]
    said = python(*options, "tests/test_mutants.py", cold=True).check().output
    assert re.search(r"^\d\d passed, 2 skipped", said, re.MULTILINE)
    assert "no time is left: --budget" in said


def test_who_ends_while_asked_is_none_of_those():
    def ends(process: psutil.Process) -> bool:
        assert process.environ()
        process.kill()
        sleeper.wait(10)
        return bool(process.environ())

    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        try:
            asked = psutil.Process(sleeper.pid)
            until = time.monotonic() + 10
            while not asked.environ() and time.monotonic() < until:
                pass  # for a moment, while it becomes `sleep`, it has none
            assert those(lambda p: p.name() == "sleep", [asked]) == [asked]
            assert those(ends, [asked]) == []
        finally:
            sleeper.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="there are no such sessions elsewhere")
def test_who_comes_before_others():
    with Job(before_others("sh", "-c", "cat /proc/self/autogroup; exit 3")) as job:
        result = job.wait(30)
    assert result.returncode == 3
    may = subprocess.run(["nice", "-n", "-1", "true"], capture_output=True)
    if not may.stderr and os.access("/proc/self/autogroup", os.W_OK):
        assert result.output.endswith(" nice -10\n")


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "just_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("just_a_folder")
    assert not installed("no_such_package")
    assert installed("pytest")


FAILS = """
import sys
import pytest
from helpers import Job

def run(word):
    with Job([sys.executable, "-c", f"print('said', {word!r})"]) as job:
        job.wait()

@pytest.fixture(scope="module")
def job_of_a_fixture():
    run("first")

def test_passes(job_of_a_fixture):
    run("second")

def test_fails(job_of_a_fixture):
    run("third")
    assert 1 == 2
"""


@pytest.mark.slow
def test_the_report_of_a_failure_ends_with_its_jobs(tmp_path):
    """Those of the test and of its fixtures, and not those of other tests."""
    (tmp_path / "test_it.py").write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    with Job([*command, tmp_path], tmp_path, PYTHONPATH=str(ROOT / "tests")) as job:
        said = job.wait().output
    found = re.findall(r"a job of this test -+\n(.*)\n\nTo run .*\n(cd .*)\n", said)
    assert [printed for printed, _ in found] == ["said first", "said third"], said
    again = subprocess.run(found[1][1], shell=True, capture_output=True, text=True, timeout=300)
    assert again.stdout == "said third\n"


def test_a_job_that_has_failed_is_not_run_again():
    """Nor is its report printed by each of the hundred tests that look at it."""
    asked = []

    def compute(key):
        asked.append(key)
        if key == 8:
            raise AssertionError("exit status 1 of rank 3\nand a long output")
        return -key

    on_demand = OnDemand(compute)
    assert (on_demand[2], on_demand[2]) == (-2, -2)
    with pytest.raises(AssertionError, match="a long output"):
        on_demand[8]
    for _ in range(2):
        with pytest.raises(AssertionError, match=r"the job of 8 has failed.*status 1 of rank 3\)$"):
            on_demand[8]
    assert asked == [2, 8]
