"""clusters/: hosts that are network namespaces, and jobs on them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import lab_hosts
import psutil
import pytest
from helpers import ROOT, TORCHRUN, Job, Result, those
from lab_hosts import LAB, Lab, name_of

LAUNCH = ROOT / "clusters/torchrun/launch.py"
SERVER = """
import socket
with socket.create_server(("", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        connection, (peer, *_) = server.accept()
        with connection, connection.makefile("rb") as incoming:
            print(peer, len(incoming.read()), flush=True)
            connection.sendall(b"thanks")
"""
CLIENT = """
import socket, sys
host, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.create_connection((host, port), timeout=2) as connection:
    connection.settimeout(60)
    connection.sendall(bytes(size))
    connection.shutdown(socket.SHUT_WR)
    print(connection.recv(10).decode())
"""


def lab(*args, name: str) -> Result:
    return Lab(name).run(*args)


def processes_of(name: str, command: str = "") -> list[psutil.Process]:
    """Whatever belongs to that lab."""
    return those(lambda p: f"--name {name} {command}" in " ".join(p.cmdline()))


def network_devices() -> set[str]:
    return set(os.listdir("/sys/class/net"))


@pytest.fixture
def hosts():
    """Three of them, in a lab of this name."""
    with lab_hosts.up(Lab(name_of("test")), 3, "--rate", "1gbit") as made:
        yield made.name
    assert not processes_of(made.name)


def test_a_host_has_a_name_an_address_and_a_loopback_of_its_own(hosts):
    before = network_devices()
    shown = lab("show", name=hosts).check().output
    assert shown == "".join(f"host{i}   10.77.0.{i + 1}   1gbit\n" for i in range(3))
    program = "import socket; print(socket.gethostname(), socket.gethostbyname('host2'))"
    said = lab("exec", 1, "--", sys.executable, "-c", program, name=hosts).check().output
    assert said == "host1 10.77.0.3\n"
    devices = lab("exec", 1, "--", "ip", "-brief", "addr", name=hosts).check().output
    assert "10.77.0.2/24 fd77::2/64" in devices
    assert sorted(line.split()[0].partition("@")[0] for line in devices.splitlines()) == [
        "eth0",
        "lo",
    ]
    assert network_devices() == before


def test_a_command_keeps_its_arguments_its_directory_and_its_status(hosts):
    program = "import os, sys; print(os.getcwd(), sys.argv[1:]); sys.exit(7)"
    result = lab("exec", 0, "--", sys.executable, "-c", program, "a b", "$HOME", "-x", name=hosts)
    assert result.returncode == 7
    assert result.output == f"{ROOT} ['a b', '$HOME', '-x']\n"


@pytest.mark.slow
def test_cables_are_cut_mended_and_slowed(hosts):
    command = [sys.executable, LAB, "--name", hosts, "exec", 2, "--", sys.executable, "-c", SERVER]
    with Job(command) as server:
        port = server.wait_until(lambda: re.search(r"^(\d+)\n", server.output), 30)[1]

        def call(size: int = 5) -> Result:
            client = (sys.executable, "-c", CLIENT, "host2", port, size)
            return lab("exec", 0, "--", *client, name=hosts)

        assert call().check().output == "thanks\n"
        server.wait_until(lambda: "10.77.0.1 5\n" in server.output, 30)
        lab("cut", 2, name=hosts).check()
        assert "host2   10.77.0.3   cut\n" in lab("show", name=hosts).output
        assert call().returncode == 1
        lab("heal", 2, name=hosts).check()
        until = time.monotonic() + 30  # the other hosts look for its address again
        while call().returncode and time.monotonic() < until:
            pass
        lab("slow", 2, "8mbit", name=hosts).check()
        assert "host2   10.77.0.3   8mbit\n" in lab("show", name=hosts).output
        started = time.monotonic()
        call(1_000_000).check()
        # At 1 MB/s; the first 64 KB may pass at once. Nothing could make it faster.
        assert time.monotonic() - started > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("end", ["down", "kill the keeper", "kill its parent"])
def test_nothing_is_left(hosts, end):
    before = network_devices()
    sleeper = [sys.executable, LAB, "--name", hosts, "exec", 1, "--", "sleep", "1000"]
    with Job(sleeper) as job:
        (inner,) = job.wait_until(lambda: those(lambda p: p.name() == "sleep", job.processes()), 30)
        # unshare, and the keeper, its child
        parent, keeper = sorted(processes_of(hosts, "keep "), key=lambda p: p.pid)
        if end == "down":
            lab("down", name=hosts).check()
        else:
            (keeper if end == "kill the keeper" else parent).kill()
        job.wait(30)
        assert not inner.is_running()
    until = time.monotonic() + 30
    while processes_of(hosts) and time.monotonic() < until:
        time.sleep(0.01)
    assert not processes_of(hosts)
    assert network_devices() == before
    again = lab("show", name=hosts)
    assert again.returncode == 2
    assert again.output == (
        f"lab.py: error: there is no lab named {hosts}; `lab.py up 3` makes one\n"
    )
    lab("up", 1, name=hosts).check()  # and a new one can be made


def test_mistakes_are_one_sentence(hosts):
    for args, says in (
        (("up", 2), f"{hosts} is up already; `lab.py down` ends it"),
        (("cut", 3), "there is no host 3: they are 0 to 2"),
        (("exec", 9, "--", "true"), "there is no host 9: they are 0 to 2"),
    ):
        result = lab(*args, name=hosts)
        assert (result.returncode, result.output) == (2, f"lab.py: error: {says}\n")
    for args, says in (
        (("slow", 1, "fast"), "'fast' is no rate such as 100mbit or 1gbit"),
        (("up", 0), "invalid choice: 0"),
    ):
        result = lab(*args, name=hosts)
        assert result.returncode == 2
        assert says in result.output.splitlines()[-1]


def test_what_is_missing_is_said():
    missing = {"PATH": "/nonexistent", "LAB": "none"}
    result = subprocess.run(
        [sys.executable, LAB, "up", "2"], env=missing, capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 2
    assert result.stderr == (
        "lab.py: error: a lab needs unshare and nsenter and ip and tc: "
        "apt install iproute2 util-linux\n"
    )


# ---- jobs on several hosts


def launch(*args, name: str, **more) -> Job:
    return Job([sys.executable, LAUNCH, *args], LAB=name, **more)


@pytest.mark.slow
def test_a_job_on_three_hosts(hosts):
    """minimal.py, which itself compares the gradient with that of one process."""
    with launch("--lab", 3, ROOT / "clusters/minimal.py", name=hosts) as job:
        said = job.wait(120).check().output
    table = re.findall(r"^host\d: rank (\d) on (host\d), cpu$", said, re.MULTILINE)
    assert [rank for rank, _ in table] == ["0", "1", "2"]
    assert {host for _, host in table} == {"host0", "host1", "host2"}
    speed = re.search(
        r": gradient equals one process's; all_reduce sends ([\d,]+) MB/s$", said, re.M
    )
    assert 0 < float(speed[1].replace(",", "")) <= 125  # 1 Gbit/s, at most


SUM = """
import socket, sys, torch, torch.distributed as dist
from datetime import timedelta
print("the agents have met", flush=True)
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
ranks = torch.tensor(float(dist.get_rank()))
dist.all_reduce(ranks)
told = f"{socket.gethostname()} is {dist.get_rank()} sum {ranks.item()}"
print(told + "\\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def two_hosts_add(lab: str, folder: Path, *options) -> Result:
    script = folder / "sum.py"
    script.write_text(SUM)
    with launch(*options, "--lab", 2, script, name=lab) as job:
        return job.wait(60)


@pytest.mark.release
def test_hosts_that_have_only_ipv6(hosts, tmp_path):
    for host in (0, 1):
        Lab(hosts).on(host, "ip", "addr", "del", f"10.77.0.{host + 1}/24", "dev", "eth0")
        Lab(hosts).on(host, "sh", "-c", 'hosts=$(grep fd77 /etc/hosts); echo "$hosts" > /etc/hosts')
    said = two_hosts_add(hosts, tmp_path).check().output
    assert len(re.findall(r"^host\d: host\d is \d sum 1.0$", said, re.MULTILINE)) == 2


@pytest.mark.release
def test_a_host_with_several_interfaces(hosts, tmp_path):
    """On host1 its own name means its other interface, from which no cable leads to host0."""
    lab = Lab(hosts)
    lab.on(1, "ip", "link", "add", "eth1", "type", "bridge")
    lab.on(1, "ip", "addr", "add", "192.168.9.1/24", "dev", "eth1")
    lab.on(1, "ip", "link", "set", "eth1", "up")
    other = 'hosts=$(grep -v host1 /etc/hosts); echo "$hosts\n192.168.9.1 host1" > /etc/hosts'
    lab.on(1, "sh", "-c", other)
    without = two_hosts_add(hosts, tmp_path)
    assert without.returncode == 1
    assert "ss1.ss_family == ss2.ss_family" in without.output  # an address of IPv4, one of IPv6
    said = two_hosts_add(hosts, tmp_path, "--interface", "eth0").check().output
    assert len(re.findall(r"^host\d: host\d is \d sum 1.0$", said, re.MULTILINE)) == 2


@pytest.mark.release
def test_hosts_that_do_not_know_each_other(hosts, tmp_path):
    """Debian's way: a host's own name is 127.0.1.1 there, and no other host has a name."""
    for host in (0, 1):
        lines = f"127.0.0.1 localhost\\n127.0.1.1 host{host}\\n"
        Lab(hosts).on(host, "sh", "-c", f'printf "{lines}" > /etc/hosts')
    ssh, list_of_hosts, script = tmp_path / "ssh", tmp_path / "hosts.txt", tmp_path / "sum.py"
    script.write_text(SUM)
    ssh.write_text(SSH_INTO_THE_LAB)
    ssh.chmod(0o755)
    there = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    there["LAB_PY"] = str(LAB)
    list_of_hosts.write_text("host0 10.77.0.1\nhost1 10.77.0.2\n")
    options = ("--nproc-per-node", 1, "--interface", "eth0")
    with launch(*options, list_of_hosts, script, name=hosts, **there) as job:
        said = job.wait(60).check().output
    assert len(re.findall(r"^host\d: host\d is \d sum 1.0$", said, re.MULTILINE)) == 2


SSH_INTO_THE_LAB = """#!/bin/sh
for last; do host=$command command=$last; done
exec "$PYTHON" "$LAB_PY" exec "${host#host}" -- sh -c "$command"
"""


@pytest.mark.release
def test_two_hosts_with_one_number(hosts, tmp_path):
    """Each is the first of two, and waits for the second: 5 s here, in place of 900 s."""
    script = tmp_path / "tell.py"
    script.write_text("import os, socket; print(socket.gethostname(), os.environ['RANK'])")
    torchrun = (*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-conf=timeout=5")
    torchrun += ("--master-addr=10.77.0.1", "--master-port=29500", "--node-rank=0", script)
    with Lab(hosts).start(0, *torchrun) as one, Lab(hosts).start(1, *torchrun) as other:
        for agent in (one, other):
            result = agent.wait(60)
            assert result.returncode == 1
            assert "DistStoreError: wait timeout after 5000ms, keys: " in result.output
            assert "role_info/0" in result.output
    with launch("--static", "--lab", 2, script, name=hosts) as job:  # it numbers the hosts
        said = job.wait(60).check().output
    told = re.findall(r"^host\d: host\d \d$", said, re.MULTILINE)  # torch may log more at the end
    assert sorted(told) == ["host0: host0 0", "host1: host1 1"]


@pytest.mark.slow
def test_a_firewall_that_opens_one_port(hosts, tmp_path):
    """The agents meet at 29500; Gloo does not get through, because it listens at other ports."""
    for family, address in (("-4", "10.77.0.1"), ("-6", "fd77::1")):
        rule = ("ip", family, "rule", "add", "to", address, "ipproto", "tcp")
        Lab(hosts).on(1, *rule, "dport", "29500", "lookup", "main", "prio", 10)
        Lab(hosts).on(1, *rule, "prohibit", "prio", 20)
    result = two_hosts_add(hosts, tmp_path, "--port", 29500)
    assert result.output.count("the agents have met") == 2
    assert result.returncode == 1
    assert "Permission denied" in result.output


FAILS_ON_HOST1 = """
import socket, time
print("here", flush=True)
if socket.gethostname() == "host1":
    raise ValueError("a mistake on this host")
time.sleep(1000)
"""


@pytest.mark.slow
def test_when_one_host_fails_all_end(hosts, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS_ON_HOST1)
    with launch("--lab", 3, script, name=hosts) as job:
        result = job.wait(120)
        assert not job.kill()  # no process was left
    assert result.returncode == 1
    assert "host1: ValueError: a mistake on this host" in re.sub(r"\[rank\d\]: ", "", result.output)
    assert "launch.py: host1 has ended with status 1" in result.output


SAVES_FOR_LONG = """
import os, signal, time
def save(number, frame):
    time.sleep(33)
    os.write(1, b"saved\\n")
    os._exit(128 + number)
signal.signal(signal.SIGTERM, save)
print("in the job", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_after_ctrl_c_there_is_time_to_save(hosts, tmp_path):
    """More than the 30 s that torchrun gives its ranks by default."""
    script = tmp_path / "saves.py"
    script.write_text(SAVES_FOR_LONG)
    with launch("--lab", 2, script, name=hosts) as job:
        job.wait_until(lambda: job.output.count("in the job") == 2, 60)
        job.process.send_signal(signal.SIGINT)
        result = job.wait(120)
        assert not job.kill()
    assert result.returncode == 130
    assert result.output.count("saved\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("an agent is killed", 137),
        pytest.param("a cable is cut", 1, marks=pytest.mark.release),
    ],
)
def test_a_job_is_ended_on_all_hosts(hosts, tmp_path, end, status):
    script = tmp_path / "trains.py"
    script.write_text(
        "import time\n"
        "from datetime import timedelta\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"  # a rank may come seconds after the other
        "group = dist.new_group(timeout=timedelta(seconds=5))\n"
        "print('in the job', flush=True)\n"
        "while True:\n"
        "    dist.all_reduce(torch.ones(1), group=group)\n"
        "    time.sleep(0.01)\n"
    )
    with launch("--lab", 2, script, name=hosts) as job:
        job.wait_until(lambda: job.output.count("in the job") == 2, 60)
        if end == "a cable is cut":
            lab("cut", 1, name=hosts).check()
        else:
            rank1 = next(p for p in job.ranks() if p.environ()["RANK"] == "1")
            rank1.parent().kill()
        result = job.wait(120)
        assert not job.kill()
    assert result.returncode == status


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (None, "hosts.txt: No such file or directory"),
        ("# none yet\n", "hosts.txt names no host"),
        ("a\nb # the second\na\n", "hosts.txt names a more than once"),
        (
            "a 10.0.0.1\nb\n",
            "hosts.txt: each line has a name, or each line has a name and an address",
        ),
    ],
)
def test_mistakes_in_the_list_of_hosts_are_one_sentence(tmp_path, file, says):
    hosts = tmp_path / "hosts.txt"
    if file is not None:
        hosts.write_text(file)
    with Job([sys.executable, LAUNCH, hosts, LAUNCH]) as job:
        result = job.wait(30)
    assert result.returncode == 2
    assert result.output == f"launch.py: error: {tmp_path}/{says}\n"
