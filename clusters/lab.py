"""Make several hosts on one machine, to try a job on several hosts and to cut their cables.

    python clusters/lab.py up 3 --rate 1gbit        # host0, host1, host2, joined by a switch
    python clusters/lab.py exec 0 -- ping -c 1 host2
    python clusters/lab.py slow 2 50mbit            # host2's cable
    python clusters/lab.py cut 1                    # pull host1's cable; "heal 1" puts it back
    python clusters/lab.py show
    python clusters/lab.py down

A host is a Linux network namespace with its own name, interface eth0, address (host0 has 10.77.0.1
and fd77::1) and loopback. Its files, cores and memory are this machine's. This machine's own
network is not touched.

A lab leaves no files behind: it is a process, the keeper, which holds the namespaces. However the
keeper ends, the kernel then ends everything that runs on the hosts, and removes the network.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
OWN_USER = ["--user", "--map-root-user"] if os.geteuid() else []
# The keeper is process 1 of a process namespace: when it ends, the kernel ends the other processes.
KEEPER = [*OWN_USER, "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
PARENT = len(KEEPER) + 2  # where this file stands in the line that starts the keeper
HOST = ["--net", "--uts", "--mount"]
SLOW = "tc qdisc replace dev {} root tbf rate {} burst 64kb latency 400ms"


class LabError(Exception):
    """What is wrong, in one sentence."""


def main() -> None:
    args = parse_args()
    try:
        if args.command not in ("keep", "host"):
            check_tools()
        args.run(args)
    except LabError as error:
        print(f"lab.py: error: {error}", file=sys.stderr)
        sys.exit(2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--name",
        default=os.environ.get("LAB", "lab"),
        type=word,
        help="name of the lab; or set $LAB",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, *arguments in (
        ("up", up, "count", "rate"),
        ("exec", execute, "host", "program"),
        ("cut", cut, "host"),
        ("heal", heal, "host"),
        ("slow", slow, "host", "new_rate"),
        ("show", show),
        ("down", down),
        ("keep", keep, "count", "rate"),
        ("host", be_host, "host", "count"),
    ):
        command = commands.add_parser(name, help=run.__doc__.splitlines()[0])
        command.set_defaults(run=run)
        if "host" in arguments:
            command.add_argument("host", type=int, metavar="HOST", help="number of the host")
        if "count" in arguments:
            command.add_argument("count", type=int, choices=range(1, 65), metavar="HOSTS")
        if "rate" in arguments:
            command.add_argument("--rate", type=rate, help="rate of each cable, such as 50mbit")
        if "new_rate" in arguments:
            command.add_argument("rate", type=rate)
        if "program" in arguments:
            command.add_argument("program", nargs="+", metavar="-- COMMAND")
    return parser.parse_args()


def word(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be letters, digits, '_', '.' or '-'")
    return text


def rate(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[kmg]bit", text.lower()):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate such as 100mbit or 1gbit")
    return text.lower()


def check_tools() -> None:
    missing = {tool: package for tool, package in TOOLS.items() if not shutil.which(tool)}
    if sys.platform != "linux" or missing:
        what = " and ".join(missing) or "Linux"
        how = f": apt install {' '.join(sorted(set(missing.values())))}" if missing else ""
        raise LabError(f"a lab needs {what}{how}")


# ---- the commands


def up(args) -> None:
    """Make a lab whose cables have this --rate, and return; the keeper stays."""
    if find(args.name, "keep"):
        raise LabError(f"{args.name} is up already; `lab.py down` ends it")
    more = ["--rate", args.rate] if args.rate else []
    keeper = subprocess.Popen(
        ["unshare", *KEEPER, *this("keep", args.name, args.count, *more)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C in this terminal is not for the lab
    )
    said = keeper.stdout.readline()
    if said != "ready\n":
        said += keeper.stdout.read()
        keeper.wait()
        raise LabError(f"no hosts could be made here: {' '.join(said.split())}")
    show(args)


def execute(args) -> None:
    """Run a command on a host, in this directory; its exit status is the command's."""
    there = inside(host_process(args))
    # In the host's mount namespace the directory must be looked up again.
    command = [*there, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *args.program]
    os.execvp(command[0], command)


def cut(args) -> None:
    """Pull a host's cable."""
    host_process(args)
    at_switch(args, f"ip link set v{args.host} down")


def heal(args) -> None:
    """Put a host's cable back."""
    host_process(args)
    at_switch(args, f"ip link set v{args.host} up")


def slow(args) -> None:
    """Change the rate of a host's cable, in both directions."""
    shell(SLOW.format("eth0", args.rate), inside(host_process(args)))
    at_switch(args, SLOW.format(f"v{args.host}", args.rate))


