"""clusters/preflight.py: what is wrong is named, on hosts of the lab and in simulated fleets."""

import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import lab_hosts
import pytest
import torch
from helpers import ROOT, Job, clean_environment, python
from lab_hosts import Lab, name_of

sys.path.insert(0, str(ROOT / "clusters"))
import preflight
import preflight_agent
import preflight_fleet
import preflight_gpus
import preflight_verdict as verdict

sys.path.remove(str(ROOT / "clusters"))

CLUSTERS = ROOT / "clusters"
TOOLS = ("slurmctld", "slurmd", "munged")
NO_SLURM = [x for x in TOOLS if not shutil.which(x, path=f"{os.environ['PATH']}:/usr/sbin")]


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


@pytest.mark.slow
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
        "b: torch 2.13.0, other hosts have 2.15.0",
        "b: GPUs 7 x H, other hosts have 8 x H",
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
        "b: its processor is slow: 3.0 GFLOP/s per core, the best processor 9.0",
        "b: its GPU 1 is slow: 100.0 TFLOP/s, the best GPU 700.0",
    ]


class Busy(preflight_fleet.Fleet):
    """Two hosts without GPUs; other programs halve the speed of b in all moments but one."""

    def __init__(self):
        self.moments = iter([50e9, 51e9, 99e9, 50e9, 52e9])

    def ask(self, told: dict[int, dict], seconds: float) -> dict:
        (request,) = {json.dumps(request) for request in told.values()}
        if json.loads(request)["do"] == "products":
            return {host: next(self.moments) if host else 100e9 for host in told}
        return {host: {"speeds": [], "wrong": []} for host in told}


@pytest.mark.parametrize("turns", [[[0], [1]], [[0, 1]]])
def test_a_processor_that_is_busy_for_moments_is_not_slow(turns):
    cores, on_gpus = preflight.measure_products(Busy(), turns, 10)
    assert cores == {0: 100e9, 1: 99e9}
    assert on_gpus == {host: {"speeds": [], "wrong": []} for host in (0, 1)}


def test_a_card_that_is_slow_on_all_measured_hosts_is_not_one_hosts_fault():
    found = verdict.slow_links(["a", "b"], {(0, 1): 10.0}, 0.6, str, "link of GPU 3", best=50.0)
    assert found == ["a - b: the link of GPU 3 is slow: 10.0, the best pair 50.0"]


# ---- what an agent reads


def port(folder: Path, card: str, kind: str, state: str) -> None:
    place = folder / f"infiniband/{card}/ports/1"
    place.mkdir(parents=True)
    for name, text in (("link_layer", kind), ("rate", "400 Gb/sec (4X NDR)"), ("state", state)):
        (place / name).write_text(f"{text}\n")


def test_every_network_card_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight_agent, "SYS", tmp_path)
    port(tmp_path, "mlx5_0", "InfiniBand", "4: ACTIVE")
    port(tmp_path, "mlx5_1", "Ethernet", "1: DOWN")
    for name, state in (("eth0", "up"), ("eth1", "down")):
        (tmp_path / f"net/{name}/device").mkdir(parents=True)
        (tmp_path / f"net/{name}/operstate").write_text(f"{state}\n")
        (tmp_path / f"net/{name}/speed").write_text("100000\n")
    (tmp_path / "net/docker0").mkdir()  # no device
    assert preflight_agent.network_cards() == [
        "InfiniBand 400 Gb/sec (4X NDR), ACTIVE",
        "Ethernet 400 Gb/sec (4X NDR), DOWN",
        "Ethernet 100000 Mbit/s, MTU ?",
    ]
    healthy = {"network cards": ["InfiniBand 400, ACTIVE"] * 8}
    hurt = {"network cards": ["InfiniBand 400, ACTIVE"] * 7 + ["InfiniBand 400, DOWN"]}
    assert verdict.differing(["a", "b", "c"], [healthy, hurt, healthy]) == [
        "b: network cards 7 x InfiniBand 400, ACTIVE and 1 x InfiniBand 400, DOWN, "
        "other hosts have 8 x InfiniBand 400, ACTIVE"
    ]


