"""Kill ranks at random, and compare the cost with torchft and with restarts from a checkpoint.

    python benchmarks/torchft_kills.py                            # some minutes
    python benchmarks/torchft_kills.py --groups 3 --kills 6 --seed 1    # some minutes

The same kills (kill -9, at the same steps, of the same ranks) hit three runs:
clusters/torchft/train.py; train.py with fixed shards of the data; and clusters/elastic_train.py,
where torchrun restarts all ranks from the last save. Look at the lost steps, and at the time in
which no rank trained. torchft's lighthouse is a thread of this process.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import torch

os.environ.setdefault("RUST_LOG", "warn")  # otherwise the lighthouse logs each step
try:
    from torchft.coordination import LighthouseServer
except ImportError as error:
    print(
        f"torchft_kills.py: error: {error}: pip install -r requirements-clusters.txt",
        file=sys.stderr,
    )
    sys.exit(2)

CLUSTERS = Path(__file__).resolve().parent.parent / "clusters"
TRAIN = CLUSTERS / "torchft/train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=100"]

FIXED = "--fixed-shares"  # of train.py


def main() -> None:
    args = parse_args()
    kills = random_kills(args.steps, args.kills, args.groups, args.seed)
    plan = ", ".join(f"rank {rank} at step {step}" for step, rank in kills)
    print(f"{args.groups} ranks, {args.steps} steps; kill -9 of {plan}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output_dir or Path(temporary)
        columns = {
            "torchft": replica_groups(args, kills, folder / "torchft"),
            "fixed shards": replica_groups(args, kills, folder / "shares", FIXED),
            "restart": restarts(args, kills, folder / "restart"),
        }
    print(f"\n{'':36}", *(f"{name:>14}" for name in columns))
    for row in columns["torchft"]:
        print(f"{row:36}", *(f"{column.get(row, '-'):>14}" for column in columns.values()))


def random_kills(steps: int, kills: int, ranks: int, seed: int) -> list[tuple[int, int]]:
    """(step, rank), in order; none in the last quarter, so that the rank is back before the end."""
    chance = random.Random(seed)
    when = sorted(chance.sample(range(steps // 10, steps * 3 // 4), kills))
    return [(step, chance.randrange(ranks)) for step in when]


# ---- the training runs


def replica_groups(args, kills, folder: Path, *more: str) -> dict:
    """Train with torchft, one torchrun per group; return the counts."""
    lighthouse = LighthouseServer("[::]:0", min_replicas=1, heartbeat_timeout_ms=1000)
    port = lighthouse.address().rpartition(":")[2]
    environment = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    script = [TRAIN, "--groups", args.groups, "--steps", args.steps, *more]
    logs = [folder / f"group{group}.jsonl" for group in range(args.groups)]
    jobs = [
        [*TORCHRUN, "--nproc-per-node=1", *script, "--group", group, "--output-dir", folder]
        for group in range(args.groups)
    ]
    times = train_and_kill(jobs, logs, kills, environment, moment=0.1)  # a step's length
    lighthouse.shutdown()
    lines = [line for log in logs for line in read(log)]
    ends = [torch.load(log.with_suffix(".pt"), weights_only=True) for log in logs]
    done = [line["time"] for line in lines if line.get("committed")]
    return {
        "no rank trains, s (median)": median_wait(done, times),
        **count(lines, args.groups),
        "all end with the same bits": "yes" if all(same_bits(x, ends[0]) for x in ends) else "no",
    }


def restarts(args, kills, folder: Path) -> dict:
    """Train under one torchrun, which restarts all ranks when one fails; return the counts."""
    script = [CLUSTERS / "elastic_train.py", "--steps", args.steps, "--output-dir", folder]
    job = [*TORCHRUN, f"--nproc-per-node={args.groups}", *script]
    log = folder / "log.jsonl"
    # Otherwise restarted ranks read the dead ranks' addresses: see clusters/elastic.md.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    times = train_and_kill([job], [log] * args.groups, kills, environment, moment=0)
    lines = read(log)
    return {
        "no rank trains, s (median)": median_wait([line["time"] for line in lines], times),
        "lost steps": len(lines) - len({line["step"] for line in lines}),
        "steps without all ranks": 0,
        "batches left out": 0,  # the data depend on the step, and lost steps are repeated
        "batches trained on twice": 0,
    }


def train_and_kill(jobs, logs, kills, environment: dict, moment: float) -> list[float]:
    """Run the jobs to their end, and kill ranks on the way; return the times of the kills.

    jobs: one per rank, or one for all. A kill waits until all ranks are there, because no peer
    could heal the last group. It comes up to `moment` seconds later, anywhere in a step.
    """
    chance, times, struck = random.Random(len(kills)), [], {}
    logs[0].parent.mkdir(parents=True, exist_ok=True)
    output = logs[0].parent / "output.txt"
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    with output.open("w") as file:
        agents = [
            subprocess.Popen([*map(str, job)], env=environment, stdout=file, stderr=file)
            for job in jobs
        ]
        try:
            for step, rank in kills:
                agent = agents[rank % len(agents)]
                place = (agent, rank if len(jobs) == 1 else 0, logs[rank], step, len(logs))
                back = struck.get(agent, ([], 0))
                process = wait_for(partial(rank_at, *place, *back), agents, output)
                time.sleep(chance.uniform(0, moment))
                struck[agent] = (psutil.Process(agent.pid).children(), time.time())
                process.kill()
                times.append(time.time())
            wait_for(lambda: all(agent.poll() == 0 for agent in agents), agents, output)
        finally:
            for agent in agents:
                agent.terminate()  # torchrun ends its ranks
            for agent in agents:
                agent.wait(40)
    return times


def rank_at(agent, local_rank, log, step, ranks, dead, since) -> psutil.Process | None:
    """This rank's process, not in `dead`, if since `since` all ranks have reached this step."""
    if agent.poll() == 0:
        sys.exit("torchft_kills.py: error: training ended before all kills: use more --steps")
    lines = [line for line in read(log) if line["time"] > since]
    if not lines or lines[-1]["step"] < step or lines[-1]["ranks"] != ranks:
        return None
    for process in psutil.Process(agent.pid).children() if agent.poll() is None else []:
        with suppress(psutil.Error):  # it has just ended
            if process not in dead and process.environ().get("RANK") == str(local_rank):
                return process
    return None


