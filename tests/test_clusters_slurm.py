"""clusters/slurm/: jobs on a real Slurm of a login node and two compute nodes, see lab.py."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pool
import psutil
import pytest
import torch
from helpers import (
    PROGRAMS,
    ROOT,
    Job,
    Patience,
    Result,
    clean_environment,
    environment,
    learned,
    those,
)

SLURM = ROOT / "clusters/slurm"
LAB = ROOT / "clusters/lab.py"
TRAIN = ROOT / "ddp_basics/train.py"
MISSING = [
    tool
    for tool in ("slurmctld", "slurmd", "munged")
    if not shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin")
]

pytestmark = [
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="Slurm's daemons need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"no {MISSING} here: apt install slurm-wlm munge"),
]


class Cluster:
    """Runs commands on the login node, in a folder where the jobs leave their output."""

    def __init__(self, name: str, conf: str, folder: Path):
        self.name, self.folder = name, folder
        self.environment = clean_environment(LAB=name, SLURM_CONF=conf, PATH=path())

    def run(self, *command, timeout: float = 300, cwd: Path = ROOT) -> Result:
        done = subprocess.run(
            [sys.executable, LAB, "exec", "0", "--", *map(str, command)],
            cwd=cwd,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return Result(done.returncode, done.stdout)

    def submit(self, *args, output: Path, **environment: str) -> str:
        """The number of a job."""
        variables = [f"{name}={value}" for name, value in environment.items()]
        command = ("env", *variables, "sbatch", "--parsable", f"--output={output}", *args)
        return self.run(*command).check().output.strip()

    def finish(self, *args, output: Path, **environment: str) -> int:
        """Run a job to its end; its exit status. (sbatch --wait looks every ten seconds.)"""
        job = self.submit(*args, output=output, **environment)
        self.wait_until(lambda: self.state(job, "JobState") in ENDED, output)
        return int(self.state(job, "ExitCode").split(":")[0])

    def state(self, job: str, what: str) -> str:
        shown = self.run("scontrol", "show", "job", job).check().output
        return re.search(rf"{what}=(\S+)", shown)[1]

    def wait_until(self, condition: Callable[[], object], *logs: Path, timeout: float = 120):
        """Raises AssertionError if no job makes progress for `timeout` seconds."""
        patience = PatienceWithJobs(self, logs, timeout)
        while True:
            asked = time.monotonic()
            if value := condition():
                return value
            if patience.is_over():
                said = "\n".join(log.read_text() for log in logs if log.exists())
                raise AssertionError(f"{patience.why}\n{self.run('squeue').output}{said[-6000:]}")
            time.sleep(max(0.2, 5 * (time.monotonic() - asked)))  # to ask takes a processor, too

    def processes(self) -> list[psutil.Process]:
        """Of the daemons, and of the jobs, which get the variables that sbatch had."""
        return those(lambda p: environment(p).get("SLURM_CONF") == self.environment["SLURM_CONF"])

    def idle(self) -> bool:
        return not self.run("squeue", "--noheader").check().output


class PatienceWithJobs(Patience):
    def __init__(self, cluster: Cluster, logs: tuple[Path, ...], seconds: float):
        self.logs = logs
        super().__init__([cluster], seconds)

    def printed(self) -> int:
        return sum(log.stat().st_size for log in self.logs if log.exists())


def path() -> str:
    """Where the jobs find this Python and its torchrun."""
    return os.pathsep.join([str(PROGRAMS), os.environ["PATH"]])


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    name, say = f"slurm{os.getpid()}", 'echo "conf $SLURM_CONF"; exec sleep 1000'
    command = [SLURM / "test_cluster.sh", "sh", "-c", say]
    with Job(command, LAB=name, PYTHON=sys.executable) as job:
        try:
            conf = job.wait_until(lambda: re.search(r"^conf (.+)\n", job.output), 60)[1]
        except AssertionError:
            if re.search("a lab needs|no hosts could be made", job.output):
                pytest.skip(job.output.strip())
            raise
        cluster = Cluster(name, conf, tmp_path_factory.mktemp("jobs"))
        assert {p.name() for p in cluster.processes()} >= {"slurmctld", "slurmd"}
        yield cluster
        job.process.terminate()  # while its command runs
        assert job.wait(30).returncode == 143
        assert not job.kill()  # daemons and jobs have ended with it
        assert not Path(conf).parent.exists()


@pytest.fixture
def cluster(running):
    yield running
    running.run("scancel", "--user=root")
    running.wait_until(running.idle)


@pytest.mark.slow
def test_a_partition_that_does_not_exist(cluster):
    result = cluster.run("sbatch", "--partition=gpu", SLURM / "train.sbatch", TRAIN)
    assert result.returncode == 1  # sbatch says it itself
    assert "sbatch: error: invalid partition specified: gpu\n" in result.output


@pytest.mark.parametrize("file", ["train.sbatch", "train_srun.sbatch"])
@pytest.mark.slow
def test_a_script_that_does_not_exist(cluster, file, tmp_path):
    log = tmp_path / "log"
    assert cluster.finish(SLURM / file, "ddp_basics/tain.py", output=log) == 2
    assert log.read_text() == (
        f"{file}: error: there is no script 'ddp_basics/tain.py' in {ROOT}\n"
    )


TELL = """
import os, socket
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS"
said = [socket.gethostname(), *(os.environ[name] for name in names.split())]
print(" ".join(said) + "\\n", end="")  # in one piece: ranks share the output
"""


@pytest.mark.slow
def test_interactive(cluster, tmp_path):
    """What a batch script does, it does within salloc as well."""
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    salloc = ("salloc", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
    said = cluster.run(*salloc, "bash", SLURM / "train_srun.sbatch", script).check().output
    told = sorted(line for line in said.splitlines() if line.startswith("host"))
    assert told == [f"host{1 + rank // 2} {rank} {rank % 2} 4 2 host1 1" for rank in range(4)]


@pytest.mark.slow
def test_from_any_launcher(cluster, tmp_path):
    any_launcher, script = ROOT / "clusters/from_any_launcher.py", tmp_path / "tell.py"
    script.write_text(TELL.replace(" OMP_NUM_THREADS", ""))
    salloc = ("salloc", "--nodes=2", "--ntasks=3", "--cpus-per-task=1")
    said = cluster.run(*salloc, "srun", "python", any_launcher, script).check().output
    told = sorted(line for line in said.splitlines() if line.startswith("host"))
    assert told == ["host1 0 0 3 2 host1", "host1 1 1 3 2 host1", "host2 2 0 3 1 host1"]
    two_steps = f"for _ in 1 2; do srun --overlap python {any_launcher} & done; wait"
    said = cluster.run("salloc", "--nodes=2", "--cpus-per-task=1", "sh", "-c", two_steps).output
    ports = re.findall(r"MASTER_PORT=(\d+)", said)
    assert sorted(ports.count(port) for port in set(ports)) == [2, 2], said
    log = tmp_path / "log"  # a batch script is not a rank
    job = ("--nodes=2", "--ntasks-per-node=1", f"--wrap=python {any_launcher}")
    assert cluster.finish(*job, output=log) == 0
    assert log.read_text().startswith("started by no launcher: RANK=0 WORLD_SIZE=1 ")


@pytest.mark.slow
def test_words_for_srun_and_a_container_come_before_the_ranks(cluster, tmp_path):
    """There is no container engine here: another program stands where one would, with arguments.

    srun writes one file for each rank."""
    script, log = tmp_path / "tell.py", tmp_path / "log"
    script.write_text("import os; print(os.environ['INSIDE'], os.environ['RANK'])")
    words = {"SRUN_ARGS": f"--output={tmp_path}/rank%t", "WRAP": "env INSIDE=yes"}
    assert cluster.finish(SLURM / "train_srun.sbatch", script, output=log, **words) == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["yes 0\n", "yes 1\n"]


# Saves on SIGTERM, which takes until there is a file of the name "go", or "go0" for rank 0.
SAVES = """
import os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
def save(number, frame):
    (folder / f"asked{rank}").touch()
    while not (folder / "go").exists() and not (folder / f"go{rank}").exists():
        time.sleep(0.01)
    (folder / f"saved{rank}").touch()
    os._exit(128 + number)