def test_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight_agent, "SYS", tmp_path)
    monkeypatch.setattr(preflight_agent.resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    assert preflight_agent.limits(2**36) == []  # no RDMA here
    assert preflight_agent.limits(64 * 2**20) == [
        "/dev/shm has 64 MB, which is a container's default"
    ]
    port(tmp_path, "mlx5_0", "InfiniBand", "4: ACTIVE")
    assert preflight_agent.limits(None) == [
        "ulimit -l is 8192 kB, and RDMA needs to pin more: unlimited"
    ]
    unlimited = (preflight_agent.resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(preflight_agent.resource, "getrlimit", lambda _: unlimited)
    assert preflight_agent.limits(None) == []


def test_what_the_driver_says(tmp_path, monkeypatch):
    """A program that answers as nvidia-smi is documented to; there is no GPU here."""
    assert preflight_gpus.asked_of_the_driver("driver_version") == []
    program = tmp_path / "nvidia-smi"
    answers = "0x0000000000000004\n0x0000000000000048\nN/A"
    program.write_text(f'#!/bin/sh\n[ "$1" = --query-gpu=clocks ] && echo "{answers}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reasons = preflight_gpus.asked_of_the_driver("clocks")
    assert len(reasons) == 3
    assert preflight_gpus.slowed_down(reasons) == [
        "GPU 1: its clock is slowed down by hardware and heat",
    ]
    assert preflight_gpus.asked_of_the_driver("temperature") == []


# ---- all_reduce


class Told:
    """Stands for the agents of hosts: keeps what they are told."""

    def __init__(self, hosts: int = 2, slow_gpu: tuple[int, int] | None = None):
        self.all_reduce, self.lost, self.here = {}, {}, range(hosts)
        self.addresses = list("abcd"[:hosts])
        self.slow_gpu = slow_gpu

    def ask(self, told: dict[int, dict], **_) -> dict:
        return dict.fromkeys(told, 29500)

    def try_to(self, told: dict[int, dict], **_) -> dict:
        self.all_reduce |= told
        return {host: {"is": self.rates(host, request["ranks"])} for host, request in told.items()}

    def rates(self, host: int, ranks: int) -> dict:
        peers = [1e9 if (host, gpu) == self.slow_gpu else 5e10 for gpu in range(ranks)]
        return {"all": 4e11, "peers": peers if ranks > 1 else [], "inside": 9e11}


@pytest.mark.parametrize(
    ("gpus", "ranks", "device"),
    [([8, 8], 8, "cuda"), ([8, 7], 7, "cuda"), ([8, 0], 1, "cpu"), ([0, 0], 1, "cpu")],
)
def test_each_gpu_gets_a_rank(gpus, ranks, device):
    fleet = Told()
    found = preflight.measure_all_reduce(fleet, ["a", "b"], dict(enumerate(gpus)), set(), 0.6)
    assert found == []
    both = {"do": "all_reduce", "ranks": ranks, "device": device, "host": "a", "port": 29500}
    assert fleet.all_reduce == {node: {"node": node, **both} for node in (0, 1)}


def test_one_slow_card_of_many_is_named():
    """GPU 3 of host c reaches no peer as fast as the others do; with two hosts it is the pair's."""
    gpus = dict.fromkeys(range(4), 8)
    fleet = Told(4, slow_gpu=(2, 3))
    found = preflight.measure_all_reduce(fleet, list("abcd"), gpus, set(), 0.6)
    what = "all_reduce of GPU 3 with its peer"
    assert found == [f"c: its {what} is slow: 1000 MB/s to any host, the best pair 50000 MB/s"]
    gpus = dict.fromkeys(range(2), 8)
    found = preflight.measure_all_reduce(Told(2, (1, 3)), list("ab"), gpus, set(), 0.6)
    assert found == [f"a - b: the {what} is slow: 1000 MB/s, the best pair 50000 MB/s"]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8])
def test_a_ring_of_neighbours(count):
    rounds = verdict.ring(list(range(10, 10 + count)))
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
    met = Counter(host for pairs in rounds for pair in pairs for host in pair)
    assert set(met.values()) <= {1 if count == 2 else 2}
    assert len(met) == (count if count > 1 else 0)


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
def test_a_job_whose_nodes_are_not_known_is_not_called_healthy():
    told = {"SLURM_JOB_NODELIST": "node[1-2]", "PATH": "/nowhere"}
    result = python(CLUSTERS / "preflight.py", "--srun", **told)
    assert result.returncode == 2
    assert "error: --srun: scontrol does not name the nodes of this job" in result.output


@pytest.mark.slow
def test_ranks_of_two_hosts_meet():
    """Two on each, as on hosts with two GPUs. Then an error of one of them is the host's."""
    agents = [Agent(), Agent()]
    agents[0].tell("store")
    port = agents[0].answer()["is"]
    where = {"host": "127.0.0.1", "port": port, "device": "cpu"}
    for node, agent in enumerate(agents):
        agent.tell("all_reduce", node=node, ranks=2, **where)
    for agent in agents:
        rates = agent.answer()["is"]
        assert min(rates["all"], rates["inside"], *rates["peers"]) > 1e6
        assert len(rates["peers"]) == 2
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
            assert not job.left_running()
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


class Dead(preflight_fleet.Fleet):
    """Of three hosts one is unknown, one dies of the first question, one says nothing at all."""

    def __init__(self):
        say = "import sys\nfor line in sys.stdin: print('{\"is\": 7}', flush=True)"
        dies = "import sys\nsys.stdin.readline()\nsys.exit('Connection closed by remote host')"
        programs = {"a": say, "b": dies, "c": "import time\ntime.sleep(60)", "d": say}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preflight_fleet, "start", lambda host, _: start(programs[host]))
            super().__init__([*programs], "ssh")


