"""clusters/mpi/: ranks that mpirun starts, on this host and on hosts of the lab."""

import os
import re
import shutil
import sys
from pathlib import Path

import lab_hosts
import pool
import pytest
import torch
from helpers import ROOT, Job, Result, free_port, learned
from lab_hosts import LAB, Lab, name_of

CLUSTERS = ROOT / "clusters"
TRAIN = ROOT / "ddp_basics/train.py"
HERE = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
KINDS = {"Open MPI": "mpirun.openmpi", "MPICH": "mpirun.mpich"}
TELL = """
import os, socket
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS"
told = " ".join(os.environ[name] for name in names.split())
cores = len(os.sched_getaffinity(0)) == os.cpu_count()
print(f"{socket.gethostname()} {told} all cores: {cores}\\n", end="", flush=True)
"""


@pytest.fixture(params=KINDS)
def mpirun(request) -> str:
    program = KINDS[request.param]
    if not shutil.which(program):
        pytest.skip(f"no {program} here: apt install openmpi-bin mpich")
    return program


@pytest.fixture
def hosts():
    """Two, in a lab of this name."""
    with lab_hosts.up(Lab(name_of("mpi")), 2) as lab:
        yield lab.name


def train_sh(name: str, mpirun: str, *args) -> Job:
    """clusters/mpi/train.sh on host0."""
    command = [sys.executable, LAB, "exec", "0", "--", CLUSTERS / "mpi/train.sh", *args]
    there = {"LAB": name, "MPIRUN": mpirun, "RSH": str(CLUSTERS / "lab_ssh.sh")}
    return Job(command, **there, **HERE, PYTHON=sys.executable)


def test_two_hosts(hosts, mpirun, tmp_path):
    script, names = tmp_path / "tell.py", tmp_path / "hosts.txt"
    script.write_text(TELL)
    names.write_text("host0\nhost1 # the second\n")
    with train_sh(hosts, mpirun, names, 2, script) as job:
        said = job.wait(60).check().output
        assert not job.kill()
    told = sorted(re.findall(r"host\d \d.*", said))
    assert told == [f"host{r // 2} {r} 4 {r % 2} 2 host0 1 all cores: True" for r in range(4)]


def test_a_host_that_there_is_not(hosts, mpirun, tmp_path):
    names = tmp_path / "hosts.txt"
    names.write_text("host0\nhost7\n")
    with train_sh(hosts, mpirun, names, 1, TRAIN) as job:
        result = job.wait(60)
        assert not job.kill()
    says = "host7 cannot be reached: lab.py: error: there is no host 7: they are 0 to 1"
    assert (result.returncode, result.output) == (2, f"train.sh: error: {says}\n")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "needs a file of hosts, the ranks on each, and a script"),
        (("none.txt", 1, TRAIN), "there is no file none.txt"),
        (("/dev/null", 1, TRAIN), "there is no file /dev/null"),
        ((__file__, "two", TRAIN), "'two' is no number of ranks"),
        ((__file__, 1, "none.py"), "there is no script none.py"),
    ],
)
def test_mistakes_are_one_sentence(args, says):
    with Job([CLUSTERS / "mpi/train.sh", *args]) as job:
        result = job.wait(30)
    assert (result.returncode, result.output) == (2, f"train.sh: error: {says}\n")


def on_this_host(mpirun: str, *args, **environment: str) -> Result:
    options = ["--oversubscribe", "--bind-to", "none"] if "openmpi" in mpirun else []
    command = [mpirun, *options, "-n", 2, sys.executable, CLUSTERS / "from_any_launcher.py", *args]
    port = str(free_port())
    with Job(command, **HERE, **AS_ROOT, **environment, MASTER_PORT=port) as job:
        result = job.wait(120)
        assert not job.kill()
    return result


@pytest.mark.slow
def test_a_training_is_the_same_as_under_torchrun(mpirun, tmp_path):
    args = ("--epochs", 1, "--log-every", 1, "--output-dir")
    on_this_host(mpirun, TRAIN, *args, tmp_path / "mpi").check()
    pool.run(TRAIN, *args, tmp_path / "torchrun", ranks=2).check()
    assert learned(tmp_path / "mpi") == learned(tmp_path / "torchrun")
    ends = [tmp_path / name / "checkpoints/step_00000022.pt" for name in ("mpi", "torchrun")]
    one, other = (torch.load(end, weights_only=True)["model"] for end in ends)
    assert all(torch.equal(one[key], other[key]) for key in other)


@pytest.mark.slow
def test_a_world_that_does_not_divide(tmp_path):
    if not shutil.which("mpirun.openmpi"):
        pytest.skip("no mpirun.openmpi here: apt install openmpi-bin")
    result = on_this_host("mpirun.openmpi", TRAIN, "--batch-size", 65)
    assert result.returncode == 2
    assert "--batch-size 65 does not divide into 2 equal parts" in result.output