signal.signal(signal.SIGTERM, save)
(folder / f"trains{rank}").touch()
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", ["train.sbatch", "train_srun.sbatch"])
@pytest.mark.parametrize("when", ["while it trains", "while it saves"])
def test_a_cancelled_job_does_not_come_back(cluster, file, when, tmp_path):
    """Its ranks have saved. While it saves: it had been told already that its time is nearly up,
    and one rank has left. This Slurm has KillOnBadExit=1, which would kill the other rank."""
    script, log = tmp_path / "saves.py", tmp_path / "log"
    script.write_text(SAVES)

    def both(what: str) -> bool:
        return all((tmp_path / f"{what}{rank}").exists() for rank in (0, 1))

    job = cluster.submit(SLURM / file, script, tmp_path, output=log)
    cluster.wait_until(lambda: both("trains"), log)
    if when == "while it saves":
        cluster.run("scancel", "--batch", "--signal=USR1", job).check()
        cluster.wait_until(lambda: both("asked"), log)
        (tmp_path / "go0").touch()
        cluster.wait_until(lambda: re.search(r"task \d: Exited with exit code", text(log)), log)
    cluster.run("scancel", job).check()
    (tmp_path / "go").touch()
    cluster.wait_until(cluster.idle, log)  # a job that will come back is PENDING
    assert both("saved"), log.read_text()
    assert "Terminating StepId" not in log.read_text()  # srun's word, before it kills in KillWait
    assert cluster.state(job, "JobState") == "CANCELLED"
    assert cluster.state(job, "Restarts") == "0"


