"""check_environment.py: what it finds, what it advises, when it says no."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, Job, torchrun_command

import check_environment as env

TORCH = SimpleNamespace(__version__="2.15.0")


def raises(error):
    def use(torch):
        raise error

    return use


def test_python_too_old():
    assert env.check_python((3, 10, 13)).stops
    assert "3.11" in env.check_python((3, 10, 13)).advice
    assert not env.check_python((3, 11, 0)).advice
    assert not env.check_python((3, 12, 1)).advice


@pytest.mark.parametrize(
    ("version", "error", "advises", "stops"),
    [
        ("2.15.0", None, False, False),
        ("2.15.0+cpu", None, False, False),  # the same release, another build
        ("2.11.0", None, True, False),  # supported, but not what the course was recorded with
        ("2.9.1", None, True, True),
        (None, "ModuleNotFoundError: no torch", True, True),
        ("2.15.0", "OSError: libcudart.so", True, True),
    ],
)
def test_torch(version, error, advises, stops):
    check = env.check_torch(version, "2.15.0", error)
    assert (bool(check.advice), check.stops) == (advises, stops)
    assert (error or "") in check.found or version is None


def test_torchvision_that_does_not_fit():
    mixed = raises(RuntimeError("operator torchvision::nms does not exist\nand more"))
    check = env.check_torchvision("0.29.2", "0.29.2", TORCH, mixed)
    assert check.stops
    assert "does not fit torch 2.15.0: RuntimeError: operator torchvision::nms" in check.found
    assert "and more" not in check.found
    assert "one file" in check.advice
    assert env.check_torchvision(None, "0.29.2", TORCH, mixed).stops
    assert env.check_torchvision("0.29.2", "0.29.2", None, mixed).stops
    assert not env.check_torchvision("0.29.2", "0.29.2", TORCH, lambda torch: None).advice


def test_packages():
    pins = {"numpy": "2.4.6", "transformers": "5.23.0", "nbval": "0.11.0"}

    def without(name):
        return {n: version for n, version in pins.items() if n != name}

    good = env.check_packages(pins, pins, None)
    assert (good.advice, good.stops) == ("", False)
    missing = env.check_packages(without("nbval"), pins, None)
    assert "missing: nbval" in missing.found
    assert missing.advice
    assert not missing.stops  # the examples run without it
    assert env.check_packages(without("numpy"), pins, None).stops
    other = env.check_packages({**pins, "numpy": "2.3.0"}, pins, None)
    assert "not as pinned: numpy 2.3.0" in other.found
    assert other.advice
    assert not other.stops
    assert "boom" in env.check_packages(pins, pins, "boom").found


def fake_torch(gpus: int, backends: str):
    return SimpleNamespace(
        cuda=SimpleNamespace(device_count=lambda: gpus, get_device_name=lambda i: "H100"),
        distributed=SimpleNamespace(is_backend_available=lambda name: name in backends.split()),
    )


def test_gpus_and_backends():
    assert env.check_gpus(fake_torch(2, ""), True).found == "2 x H100"
    assert not env.check_gpus(fake_torch(0, ""), False).advice
    assert env.check_gpus(fake_torch(0, ""), True).advice  # a driver, but no GPU
    assert not env.check_gpus(fake_torch(0, ""), True).stops
    assert env.check_backends(fake_torch(0, "gloo")).found == "gloo"
    assert not env.check_backends(fake_torch(0, "gloo")).advice
    assert env.check_backends(fake_torch(0, "nccl")).stops
    assert env.check_backends(None).stops


def test_gloo():
    check = env.check_gloo(TORCH, raises(RuntimeError("Gloo connectFullMesh failed")))
    assert check.stops
    assert "connectFullMesh" in check.found
    assert not env.check_gloo(TORCH, lambda torch: None).advice
    assert env.check_gloo(None, lambda torch: None).stops
    env.two_gloo_ranks(torch)  # the real one


def test_a_check_that_raises_is_one_line(monkeypatch):
    monkeypatch.delattr(os, "sysconf")
    check = env.ask("machine", lambda: env.check_machine(*env.this_machine()))
    assert "AttributeError" in check.found
    assert "'machine'" in check.advice


# Names and interfaces.


def names(monkeypatch, known: dict[str, str]) -> None:
    """Names resolve to these addresses; all other names do not."""

    def getaddrinfo(host, port, family=0, type=0, proto=0, flags=0):
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "gethostname", lambda: "mine")


def test_torchrun_asks_getfqdn_unless_it_is_told(monkeypatch):
    names(monkeypatch, {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "mine": "127.0.0.1"})
    monkeypatch.setattr(socket, "getfqdn", lambda name="": "1.0.0.10.in-addr.arpa")
    check = env.check_torchrun(None)
    assert check.stops
    assert "1.0.0.10.in-addr.arpa" in check.found
    assert "export PET_LOCAL_ADDR=127.0.0.1 " in check.advice
    assert "127.0.0.1 1.0.0.10.in-addr.arpa)" in check.advice
    assert not env.check_torchrun("127.0.0.1").advice
    assert env.check_torchrun("nowhere").stops
    monkeypatch.setattr(socket, "getfqdn", lambda name="": "mine")
    assert not env.check_torchrun(None).advice
    monkeypatch.setattr(socket, "getfqdn", lambda name="": "a..b")  # UnicodeError
    monkeypatch.setattr(socket, "getaddrinfo", REAL_GETADDRINFO)
    assert env.check_torchrun(None).stops


REAL_GETADDRINFO = socket.getaddrinfo


def test_torchrun_needs_localhost(monkeypatch):
    names(monkeypatch, {"mine": "127.0.0.1"})
    monkeypatch.setattr(socket, "getfqdn", lambda name="": "mine")
    check = env.check_torchrun(None)
    assert check.stops
    assert "127.0.0.1 localhost" in check.advice


@pytest.mark.parametrize(
    ("interfaces", "loopback"),
    [([(1, "lo"), (2, "eth0")], "lo"), ([(1, "lo0"), (2, "gif0"), (5, "en0")], "lo0")],
    ids=["linux", "macos"],
)
def test_host_name_of_another_machine(monkeypatch, interfaces, loopback):
    monkeypatch.setattr(socket, "if_nameindex", lambda: interfaces)
    names(monkeypatch, {"mine": "127.0.0.1"})
    assert env.check_host_name(None) == ("host name", "mine is 127.0.0.1", "", False)
    # 192.0.2.1 is reserved for documentation (RFC 5737); here the kernel would refuse to bind it.
    names(monkeypatch, {"mine": "203.0.113.1"})
    for known in ({"mine": "203.0.113.1"}, {}):
        names(monkeypatch, known)
        check = env.check_host_name(None)
        assert check.advice.endswith(f"export GLOO_SOCKET_IFNAME={loopback}")
        assert not check.stops  # Gloo takes the loopback by itself
    other = interfaces[-1][1]
    assert not env.check_host_name(other).advice
    assert not env.check_host_name(f"{other},{loopback}").advice
    check = env.check_host_name("ib0")
    assert check.stops
    assert f"no ib0, only {loopback}, " in check.found


def test_machine():
    assert not env.check_machine(2, 16, 50, 8).advice
    for poor in ((1, 16, 50, 8), (2, 2, 50, 8), (2, 16, 50, 0.0625)):
        assert env.check_machine(*poor).advice


def test_reads_the_pins():
    assert env.read_pins(ROOT / "requirements.txt").keys() == {"torch", "torchvision"}
    assert env.read_pins(ROOT / "requirements-common.txt").keys() >= env.ESSENTIAL


def run(*command):
    return subprocess.run(
        [*map(str, command)], cwd="/", capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_here():
    """The real thing, in the environment that runs the tests."""
    result = run(sys.executable, ROOT / "check_environment.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "ready"
    assert re.search("^ok  Gloo +two ranks have added numbers$", result.stdout, re.MULTILINE)
    assert "missing" not in result.stdout
    assert len(result.stdout.splitlines()) <= 15


def test_with_nothing_installed():
    """-I -S: no site-packages, as with a bare python3."""
    result = run(sys.executable, "-I", "-S", ROOT / "check_environment.py")
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("not ready: torch, torchvision, packages")
    assert "pip install -r requirements.txt" in result.stdout
    assert "Traceback" not in result.stderr
    brief = run(sys.executable, "-I", "-S", ROOT / "check_environment.py", "--brief")
    lines = [line for line in result.stdout.splitlines() if not line.startswith("ok ")]
    assert (brief.stdout.splitlines(), brief.returncode) == (lines, 1)


WINDOWS = """
import os, runpy, shutil, socket, sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
for name in ("sysconf", "sched_getaffinity", "fork", "uname", "getuid"):
    delattr(os, name)
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
sys.platform = "win32"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_on_windows():
    """Simulated: what Python lacks there is taken away."""
    result = run(sys.executable, "-c", WINDOWS, ROOT / "check_environment.py")
    assert result.returncode == 1, result.stdout + result.stderr
    first, advice, last = result.stdout.splitlines()
    assert first.split() == ["!!", "system", "win32"]
    assert "WSL" in advice
    assert last == "not ready: system"
    assert result.stderr == ""


