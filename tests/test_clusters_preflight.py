"""clusters/preflight.py: what is wrong is named, on hosts of the lab and in simulated fleets."""

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter

import lab_hosts
import pytest
import torch
from helpers import ROOT, Job, clean_environment
from lab_hosts import Lab, name_of

sys.path.insert(0, str(ROOT / "clusters"))
import preflight
import preflight_verdict as verdict

sys.path.remove(str(ROOT / "clusters"))

CLUSTERS = ROOT / "clusters"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 301])
def test_each_pair_meets_once_in_as_many_rounds_as_hosts(count):
    plan = verdict.rounds(count)
    assert len(plan) <= count
    for pairs in plan:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
    met = Counter(frozenset(pair) for pairs in plan for pair in pairs)
    assert len(met) == count * (count - 1) // 2
    assert set(met.values()) <= {1}


def test_the_plan_for_a_thousand():
    command = [sys.executable, CLUSTERS / "preflight.py", "--plan", "1000"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("1000 hosts, 499500 pairs: 999 rounds, ")


def test_one_slow_host_and_one_slow_link_of_a_thousand():
    """Every value varies by a tenth; nothing else is named."""
    chance, hosts = random.Random(0), [f"h{i}" for i in range(1000)]
    values = {p: 100 * chance.uniform(0.9, 1) for p in itertools.combinations(range(1000), 2)}
    for pair in values:
        if 417 in pair:
            values[pair] /= 10
    values[5, 6] = 20.0
    found = verdict.slow_links(hosts, values, 0.6, lambda v: f"{v:.0f} MB/s")
    assert found == [
        "h417: its link is slow: 10 MB/s to any host, the best pair 100 MB/s",
        "h5 - h6: the link is slow: 20 MB/s, the best pair 100 MB/s",
    ]


def test_three_hosts_are_enough_to_know_which_one_is_slow():
    found = verdict.slow_links(["a", "b", "c"], {(0, 1): 100.0, (0, 2): 9.0, (1, 2): 9.0}, 0.6, str)
    assert found == ["c: its link is slow: 9.0 to any host, the best pair 100.0"]
    assert verdict.slow_links(["a"], {}, 0.6, str) == []
    assert verdict.slow_links(["a", "b"], {(0, 1): 1.0}, 0.6, str) == []


def test_hosts_that_cannot_be_reached():
    errors = {(0, 1): "timed out", (1, 2): "timed out", (1, 3): "timed out"}
    assert verdict.broken_links(["a", "b", "c", "d"], errors) == [
        "b: no connection with any host: timed out"
    ]
    assert verdict.broken_links(["a", "b", "c"], {(0, 2): "refused"}) == [
        "a - c: no connection: refused"
    ]
    assert verdict.broken_links(["a", "b"], {(0, 1): "refused"}) == [
        "a - b: no connection: refused"
    ]


def test_the_odd_one_out():
    two, three = {"torch": "2.15.0", "GPUs": ["H"] * 8}, {"torch": "2.13.0", "GPUs": ["H"] * 7}
    assert verdict.differing(["a", "b", "c"], [two, three, two]) == [
        "b: torch 2.13.0, the others have 2.15.0",
        "b: GPUs 7 x H, the others have 8 x H",
    ]
    assert verdict.differing(["a", "b"], [two, two]) == []
    assert verdict.differing(["a", "b"], [{"CUDA": None}, {"CUDA": "13.2"}]) == [
        "hosts differ in CUDA: a none, b 13.2"
    ]


def test_clocks_and_devices():
    assert verdict.wrong_clocks(["a", "b", "c"], [50.0, 50.2, 140.1]) == [
        "c: its clock is 90 s ahead"
    ]
    assert verdict.wrong_clocks(["a", "b", "c"], [0.0, -60.0, 0.1]) == [
        "b: its clock is 60 s behind"
    ]
    found = verdict.slow_devices(["a", "b"], [[9e9, 7e14, 7e14], [3e9, 7e14, 1e14]], 0.6)
    assert found == [
        "b: its processor is slow: 3.0 GFLOP/s a core, the best processor 9.0",
        "b: its GPU 1 is slow: 100.0 TFLOP/s, the best GPU 700.0",
    ]


# ---- all_reduce


class Told:
    """Stands for the agents of hosts: keeps what they are told."""

    def __init__(self):
        self.all_reduce = {}

    def ask(self, told: dict[int, dict], **_) -> dict:
        self.all_reduce |= {host: request for host, request in told.items() if "ranks" in request}
        return {
            host: {"is": 1.0} if "ranks" in request else 29500 for host, request in told.items()
        }


@pytest.mark.parametrize(
    ("gpus", "ranks", "device"),
    [([8, 8], 8, "cuda"), ([8, 7], 7, "cuda"), ([8, 0], 1, "cpu"), ([0, 0], 1, "cpu")],
)
def test_each_gpu_gets_a_rank(gpus, ranks, device):
    fleet = Told()
    reduced, failed = preflight.measure_all_reduce(fleet, ["a", "b"], gpus, skip=set())
    assert (reduced, failed) == ({(0, 1): 1.0}, [])
    both = {"do": "all_reduce", "ranks": ranks, "device": device, "host": "a", "port": 29500}
    assert fleet.all_reduce == {node: {"node": node, **both} for node in (0, 1)}


class Agent:
    def __init__(self):
        command = [sys.executable, CLUSTERS / "preflight_agent.py"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=clean_environment(), **pipes)

    def tell(self, do: str, **told) -> None:
        print(json.dumps({"do": do, **told}), file=self.process.stdin, flush=True)

    def answer(self) -> dict:
        return json.loads(self.process.stdout.readline())


@pytest.mark.slow
def test_ranks_of_two_hosts_meet():
    """Two on each, as on hosts with two GPUs. Then an error of one of them is the host's."""
    agents = [Agent(), Agent()]
    agents[0].tell("store")
    port = agents[0].answer()["is"]
    where = {"host": "127.0.0.1", "port": port, "device": "cpu"}
    for node, agent in enumerate(agents):
        agent.tell("all_reduce", node=node, ranks=2, **where)
    assert all(agent.answer()["is"] > 1e6 for agent in agents)
    agents[0].tell("all_reduce", node=0, ranks=2, **where | {"device": "nowhere"})
    assert "nowhere" in agents[0].answer()["error"]
    for agent in agents:
        agent.process.stdin.close()
        assert agent.process.wait(30) == 0


# ---- on hosts of the lab


class Hosts(Lab):
    def preflight(self, *args, **environment: str):
        command = [sys.executable, CLUSTERS / "preflight.py", "--lab", 3, *args]
        # A fork would not see another version of torch, which is mounted over the files.
        with Job(command, LAB=self.name, **environment) as job:
            result = job.wait(120)
            assert not job.kill()
        stages = ("pairs ...", "all_reduce ...", "matmul ...")
        lines = [line for line in result.output.splitlines() if line not in stages]
        return result.returncode, lines


@pytest.fixture
def lab():
    if os.geteuid():
        pytest.skip("needs root, to put other files onto a host")
    with lab_hosts.up(Hosts(name_of("preflight")), 3, "--rate", "300mbit") as lab:
        yield lab


@pytest.mark.slow
def test_nothing_is_wrong(lab, tmp_path):
    assert lab.preflight("--directory", tmp_path) == (0, ["3 host(s): nothing wrong"])
    assert not list(tmp_path.iterdir())


# What Python runs when it starts, on one host only.
ODD_CLOCK = "import time; true = time.time; time.time = lambda: true() + 90\n"
# A processor without its vector units: that part of the instructions is not used.
OLD_PROCESSOR = "import os; os.environ['MKL_CBWR'] = 'COMPATIBLE'\n"


@pytest.mark.slow
def test_what_is_wrong_is_named(lab, tmp_path):
    """A slow link, a slow processor, another torch, a wrong clock, a missing directory."""
    paths = {name: tmp_path / name for name in ("site", "clock", "processor", "shared")}
    for path in paths.values():
        path.mkdir()
    (paths["shared"] / "runs").mkdir()
    (paths["clock"] / "sitecustomize.py").write_text(ODD_CLOCK)
    (paths["processor"] / "sitecustomize.py").write_text(OLD_PROCESSOR)
    there = ROOT / torch.version.__file__
    version = tmp_path / "version.py"
    version.write_text(f"{there.read_text()}\n__version__ = '2.9.9'\n")

    lab.run("slow", 2, "50mbit").check()
    lab.on(0, "mount", "--bind", paths["processor"], paths["site"])
    lab.on(1, "mount", "--bind", version, there)
    lab.on(1, "mount", "--bind", paths["clock"], paths["site"])
    lab.on(2, "mount", "-t", "tmpfs", "tmpfs", paths["shared"])
    runs = paths["shared"] / "runs"
    status, lines = lab.preflight("--directory", runs, PYTHONPATH=str(paths["site"]))
    assert status == 1, lines
    expected = [
        "host1: its clock is 90 s ahead",
        f"host2: the directory {runs} is missing",
        f"host1: torch 2.9.9, the others have {torch.__version__}",
        r"host2: its link is slow: \d+ Mbit/s to any host, the best pair \d+ Mbit/s",
        r"host2: its all_reduce is slow: \d+ MB/s to any host, the best pair \d+ MB/s",
        r"host0: its processor is slow: .* GFLOP/s a core, the best processor .*",
        r"6 thing\(s\) wrong",
    ]
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert line == pattern or re.fullmatch(pattern, line), lines


@pytest.mark.slow
def test_a_host_that_cannot_be_asked(lab):
    with Job([sys.executable, CLUSTERS / "preflight.py", "--lab", 4], LAB=lab.name) as job:
        result = job.wait(60)
        assert not job.kill()
    says = "host3 cannot be asked: lab.py: error: there is no host 3: they are 0 to 2"
    assert (result.returncode, result.output) == (2, f"preflight.py: error: {says}\n")


@pytest.mark.skipif(not shutil.which("ssh"), reason="no ssh here")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("none.invalid\n", "none.invalid cannot be asked: ssh: Could not resolve hostname"),
        ("# nobody\n", "names no host"),
        ("a\na\n", "names a host more than once"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, text, says):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(text)
    command = [sys.executable, CLUSTERS / "preflight.py", hosts]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