def printed_line(file: str) -> list[str]:
    """The options of sbatch in the line for 8 GPUs that the file prints."""
    line = re.search(r"sbatch (--nodes=4 .*) \\\n", (SLURM / file).read_text())[1]
    return [word for word in line.split() if not word.startswith(("--nodes", "--time"))]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["train.sbatch", "train_srun.sbatch"])
def test_eight_gpus_get_the_cores_and_the_memory_of_a_node(cluster, file, tmp_path):
    script, log = tmp_path / "threads.py", tmp_path / "log"
    # With end="" it is one write: the ranks share the log.
    script.write_text("import os; print(f\"threads {os.environ['OMP_NUM_THREADS']}\\n\", end='')")
    one_node = ("--nodes=1", *printed_line(file), SLURM / file, script)
    job = cluster.submit(*one_node, output=log, OMP_NUM_THREADS="")
    assert "cpu=96,mem=4000M," in cluster.state(job, "TRES")
    cluster.wait_until(cluster.idle, log)
    assert log.read_text() == "threads 12\n" * 8


@pytest.mark.slow
def test_too_few_cores_for_the_gpus_are_a_warning(cluster, tmp_path):
    log = tmp_path / "log"
    script = tmp_path / "script.py"
    script.write_text("")
    for file, says in (
        ("train.sbatch", "8 ranks share 4 cores"),
        ("train_srun.sbatch", "one core for each rank"),
    ):
        tasks = [] if file == "train.sbatch" else ["--ntasks-per-node=8", "--cpus-per-task=1"]
        job = ("--nodes=1", "--gpus-per-node=8", *tasks, SLURM / file, script)
        assert cluster.finish(*job, output=log) == 0
        advice = "sbatch --cpus-per-task=N --mem=0"
        assert f"{file}: warning: {says}: {advice}\n" in log.read_text()


@pytest.mark.slow
def test_sweep(cluster, tmp_path):
    runs, script = tmp_path / "runs.txt", tmp_path / "tell.py"
    runs.write_text("--lr 1e-3\n--lr 2e-3 --seed 3\n")
    script.write_text("import sys; print(sys.argv[1:])")
    sweep = ("--array=1-3%2", SLURM / "sweep.sbatch", runs, script, "--epochs", 1)
    job = cluster.submit(*sweep, output=tmp_path / "log%a")
    cluster.wait_until(cluster.idle)
    states = re.findall(r"JobState=(\S+)", cluster.run("scontrol", "show", "job", job).output)
    assert sorted(states) == ["COMPLETED", "COMPLETED", "FAILED"]  # there is no line 3
    assert (tmp_path / "log3").read_text() == (
        "sweep.sbatch: error: needs --array, a file with line 3, and a script\n"
    )
    for number, words in ((1, "'--lr', '1e-3'"), (2, "'--lr', '2e-3', '--seed', '3'")):
        said = (tmp_path / f"log{number}").read_text()
        assert f"['--epochs', '1', {words}]" in said


