"""Check a distributed version of one_process.py: does it train as one process does, and survive?

    cp notebooks/capstone/one_process.py my_train.py    # and make it distributed
    python notebooks/capstone/check.py my_train.py      # an unchanged copy: status 1

Starts your file under torchrun: on 1 rank; on 2, of which one is killed; on 3, which continue; on 2
with dropout and bf16. Prints a line for each that is right, then "correct", or "not yet:" and the
first mistake (status 1).
"""

import argparse
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import mistakes
import mistakes_later
import psutil
from mistakes import STEPS, NotYet, Run
from oracle import far

OBSERVE = Path(__file__).with_name("observe.py")
PLAIN = ("--dropout", "0", "--precision", "fp32")  # what one process computes to the last digits
KILL_AT = STEPS + STEPS // 2  # in the middle of the second epoch
Launch = Callable[..., tuple[int | None, str, str]]  # as torchrun() below, without `seconds`


def main() -> None:
    args = parse_args()
    if not args.script.is_file():
        print(f"error: there is no file {args.script}", file=sys.stderr)
        sys.exit(2)
    try:
        for line in stages(args.script.resolve(), partial(torchrun, args.timeout)):
            print(line, flush=True)
    except NotYet as mistake:
        print(f"not yet: {mistake}")
        sys.exit(1)
    print("correct: on 1, 2 and 3 ranks your script trains the same network")


def stages(script: Path, launch: Launch) -> Iterator[str]:
    """A line for each start that is right. Raises NotYet at the first mistake."""
    with tempfile.TemporaryDirectory(prefix="capstone") as name:
        folder = Path(name)

        def start(title: str, ranks: int, *options: str, kill_at: int = 0) -> Run:
            return started(title, script, launch, folder / title, ranks, options, kill_at)

        with about("1 rank"):
            one = start("one", 1, *PLAIN, "--epochs", "2", "--folder", str(folder / "a"))
            judge(one, 2 * STEPS)
        yield f"1 rank: {len(one.steps)} steps, each gradient and weight as in one process"

        options = (*PLAIN, "--epochs", "3", "--folder", str(folder / "b"))
        with about("2 ranks"):
            two = start("two", 2, *options, kill_at=KILL_AT)
            velocities = judge(two, KILL_AT, killed=True)
            other = far(two.steps[0][0]["before"], one.steps[0][0]["before"])
            mistakes.wrong_if(other, "they begin with other weights than 1 rank does")
            mistakes_later.checkpoint(two, folder / "b/checkpoint.pt", 1)
        yield f"2 ranks: rank 1 killed after step {KILL_AT}, until then as one process"

        with about("3 ranks that continue"):
            three = start("three", 3, *options)
            mistakes_later.resumed(three, two, 3)
            judge(three, 2 * STEPS, velocity=velocities[STEPS - 1], first_epoch=1)
        yield f"3 ranks: continued after epoch 1, {len(three.steps)} steps as in one process"

        with about("2 ranks, dropout 0.2, bf16"):
            options = ("--dropout", "0.2", "--precision", "bf16", "--epochs", "1")
            mixed = start("mixed", 2, *options, "--folder", str(folder / "c"))
            mistakes.ended(mixed)
            mistakes_later.dropout_and_precision(mixed)
        yield "2 ranks: each draws dropout masks of its own, and computes in bf16"


@contextlib.contextmanager
def about(title: str) -> Iterator[None]:
    """Put the title in front of a mistake."""
    try:
        yield
    except NotYet as mistake:
        raise NotYet(f"{title}: {mistake}") from None


def judge(run: Run, steps: int, killed: bool = False, velocity=None, first_epoch=0) -> list:
    """Look for mistakes in what was recorded, then in how it ended; return the velocities.

    steps: as many should be made. killed: the last rank, after them.
    """
    velocities = []
    if run.steps:
        mistakes.samples(run)
        mistakes.start(run)
        mistakes.gradients(run)
        velocities = mistakes.weights(run, velocity)
    made = len(run.of(run.ranks - 1, "step"))
    if not killed or made < steps:
        mistakes.ended(run)
    mistakes.wrong_if(made != steps, f"it makes {made} steps, one process makes {steps}")
    mistakes.evaluation(run, first_epoch)
    return velocities


def started(title, script, launch: Launch, record: Path, ranks: int, options, kill_at) -> Run:
    record.mkdir()
    environment = {"CAPSTONE_RECORD": str(record), "CAPSTONE_KILL": str(kill_at)}
    status, output, waits = launch(ranks, [OBSERVE, script, *options], environment)
    return Run(ranks, status, output, [read(record, rank) for rank in range(ranks)], waits)


def read(record: Path, rank: int) -> list[tuple]:
    """What observe.py has written; the end may be missing where a rank was killed."""
    found, file = [], record / f"rank_{rank}.pickle"
    if file.exists():
        with open(file, "rb") as stream, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                found.append(pickle.load(stream))
    return found


def torchrun(
    seconds: float, ranks: int, command: list, environment: dict[str, str]
) -> tuple[int | None, str, str]:
    """Run a command on `ranks` ranks. Returns its status, its output, and where it waits.

    After `seconds` the status is None, and the last text says in which lines the ranks are.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc_per_node={ranks}", *map(str, command)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    inherited |= {"OMP_NUM_THREADS": "1", **environment}
    with tempfile.TemporaryFile("w+") as log:
        job = subprocess.Popen(
            launcher, env=inherited, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        waits = ""
        try:
            status = job.wait(seconds)
        except subprocess.TimeoutExpired:
            status, waits = None, where(job, command[1], Path(environment["CAPSTONE_RECORD"]))
        finally:
            end(job)
        log.seek(0)
        return status, log.read(), waits


def where(job: subprocess.Popen, script: Path, record: Path) -> str:
    """Such as "rank 0 is in line 61, rank 1 in line 58": asks observe.py for the ranks' stacks."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(job.pid).children(recursive=True):
            if str(OBSERVE) in process.cmdline():
                process.send_signal(signal.SIGUSR1)
    files = sorted(record.glob("*.stack"))
    until = time.monotonic() + 5
    while time.monotonic() < until and not all(file.stat().st_size for file in files):
        time.sleep(0.05)
    found = []
    for file in files:
        lines = [line for line in file.read_text().splitlines() if f'"{script}"' in line]
        if lines:
            found.append(f"{file.stem.replace('_', ' ')} is in line {lines[0].split()[3]}")
    return ", ".join(found)


def end(job: subprocess.Popen) -> None:
    """Kill torchrun and its ranks, which are its children although in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        agent = psutil.Process(job.pid)
        for process in [*agent.children(recursive=True), agent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    job.wait()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("script", type=Path, help="your file, such as my_train.py")
    add("--timeout", type=float, default=120, help="seconds for one start (default: 120)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