# Each piece of advice, tried: a job that waits without it runs with it.

WAITS = "network addresses of .* cannot be retrieved|failed to connect|errno"
MINIMAL = ROOT / "collectives/minimal.py"
ARPA = 'import socket\nsocket.getfqdn = lambda name="": "1.0.0.10.in-addr.arpa"\n'
# An address that can be listened on, but not be reached, as behind a firewall.
UNREACHABLE = "sysctl -qw net.ipv4.ip_nonlocal_bind=1"
CHECKS = f"""
import os, sys, torch
sys.path.append("{ROOT}")
import check_environment as env
local_addr, interfaces = map(os.environ.get, ("PET_LOCAL_ADDR", "GLOO_SOCKET_IFNAME"))
checks = [env.check_torchrun(local_addr), env.check_host_name(interfaces)]
for check in [*checks, env.check_gloo(torch, env.two_gloo_ranks)]:
    print(check.name, check.stops, check.advice)
"""


class World:
    """A machine that a test describes."""

    def __init__(self, folder: Path, enter: Iterable[str] = (), **environment: str):
        """enter: what runs a command there."""
        self.enter, self.environment, self.script = enter, environment, folder / "checks.py"
        self.script.write_text(CHECKS)

    def job(self, *command, **environment: str) -> Job:
        return Job([*self.enter, *command], **self.environment, **environment)

    def checks(self, **environment: str) -> tuple[list[str], str]:
        """The names of the checks that stop; all that is printed."""
        with self.job(sys.executable, self.script, **environment) as job:
            output = job.wait(120).check().output
        return re.findall("^(.+) True ", output, re.MULTILINE), output

    def torchrun(self, **environment: str) -> Job:
        return self.job(*torchrun_command(MINIMAL), **environment)