def start(program: str) -> subprocess.Popen:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_named_and_the_others_go_on():
    fleet = Dead()
    try:
        begun = {host: {"do": "clock"} for host in (0, 3)}
        assert fleet.ask(begun, seconds=60) == {0: 7, 3: 7}  # a busy machine takes seconds
        assert fleet.all("clock", seconds=3) == {0: 7, 3: 7}
        assert fleet.all("facts", seconds=3) == {0: 7, 3: 7}
        assert fleet.lost == {
            1: "it cannot be asked: Connection closed by remote host",
            2: "no answer within 3 s",
        }
    finally:
        fleet.agents[2].kill()
        fleet.end()


ANSWERS = "import sys; [print('{\"is\": 7}', flush=True) for line in sys.stdin]"
FULL_PIPE = "sys.stderr.write('warning: ' + 'x' * 100_000 + chr(10))"


@pytest.mark.parametrize(
    ("says", "answers"),
    [
        ("print('Welcome to the cluster!')", True),
        ("print('42')", True),  # it is JSON, but no answer
        (FULL_PIPE, True),
        (f"{FULL_PIPE}; sys.exit('no torch here')", False),
    ],
)
def test_words_of_a_host_that_are_no_answers(monkeypatch, says, answers):
    """Its shell greets on stdout, or a library fills the pipe of stderr."""
    monkeypatch.setattr(
        preflight_fleet, "start", lambda *_: start(f"import sys; {says}\n{ANSWERS}")
    )
    fleet = preflight_fleet.Fleet(["a"], "ssh")
    try:
        assert fleet.all("clock", seconds=20) == ({0: 7} if answers else {})
        assert fleet.lost == ({} if answers else {0: "it cannot be asked: no torch here"})
    finally:
        fleet.agents[0].kill()
        fleet.end()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_partner_connects_with_ipv4_or_ipv6(monkeypatch, address):
    monkeypatch.setattr(preflight_agent, "listening", [])
    port = preflight_agent.listen()
    with preflight_agent.listening[0], socket.create_connection((address, port), timeout=10):
        pass


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
    # Four: one more than there are.
    options = ("--lab", 4, "--directory", runs)
    status, lines = lab.preflight(*options, PYTHONPATH=str(paths["site"]))
    assert status == 1, lines
    expected = [
        "host3: it cannot be asked: lab.py: error: there is no host 3: they are 0 to 2",
        "host1: its clock is 90 s ahead",
        f"host2: the directory {runs} is missing",
        f"host1: torch 2.9.9, other hosts have {torch.__version__}",
        r"host2: its link is slow: \d+ Mbit/s to any host, the best pair \d+ Mbit/s",
        r"host2: its all_reduce is slow: \d+ MB/s to any host, the best pair \d+ MB/s",
        r"host0: its processor is slow: .* GFLOP/s per core, the best processor .*",
        r"7 thing\(s\) wrong",
    ]
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert line == pattern or re.fullmatch(pattern, line), lines


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or bool(NO_SLURM), reason=f"needs root; missing: {NO_SLURM}")
def test_on_the_nodes_of_a_job_of_slurm(tmp_path):
    """Real daemons, two nodes: host2 has no directory. ssh is not used."""
    (tmp_path / "runs").mkdir()
    command = [CLUSTERS / "slurm/test_cluster.sh", "sh", "-c", IN_A_JOB, "sh", sys.executable]
    command += [CLUSTERS, tmp_path, tmp_path / "runs"]
    path = f"{os.environ['PATH']}:/usr/sbin"
    with Job(command, LAB=name_of("preflights"), PYTHON=sys.executable, PATH=path) as job:
        result = job.wait(200)
        assert not job.kill()
    says = f"host2: the directory {tmp_path}/runs is missing\n1 thing(s) wrong\n"
    assert says in result.output
    assert result.returncode == 1, result.output