def show(args) -> None:
    """List the hosts and the state of their cables."""
    links = at_switch(args, "ip -brief link")
    queues = at_switch(args, "tc qdisc show")
    for number in sorted(find(args.name, "host")):
        cable = re.search(rf"^v{number}@\S+ +(\S+)", links, re.MULTILINE)[1]
        limit = re.search(rf"dev v{number} root .*?rate (\S+)", queues)
        state = "cut" if cable == "DOWN" else limit[1].lower() if limit else "no limit"
        print(f"host{number}   {address(number)}   {state}")


def down(args) -> None:
    """End the lab and all that runs on its hosts."""
    keeper = keeper_process(args.name)
    os.kill(keeper, signal.SIGKILL)  # process 1 of a namespace does not listen to anything else
    until = time.monotonic() + 20
    while any(find(args.name, *what) for what in (("host",), ("keep",), ("keep", PARENT))):
        if time.monotonic() > until:
            raise LabError("the hosts do not end; what runs on them may hang in the kernel")
        time.sleep(0.01)


# ---- the keeper, in namespaces of its own, and its hosts


def keep(args) -> None:
    """(Started by "up".) Make a switch and the hosts, and keep them alive."""
    shell("ip link add switch type bridge")
    shell("ip link set switch up")
    for number in range(args.count):
        host = subprocess.Popen(
            ["unshare", *HOST, *this("host", args.name, number, args.count)],
            stdout=subprocess.PIPE,
            text=True,
        )
        host.stdout.readline()  # now it is in its own namespaces
        there, cable = inside(host.pid), f"v{number}"
        shell(f"ip link add {cable} type veth peer name eth0 netns {host.pid}")
        shell(f"ip link set {cable} master switch up")
        shell("ip link set lo up", there)
        shell(f"ip addr add {address(number)}/24 dev eth0", there)
        shell(f"ip addr add fd77::{number + 1:x}/64 dev eth0 nodad", there)
        shell("ip link set eth0 up", there)
        if args.rate:
            shell(SLOW.format("eth0", args.rate), there)
            shell(SLOW.format(cable, args.rate))
    print("ready", flush=True)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    while True:
        os.wait()  # an orphan on a host becomes a child of process 1


def be_host(args) -> None:
    """(Started by the keeper.) Hold the namespaces of one host."""
    shell(f"hostname host{args.host}")
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for number in range(args.count):
        lines += [f"{address(number)} host{number}", f"fd77::{number + 1:x} host{number}"]
    # This host's own /etc/hosts, in memory; it covers /mnt for a moment, on this host only.
    shell("mount -t tmpfs tmpfs /mnt")
    Path("/mnt/hosts").write_text("\n".join(lines) + "\n")
    shell("mount --bind /mnt/hosts /etc/hosts")
    # No name server is reachable from here: a query would take seconds to fail.
    Path("/mnt/resolv.conf").touch()
    if Path("/etc/resolv.conf").exists():
        shell("mount --bind /mnt/resolv.conf /etc/resolv.conf")
    shell("umount /mnt")
    print("here", flush=True)
    while True:
        signal.pause()


# ---- finding and entering


def this(command: str, name: str, *arguments) -> list[str]:
    return [sys.executable, __file__, "--name", name, command, *map(str, arguments)]


def find(name: str, command: str, first: int = 1) -> dict[int, int]:
    """Processes of this lab's keeper or hosts, by the number behind the command.

    first: the position of this file in the command line; 1 in `python lab.py ...`.
    """
    found = {}
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_text(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if words[first : first + 4] == [__file__, "--name", name, command]:
            found[int(words[first + 4])] = int(place.parent.name)
    return found


def keeper_process(name: str) -> int:
    found = find(name, "keep")
    if not found:
        raise LabError(f"there is no lab named {name}; `lab.py up 3` makes one")
    return next(iter(found.values()))


def host_process(args) -> int:
    keeper_process(args.name)
    hosts = find(args.name, "host")
    if args.host not in hosts:
        raise LabError(f"there is no host {args.host}: they are 0 to {max(hosts)}")
    return hosts[args.host]


def inside(process: int) -> list[str]:
    """The words that run a command in the namespaces of that process."""
    own_user = ["--user", "--preserve-credentials"] if OWN_USER else []
    return ["nsenter", f"--target={process}", *own_user, "--net", "--uts", "--mount", "--pid", "--"]


def at_switch(args, command: str) -> str:
    return shell(command, inside(keeper_process(args.name)))


def shell(line: str, there: Sequence[str] = ()) -> str:
    """What a command prints, run here or `there`."""
    done = subprocess.run([*there, *line.split()], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise LabError(f"{line}: {done.stderr.strip()}")
    return done.stdout


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


if __name__ == "__main__":
    main()
