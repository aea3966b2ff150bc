"""Ranks without torchrun: for tests of what a script computes, and of one rank that dies alone."""

import time
from pathlib import Path

import forks
import torch.distributed as dist
from helpers import (
    COLD,
    PYTHON,
    ROOT,
    Job,
    Patience,
    Result,
    clean_environment,
    keeper,
    note,
    on_backend,
    torchrun_command,
    typed,
)


class Rank(Job):
    """One rank as a job of its own, which can be killed alone.

    with Rank(script, "--steps", 5, **environment(0, 2, store)) as rank: ...
    """

    def __init__(self, script, *args, cold: bool = False, **told):
        command = on_backend(script, *args)
        if not (cold or COLD):  # else this rank would begin before the next one's keeper does
            for number in (0, 1):
                keeper(number, told.get("interpreter", PYTHON))
        if cold:
            super().__init__([told.get("interpreter", PYTHON), *command], **told)
        else:
            super().__init__(command, fork=int(told.get("RANK", 0)), **told)


def run(
    script,
    *args,
    ranks: int = 1,
    nodes: int = 1,
    timeout: float = 300,
    cwd: Path | list[Path] = ROOT,
    cold: bool = False,
    interpreter: Path = PYTHON,
    **changes: str | list[str],
) -> Result:
    """Run `script` to its end on `ranks` ranks, or as one plain process; no process is left.

    nodes: as if the ranks were on this many nodes, all of which are this machine.
    cwd: a list has a folder for each rank, as the disks of hosts that share none.
    cold: new processes, not forks: for what happens at the end of the interpreter.

    The exit status is the first that is not 0. The other ranks are killed a moment later: one may
    be about to say why it gave up first.
    changes: of the environment; a list has a value for each rank.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folders = cwd if isinstance(cwd, list) else [cwd] * ranks
    own = [of_rank(changes, rank) for rank in range(ranks)]
    command = [interpreter, *torchrun_command(script, *args, ranks=ranks)[1:]]
    command = typed(command, folders[0], **own[0])
    jobs, left = [], []
    try:
        for rank in range(ranks):
            told = environment(rank, ranks, store, nodes, **own[rank])
            first = jobs[0] if jobs else None
            told |= {"cwd": folders[rank], "beside": first, "cold": cold}
            told |= {"interpreter": interpreter}
            jobs.append(Rank(script, *args, **told))
        patience = Patience(jobs, timeout)
        status, failed = first_failure(jobs, patience)
        if status is None:
            jobs[0].abort()
            said = f"{patience.why}\n{command}\n{jobs[0].output[-200_000:]}"
            raise TimeoutError(said)
        left = jobs[0].left_running() if status == 0 else []
        by_then = len(jobs[0].output)
        until = time.monotonic() + 0.3
        while time.monotonic() < until and None in [job.process.poll() for job in jobs]:
            time.sleep(0.01)
        output = jobs[0].output
    finally:
        for job in jobs:
            job.process.kill()
        if jobs:
            jobs[0].kill()  # all have one mark: it finds what any of them has left
        for job in jobs:
            job.process.wait(timeout=10)
        note(command, jobs[0].output if jobs else "")
    jobs[0].log.close()
    assert not left, f"processes were left running: {left}\n{output[-3000:]}"
    return Result(status, output, command, failed, by_then)


def of_rank(changes: dict[str, str | list[str]], rank: int) -> dict[str, str]:
    return {n: value[rank] if isinstance(value, list) else value for n, value in changes.items()}


def first_failure(jobs: list[Job], patience: Patience) -> tuple[int | None, int | None]:
    """The first exit status that is not 0, and the number of its job.

    0 and None if all jobs end well; None and None without progress so long.
    """
    while not patience.is_over():
        statuses = [job.process.poll() for job in jobs]
        for number, status in enumerate(statuses):
            if status:
                return status, number
        if None not in statuses:
            return 0, None
        forks.pause([job.process for job in jobs if job.process.poll() is None])
    return None, None


def environment(
    rank: int, ranks: int, store: dist.TCPStore, nodes: int = 1, **changes: str
) -> dict[str, str]:
    """What torchrun tells a rank."""
    if ranks == 1:
        return clean_environment(**changes)
    node, local_rank = divmod(rank, ranks // nodes)
    told = {"RANK": rank, "WORLD_SIZE": ranks}
    told |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks // nodes}
    told |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes, "TORCHELASTIC_RESTART_COUNT": 0}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # we serve it, not rank 0
    return clean_environment(**{name: str(value) for name, value in told.items()}, **changes)
