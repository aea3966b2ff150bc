"""check_environment.py: what it finds, what it advises, when it says no."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

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


def test_loopback():
    check = env.check_loopback(TORCH, raises(RuntimeError("Gloo connectFullMesh failed")))
    assert check.stops
    assert "connectFullMesh" in check.found
    assert not env.check_loopback(TORCH, lambda torch: None).advice
    env.two_gloo_ranks(torch)  # the real one


def test_host_name_of_another_machine(monkeypatch):
    assert not env.check_host_name("localhost").advice
    # 192.0.2.1 is reserved for documentation (RFC 5737): no machine can listen on it.
    monkeypatch.setattr(env.socket, "gethostbyname", lambda name: "192.0.2.1")
    assert "GLOO_SOCKET_IFNAME" in env.check_host_name("moved").advice


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
    assert "two Gloo ranks have added numbers" in result.stdout
    assert "missing" not in result.stdout
    assert len(result.stdout.splitlines()) <= 15


def test_with_nothing_installed():
    """-I -S: no site-packages, as with a bare python3."""
    result = run(sys.executable, "-I", "-S", ROOT / "check_environment.py")
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("not ready: torch, torchvision, packages")
    assert "pip install -r requirements.txt" in result.stdout
    assert "Traceback" not in result.stderr
