"""clusters/from_any_launcher.py: what each launcher sets, and what is made of it."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, Job, Result, clean_environment

sys.path.insert(0, str(ROOT / "clusters"))
from from_any_launcher import LAUNCHERS, first_host, launched_by, tasks_of_node, who_am_i

sys.path.remove(str(ROOT / "clusters"))

SCRIPT = ROOT / "clusters/from_any_launcher.py"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = {
    "SLURM_JOB_ID": "412",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09],cpu1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1378025473",
}
MVAPICH2 = {name.replace("OMPI", "MV2"): OPEN_MPI[name] for name in OPEN_MPI if "OMPI" in name}
CRAY_PMI = {"PMI_RANK": "9", "PMI_SIZE": "16", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
PALS = {
    "PALS_RANKID": "9",
    "PMI_SIZE": "16",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
}
FLUX = {  # which also speaks PMI
    "FLUX_TASK_RANK": "5",
    "FLUX_JOB_SIZE": "8",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}
EXPLICIT = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "m", "MASTER_PORT": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
NEEDS = "which is not enough: set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"
TORCHRUN = dict(zip(NAMES, ["2", "4", "0", "2", "10.0.0.1", "4711"], strict=True))


@pytest.mark.parametrize(
    ("env", "launcher", "told"),
    [
        ({}, "no launcher", "0 1 0 1 127.0.0.1 29500"),
        (TORCHRUN, "torchrun", "2 4 0 2 10.0.0.1 4711"),
        (SLURM, "Slurm", "5 7 1 2 gpu07 20412"),
        (SLURM | {"SLURM_NODEID": "3", "SLURM_LOCALID": "0"}, "Slurm", "5 7 0 1 gpu07 20412"),
        (OPEN_MPI | {"MASTER_ADDR": "a"}, "Open MPI", "3 4 1 2 a 25473"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "Open MPI", "3 4 1 4 127.0.0.1 25473"),
        (MPICH, "MPICH", "1 2 1 2 127.0.0.1 29500"),
        (MPICH | {"MASTER_ADDR": "b", "MASTER_PORT": "1"}, "MPICH", "1 2 1 2 b 1"),
        (MVAPICH2 | {"MASTER_ADDR": "a"}, "MVAPICH2", "3 4 1 2 a 29500"),
        (CRAY_PMI | {"MASTER_ADDR": "a"}, "Cray PMI", "9 16 1 4 a 29500"),
        (PALS | {"MASTER_ADDR": "a"}, "PALS", "9 16 1 4 a 29500"),
        (CRAY_PMI | PALS | {"MASTER_ADDR": "a"}, "Cray PMI", "9 16 1 4 a 29500"),
        (FLUX | {"MASTER_ADDR": "a"}, "Flux", "5 8 1 4 a 29500"),
        (
            FLUX | {"FLUX_JOB_NNODES": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "a"},
            "Flux",
            "5 8 1 3 a 29500",
        ),
        # A rank on each host: Volcano's, Kubeflow's PyTorchJob, a launcher written by hand.
        (EXPLICIT, "RANK and WORLD_SIZE", "3 8 0 1 m 1"),
        (EXPLICIT | {"JOB_COMPLETION_INDEX": "7"}, "RANK and WORLD_SIZE", "3 8 0 1 m 1"),
        # One within the other: the inner one has started us.
        (SLURM | OPEN_MPI | {"MASTER_ADDR": "a"}, "Open MPI", "3 4 1 2 a 25473"),
        (SLURM | TORCHRUN, "torchrun", "2 4 0 2 10.0.0.1 4711"),
        # srun --mpi=pmi2 sets PMI_RANK and no local rank
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}, "Slurm", "5 7 1 2 gpu07 20412"),
    ],
)
def test_each_launcher(env, launcher, told):
    assert launched_by(env) == launcher
    assert " ".join(who_am_i(env)[name] for name in NAMES) == told


@pytest.mark.parametrize(
    ("env", "name", "values"),
    [
        (SLURM, "SLURM_STEP_ID", ["0", "1", "2"]),  # two sruns in one job, at the same time
        (SLURM, "SLURM_JOB_ID", ["412", "413"]),
        (SLURM | OPEN_MPI | {"MASTER_ADDR": "a"}, "PMIX_NAMESPACE", ["1378025473", "1378156545"]),
        (OPEN_MPI | {"MASTER_ADDR": "a"}, "PMIX_NAMESPACE", ["prterun-a-7@1", "prterun-a-8@1"]),
    ],
)
def test_ranks_of_two_jobs_do_not_meet(env, name, values):
    ports = [int(who_am_i(env | {name: value})["MASTER_PORT"]) for value in values]
    assert len(set(ports)) == len(values)
    assert all(20000 <= port < 30000 for port in ports)


def test_the_table_of_platforms_has_the_same_names():
    """As on the page: | launcher | rank, size | local rank, local size | first host |."""
    page = (ROOT / "clusters/platforms.md").read_text()
    cells = [row.split("|")[2:4] for row in page.splitlines() if row.startswith("|")]
    rows = [re.findall(r"`([A-Z]\w+)`", "".join(names)) for names in cells]
    for launcher in set(LAUNCHERS) - {"torchrun", "RANK and WORLD_SIZE", "Kubernetes"}:
        assert list(LAUNCHERS[launcher]) in rows, launcher


def test_a_batch_script_is_no_rank():
    """Slurm sets SLURM_PROCID=0 there, too, beside the number of tasks that srun would start."""
    batch = {k: v for k, v in SLURM.items() if "STEP" not in k} | {"SLURM_PROCID": "0"}
    assert launched_by(batch) == "no launcher"
    assert who_am_i(batch)["WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("train-3", "train-0"),
        ("my-job-12.pods.ns.svc.cluster.local", "my-job-0.pods.ns.svc.cluster.local"),
    ],
)
def test_kubernetes(monkeypatch, name, first):
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    env = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4"}
    told = who_am_i(env)
    assert launched_by(env) == "Kubernetes"
    assert [told[name] for name in NAMES] == ["3", "4", "0", "1", first, "29500"]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("host0", "host0"),
        ("a,b", "a"),
        ("host[1-2]", "host1"),
        ("n[3,5-9]", "n3"),
        ("gpu-a[007-012],x", "gpu-a007"),
        ("rack[1-2]-ib,x", "rack1-ib"),
        ("rack[1-2]node[01-04],x[3]", "rack1node01"),
    ],
)
def test_first_of_a_list_of_hosts(nodes, first):
    assert first_host(nodes) == first
    if shutil.which("scontrol"):  # as Slurm itself reads it
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode or done.stdout.split()[0] == first


def test_tasks_of_each_node():
    assert [tasks_of_node("4(x2),3,12", node) for node in range(4)] == ["4", "4", "3", "12"]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (OPEN_MPI, "Open MPI does not tell where rank 0 runs: set MASTER_ADDR to its host"),
        (MPICH | {"PMI_RANK": "2"}, "MPICH says rank 2 of 2, which cannot be"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "torchrun says rank 2 of two, which cannot be"),
        (CRAY_PMI | {"PMI_LOCAL_RANK": "4"}, "Cray PMI says rank 4 of 4, which cannot be"),
        (
            EXPLICIT | {"LOCAL_RANK": "1"},
            f"a launcher has set LOCAL_RANK, RANK, WORLD_SIZE, {NEEDS}",
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "8"}, f"a launcher has set PMI_RANK, {NEEDS}"),
        ({"PALS_RANKID": "3"}, f"a launcher has set PALS_RANKID, {NEEDS}"),
        ({"JSM_NAMESPACE_RANK": "3"}, f"a launcher has set JSM_NAMESPACE_RANK, {NEEDS}"),
        ({"MVP_COMM_WORLD_RANK": "3"}, f"a launcher has set MVP_COMM_WORLD_RANK, {NEEDS}"),
        ({"JOB_COMPLETION_INDEX": "3"}, f"a launcher has set JOB_COMPLETION_INDEX, {NEEDS}"),
        ({"RANK": "3", "MASTER_ADDR": "m"}, f"a launcher has set RANK, {NEEDS}"),
        (
            FLUX | {"FLUX_JOB_NNODES": "3"},
            "8 tasks on 3 nodes: set LOCAL_WORLD_SIZE to those of this node",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(env, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        who_am_i(env)
    command = [sys.executable, SCRIPT]
    done = subprocess.run(
        command, env=clean_environment(**env), capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"from_any_launcher.py: error: {says}\n"


def test_the_script_is_the_same_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.getpid(), os.environ['RANK'], *sys.argv[1:])")
    with Job([sys.executable, SCRIPT, script, "--epochs", "5"], **MPICH) as job:
        said = job.wait(30).check().output
        assert said == f"{job.process.pid} 1 --epochs 5\n"
    with Job([sys.executable, SCRIPT, tmp_path / "none.py"]) as job:
        result = job.wait(30)
    assert result.returncode == 2
    assert result.output == (
        f"from_any_launcher.py: error: there is no script {tmp_path}/none.py in {os.getcwd()}\n"
    )


@pytest.mark.skipif(not shutil.which("ssh"), reason="no ssh here")
@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("none.invalid", "none.invalid cannot be reached: ssh: Could not resolve hostname"),
        ("localhost", "localhost cannot be reached: "),  # no server there, or it refuses us
    ],
)
def test_a_host_that_cannot_be_reached(tmp_path, host, says):
    hosts, config = tmp_path / "hosts.txt", tmp_path / ".ssh/config"
    hosts.write_text(f"{host}\n")
    config.parent.mkdir()
    launch = [sys.executable, ROOT / "clusters/torchrun/launch.py", hosts, SCRIPT]
    bin = tmp_path / "bin"
    bin.mkdir()
    # ssh itself, to a port on which no server listens: a test must not log in anywhere
    (bin / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F none -p 1 "$@"\n')
    (bin / "ssh").chmod(0o755)
    with Job(launch, PATH=f"{bin}:{os.environ['PATH']}") as job:
        result = job.wait(60)
        assert not job.kill()
    assert result.returncode == 2
    assert result.output.count("\n") == 1
    assert result.output.startswith(f"launch.py: error: {says}")


def shells(folder: Path) -> str:
    """A PATH with an ssh that prints the command for a host in place of running it there."""
    (folder / "ssh").write_text(
        '#!/bin/sh\nfor last; do :; done; [ "$last" = true ] || echo "$last"\n'  # or a check
    )
    (folder / "ssh").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def remote_lines(folder: Path, hosts: str, *options, **environment: str) -> list[str]:
    """What launch.py would run on each host."""
    (folder / "hosts.txt").write_text(hosts)
    launch = [sys.executable, ROOT / "clusters/torchrun/launch.py", *options]
    with Job([*launch, folder / "hosts.txt", SCRIPT], PATH=shells(folder), **environment) as job:
        said = job.wait(30).check().output
    return sorted(said.splitlines())


def test_what_runs_on_each_host(tmp_path):
    """As many ranks as GPUs; variables of this shell are handed on if they are named."""
    options = ("--env", "NCCL_DEBUG=INFO", "--env", "HF_HOME", "--port", 29400)
    one, other = remote_lines(tmp_path, "a\nme@b\n", *options, HF_HOME="/data/a b")
    assert other.removeprefix("me@b: ") == one.removeprefix("a: ")
    assert " NCCL_DEBUG=INFO 'HF_HOME=/data/a b' " in one
    assert " TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100 " in one
    assert " --nproc-per-node=gpu --rdzv-backend=c10d --rdzv-endpoint=a:29400 " in one
    assert "--local-addr" not in one


def test_the_time_to_save_is_what_was_asked_for(tmp_path):
    """Of --env, else of this shell: launch.py itself waits ten seconds longer."""
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    (line,) = remote_lines(tmp_path, "a\n", "--env", f"{name}=600", **{name: "60"})
    assert re.findall(rf"{name}=(\d+)", line) == ["600"]
    (line,) = remote_lines(tmp_path, "a\n", **{name: "60"})
    assert re.findall(rf"{name}=(\d+)", line) == ["60"]


def test_addresses_behind_the_names(tmp_path):
    """An alias of ~/.ssh/config means nothing to the other hosts."""
    hosts = "me@alias 10.0.0.7 # rack 1\nother fd77::2\n"
    one, other = remote_lines(tmp_path, hosts, "--nproc-per-node", 2, "--port", 29500)
    assert " --local-addr=10.0.0.7 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.7:29500 " in one
    assert " --local-addr=fd77::2 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.7:29500 " in other
    assert " --rdzv-conf=is_host=1 " in one
    assert " --rdzv-conf=is_host=0 " in other
    one, other = remote_lines(tmp_path, hosts, "--static")
    assert " --local-addr=10.0.0.7 --node-rank=0 --master-addr=10.0.0.7 " in one
    assert " --local-addr=fd77::2 --node-rank=1 --master-addr=10.0.0.7 " in other


def test_each_job_has_its_own_port(tmp_path):
    """Jobs with one port meet in one store: when the first job ends, the second one fails."""
    ports = set()
    for _ in range(3):
        lines = remote_lines(tmp_path, "a\nb\n")
        (port,) = set(re.findall(r"--rdzv-endpoint=a:(\d+) ", "".join(lines)))
        assert 20000 <= int(port) < 30000
        ports.add(port)
    assert len(ports) > 1


def launch_here(folder: Path, script: Path, *options) -> Result:
    """launch.py with one host: an ssh that runs everything on this machine."""
    ssh, hosts = folder / "ssh", folder / "hosts.txt"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    hosts.write_text("127.0.0.1\n")
    launch = [sys.executable, ROOT / "clusters/torchrun/launch.py", *options, hosts, script]
    with Job(launch, PATH=f"{folder}:{os.environ['PATH']}") as job:
        result = job.wait(120)
        assert not job.kill()
    return result


def test_a_port_that_is_taken(tmp_path):
    """The agents would wait for each other for minutes, and print nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = launch_here(tmp_path, SCRIPT, "--port", port)
    assert result.returncode == 2
    says = f"port {port} is taken on 127.0.0.1: pass another port with --port"
    assert result.output == f"launch.py: error: {says}\n"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_host_without_gpus(tmp_path):
    result = launch_here(tmp_path, SCRIPT)
    assert result.returncode == 1
    says = "127.0.0.1 has no GPU that PyTorch can use: pass the number of ranks, --nproc-per-node N"
    assert f"launch.py: error: {says}\n" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_reaches_the_terminals_of_the_hosts(tmp_path, number):
    """Also when our own terminal is closed.

    A signal to ssh would close theirs at once: a rank that prints then fails before it saves.
    """
    ssh, hosts, script = tmp_path / "ssh", tmp_path / "hosts.txt", tmp_path / "saves.py"
    script.write_text(PRINTS_AND_SAVES)
    ssh.write_text(SSH_WITH_A_TERMINAL.format(program=[sys.executable, str(script)]))
    ssh.chmod(0o755)
    hosts.write_text("here\n")
    launch = [sys.executable, ROOT / "clusters/torchrun/launch.py", hosts, script]
    with Job(launch, PATH=f"{tmp_path}:{os.environ['PATH']}", SAVED=str(tmp_path / "saved")) as job:
        job.wait_until(lambda: "here: step 3" in job.output)
        job.process.send_signal(number)
        result = job.wait(60)
        assert (tmp_path / "saved").exists()  # by the time that launch.py has ended
    assert result.returncode == 128 + number
    assert "here: saved" in result.output


