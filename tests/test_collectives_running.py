"""collectives/debugging.md: each command as printed, each claim.

Only the port differs from the printed one: 29500 may be in use here.
"""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from helpers import (
    PROGRAMS,
    ROOT,
    Job,
    Torchrun,
    free_port,
    still_running,
    torchrun,
    torchrun_command,
)

pytestmark = pytest.mark.slow
PAGE = (ROOT / "collectives/debugging.md").read_text()
COMMANDS = "".join(re.findall("^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
# One part of each command, which no other command has.
PARTS = ("--tee", "--redirects", "--local-ranks", "tail", "--breakpoint-on", "--fill-memory-on")
PARTS += ("--master-port", "ss ", "lsof", "pgrep", "kill PID", "kill -9", "tmux", "setsid", "nohup")
DEBUGGING = ROOT / "collectives/debugging.py"
TERMINAL = ROOT / "tests/workers/terminal.py"


def command(part: str) -> str:
    assert part in PARTS
    return next(command for command in COMMANDS if part in command)


def test_each_command_is_tried():
    assert len(COMMANDS) == len(PARTS)
    for printed in COMMANDS:
        assert sum(part in printed for part in PARTS) == 1, printed
    source = Path(__file__).read_text()
    assert [part for part in PARTS if f'command("{part}")' not in source] == []


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A directory above collectives/, with torchrun on PATH."""
    (tmp_path / "collectives").symlink_to(ROOT / "collectives")
    monkeypatch.setenv("PATH", f"{PROGRAMS}:{os.environ['PATH']}")
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    return tmp_path


def typed(text: str, here: Path, **options) -> Job:
    return Job(["bash", "-c", text], cwd=here, **options)


def needs(program: str) -> None:
    if not shutil.which(program):
        pytest.skip(f"needs {program}")


# Logs.


def lines(here: Path, text: str) -> tuple[str, dict[str, str]]:
    """What the command shows, and what it leaves in files, by the end of their names."""
    with typed(text, here) as job:
        shown = job.wait(120).check().output
    files = {"/".join(p.parts[-3:]): p.read_text() for p in here.glob("logs/*/*/*/*.log")}
    return shown, files


def test_tee_shows_and_keeps(here):
    shown, files = lines(here, command("--tee"))
    assert "[default1]:rank 1 begins" in shown
    assert files["attempt_0/1/stdout.log"] == "rank 1 begins\n"
    assert "step 19: the sum" in files["attempt_0/0/stdout.log"]
    assert len(files) == 4
    with typed(command("tail"), here) as job:
        assert "step 19: the sum of the ranks is 1\n" in job.wait(20).check().output


def test_redirects_keep_and_do_not_show(here):
    shown, files = lines(here, command("--redirects"))
    assert "begins" not in shown
    assert files["attempt_0/1/stdout.log"] == "rank 1 begins\n"


@pytest.mark.release
def test_the_filter_shows_one_rank(here):
    shown, files = lines(here, command("--local-ranks"))
    assert "rank 0 begins" in shown
    assert "rank 1 begins" not in shown
    assert files == {}
    both = command("--tee").replace("--tee=3", "--tee=3 --local-ranks-filter=0")
    with typed(both, here) as job:
        assert "rank 1 begins" not in job.wait(120).check().output
    assert [p.read_text() for p in here.glob("logs/*/*/1/stdout.log")] == ["rank 1 begins\n"]


# A debugger.


def terminal(here: Path, *steps: tuple[str, str], **options) -> Job:
    """A terminal that types `steps`: (what it shows, what is typed then). Python buffers."""
    options = {"PYTHONUNBUFFERED": ""} | options
    return Job([sys.executable, TERMINAL, json.dumps(steps)], cwd=here, **options)


def test_a_debugger_on_one_rank(here):
    start = ("ready> ", command("--breakpoint-on"))
    pdb = [("(Pdb)", "up"), ("(Pdb)", "p worker.rank, total"), ("(Pdb)", "total += 100")]
    with terminal(here, start, *pdb, ("(Pdb)", "c"), ("step 19", ""), ("ready>", "")) as job:
        screen = job.wait(120).check().output
    assert "(1, tensor([1.]))" in screen
    assert "step 3: the sum of the ranks is 101" in screen
    assert "step 4: the sum of the ranks is 1\r" in screen
    assert inspect.signature(dist.breakpoint).parameters["timeout_s"].default == 3600


PLAIN = """
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo")  # a rank may come seconds after the other, on a busy machine
group = dist.new_group(timeout=timedelta(seconds=2))
if dist.get_rank() == 1:
    breakpoint()
dist.all_reduce(torch.ones(1), group=group)
"""


def test_a_plain_breakpoint_is_bounded_by_the_timeout(here):
    (here / "plain.py").write_text(PLAIN)
    start = "torchrun --standalone --nproc_per_node=2 plain.py"
    steps = [("ready> ", start), ("(Pdb)", "p 6 * 7"), ("42", "")]
    with terminal(here, *steps, ("Timed out waiting 2000ms", "")) as job:
        job.wait(120).check()


def test_how_a_debugger_ends(here):
    start, pdb = ("ready> ", command("--breakpoint-on")), "(Pdb)"
    with terminal(here, start, (pdb, "q"), ("FAILED", ""), ("ready>", "")) as job:
        assert "bdb.BdbQuit" in job.wait(120).check().output
    # Not pdb's answer to Ctrl-C: with it, a terminal discards what was printed and not yet shown.
    interrupted = [(pdb, "\x03"), ("Unable to shutdown process", ""), ("got signal: 2", "")]
    with terminal(here, start, *interrupted, PET_SHUTDOWN_TIMEOUT="2") as job:
        job.wait(120).check()


def test_where_a_prompt_goes(here):
    tee = command("--breakpoint-on").replace("--standalone", "--standalone --log-dir=logs --tee=3")
    steps = [("ready> ", tee), ("ATTENTION", "p 6 * 7"), ("42", "c"), ("step 19", "")]
    with terminal(here, *steps) as job:
        before, _, after = job.wait(120).check().output.partition("p 6 * 7")
    assert "(Pdb)" not in before
    assert re.search(r"\(Pdb\) (\[default1\]:)?42", after)
    hidden = tee.replace("--tee", "--redirects")
    with terminal(here, ("ready> ", hidden), ("ready> ", "")) as job:
        job.wait_until(lambda: "(Pdb)" in "".join(p.read_text() for p in here.rglob("stdout.log")))
        assert "(Pdb)" not in job.output


def test_a_breakpoint_without_a_terminal(here):
    with typed(command("--breakpoint-on"), here) as job:
        result = job.wait(120)
    assert result.returncode == 1
    assert "bdb.BdbQuit" in result.output.rpartition("Root Cause")[2]


# A port, and ranks that are left.


def test_who_holds_the_port(here):
    needs("lsof")
    port = str(free_port())
    start = command("--master-port").replace("29500", port)
    with typed(start, here) as job:
        job.wait_until(lambda: "step 0" in job.output)
        with typed(start, here) as second:
            result = second.wait(120)
        assert result.returncode == 1
        assert "EADDRINUSE, message: address already in use" in result.output
        holders = {agent.pid for agent in job.agents()}
        shown = look(command("lsof"), port)
        assert holders & set(map(int, re.findall(r"^\S+ +(\d+)", shown, re.MULTILINE)))
        if shutil.which("ss"):
            shown = look(command("ss "), port)
            assert holders & set(map(int, re.findall(r"pid=(\d+)", shown)))
        for agent in job.agents():
            agent.terminate()
        job.wait(60)
        assert not job.left_running()


def look(printed: str, port: str) -> str:
    text = printed.replace("29500", port)
    return subprocess.run(text, shell=True, capture_output=True, text=True, timeout=60).stdout


def test_ranks_that_are_left(here):
    needs("pgrep")
    start = torchrun_command("collectives/debugging.py", "--steps", 600)
    with Job(start, cwd=here) as job:
        job.wait_until(lambda: "step 3" in job.output)
        ranks = job.ranks()
        assert len(ranks) == 2
        job.process.kill()
        job.process.wait(10)
        steps = job.output.count("step")
        wait_until(lambda: job.output.count("step") > steps + 5)  # they keep training
        found = subprocess.run(command("pgrep").split(), capture_output=True, text=True, timeout=60)
        assert {rank.pid for rank in ranks} <= {
            int(x.split()[0]) for x in found.stdout.splitlines()
        }

        numbers = f"{ranks[0].pid} {ranks[1].pid}"
        ranks[1].send_signal(signal.SIGSTOP)  # a rank that SIGTERM does not end
        # Until it has stopped, which takes a while on a busy machine, SIGTERM does.
        wait_until(lambda: ranks[1].status() == psutil.STATUS_STOPPED)
        for printed, left in ((command("kill PID"), ranks[1:]), (command("kill -9"), [])):
            subprocess.run(printed.replace("PID PID", numbers), shell=True, timeout=60)
            wait_until(lambda left=left: still_running(ranks) == left)


def wait_until(condition: Callable[[], object], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# A terminal that closes.


def closed(here: Path, start: str) -> Job:
    """The job, typed into a terminal that closes at step 3."""
    return terminal(here, ("ready> ", start), ("step 3", ""))


def reached(here: Path) -> int:
    return (here / "training.log").read_text().count("step")


@pytest.mark.parametrize("how", ["tmux", "setsid", "nohup"])
def test_a_job_outlives_the_terminal(here, how):
    needs(how)
    start = {"tmux": command("tmux"), "setsid": command("setsid"), "nohup": command("nohup")}[how]
    with closed(here, start) as job:
        job.process.wait(120)
        steps = reached(here)
        wait_until(lambda: reached(here) > steps + 10)


@pytest.mark.parametrize("prefix", ["", "nohup ", "TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM nohup "])
def test_a_job_ends_with_the_terminal(here, prefix):
    flag = "nohup torchrun --signals-to-handle=SIGTERM,SIGINT"
    assert flag in command("nohup")
    with closed(here, command("nohup").replace(flag, f"{prefix}torchrun")) as job:
        job.process.wait(120)
        wait_until(lambda: "got signal: 1" in (here / "training.log").read_text())
        assert "closing signal SIGHUP" in (here / "training.log").read_text()


# Memory.


def test_out_of_memory_on_one_rank(here):
    with typed(command("--fill-memory-on"), here) as job:
        result = job.wait(120)
    assert result.returncode == 1
    # torchrun orders the failures by whole seconds: if rank 0 loses its connection in the same
    # second, torchrun names it first.
    failures = re.findall(r"time +: (\S+)\n.*\n +rank +: (\d) ", result.output)
    causes = {rank for time, rank in failures if time == min(failures)[0]}
    assert "1" in causes
    assert "can't allocate memory" in result.output.rpartition("FAILED")[2]
    of_rank_0 = re.findall(r"^\[rank0\]: RuntimeError: (.*)", result.output, re.MULTILINE)
    assert all(re.search("Connection closed by peer|Read error", line) for line in of_rank_0)


def entries(output: str) -> dict[str, tuple[str, str]]:
    """From torchrun's report, for each rank: its exit status, and its signal if it was killed.

    torchrun dates an exception at its raise, and a killed rank when torchrun notices it. "Root
    Cause" is the earlier one.
    """
    report = output.rpartition("FAILED")[2]
    entry = r"rank +: (\d) .*\n +exitcode +: (\S+) .*\n.*\n +traceback : (Signal.*PID|)"
    return {rank: (status, signal) for rank, status, signal in re.findall(entry, report)}


def test_a_rank_that_is_killed(here):
    with Torchrun(DEBUGGING, "--steps", 600) as job:
        job.wait_until(lambda: "step 3" in job.output)
        job.ranks()[1].kill()
        output = job.wait(120).output
    assert entries(output)["1"] == ("-9", "Signal 9 (SIGKILL) received by PID")


LIMITED = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    print("process", os.getpid(), flush=True)
    open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
    torch.ones(2**28)
dist.barrier()
"""


@pytest.fixture
def limited():
    """A control group whose processes may allocate 64 MiB of memory."""
    group = Path(f"/sys/fs/cgroup/memory/test_running_{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs control groups, version 1, and the right to make one: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(2**26))
        yield group
    finally:
        group.rmdir()


def test_a_rank_that_the_kernel_ends(here, limited):
    (here / "limited.py").write_text(LIMITED)
    with Torchrun(here / "limited.py", limited, cold=True) as job:
        output = job.wait(120).output
    assert entries(output)["1"][0] == "-9"
    assert "memory" not in output
    process = re.search(r"process (\d+)", output)[1]
    log = subprocess.run("dmesg", capture_output=True, text=True, timeout=60).stdout
    assert re.search(rf"Killed process {process} \(python", log)


@pytest.mark.parametrize("flag", ["--breakpoint-on", "--fill-memory-on"])
def test_a_rank_that_is_not_there(flag):
    result = torchrun(DEBUGGING, flag, 2)
    assert result.returncode != 0
    assert f"debugging.py: error: {flag} 2: the last rank is 1" in result.output