IN_A_JOB = """
"$1" "$2/lab.py" exec 2 -- mount -t tmpfs tmpfs "$3"
salloc --quiet --nodes=2 --ntasks-per-node=1 "$1" "$2/preflight.py" --srun --directory "$4"
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# nobody\n", "names no host"),
        ("a\na\n", "names a host more than once"),
        ("a 10.0.0.1\nb\n", "each line has a name, or each line has a name and an address"),
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


@pytest.mark.skipif(not shutil.which("ssh"), reason="no ssh here")
def test_an_unknown_host_is_named(tmp_path):
    """No host answers: the program ends with that."""
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("none.invalid\n")
    command = [sys.executable, CLUSTERS / "preflight.py", hosts]
    environment = clean_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    why = "none.invalid: it cannot be asked: ssh: Could not resolve hostname"
    assert done.stdout.startswith(why)
    assert done.stdout.endswith("\n1 thing(s) wrong\n")


def test_the_file_of_hosts_is_that_of_launch(tmp_path):
    """A name for ssh, and an address at which the other hosts reach that host."""
    ssh, hosts = tmp_path / "ssh", tmp_path / "hosts.txt"
    ssh.write_text(
        '#!/bin/sh\nfor last; do host=$command command=$last; done\nexec echo "$host" >&2\n'
    )
    ssh.chmod(0o755)
    hosts.write_text("me@alias 10.0.0.7 # rack 1\nother fd77::2\n")
    command = [sys.executable, CLUSTERS / "preflight.py", hosts]
    environment = clean_environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    why = "it cannot be asked"
    assert done.stdout.splitlines()[:2] == [f"alias: {why}: me@alias", f"other: {why}: other"]


def test_where_other_hosts_reach_a_host(monkeypatch):
    monkeypatch.setattr(preflight_fleet, "start", lambda *_: start(""))
    fleet = preflight_fleet.Fleet(["me@a", "b"], "ssh", {"me@a": None, "b": "10.0.0.2"})
    fleet.end()
    assert fleet.addresses == ["a", "10.0.0.2"]


def test_gpus_that_torch_does_not_see_are_named(monkeypatch, tmp_path):
    """Else a job of Slurm that forgot to request its GPUs has "nothing wrong"."""
    for gpu in range(torch.cuda.device_count() + 2):
        (tmp_path / str(gpu)).mkdir()
    monkeypatch.setattr(preflight_gpus, "DRIVER", tmp_path)
    wrong = " ".join(preflight_agent.facts([], str(tmp_path))["wrong"])
    seen = torch.cuda.device_count()
    assert f"torch sees {seen} of the {seen + 2} GPUs here" in wrong


def test_srun_needs_a_job():
    command = [sys.executable, CLUSTERS / "preflight.py", "--srun"]
    environment = clean_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "error: --srun: not in a Slurm job: salloc --nodes=N --exclusive --gpus-per-node=8\n"
    )
