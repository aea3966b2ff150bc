"""Start a rank under any launcher: set RANK, WORLD_SIZE and MASTER_ADDR from its variables.

    srun python clusters/from_any_launcher.py ddp_basics/train.py
    mpirun python clusters/from_any_launcher.py ddp_basics/train.py
    python clusters/from_any_launcher.py                # print the six variables and the launcher

PyTorch reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which
torchrun sets. Every other launcher uses other names. As a command this file sets the six variables
and executes the script in its own process; within a script: os.environ.update(who_am_i()).
"""

import os
import re
import socket
import sys
import zlib
from collections.abc import Mapping

# rank, world size, local rank, local world size. A launcher has started us if all of its names are
# set. Inner launchers first: Slurm's names are set, too, if mpirun has started us in a Slurm job.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": [f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "MVAPICH2": [f"MV2_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    # HPE Cray's mpiexec: names of PMI where programs use Cray PMI (Polaris), and its own names
    "Cray PMI": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),  # Aurora
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel MPI, too
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"),
    # A batch script is process 0 as well; only processes that srun has started have a step's tasks.
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    # One rank per host or pod: there is no local rank.
    "RANK and WORLD_SIZE": ("RANK", "WORLD_SIZE"),  # Volcano's, Kubeflow's, or your own
    "Kubernetes": ("JOB_COMPLETION_INDEX", "WORLD_SIZE"),  # an Indexed Job
}
# If one of these is set, some launcher, perhaps unknown here, has started this rank. (Not
# SLURM_PROCID: it is 0 in a batch script.)
TRACES = {name for names in LAUNCHERS.values() for name in names[:1]} - {"SLURM_PROCID"}
TRACES |= {"WORLD_SIZE", "LOCAL_RANK", "PALS_RANKID", "PMIX_RANK"}
TRACES |= {"MVP_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK"}  # MVAPICH 3, jsrun


def who_am_i(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The six variables that PyTorch reads; without a launcher, those of a world of one.

    MASTER_ADDR and MASTER_PORT are kept if they are set. Raises ValueError, in one sentence, if
    a launcher's names are incomplete, the numbers contradict each other, or the address of rank
    0's host is unknown.
    """
    launcher = launched_by(env)
    rank, size, *local = [env[name] for name in LAUNCHERS.get(launcher, ())] or ["0", "1"]
    local_rank, local_size = local or ["0", "1"]
    if launcher == "Slurm":
        local_size = tasks_of_node(local_size, int(env.get("SLURM_NODEID", 0)))
    elif launcher == "Flux":
        local_size = env.get("LOCAL_WORLD_SIZE") or equal_share(size, local_size)
    for number, count in ((rank, size), (local_rank, local_size)):
        if not (number + count).isdigit() or not int(number) < int(count):
            raise ValueError(f"{launcher} says rank {number} of {count}, which cannot be")
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not address and size == local_size:
        address = "127.0.0.1"
    elif not address and launcher == "Slurm":
        address = first_host(env["SLURM_STEP_NODELIST"])
    elif not address and launcher == "Kubernetes":  # train-3.service... -> train-0.service...
        address = re.sub(r"^(.*)-\d+(?=\.|$)", r"\1-0", socket.getfqdn(), count=1)
    elif not address:
        raise ValueError(f"{launcher} does not tell where rank 0 runs: set MASTER_ADDR to its host")
    values = (rank, size, local_rank, local_size, address, port or own_port(env, launcher))
    return dict(zip((*LAUNCHERS["torchrun"], "MASTER_ADDR", "MASTER_PORT"), values, strict=True))


def launched_by(env: Mapping[str, str]) -> str:
    """A name of LAUNCHERS, or "no launcher". Raises ValueError if its names are incomplete."""
    complete = [name for name, names in LAUNCHERS.items() if all(x in env for x in names)]
    one_a_host = complete[:1] in (["RANK and WORLD_SIZE"], ["Kubernetes"])
    if complete and not (one_a_host and "LOCAL_RANK" in env):  # half of torchrun's names
        return complete[0]
    found = ", ".join(sorted(TRACES & env.keys()))
    if found:
        needed = ", ".join(LAUNCHERS["torchrun"])
        raise ValueError(f"a launcher has set {found}, which is not enough: set {needed}")
    return "no launcher"


def own_port(env: Mapping[str, str], launcher: str) -> str:
    """A port that all ranks compute alike, and ranks of another job or step do not."""
    mpirun, job = env.get("PMIX_NAMESPACE", ""), env.get("SLURM_JOB_ID", "")
    if mpirun and (launcher == "Open MPI" or not job):  # one Slurm job may call mpirun twice
        number = int(mpirun) if mpirun.isdigit() else zlib.crc32(mpirun.encode())
    elif job:  # each srun is a step; only its own processes are certain to have its number
        step = int(env.get("SLURM_STEP_ID", 0)) if launcher == "Slurm" else 0
        number = int(job) + 1009 * step
    else:
        return "29500"
    return str(20000 + number % 10000)


def equal_share(tasks: str, nodes: str) -> str:
    """Tasks of each node, for a launcher that does not say how many this node has."""
    if not (tasks + nodes).isdigit() or not int(nodes) or int(tasks) % int(nodes):
        raise ValueError(
            f"{tasks} tasks on {nodes} nodes: set LOCAL_WORLD_SIZE to those of this node"
        )
    return str(int(tasks) // int(nodes))


def tasks_of_node(counts: str, node: int) -> str:
    """The tasks of a node in a list such as 4(x2),3: four on each of two nodes, three on one."""
    each = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [count for count, times in each for _ in range(int(times or 1))][node]


def first_host(nodes: str) -> str:
    """The first of a list such as gpu[07-09,12],cpu1: gpu07."""
    first = re.match(r"(?:\[[^]]*\]|[^,[])*", nodes)[0]  # up to a comma outside of brackets
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first)


def main() -> None:
    try:
        six = who_am_i()
        if len(sys.argv) > 1 and not os.path.isfile(sys.argv[1]):
            raise ValueError(f"there is no script {sys.argv[1]} in {os.getcwd()}")
    except ValueError as error:
        print(f"from_any_launcher.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    if len(sys.argv) == 1:
        words = " ".join(f"{name}={value}" for name, value in six.items())
        print(f"started by {launched_by(os.environ)}: {words}")
        sys.exit()
    os.environ.update(six)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])  # the same process: signals reach it


if __name__ == "__main__":
    main()