@pytest.mark.slow
def test_a_run_of_a_sweep_saves_before_its_time_limit(cluster, tmp_path):
    runs, script, log = (tmp_path / name for name in ("runs.txt", "saves.py", "log"))
    runs.write_text(f"{tmp_path}\n")
    script.write_text(SAVES)
    job = cluster.submit("--array=1", SLURM / "sweep.sbatch", runs, script, output=log)
    cluster.wait_until((tmp_path / "trains0").exists, log)
    nearly_up(cluster, job)
    cluster.wait_until((tmp_path / "asked0").exists, log)
    (tmp_path / "go0").touch()
    cluster.wait_until(cluster.idle, log)
    assert (tmp_path / "saved0").exists(), log.read_text()


def nearly_up(cluster: Cluster, job: str) -> None:
    """Leave the job less than the two minutes of --signal. Slurm notes that within 30 s."""
    minutes = int(cluster.state(job, "RunTime").split(":")[1])
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}").check()


@pytest.mark.slow
def test_torchrun_on_each_node(cluster, tmp_path):
    """Each rank has a log of its own; the job's output has those of local rank 0 only."""
    log, logs = tmp_path / "log", tmp_path / "logs"
    hello = ("--nodes=2", SLURM / "train.sbatch", ROOT / "collectives/hello_world.py")
    options = f"--log-dir={logs} --tee=3 --local-ranks-filter=0"
    more = {"TORCHRUN_ARGS": options, "RANKS_PER_NODE": "2"}
    assert cluster.finish(*hello, output=log, **more) == 0, log.read_text()
    said = log.read_text()
    table = re.findall(r"^\[default0\]: +(\d)  +([01])  +4  gloo +host(\d)", said, re.MULTILINE)
    assert [row[:2] for row in table] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert sorted(row[2] for row in table) == ["1", "1", "2", "2"]
    assert "[default1]" not in said
    each = [file.read_text() for file in logs.glob("*/attempt_0/[01]/stdout.log")]
    assert sorted(re.findall(r"hello from rank (\d) of 4", "".join(each))) == list("0123")


@pytest.mark.slow
def test_a_world_that_does_not_divide(cluster, tmp_path):
    log = tmp_path / "log"
    job = (SLURM / "train_srun.sbatch", TRAIN, "--batch-size", 65)
    assert cluster.finish(*job, output=log) == 2
    assert "--batch-size 65 does not divide into 2 equal parts" in log.read_text()
    assert not of_jobs(cluster)


def of_jobs(cluster: Cluster) -> list[psutil.Process]:
    """Processes of Python on the nodes."""

    def here(process) -> bool:
        environment = process.environ()
        ours = environment.get("SLURM_CONF") == cluster.environment["SLURM_CONF"]
        return ours and "SLURM_PROCID" in environment and process.name().startswith("python")

    return those(here)


# train.py, which does not go on from step 30 before it is asked to stop, the first time.
WAITS = """
import os, runpy, sys, time
sys.path.insert(0, {directory!r})
import train
agreed = train.StopRequests.agreed
def wait(stop, step):
    if step == 30 and "SLURM_RESTART_COUNT" not in os.environ:
        print("at step 30", flush=True)
        until = time.monotonic() + 600
        while not stop.asked and time.monotonic() < until:
            time.sleep(0.01)
        print("asked", flush=True)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(35)  # as if to save took so long: by default torchrun kills after 30 s
        stop.next_look = step
    return agreed(stop, step)
train.StopRequests.agreed = wait
train.main()
"""


