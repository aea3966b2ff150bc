"""tests/forks.py: a fork runs a script as a new process does, and what differs is known."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pool
import psutil
import pytest
from helpers import COLD, Job, Torchrun, clean_environment, keeper, python, torchrun

LAST = Path("/proc/sys/kernel/ns_last_pid")
pytestmark = pytest.mark.skipif(COLD, reason="nothing is forked")


@pytest.fixture
def script(tmp_path):
    def write(text: str, name: str = "script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_ranks_print_whole_lines(script):
    """Also with PYTHONUNBUFFERED, where print() of two values writes them one after the other."""
    text = "import os\nfor number in range(5000):\n    print('rank', os.environ['RANK'], number)\n"
    lines = pool.run(script(text), ranks=2).check().output.splitlines()
    assert sorted(lines) == sorted(f"rank {r} {i}" for r in (0, 1) for i in range(5000))


@pytest.mark.parametrize("name", ["helpers", "forks", "copies", "check_environment", "course"])
def test_a_fork_does_not_see_the_tests(script, name):
    result = python(script(f"import torch\nimport {name}\n"))
    assert result.returncode == 1
    assert f"No module named '{name}'" in result.output


def test_ranks_iterate_over_a_set_in_different_orders(script):
    """The classic bug: collectives in the order of a set of strings. Hash seeds differ."""
    text = "print(*{f'axis {number}' for number in range(20)})\n"
    first, second = pool.run(script(text), ranks=2).check().output.splitlines()
    assert first != second
    assert sorted(first.split()) == sorted(second.split())


ENDS = {
    "pass": (0, ""),
    "sys.exit(7)": (7, ""),
    "sys.exit('a mistake')": (1, "a mistake\n"),
    "sys.exit()": (0, ""),
    "threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()": (0, "late\n"),
    "os._exit(3)": (3, ""),
    "os.kill(os.getpid(), signal.SIGTERM)": (-15, ""),
    "os.kill(os.getpid(), signal.SIGKILL)": (-9, ""),
    "print('no newline', end='')": (0, "no newline"),
}


def test_a_fork_ends_as_a_new_process_does(script):
    for statement, (status, output) in ENDS.items():
        result = python(script(f"import os, signal, sys, threading, time\n{statement}\n"))
        assert (result.returncode, result.output) == (status, output), statement


@pytest.mark.skipif(not os.access(LAST, os.W_OK), reason="needs root on Linux")
def test_a_number_of_a_process_may_return(script):
    """After 32,768 processes and threads, numbers are given again: a few times in a whole run."""
    says = script("import os\nprint(os.getpid())\n", "says.py")
    for _ in range(100):  # another process may take the number first, and keep it: so a new one
        ended = python(says).check().output
        LAST.write_text(str(int(ended) - 1))
        with Job([script("import time\ntime.sleep(60)\n")], fork=0) as job:
            if job.process.pid == int(ended):
                assert job.process.poll() is None
                return
    pytest.fail("100 processes, and none had the number of one that had ended")


def test_an_answer_that_a_killed_test_has_left_is_dropped(script, tmp_path):
    (tmp_path / "log").touch()
    says = script("print('ran')\n")
    told = ([str(says)], str(tmp_path), clean_environment(), str(tmp_path / "log"))
    keeper(0).connection.send(((0, 0), *told))  # as from a test that did not live to hear of it
    for _ in range(3):
        assert python(says).check().output == "ran\n"
    while (tmp_path / "log").read_text() != "ran\n":  # it runs beside the others
        time.sleep(0.01)


def test_a_fork_shows_the_traceback_of_a_new_process(script):
    path = script("def fail():\n    raise ValueError('so')\nfail()\n")
    fork, process = python(path), python(path, cold=True)
    assert fork == process
    assert process.returncode == 1
    assert process.output.count("\n  File") == 2


def test_a_fork_is_told_its_arguments_folder_and_environment(script, tmp_path):
    path = script("import os, sys\nprint(sys.argv[1:], os.getcwd(), os.environ.get('COLOUR'))\n")
    for cold in (False, True):
        output = python(path, "a b", 3, cwd=tmp_path, cold=cold, COLOUR="red").check().output
        assert output == f"['a b', '3'] {tmp_path} red\n"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCH_LOGS", "HOME", "PYTHONHASHSEED"])
def test_what_python_and_torch_read_at_their_start_is_for_a_new_process(name):
    environment = dict(keeper(0).environment)
    assert keeper(0).may_fork(environment | {"COLOUR": "red"})
    assert not keeper(0).may_fork(environment | {name: "3"})


def test_what_a_library_sets_in_the_tests_own_process_makes_no_job_cold(monkeypatch):
    keeper(0)  # begins before the import
    monkeypatch.setenv("KMP_SET_BY_AN_IMPORT", "FALSE")
    assert keeper(0).may_fork(clean_environment())


# In short sleeps: Python sees a signal that comes just before a sleep only after it.
WAIT = "import time\nprint('ready', flush=True)\nfor _ in range(1000):\n    time.sleep(0.1)\n"


def test_a_fork_is_killed_with_its_children(script):
    with Job([script("import os\nos.fork()\n" + WAIT)], fork=0) as job:
        job.wait_until(lambda: job.output.count("ready") == 2)
        processes = job.processes()
        assert len(processes) == 2
    assert not any(process.is_running() for process in processes)


@pytest.mark.slow
def test_a_fork_has_ended_although_its_child_has_not(script):
    with Job([script("import os\nif os.fork():\n    os._exit(3)\n" + WAIT)], fork=0) as job:
        assert job.wait(10).returncode == 3
        assert len(job.left_running(patience=0)) == 1


def test_signals_reach_the_fork(script):
    text = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit('stopped'))\n"
    with Job([script(text + WAIT)], fork=0) as job:
        job.wait_until(lambda: "ready" in job.output)
        job.process.terminate()
        result = job.wait(10)
    assert (result.returncode, result.output) == (1, "ready\nstopped\n")


OWNER = """
import sys, time
sys.path.insert(0, {tests!r})
from helpers import Job
with Job([{script!r}], fork=0) as job:
    job.wait_until(lambda: "ready" in job.output)
    print(job.process.pid, job.process.keeper.process.pid, flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
def test_forks_end_with_the_process_that_asked_for_them(script, tmp_path):
    """As when pytest is killed: nothing is left."""
    owner = tmp_path / "owner.py"
    owner.write_text(OWNER.format(tests=os.path.dirname(__file__), script=str(script(WAIT))))
    with Job([sys.executable, owner]) as job:
        pids = job.wait_until(lambda: job.output.endswith("\n") and job.output.split())
        left = [psutil.Process(int(pid)) for pid in pids]
        job.process.kill()
        psutil.wait_procs(left, timeout=10)
        assert not any(process.is_running() for process in left)


@pytest.mark.slow
def test_a_job_that_waits_for_what_will_not_come_has_no_progress(script):
    """Even if it is busy at first. The error has its stack."""
    text = "import time\nwhile time.process_time() < 1: pass\ntime.sleep(1000)\n"
    with (
        Job([sys.executable, script(text)]) as job,
        pytest.raises(TimeoutError, match=r'next to nothing for 3 s(?s:.*)script.py", line 3'),
    ):
        job.wait(3)


@pytest.mark.slow
def test_a_job_that_spins_is_ended_later(script):
    with (
        Job([script("while True: pass\n")], fork=0) as job,
        pytest.raises(
            TimeoutError, match=r'^computed and printed nothing for 4 s(?s:.*)script.py", line 1'
        ),
    ):
        job.wait(1)


@pytest.mark.slow
@pytest.mark.parametrize("does", ["pass", "time.sleep(0.1); print(1)"])
def test_a_job_that_computes_or_prints_has_time(script, does):
    """It goes on for twice as long as the limit."""
    text = f"import time\nend = time.monotonic() + 16\nwhile time.monotonic() < end:\n    {does}\n"
    begun = time.monotonic()
    python(script(text), timeout=8).check()  # a busy machine begins late
    assert time.monotonic() - begun > 16


def test_a_rank_that_is_killed(script):
    with Job([script(WAIT)], fork=1) as job:
        job.wait_until(lambda: "ready" in job.output)
        job.process.kill()
        assert job.wait(10).returncode == -signal.SIGKILL


TOLD = """
import json, os, sys
import beside
own = ("ERROR_FILE", "RUN_ID", "MASTER_PORT", "TEST_JOB_MARK", "PYTHONHASHSEED", "_")
told = {name: value for name, value in os.environ.items() if not name.endswith(own)}
line = json.dumps([__name__, sys.argv, os.getcwd(), beside.__file__, told])
os.write(1, f"{line}\\n".encode())  # in one piece
sys.exit(3 * (sys.argv[-1] == "fail"))
"""


@pytest.mark.slow
def test_ranks_of_a_forked_torchrun_are_told_what_torchrun_tells(script, tmp_path):
    (tmp_path / "job").mkdir()
    path = script(TOLD).rename(tmp_path / "job/told.py")
    path.with_name("beside.py").touch()
    options = {"cwd": tmp_path, "COLOUR": "red", "options": ("--max-restarts=2",)}
    cold, forked = (
        sorted(torchrun(path, "a b", 3, cold=cold, **options).check().output.splitlines())
        for cold in (True, False)
    )
    assert len(cold) == 2
    assert list(map(json.loads, cold)) == list(map(json.loads, forked))
    cold, forked = (torchrun(path, "fail", cold=cold) for cold in (True, False))
    assert cold.returncode == forked.returncode == 1
    assert "exitcode  : 3 (pid:" in cold.output
    assert "exitcode  : 3 (pid:" in forked.output
    assert forked.command == cold.command


DIES_ONCE = """
import os, time
print("rank", os.environ["RANK"], "start", os.environ["TORCHELASTIC_RESTART_COUNT"], os.getpid())
while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_rank_of_a_forked_torchrun_is_found_and_starts_again(script):
    with Torchrun(script(DIES_ONCE), ranks=3, options=("--max-restarts=1",)) as job:
        job.wait_until(lambda: job.output.count("start 0") == 3)
        pids = [process.pid for process in job.ranks()]
        assert all(f"rank {rank} start 0 {pid}\n" in job.output for rank, pid in enumerate(pids))
        job.ranks()[1].kill()
        assert job.wait(60).check().output.count("start 1") == 3
        assert not job.left_running()