# It runs a stand-in for torchrun, whatever it is asked to run.
SSH_WITH_A_TERMINAL = """#!/usr/bin/env python3
import os, pty, select, sys
if sys.argv[-1] == "true" or " -c " in sys.argv[-1]:  # launch.py asks whether the port is free
    sys.exit()
pid, terminal = pty.fork()
if not pid:
    os.execv({program[0]!r}, {program})
sources = [0, terminal]
while True:
    for source in select.select(sources, [], [])[0]:
        try:
            data = os.read(source, 4096)
        except OSError:  # the last process of this terminal has ended
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if source == 0 and not data:
            sources.remove(0)
        os.write(1 if source else terminal, data)
"""

PRINTS_AND_SAVES = """
import os, signal, sys, time
from pathlib import Path
asked = []
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, lambda *_: asked.append(True))
step = 0
while not asked or step < 5:
    step += 1
    print("step", step, flush=True)
    time.sleep(0.2)
time.sleep(1)
Path(os.environ["SAVED"]).touch()
print("saved", flush=True)
sys.exit(1)
"""


def test_a_variable_that_is_not_set(tmp_path):
    launch = [sys.executable, ROOT / "clusters/torchrun/launch.py", "--env", "NO_SUCH_NAME"]
    with Job([*launch, "hosts.txt", SCRIPT]) as job:
        result = job.wait(30)
    assert result.returncode == 2
    says = "NO_SUCH_NAME is not set in this shell, and has no value here"
    assert result.output.endswith(f"error: argument --env: {says}\n")
