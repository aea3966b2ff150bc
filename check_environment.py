"""Print what this machine has, what is wrong, and what to do.

    python3 check_environment.py            # one line per item: "ok", or "!!" and advice below
    python3 check_environment.py --brief    # the "!!" lines, their advice and the verdict

Needs only Python, on Linux and macOS. Exit status 1 if something is wrong that stops the examples,
else 0: a machine without a GPU is fine.
"""

import argparse
import os
import re
import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
INSTALL = "run 'make demo', or 'pip install -r requirements.txt' in a virtual environment"
# The demo needs these packages; the rest is for the course and the tests.
ESSENTIAL = {"numpy", "scikit-learn"}


class Check(NamedTuple):
    name: str
    found: str
    advice: str = ""  # what to do; empty if nothing is wrong
    stops: bool = False  # whether the examples cannot run


def main():
    parser = argparse.ArgumentParser(description="Print what this machine has and what is wrong.")
    parser.add_argument("--brief", action="store_true", help="print only what is wrong")
    brief = parser.parse_args().brief
    checks = [ask("system", check_system, sys.platform)]
    if not checks[0].stops:  # the other checks need Linux or macOS
        checks += check_all()
    for check in checks:
        if brief and not check.advice:
            continue
        print("{}  {:<12} {}".format("!!" if check.advice else "ok", check.name, check.found))
    for advice in dict.fromkeys(check.advice for check in checks if check.advice):
        print("->  " + advice)
    broken = [check.name for check in checks if check.stops]
    print("not ready: " + ", ".join(broken) if broken else "ready")
    sys.exit(1 if broken else 0)


def check_all():
    builds, others = (read_pins(ROOT / f"requirements{part}.txt") for part in ("", "-common"))
    torch, torch_error = try_import("torch")
    # Some builds write "_" instead of "-" in a package's name: pip treats both as one name.
    named = (d for d in metadata.distributions() if d.metadata and d.metadata["Name"])
    installed = {d.metadata["Name"].replace("_", "-"): d.version for d in named}
    versions = installed.get("torch"), installed.get("torchvision")
    transformers_error = try_import("transformers")[1]
    return [
        ask("Python", check_python, sys.version_info[:3]),
        ask("torch", check_torch, versions[0], builds["torch"], torch_error),
        ask("torchvision", check_torchvision, versions[1], builds["torchvision"], torch, call_nms),
        ask("packages", check_packages, installed, others, transformers_error),
        ask("GPUs", check_gpus, torch, shutil.which("nvidia-smi") is not None),
        ask("backends", check_backends, torch),
        ask("torchrun", check_torchrun, os.environ.get("PET_LOCAL_ADDR")),
        ask("host name", check_host_name, os.environ.get("GLOO_SOCKET_IFNAME")),
        ask("loopback", check_loopback),
        ask("Gloo", check_gloo, torch, two_gloo_ranks),
        ask("machine", lambda: check_machine(*this_machine())),
    ]


def ask(name, check, *args):
    """The check's result. If the check itself raises, its error is the result."""
    try:
        return check(*args)
    except Exception as error:
        advice = f"'{name}' could not be checked here: look at the error in its line"
        return Check(name, f"not checked: {first_line(error)}", advice)


def check_system(platform):
    advice = "the examples run on Linux (macOS: not tested); on Windows, run all of this inside WSL"
    supported = platform in ("linux", "darwin")
    return Check("system", platform, "" if supported else advice, stops=not supported)


def check_python(version):
    found = "{} in {}".format(".".join(map(str, version)), sys.prefix)
    old = version < (3, 11)
    advice = "install Python 3.11 or newer and name it: make demo PYTHON=python3.12" if old else ""
    return Check("Python", found, advice, stops=old)


def check_torch(version, pin, error):
    if version is None or error:
        found = f"{version}, import fails: {error}" if version else "not installed"
        return Check("torch", found, INSTALL, stops=True)
    found = f"{version} (pinned: {pin})"
    if tuple(map(int, version.split(".")[:2])) < (2, 11):
        return Check("torch", found, "the examples need 2.11 or newer: " + INSTALL, stops=True)
    same = version.partition("+")[0] == pin  # "+" precedes the kind of build
    return Check("torch", found, "" if same else "the course needs the pinned one: " + INSTALL)


def check_torchvision(version, pin, torch, use):
    """use: calls compiled code of torchvision; raises if torchvision does not fit torch."""
    if version is None or torch is None:
        found = f"{version}, not tried without torch" if version else "not installed"
        return Check("torchvision", found, INSTALL, stops=True)
    found = f"{version} (pinned: {pin})"
    try:
        use(torch)
    except Exception as error:  # a mismatch shows as any of OSError, RuntimeError, ImportError
        found = f"{found} does not fit torch {torch.__version__}: {first_line(error)}"
        return Check("torchvision", found, "install both from one file: " + INSTALL, stops=True)
    return Check("torchvision", f"{found}, fits torch")


def check_packages(installed, pins, error):
    """error: why transformers cannot be imported, or None."""
    missing = [name for name in pins if name not in installed]
    others = [f"{n} {installed[n]}" for n in pins if installed.get(n, pins[n]) != pins[n]]
    found = f"{len(pins) - len(missing)} of {len(pins)} installed"
    found += "; missing: " + ", ".join(missing) if missing else ""
    found += "; not as pinned: " + ", ".join(others) if others else ""
    error = None if "transformers" in missing else error
    found += f"; import transformers fails: {error}" if error else ""
    advice = INSTALL if missing or others or error else ""
    return Check("packages", found, advice, stops=not ESSENTIAL.isdisjoint(missing))


