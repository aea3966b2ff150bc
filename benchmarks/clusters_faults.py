"""(Part of clusters.py.) Faults on two lab hosts: seconds until noticed, and until the next step.

    python benchmarks/clusters_faults.py --part torchft --repeats 1        # one column, printed

restart    torchrun --nnodes=2 --max-restarts, clusters/elastic_train.py: needs both hosts
elastic    elastic_train.py with --nnodes=1:2, which continues with one host
torchft    clusters/torchft/train.py, a torchrun on each host, the lighthouse on a third host
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "clusters")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank

import bench
import lab
import psutil
from clusters_links import hosts

TIMEOUT = 5  # timeout of collectives, seconds
KEEP_ALIVE = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
NOTICED = r"\w*Error\b|got exception|exitcode: -9"  # a line that reports a fault contains this
LIGHTHOUSE = ["--min_replicas", "1", "--heartbeat_timeout_ms", "1000"]
FAULTS = {
    "rank": "kill -9 of a rank",
    "agent": "kill -9 of an agent",
    "first": "kill -9 where they meet",
    "cut": "a cable is cut",
    "frozen": "a host is frozen",
}
PARTS = {"restart": ["rank"], "elastic": list(FAULTS), "torchft": ["rank", "cut", "frozen"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each measurement")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, help="default: all of the part")
    args = parser.parse_args()
    print("\n\n".join(faults_text(args.repeats, {args.part: args.faults or PARTS[args.part]})))


class Training:
    """A job on host0 and host1 that does not end by itself, with a line in a log for each step."""

    def __init__(self, name: str, command: list[str], folder: Path):
        self.name, self.command, self.folder = name, command, folder
        self.agents, self.outputs, self.read, self.lines = {}, [], {}, []
        if name == "torchft":
            self.run(2, str(Path(sys.executable).with_name("torchft_lighthouse")), *LIGHTHOUSE)
        for host in (0, 1):
            self.start(host)
        self.next_step(2, 0)

    def lab(self, *words) -> None:
        subprocess.run([*self.command, *map(str, words)], check=True, timeout=60)

    def run(self, host: int, *words) -> subprocess.Popen:
        self.outputs.append(self.folder / f"output{len(self.outputs)}.txt")
        told = os.environ | {"PYTHONUNBUFFERED": "1", "RUST_LOG": "warn"}
        if self.name == "torchft":
            told |= {"TORCHFT_LIGHTHOUSE": f"http://{lab.address(2)}:29510"}
        else:  # otherwise new ranks read the dead ranks' addresses
            told |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        line = [*self.command, "exec", host, "--", *words]
        with self.outputs[-1].open("w") as file:
            return subprocess.Popen([*map(str, line)], env=told, stdout=file, stderr=file)

    def start(self, host: int) -> None:
        """Start this host's agent, which starts the rank."""
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
        if self.name == "torchft":
            words += ["--standalone", "--max-restarts=100", ROOT / "clusters/torchft/train.py"]
            words += ["--groups", 2, "--group", host]
        else:
            nodes = "2" if self.name == "restart" else "1:2"
            words += [f"--nnodes={nodes}", "--max-restarts=100", f"--rdzv-conf={KEEP_ALIVE}"]
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={lab.address(0)}:29500"]
            words += ["--rdzv-id=a", ROOT / "clusters/elastic_train.py", "--save-every", 200]
        more = ["--steps", 10**9, "--timeout", TIMEOUT, "--output-dir", self.folder]
        self.agents[host] = self.run(host, *words, *more)

    def processes(self, host: int) -> list[psutil.Process]:
        """The agent of this host, and its rank."""
        below = psutil.Process(self.agents[host].pid).children(recursive=True)
        (rank,) = (process for process in below if "TORCHELASTIC_RUN_ID" in process.environ())
        return [rank.parent(), rank]

    def next_step(self, ranks: int, since: float, before: tuple = (0, 0), restarted: bool = False):
        """(When a fault was first reported, when `ranks` ranks first finished a step.)

        before: an earlier result of `said`. restarted: count only steps after the ranks restarted.
        """
        deadline, noticed = time.monotonic() + 120, None
        while len(done := self.steps(ranks, since)) < 5:
            errors, starts = self.said()
            if noticed is None and errors > before[0]:
                noticed = time.time()
            if restarted and starts == before[1]:
                since = time.time()
            if time.monotonic() > deadline:
                said = "\n".join(output.read_text()[-2000:] for output in self.outputs)
                raise TimeoutError(f"{self.name}: no steps of {ranks} rank(s)\n{said}")
            time.sleep(0.01)
        return noticed, done[0]

    def steps(self, ranks: int, since: float) -> list[float]:
        """When steps were finished by `ranks` ranks."""
        for log in self.folder.glob("*.jsonl"):
            with log.open() as file:
                file.seek(self.read.get(log, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]  # the last line may be half there
            self.read[log] = self.read.get(log, 0) + len(whole)
            self.lines += map(json.loads, whole.splitlines())
        self.lines = [line for line in self.lines if line["time"] > since]
        done = [x for x in self.lines if x["ranks"] == ranks and x.get("committed", "loss" in x)]
        return sorted(line["time"] for line in done)

    def said(self) -> tuple[int, int]:
        """How often all outputs report a fault, and a start of elastic_train.py."""
        text = "".join(path.read_text() for path in self.outputs)
        return len(re.findall(NOTICED, text)), text.count("rank(s), from step")


def strike(job: Training, fault: str) -> dict[str, float]:
    """Cause a fault, then repair it. Seconds until it is noticed, and until the next step."""
    agent, rank = job.processes(1)
    left = 1 if fault in ("cut", "frozen") or job.name == "torchft" else 2
    before, since = job.said(), time.time()
    if fault == "rank":
        rank.kill()
    elif fault == "cut":
        job.lab("cut", 1)
    elif fault == "frozen":
        agent.suspend()
        rank.suspend()
    elif fault == "agent":
        agent.kill()
        job.start(1)  # otherwise no process would notice
    elif fault == "first":
        for process in job.processes(0):
            process.kill()
        job.agents[1].wait(60)  # it ends by itself
        ended = time.time() - since
        since = time.time()
        job.start(0)
        job.start(1)
    noticed, done = job.next_step(left, since, before, restarted=left == 2)
    if fault == "cut":
        job.lab("heal", 1)
    elif fault == "frozen":
        # nsenter, the agent's parent, has stopped itself when the agent stopped.
        for process in (agent, rank, psutil.Process(job.agents[1].pid)):
            process.resume()
    job.next_step(2, time.time())
    found = {"next step": done - since}
    if fault == "first":
        found["noticed"] = ended
    elif fault != "agent" and noticed:
        found["noticed"] = noticed - since
    return found


def faults_text(repeats: int, parts: dict[str, list[str]] = PARTS) -> list[str]:
    rows = [("seconds after the fault", *(f"{name}: {w}" for name in parts for w in WHAT))]
    found = {}
    for name, faults in parts.items():
        with hosts(3) as command, tempfile.TemporaryDirectory() as folder:
            job = Training(name, command, Path(folder))
            for fault in [fault for _ in range(repeats) for fault in faults]:
                for what, seconds in strike(job, fault).items():
                    found.setdefault((fault, name, what), []).append(seconds)
    for fault, title in FAULTS.items():
        cells = [found.get((fault, name, what)) for name in parts for what in WHAT]
        if any(cells):
            rows.append((title, *(bench.summary(cell) if cell else "-" for cell in cells)))
    return ["## Faults: noticed, and the next step", bench.table(rows), ABOUT]


WHAT = ("noticed", "next step")
ABOUT = (
    "Medians (min ... max). One job, with one rank on each of two hosts, suffers one fault "
    "after another; each time we wait until both ranks are back. Noticed: the first line of "
    f"output that reports the fault. Collectives time out after {TIMEOUT} s; a host without "
    "heartbeat is given up after 3 s (torchrun's agents) or 1 s (torchft's lighthouse). After a"
    " cut cable or a frozen host, the next step is that of the other host alone. A killed agent"
    " is not noticed, and its rank continues to train: the seconds count from the start of a "
    "new agent. They meet on the first host: when it is killed, the other agent ends, and the "
    "next step counts from the restart of the commands. restart can only wait for a host that "
    "is missing."
)


if __name__ == "__main__":
    main()