# Rank 0 goes on for longer than a minute after the other has ended well, and without an error.
EXPORTS = """
import os, time
time.sleep(70 if os.environ["RANK"] == "0" else 0)
print(f"rank {os.environ['RANK']} has ended\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_jobs_that_lose_their_nodes_continue_bit_for_bit(cluster, tmp_path):
    """One whose time is nearly up, under torchrun; one that gives way to another, without.

    A third one on the same nodes, meanwhile: there one rank needs longer than the other.
    """
    export, exported = tmp_path / "export.py", tmp_path / "export.log"
    export.write_text(EXPORTS)
    urgent = ("--partition=urgent", "--cpus-per-task=1")
    late = cluster.submit(*urgent, SLURM / "train_srun.sbatch", export, output=exported)
    script = tmp_path / "waits.py"
    script.write_text(WAITS.format(directory=str(TRAIN.parent)))
    args = ("--epochs", 2, "--log-every", 1, "--output-dir")
    logs = {name: tmp_path / f"{name}.log" for name in ("time", "urgent")}
    torchrun = (*urgent, SLURM / "train.sbatch", script)
    srun = ("--cpus-per-task=2", SLURM / "train_srun.sbatch", script)
    jobs = {
        "time": cluster.submit(*torchrun, *args, tmp_path / "time", output=logs["time"]),
        "urgent": cluster.submit(*srun, *args, tmp_path / "urgent", output=logs["urgent"]),
    }
    for log in logs.values():
        cluster.wait_until(lambda: "at step 30" in text(log), *logs.values())  # noqa: B023
    nearly_up(cluster, jobs["time"])
    urgent = ("--partition=urgent", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=94")
    cluster.submit(*urgent, "--wrap=true", output=Path("/dev/null"))
    cluster.wait_until(lambda: "asked" in text(logs["time"]), logs["time"])
    before_it_starts_again = ("scontrol", "update", f"JobId={jobs['time']}", "TimeLimit=60")
    cluster.run(*before_it_starts_again).check()
    whole = tmp_path / "whole"
    pool.run(TRAIN, *args, whole, ranks=2).check()
    for name, job in jobs.items():
        cluster.wait_until(lambda: cluster.state(job, "JobState") in ENDED, logs[name])  # noqa: B023
        said = logs[name].read_text()
        assert cluster.state(job, "JobState") == "COMPLETED", said[-6000:]
        assert cluster.state(job, "Restarts") == "1"
        assert "stopped by SIGTERM after step 30 of 44" in said
        assert learned(tmp_path / name) == learned(whole)
        ends = [folder / "checkpoints/step_00000044.pt" for folder in (tmp_path / name, whole)]
        one, other = (torch.load(end, weights_only=True)["model"] for end in ends)
        assert all(torch.equal(one[key], other[key]) for key in other)
    cluster.wait_until(lambda: cluster.state(late, "JobState") in ENDED, exported)
    assert cluster.state(late, "JobState") == "COMPLETED", exported.read_text()
    assert exported.read_text() == "rank 1 has ended\nrank 0 has ended\n"


@pytest.mark.slow
@pytest.mark.parametrize("file", ["train.sbatch", "train_srun.sbatch"])
def test_a_time_limit_before_the_first_step_is_an_error(cluster, file, tmp_path):
    """Slurm would signal the job at its start, and it would go back to the queue for ever."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("")
    job = cluster.submit("--time=3", SLURM / file, script, "--output-dir", tmp_path, output=log)
    cluster.wait_until(lambda: cluster.state(job, "JobState") in ENDED, log)
    assert cluster.state(job, "ExitCode") == "2:0"
    assert cluster.state(job, "Restarts") == "0"
    assert log.read_text() == (
        f"{file}: error: a time limit of 3:00 leaves no time to train, because --signal comes "
        "120 s before: sbatch --time=4 or more\n"
    )
    log.unlink()
    for more in (
        ["--time=3", SLURM / file, script],
        ["--time=4", SLURM / file, script, "--output-dir=x"],
    ):
        assert cluster.finish("--nodes=1", *more, output=log) == 0, log.read_text()