def wait_for(condition, agents, output: Path, seconds: float = 300):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if any(agent.poll() for agent in agents) or time.monotonic() > deadline:
            said = output.read_text()[-4000:]
            sys.exit(f"torchft_kills.py: error: a run failed, or hangs:\n{said}")
        time.sleep(0.005)
    return value


# ---- the counts


def read(log: Path) -> list[dict]:
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [
        json.loads(line) for line in lines if line.endswith("\n")
    ]  # the last line may be incomplete


def count(lines: list[dict], groups: int) -> dict[str, int]:
    """Count steps and batches in the logs of all groups, also of those killed in between.

    An attempt is identified by its step and its number of groups. If one group has committed it,
    the gradients of all its groups are included.
    """
    committed = {(line["step"], line["ranks"]) for line in lines if line.get("committed")}
    attempts = [line for line in lines if "batch" in line]
    tried = {(line["step"], line["ranks"]) for line in attempts}
    used = Counter(x["batch"] for x in attempts if (x["step"], x["ranks"]) in committed)
    return {
        "lost steps": len(tried - committed),
        "steps without all ranks": sum(here < groups for _, here in committed),
        "batches left out": max(used) + 1 - len(used),
        "batches trained on twice": used.total() - len(used),
    }


def median_wait(done: list[float], kills: list[float]) -> float:
    """The median, over the kills, of the longest time between two steps after the kill."""
    pairs = list(itertools.pairwise(sorted(done)))
    ends = [*kills[1:], math.inf]
    found = [
        max(b - a for a, b in pairs if kill < b < end)
        for kill, end in zip(kills, ends, strict=True)
    ]
    return round(statistics.median(found), 1)


def same_bits(a: dict, b: dict) -> bool:
    """Whether two nested dicts hold equal tensors and numbers under equal names."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--groups", type=int, default=2, help="number of replica groups, of one rank each")
    add("--steps", type=int, default=600, help="number of optimizer steps")
    add("--kills", type=int, default=4, help="number of kills")
    add("--seed", type=int, default=0, help="random seed of the kills' steps and ranks")
    add("--output-dir", type=Path, help="empty directory for the logs (default: not kept)")
    args = parser.parse_args()
    if not 2 <= args.groups <= 12:
        parser.error(f"--groups {args.groups}: must be 2 to 12, so that a group survives a kill")
    room = args.steps * 3 // 4 - args.steps // 10
    if not 1 <= args.kills <= room:
        parser.error(f"--kills {args.kills}: {args.steps} steps have room for 1 to {room}")
    if args.output_dir and args.output_dir.exists() and any(args.output_dir.iterdir()):
        parser.error(f"--output-dir {args.output_dir} is not empty")
    return args


if __name__ == "__main__":
    main()
