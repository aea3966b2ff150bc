"""The all_reduces between two hosts that preflight_agent.py measures: one rank for each GPU.

With several ranks, or with NCCL, each rank is an agent in a process of its own, with a time limit.
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

AGENT = Path(__file__).with_name("preflight_agent.py")


def all_reduce(node: int, ranks: int, **where) -> dict:
    """Bytes per second between two hosts. "all": of this host's slowest rank, with all ranks;
    "peers": of each rank here with its peer on the other host; "inside": among the ranks here.

    node: 0 or 1, this host. ranks: processes on each host, one per GPU, so that every GPU, NVLink
    and network card takes part. where: see `one_rank`.
    """
    told = [{"node": node, "local_rank": i, "ranks": ranks} for i in range(ranks)]
    if ranks == 1 and where["device"] == "cpu":
        return {"all": one_rank(**told[0], **where)["all"], "peers": [], "inside": 0}
    with ThreadPoolExecutor(ranks) as pool:
        answers = [*pool.map(lambda rank: in_a_process({"do": "one_rank", **rank, **where}), told)]
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:  # the ranks that hang wait for one that has failed
        raise RuntimeError(min(errors, key=lambda error: error in (DIED, HANGS)))
    rates = [answer["is"] for answer in answers]
    if ranks == 1:
        return {"all": rates[0]["all"], "peers": [], "inside": 0}
    slowest = {name: min(rate[name] for rate in rates) for name in ("all", "inside")}
    return slowest | {"peers": [rate["peer"] for rate in rates]}


DIED, HANGS = "a rank died", "a rank hangs"


def in_a_process(request: dict, seconds: float = 150) -> dict:
    """The answer of a new agent. NCCL may hang, and its watchdog may end its process."""
    command, text = [sys.executable, AGENT], json.dumps(request) + "\n"
    try:
        done = subprocess.run(
            command, input=text, stdout=subprocess.PIPE, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:  # it has been killed
        return {"error": HANGS}
    return json.loads(done.stdout or json.dumps({"error": DIED}))


def one_rank(node: int, local_rank: int, ranks: int, host: str, port: int, device: str) -> dict:
    """This rank's bytes per second in all_reduces: NCCL on "cuda" devices, Gloo on the "cpu"."""
    import torch
    import torch.distributed as dist

    place = torch.device(device, local_rank if device == "cuda" else None)
    if device == "cuda":
        torch.cuda.set_device(place)
    limit = {"timeout": timedelta(seconds=15)}
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10)),
        rank=node * ranks + local_rank,
        world_size=2 * ranks,
        device_id=place if device == "cuda" else None,
        **limit,
    )
    try:
        return rates_of_groups(dist, node, local_rank, ranks, place, limit)
    finally:  # an agent that measures in its own process needs another group for the next pair
        dist.destroy_process_group()


def rates_of_groups(dist, node: int, local_rank: int, ranks: int, place, limit: dict) -> dict:
    """Bytes per second of an all_reduce of all ranks, of this host's, of this rank and its peer."""
    import torch

    device = place.type
    groups = {"all": None}
    if ranks > 1:  # every rank takes part in making every group
        hosts = [dist.new_group([n * ranks + i for i in range(ranks)], **limit) for n in range(2)]
        peers = [dist.new_group([i, ranks + i], **limit) for i in range(ranks)]
        groups |= {"inside": hosts[node], "peer": peers[local_rank]}
    count = 2**20 if device == "cpu" else 2**26
    data = torch.randn(count, device=place)  # float32
    found = {}
    for name, group in groups.items():  # groups with the same name run at the same time
        times = []
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(data, dist.ReduceOp.MAX, group)
            if device == "cuda":
                torch.cuda.synchronize(place)
            times.append(time.perf_counter() - start)
        # The fastest call: another program may have slowed down the rest.
        found[name] = data.numel() * 4 / min(times[1:])
    dist.barrier()
    return found