# Trains until it is asked to leave; then it makes what it is told to make, as a save would.
LEAVES = """
import os, pathlib, signal, sys, time
def leave(*_):
    if len(sys.argv) > 4:
        pathlib.Path(sys.argv[4]).mkdir(parents=True)
    status = int(sys.argv[1])
    if status < 0:  # as a script without a handler
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
signal.signal(signal.SIGTERM, leave)
print("here", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "status", "folder", "saved", "why"),
    [
        ("train_srun.sbatch", 143, "", "", ""),
        ("train_srun.sbatch", 143, "run", "checkpoints/step_7", None),
        ("train_srun.sbatch", -15, "run", "", "there is no new save in {folder}/checkpoints"),
        ("train.sbatch", 143, "run", "checkpoints/step_7", None),
        ("train.sbatch", 1, "run", "", "there is no new save in {folder}/checkpoints"),
        (
            "train.sbatch",
            1,
            "run",
            "checkpoints/unfinished_7",
            "there is no new save in {folder}/checkpoints",
        ),
    ],
)
def test_a_job_that_saves_nothing_does_not_begin_anew(
    cluster, tmp_path, file, status, folder, saved, why
):
    """It would be at its time limit again after the same hour, and again: for ever."""
    script, log, run = tmp_path / "leaves.py", tmp_path / "log", tmp_path / folder
    script.write_text(LEAVES)
    args = [status, *(("--output-dir", run) if folder else ()), *((run / saved,) if saved else ())]
    job = cluster.submit("--nodes=1", SLURM / file, script, *args, output=log)
    cluster.wait_until(lambda: "here" in text(log), log)
    cluster.run("scancel", "--batch", "--signal=USR1", job).check()  # as near the time limit
    cluster.wait_until(lambda: cluster.state(job, "JobState") != "RUNNING", log)
    cluster.wait_until(lambda: cluster.state(job, "JobState") != "COMPLETING", log)
    assert cluster.state(job, "Restarts") == str(int(why is None)), log.read_text()
    assert cluster.state(job, "JobState") == ("PENDING" if why is None else "FAILED")
    if why:
        says = why.format(folder=run)
        assert f"{file}: error: {says}: the job is not requeued\n" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("file", ["train.sbatch", "train_srun.sbatch"])
def test_a_site_that_passes_no_environment_on(cluster, tmp_path, file):
    """sbatch --export=NONE: the script itself finds Python, at the line that says so."""
    script, log, copy = tmp_path / "tell.py", tmp_path / "log", tmp_path / file
    script.write_text(TELL)
    lines = (SLURM / file).read_text().splitlines()
    (place,) = (n for n, line in enumerate(lines) if line.startswith("# Put `module load"))
    lines[place] = f"export PATH={path()}"
    copy.write_text("\n".join([*lines, ""]))
    assert cluster.finish("--export=NONE", "--nodes=1", copy, script, output=log) == 0, text(log)
    assert "host1 0 0 1 1 " in log.read_text()


# A squeue during which the signal arrives, at the job's first start. It sends it to the script: the
# parent of the subshell that has called it.
SIGNALS = """#!/bin/sh
[ "$SLURM_RESTART_COUNT" ] || kill -USR1 $(ps -o ppid= -p $PPID)
exec {squeue} "$@"
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", ["train.sbatch", "train_srun.sbatch"])
def test_a_signal_before_the_ranks_start(cluster, tmp_path, file):
    """bash would end with it, and the job with it: FAILED, by signal 10."""
    script, log, squeue = tmp_path / "leaves.py", tmp_path / "log", tmp_path / "squeue"
    script.write_text(LEAVES)
    squeue.write_text(SIGNALS.format(squeue=shutil.which("squeue")))
    squeue.chmod(0o755)
    job = cluster.submit(
        *("--nodes=1", SLURM / file, script, "143", "--output-dir", tmp_path),
        output=log,
        PATH=f"{tmp_path}:{path()}",
    )
    cluster.wait_until(lambda: "here" in text(log), log)
    assert cluster.state(job, "Restarts") == "1"  # no rank ran before