def assert_advice_helps(world: World, broken: list[str], advice: dict[str, str]) -> None:
    found, output = world.checks()
    assert found == broken
    assert dict(re.findall(r"export (\w+)=(\S+)", output)) == advice
    with world.torchrun() as job:
        job.wait_until(lambda: len(re.findall(WAITS, job.output)) > 2, timeout=120)
        assert not job.ranks()
    with world.torchrun(**advice) as job:
        printed = job.wait(120).check().output
    assert "rank 1 of 2: all_reduce [1]" in printed
    assert not re.findall(WAITS, printed)
    assert "Unable to resolve hostname" not in printed
    found, output = world.checks(**advice)
    assert found == []
    assert "export" not in output


@pytest.mark.release
def test_a_name_that_resolves_only_backwards(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ARPA)
    world = World(tmp_path, PYTHONPATH=str(tmp_path))
    assert_advice_helps(world, ["torchrun"], {"PET_LOCAL_ADDR": "127.0.0.1"})


@pytest.mark.release
@pytest.mark.parametrize(
    ("hosts", "commands", "broken"),
    [
        ("127.0.0.1 localhost", (), ["torchrun"]),
        ("127.0.0.1 localhost\n203.0.113.1 nowhere", (UNREACHABLE,), ["torchrun", "Gloo"]),
    ],
    ids=["does not resolve", "cannot be reached"],
)
def test_a_name_that_does_not_lead_here(tmp_path, hosts, commands, broken):
    file = tmp_path / "hosts"
    prepare = ["hostname nowhere", f"mount --bind {file} /etc/hosts", "ip link set lo up"]
    enter = ["unshare", "--uts", "--mount", "--net", "sh", "-ec"]
    enter += ["; ".join([*prepare, *commands, 'exec "$@"']), "sh"]
    file.write_text(hosts + "\n")
    if sys.platform != "linux" or not shutil.which("unshare") or run(*enter, "true").returncode:
        pytest.skip("needs Linux and the rights to make namespaces")
    world = World(tmp_path, enter)
    advice = {"PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    assert_advice_helps(world, broken, advice)

    # The other advice: a line in /etc/hosts.
    line = re.search("add this line to /etc/hosts: ([^)]+)", world.checks()[1])[1]
    file.write_text(f"{line}\n{hosts.splitlines()[0]}\n")
    assert world.checks()[0] == []
