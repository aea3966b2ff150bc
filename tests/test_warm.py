"""notebooks/warm_python.py: a fork that stands in for a new Python is like one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pool
import psutil
import pytest
from helpers import ROOT, Job, clean_environment, parent_of, python, torchrun, warm_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="there are no forks elsewhere"),
]


def test_warm_ranks_print_whole_lines(tmp_path):
    """Also with PYTHONUNBUFFERED, where print() of two values writes them one after the other."""
    script = tmp_path / "print_two.py"
    script.write_text(
        "import os\nfor number in range(5000):\n    print('rank', os.environ['RANK'], number)\n"
    )
    lines = pool.run(script, ranks=2).check().output.splitlines()
    assert sorted(lines) == sorted(f"rank {r} {i}" for r in (0, 1) for i in range(5000))


@pytest.mark.parametrize(
    "name", ["helpers", "warm", "copies", "check_environment", "train", "course", "warm_server"]
)
def test_warm_ranks_do_not_see_the_tests(tmp_path, name):
    script = tmp_path / "imports.py"
    script.write_text(f"import torch\nimport {name}\n")
    result = pool.run(script)
    assert result.returncode == 1
    assert f"No module named '{name}'" in result.output


HIDES = """
import os, sys, time
from pathlib import Path
pid_file = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    pid_file.with_suffix(".part").write_text(str(os.getpid()))
    pid_file.with_suffix(".part").rename(pid_file)
    os.execve("/bin/sleep", ["sleep", "60"], {})
while not pid_file.exists():
    time.sleep(0.01)
while not Path(f"/proc/{pid_file.read_text()}/cmdline").read_bytes().startswith(b"sleep"):
    time.sleep(0.01)