def check_gpus(torch, has_driver):
    gpus = range(torch.cuda.device_count() if torch else 0)
    names = [torch.cuda.get_device_name(i) for i in gpus]
    found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    hidden = torch and has_driver and not names
    advice = "torch cannot use the GPU: old driver (nvidia-smi), or a CPU build" if hidden else ""
    return Check("GPUs", found or "none: the examples run on the CPU", advice)


def check_backends(torch):
    there = [b for b in ("gloo", "nccl") if torch and torch.distributed.is_backend_available(b)]
    advice = "" if "gloo" in there else INSTALL
    return Check("backends", ", ".join(there) or "none", advice, stops="gloo" not in there)


def check_torchrun(local_addr):
    """torchrun --standalone connects to itself by two names, and waits for minutes if that fails.

    local_addr: torchrun's --local-addr; by default the second name is socket.getfqdn().
    """
    name = local_addr or socket.getfqdn()
    try:
        connect("localhost")
    except (OSError, UnicodeError) as error:
        advice = "add this line to /etc/hosts: 127.0.0.1 localhost"
        return Check("torchrun", f"cannot reach localhost ({error})", advice, stops=True)
    try:
        connect(name)
    except (OSError, UnicodeError) as error:
        advice = "for jobs on this machine alone: export PET_LOCAL_ADDR=127.0.0.1"
        advice += f" (or add this line to /etc/hosts: 127.0.0.1 {name})"
        return Check("torchrun", f"cannot reach itself as {name} ({error})", advice, stops=True)
    return Check("torchrun", f"reaches itself as localhost and as {name}")


def connect(host):
    """Connect to a server of this process that listens on all addresses, as torchrun's does."""
    both = socket.has_dualstack_ipv6()  # IPv4 and IPv6
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        socket.create_connection((host, server.getsockname()[1]), timeout=5).close()


def check_host_name(interfaces):
    """Gloo listens on an address of the host name, unless GLOO_SOCKET_IFNAME names interfaces."""
    here = [name for _, name in socket.if_nameindex()]
    if interfaces:
        unknown = sorted(set(interfaces.split(",")) - set(here))
        found = f"GLOO_SOCKET_IFNAME={interfaces}"
        if unknown:
            found += f", but this machine has no {', '.join(unknown)}, only {', '.join(here)}"
            return Check("host name", found, "unset GLOO_SOCKET_IFNAME", stops=True)
        return Check("host name", f"not used by Gloo: {found}")
    name = socket.gethostname()
    try:
        return Check("host name", f"{name} is {own_address(name)}")
    except (OSError, UnicodeError) as error:
        advice = f"Gloo warns and takes the loopback; on this machine alone: {take_loopback()}"
        return Check("host name", f"{name} has no address of this machine ({error})", advice)


def own_address(name):
    """The first address of the name that this machine can listen on, as Gloo looks for one."""
    reason = None
    for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind) as server:
                server.bind(address)
            return address[0]
        except OSError as error:
            reason = error
    raise reason


def take_loopback():
    """The command that makes Gloo use this machine's loopback, which is lo0 on macOS."""
    here = [name for _, name in socket.if_nameindex()]
    return f"export GLOO_SOCKET_IFNAME={'lo0' if 'lo0' in here else 'lo'}"


def check_loopback():
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        advice = "let processes connect to 127.0.0.1: look at the firewall, a VPN, a sandbox"
        return Check("loopback", first_line(error), advice, stops=True)
    return Check("loopback", "works")


def check_gloo(torch, add):
    """add: makes two ranks add numbers over Gloo; raises if they cannot."""
    if torch is None:
        return Check("Gloo", "not tried without torch", INSTALL, stops=True)
    try:
        add(torch)
    except Exception as error:
        advice = f"for jobs on this machine alone: {take_loopback()}"
        return Check("Gloo", first_line(error), advice, stops=True)
    return Check("Gloo", "two ranks have added numbers")


def check_machine(cores, memory, disk, shared_memory):
    """memory, disk, shared_memory: GiB."""
    found = f"{cores} core(s), {memory:.0f} GiB memory, {disk:.0f} GiB disk free"
    limits = (
        (cores < 2, "one core: two ranks take turns, expect half the speed"),
        (memory < 3, "little memory: a rank takes half a GiB, so run two at most"),
        (shared_memory < 0.1, "little shared memory: start Docker with --shm-size=1g"),
    )
    return Check("machine", found, "; ".join(advice for low, advice in limits if low))


def this_machine():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    shared = shutil.disk_usage("/dev/shm").total / 2**30 if os.path.isdir("/dev/shm") else memory
    return cores, memory, shutil.disk_usage(ROOT).free / 2**30, shared


def call_nms(torch):
    from torchvision.ops import nms

    nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5)


def two_gloo_ranks(torch):
    """Connect two ranks, here two threads, as torchrun does; Gloo chooses their addresses."""
    dist, timeout = torch.distributed, timedelta(seconds=10)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)

    def work(rank):
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)
        group = dist.ProcessGroupGloo(store, rank, 2, timeout)
        total = torch.tensor([rank + 1.0])
        group.allreduce([total]).wait()
        return total.item()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [3.0, 3.0]  # or raises what a rank raised


def read_pins(path):
    return dict(re.findall(r"^([\w-]+)={2,3}([^\s#]+)", path.read_text(), flags=re.MULTILINE))


def try_import(name):
    """Return (module, None), or (None, the reason in one line)."""
    try:
        return __import__(name), None
    except Exception as error:  # broken builds raise errors of many kinds
        return None, first_line(error)


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:150]


if __name__ == "__main__":
    main()
