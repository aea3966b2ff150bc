"""clusters/from_any_launcher.py under mpirun: ranks on this host, and on hosts of the lab."""

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


# What mpirun calls in place of ssh: `FILE host1 WORDS`, which a shell there reads once more.
RSH = """#!/bin/sh
while [ "$1" != "${1#-}" ]; do shift; done
host=$1
shift
exec "$PYTHON" "$LAB_PY" exec "${host#host}" -- sh -c "$*"
"""


@pytest.mark.slow
def test_two_hosts(hosts, mpirun, tmp_path):
    script, rsh = tmp_path / "tell.py", tmp_path / "rsh"
    script.write_text(TELL)
    rsh.write_text(RSH)
    rsh.chmod(0o755)
    if "openmpi" in mpirun:  # as in clusters/hosts.md, but for root and the lab
        options = ["--host", "host0:2,host1:2", "--bind-to", "none", "-x", "MASTER_ADDR=host0"]
        options += ["-x", "PATH", "--mca", "plm_rsh_agent", rsh]
    else:
        options = ["-hosts", "host0,host1", "-ppn", 2, "-n", 4, "-genv", "MASTER_ADDR", "host0"]
        options += ["-launcher", "ssh", "-launcher-exec", rsh]
    command = [sys.executable, LAB, "exec", "0", "--", mpirun, *options, sys.executable]
    # Open MPI keeps files of a host by its name and by process numbers: labs have both in common.
    there = {"LAB": hosts, "LAB_PY": str(LAB), "PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    with Job(
        [*command, CLUSTERS / "from_any_launcher.py", script], **there, **HERE, **AS_ROOT
    ) as job:
        said = job.wait(60).check().output
        assert not job.kill()
    told = sorted(re.findall(r"host\d \d.*", said))
    assert told == [f"host{r // 2} {r} 4 {r % 2} 2 host0 1 all cores: True" for r in range(4)]


def on_this_host(mpirun: str, *args, **environment: str) -> Result:
    options = ["--oversubscribe", "--bind-to", "none"] if "openmpi" in mpirun else []
    command = [mpirun, *options, "-n", 2, sys.executable, CLUSTERS / "from_any_launcher.py", *args]
    port = str(free_port())
    with Job(command, **HERE, **AS_ROOT, **environment, MASTER_PORT=port) as job:
        result = job.wait(120)
        assert not job.kill()
    return result


@pytest.mark.slow
def test_a_training_is_the_same_as_under_torchrun(tmp_path):
    if not shutil.which("mpirun.openmpi"):
        pytest.skip("no mpirun.openmpi here: apt install openmpi-bin")
    args = ("--epochs", 1, "--log-every", 1, "--output-dir")
    on_this_host("mpirun.openmpi", TRAIN, *args, tmp_path / "mpi").check()
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