sys.exit(2)
"""


def test_a_rank_that_bears_no_mark_is_killed_too(tmp_path):
    """As for a moment one does that is being started: who looks for the mark does not find it."""
    script, pid = tmp_path / "hides.py", tmp_path / "pid"
    script.write_text(HIDES)
    assert pool.run(script, pid, ranks=2, timeout=30).returncode == 2
    assert not psutil.pid_exists(int(pid.read_text()))


TELL = """
import json, os, resource, sys
told = {
    "arguments": sys.argv[1:],
    "main": __name__,
    "folder": os.getcwd(),
    "path": sys.path[0],
    "mark": os.environ["MARK"],
    "umask": os.umask(0),
    "processors": len(os.sched_getaffinity(0)),
    "limit": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
    "input": sys.stdin.read(),
    "has torch": "torch" in sys.modules,
}
print(json.dumps(told))
"""


def start_in(folder: Path, executable: str, *arguments, **environment: str) -> str:
    """What TELL prints, with umask, limit and processors of its own."""
    shell = 'umask 27; ulimit -f 100; exec taskset -c 0 "$@"'
    command = ["sh", "-c", shell, "sh", executable, *arguments]
    environment = clean_environment(WARM_PYTHON=str(warm_folder()), MARK="here", **environment)
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input="said",
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "arguments", [("tell.py", "a b", "--c"), ("-u", "-m", "tell", "a b", "--c")]
)
def test_a_fork_is_told_what_a_process_is_told(tmp_path, arguments):
    (tmp_path / "tell.py").write_text(TELL)
    process = start_in(tmp_path, sys.executable, *arguments)
    fork = start_in(tmp_path, f"{warm_folder()}/python", *arguments)
    assert (process.pop("has torch"), fork.pop("has torch")) == (False, True)
    assert fork == process
    assert process["limit"] == 100 * 512


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("-c", TELL), {}),
        (("-B", "tell.py"), {}),
        (("tell.py",), {"OMP_NUM_THREADS": "2"}),
        (("tell.py",), {"TORCH_FR_BUFFER_SIZE": "10"}),
        (("tell.py",), {"HF_HUB_OFFLINE": "0"}),
    ],
)
def test_what_a_fork_would_be_too_late_for_is_a_process(tmp_path, arguments, environment):
    (tmp_path / "tell.py").write_text(TELL)
    told = start_in(tmp_path, f"{warm_folder()}/python", *arguments, **environment)
    assert not told["has torch"]


@pytest.mark.parametrize(
    ("statement", "status", "output"),
    [
        ("pass", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('a mistake')", 1, "a mistake\n"),
        ("sys.exit()", 0, ""),
        ("atexit.register(print, 'at the end')", 0, "at the end\n"),
        ("threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()", 0, "late\n"),
        ("os._exit(3)", 3, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("print('no newline', end='')", 0, "no newline"),
    ],
)
def test_a_fork_ends_as_a_process_does(tmp_path, statement, status, output):
    script = tmp_path / "end.py"
    script.write_text(f"import atexit, os, signal, sys, threading, time\n{statement}\n")
    for cold in (True, False):
        result = python(script, cold=cold)
        assert (result.returncode, result.output) == (status, output)


def test_a_fork_shows_the_traceback_that_a_process_shows(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("def fail():\n    raise ValueError('so')\nfail()\n")
    process, fork = (python(script, cold=cold) for cold in (True, False))
    assert fork == process
    assert process.returncode == 1
    assert process.output.count("\n  File") == 2


WAIT = "import time\nprint('ready', flush=True)\ntime.sleep(100)\n"


@pytest.mark.parametrize("victim", ["the fork", "the one that stands in"])
def test_a_fork_and_its_stand_in_die_together(tmp_path, victim):
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    with Job([sys.executable, script, "argument"], NAME="value") as job:
        job.wait_until(lambda: "ready" in job.output)
        (fork,) = job.processes()  # what stands in for it is not seen
        assert fork.pid != job.process.pid
        assert fork.cmdline()[1:] == [str(script), "argument"]
        assert fork.environ()["NAME"] == "value"
        assert parent_of(fork) == psutil.Process()
        (fork if victim == "the fork" else job.process).kill()
        assert job.wait(10).returncode == -signal.SIGKILL
        psutil.wait_procs([fork], timeout=10)
        assert not fork.is_running()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_for_a_group_reaches_the_children_of_the_fork(tmp_path, number):
    """As torchrun ends a rank and its data loaders: it gives each rank a group of its own."""
    script = tmp_path / "parent.py"
    script.write_text(f"import os\nchild = os.fork()\n{WAIT}")
    with Job(["setsid", f"{warm_folder()}/python", script]) as job:
        job.wait_until(lambda: job.output.count("ready") == 2)
        processes = job.processes()
        os.killpg(job.process.pid, number)
        assert job.wait(10).returncode == -number
        psutil.wait_procs(processes, timeout=10)
        assert not any(process.is_running() for process in processes)


def test_signals_reach_the_fork(tmp_path):
    script = tmp_path / "hear.py"
    handler = "def stop(*_):\n    sys.exit('stopped')\n"
    script.write_text(f"import signal, sys\n{handler}signal.signal(signal.SIGTERM, stop)\n{WAIT}")
    with Job([sys.executable, script]) as job:
        job.wait_until(lambda: "ready" in job.output)
        job.process.terminate()
        result = job.wait(10)
    assert (result.returncode, result.output) == (1, "ready\nstopped\n")


def test_forks_end_with_the_process_that_asked_for_them(tmp_path):
    """As when pytest is killed: nothing is left."""
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    owner = tmp_path / "owner.py"
    owner.write_text(
        f"import sys, time\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nfrom helpers import Job\n"
        f"job = Job([sys.executable, {str(script)!r}])\n"
        "job.wait_until(lambda: 'ready' in job.output)\nprint(job.processes()[0].pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    with Job([sys.executable, owner], cold=True) as job:
        fork = psutil.Process(int(job.wait_until(lambda: job.output.strip())))
        job.process.kill()
        psutil.wait_procs([fork], timeout=10)
        assert not fork.is_running()


def test_a_fork_hears_of_the_level_of_logs_and_checks(tmp_path):
    script = tmp_path / "levels.py"
    script.write_text(
        "from datetime import timedelta\nimport torch.distributed as dist\n"
        "print(dist.get_debug_level())\n"
        "dist.TCPStore('127.0.0.1', 1, is_master=False, timeout=timedelta(seconds=0.1))\n"
    )
    for level in ("WARNING", "ERROR"):
        told = {"TORCH_CPP_LOG_LEVEL": level, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
        for cold in (True, False):
            output = python(script, cold=cold, **told).output
            assert output.startswith("DebugLevel.DETAIL\n")
            assert ("[W" in output) == (level == "WARNING")


def test_torchruns_ranks_are_forks(tmp_path):
    script = tmp_path / "tell.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], 'torch' in sys.modules)\n")
    for cold in (True, False):
        result = torchrun(script, cold=cold).check()
        assert sorted(result.output.splitlines()) == [f"0 {not cold}", f"1 {not cold}"]


NAMES = """
import inspect
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

asked = []
stack = inspect.stack
inspect.stack = lambda: asked.append(True) or stack()[1:]

class Executor:
    def note(self):
        return dynamic_rendezvous.get_method_name(), dynamic_rendezvous.get_method_name(depth=3)

    def keep_alive(self):
        return self.note()

def agent():
    return Executor().keep_alive()

print(*agent(), bool(asked))
"""


def test_agents_in_forks_look_through_no_modules(tmp_path):
    """torch.distributed.run's agent does for each of its notes, 0.25 s long where torch._dynamo and
    transformers are imported: with a heart that beats once a second too often for two processors.
    """
    script = tmp_path / "names.py"
    script.write_text(NAMES)
    assert python(script, cold=True).check().output == "keep_alive agent True\n"
    assert python(script).check().output == "keep_alive agent False\n"