# One task of an array. It says who it is, and when it is told to leave.
TASK = """
import os, pathlib, signal, sys, time
task, folder = os.environ["SLURM_ARRAY_TASK_ID"], pathlib.Path(sys.argv[-1])
def leave(*_):
    (folder / f"told{task}").touch()
    (folder / f"checkpoints/step_{task}").mkdir(parents=True)
    os._exit(143)
signal.signal(signal.SIGTERM, leave)
(folder / f"trains{task}").touch()
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_task_of_an_array_leaves_the_other_tasks_alone(cluster, tmp_path):
    """The last task's SLURM_JOB_ID is the array's: a signal to this number is for all tasks."""
    script, log = tmp_path / "task.py", tmp_path / "log"
    script.write_text(TASK)
    task = ("--nodes=1", SLURM / "train_srun.sbatch", script, "--output-dir", tmp_path)
    array = cluster.submit("--array=1-2", *task, output=log)
    cluster.wait_until(lambda: all((tmp_path / f"trains{n}").exists() for n in (1, 2)), log)
    jobs = {n: cluster.state(f"{array}_{n}", "JobId") for n in (1, 2)}
    (last,) = (n for n, job in jobs.items() if job == array)
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_{last}").check()
    cluster.wait_until(lambda: cluster.state(f"{array}_{last}", "Restarts") == "1", log)
    assert (tmp_path / f"told{last}").exists()
    other = 3 - last
    assert not (tmp_path / f"told{other}").exists()
    assert cluster.state(f"{array}_{other}", "JobState") == "RUNNING"
    assert cluster.state(f"{array}_{other}", "Restarts") == "0"


@pytest.mark.slow
def test_each_node_starts_as_many_ranks_as_it_has_gpus(cluster, tmp_path):
    """In a shell of salloc, too, which does not know how many they are."""
    script = tmp_path / "tell.py"
    script.write_text(TELL.replace("OMP_NUM_THREADS", "SLURM_GPUS_ON_NODE OMP_NUM_THREADS"))
    salloc = ("salloc", "--nodes=2", "--ntasks-per-node=1", "--gpus=3", "--cpus-per-task=4")
    shell = ("env", "OMP_NUM_THREADS=", *salloc, "bash")
    said = cluster.run(*shell, SLURM / "train.sbatch", script, timeout=120).check().output
    told = [line.split() for line in said.splitlines() if re.match(r"host\d \d ", line)]
    assert sorted(int(words[1]) for words in told) == [0, 1, 2], said
    for host in ("host1", "host2"):
        ranks = [words for words in told if words[0] == host]
        assert {(words[4], words[6]) for words in ranks} == {(str(len(ranks)),) * 2}, said
        assert {words[7] for words in ranks} == {str(4 // len(ranks))}


@pytest.mark.slow
def test_nodes_with_different_numbers_of_tasks_are_an_error(cluster, tmp_path):
    script, log = tmp_path / "tell.py", tmp_path / "log"
    script.write_text(TELL)
    uneven = ("--nodes=2", "--ntasks=3", "--ntasks-per-node=2", SLURM / "train_srun.sbatch")
    assert cluster.finish(*uneven, script, output=log) == 2, text(log)
    assert log.read_text() == (
        "train_srun.sbatch: error: 3 tasks on 2 nodes, but each node needs the same number: "
        "sbatch --nodes=N --ntasks-per-node=N, without --ntasks\n"
    )


# Types Ctrl-C as a terminal does: the whole foreground group gets SIGINT.
CTRL_C = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
script = subprocess.Popen(["bash", *sys.argv[2:], str(folder)], start_new_session=True)
until = time.monotonic() + 60
while time.monotonic() < until and not all((folder / f"trains{r}").exists() for r in (0, 1)):
    time.sleep(0.05)
os.killpg(script.pid, signal.SIGINT)
print("status", script.wait(60), flush=True)
until = time.monotonic() + 30  # a step that has ended is listed for another moment
steps = ["unknown"]
while steps and time.monotonic() < until:
    listed = subprocess.run(["squeue", "--steps", "--noheader"], stdout=subprocess.PIPE, text=True)
    steps = [line for line in listed.stdout.splitlines() if "extern" not in line]
print("steps", steps, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", ["train.sbatch", "train_srun.sbatch"])
def test_ctrl_c_in_an_interactive_job(cluster, tmp_path, file):
    script, press = tmp_path / "saves.py", tmp_path / "press.py"
    script.write_text(SAVES)
    press.write_text(CTRL_C)
    (tmp_path / "go").touch()
    salloc = ("salloc", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
    said = cluster.run(*salloc, "python", press, tmp_path, SLURM / file, script, timeout=120).output
    assert "\nsteps []\n" in said, said
    assert re.search(r"status (?!-|0)", said), said
    assert all((tmp_path / f"saved{rank}").exists() for rank in (0, 1)), said


@pytest.mark.slow
def test_a_run_of_a_sweep_keeps_its_log_when_it_comes_back(cluster, tmp_path):
    runs, script, log = (tmp_path / name for name in ("runs.txt", "waits.py", "log"))
    runs.write_text("--lr 1\n")
    script.write_text(
        "import os, time; back = 'SLURM_RESTART_COUNT' in os.environ\n"
        "print('back' if back else 'first', flush=True); time.sleep(0 if back else 100)"
    )
    job = cluster.submit("--array=1", SLURM / "sweep.sbatch", runs, script, output=log)
    cluster.wait_until(lambda: "first" in text(log), log)
    cluster.run("scontrol", "requeue", job).check()
    cluster.wait_until(lambda: re.search("^back", text(log), re.M), log)
    assert re.findall("^(first|back)", text(log), re.M) == ["first", "back"]


ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")


def text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


@pytest.mark.slow
def test_what_is_missing_is_said(tmp_path):
    for tool in ("dirname", "bash"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    command = ["bash", SLURM / "test_cluster.sh"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert said.returncode == 2
    assert said.stderr == "test_cluster.sh: error: a command is needed, such as sinfo or bash\n"
