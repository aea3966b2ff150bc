"""Start one training job on several hosts: a torchrun agent on each, over ssh or in the lab.

    python clusters/torchrun/launch.py hosts.txt ddp_basics/train.py --epochs 5     # over ssh
    python clusters/torchrun/launch.py --env NCCL_DEBUG=INFO hosts.txt ddp_basics/train.py
    python clusters/lab.py up 3 --rate 1gbit                                        # or, in the lab
    python clusters/torchrun/launch.py --lab 3 ddp_basics/train.py --epochs 2 --batch-size 96

hosts.txt has one name per line, as in `ssh NAME`; a comment begins with '#'. If the hosts cannot
resolve each other's names, write after each name an address that the other hosts can reach:

    gpu-a 10.0.0.1
    gpu-b 10.0.0.2

The agents meet on the first host. The script, this directory and Python must have the same path on
all hosts. Each line of output begins with its host. When an agent fails, or you press Ctrl-C, this
program ends all agents, and exits with the status of the agent that failed first.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

LAB = Path(__file__).resolve().parent.parent / "lab.py"
# A host that has lost power sends nothing: ssh probes it three times in 15 s.
SSH = ["ssh", "-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
SSH += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
JOB = uuid.uuid4().hex[:8]
# A port for each job: jobs with one port meet in one store, which ends with the first of them.
PORT = 20000 + int(JOB, 16) % 10000
TAKEN = 98  # the exit status of the next command, if a process listens on the port
IS_FREE = f"""import socket, sys
both = dict(family=socket.AF_INET6, dualstack_ipv6=True) if socket.has_dualstack_ipv6() else dict()
try:
    socket.create_server(("", int(sys.argv[1])), **both)
except OSError:
    sys.exit({TAKEN})"""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # the seconds that an agent gives its ranks to save


def main() -> None:
    args = parse_args()
    hosts = {f"host{i}": None for i in range(args.lab or 0)} or read_hosts(args)  # name: address
    ask(hosts, args)
    agents = {host: start(host, torchrun_on(host, hosts, args), args.lab) for host in hosts}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: ended.put((None, 128 + number)))
    ended = SimpleQueue()
    for host, agent in agents.items():
        in_background(lambda host=host, agent=agent: ended.put((host, agent.wait())))
    printers = [in_background(partial(show, *item)) for item in agents.items()]
    status = first_failure(len(hosts), ended)
    if status:
        end(agents.values(), printers, int(args.env[SHUTDOWN]) + 10)
    for printer in printers:
        printer.join(5)
    sys.exit(status)


def torchrun_on(host: str, hosts: dict[str, str | None], args) -> list[str]:
    """The command of torchrun for one host."""
    names = list(hosts)
    first = hosts[names[0]] or names[0].rpartition("@")[2]  # without the user's name
    torchrun = ["-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
    torchrun += [f"--nproc-per-node={args.nproc_per_node or (1 if args.lab else 'gpu')}"]
    if hosts[host]:  # else the agent publishes the host's own name
        torchrun += [f"--local-addr={hosts[host]}"]
    if args.static:
        torchrun += [
            f"--node-rank={names.index(host)}",
            f"--master-addr={first}",
            f"--master-port={args.port}",
        ]
    else:
        endpoint = f"[{first}]" if ":" in first else first  # an address of IPv6
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}:{args.port}"]
        torchrun += [f"--rdzv-id={JOB}"]
        if hosts[host]:  # else the agent checks whether its own name has the endpoint's address
            torchrun += [f"--rdzv-conf=is_host={int(host == names[0])}"]
    environment = [f"{name}={value}" for name, value in args.env.items()]
    if args.interface:
        kinds = ("GLOO", "NCCL")
        environment += [f"{kind}_SOCKET_IFNAME={args.interface}" for kind in kinds]
    return ["env", *environment, sys.executable, "-u", *torchrun, args.script, *args.arguments]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        usage="launch.py [OPTIONS] (HOSTS | --lab N) SCRIPT ...",
    )
    parser.add_argument(
        "--nproc-per-node",
        help="number of ranks on each host (default: gpu, one per GPU; in the lab: 1)",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        type=variable,
        metavar="NAME[=VALUE]",
        help="set a variable on all hosts, to VALUE or to this shell's value; may be repeated",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        help="port on which the agents meet on the first host (default: random, 20000 to 29999)",
    )
    parser.add_argument(
        "--interface",
        help="network interface for Gloo and NCCL, such as eth0 (default: chosen by Gloo and NCCL)",
    )
    parser.add_argument(
        "--static",
        action="store_true",
        help="number the ranks in the order of the hosts; a lost host cannot rejoin",
    )
    parser.add_argument(
        "--lab", type=int, metavar="N", help="use the first N lab hosts instead of HOSTS"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.env = {SHUTDOWN: os.environ.get(SHUTDOWN, "100")} | dict(args.env)
    if not args.env[SHUTDOWN].isdigit():
        parser.error(f"{SHUTDOWN} takes seconds, not {args.env[SHUTDOWN]!r}")
    args.hosts = None if args.lab else next(iter(args.words), None)
    args.script, *args.arguments = args.words[0 if args.lab else 1 :] or [None]
    if args.script is None:
        parser.error("pass a file of hosts (or --lab N), then a script")
    if not Path(args.script).is_file():
        parser.error(f"there is no script {args.script}")
    return args


def variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} is not set in this shell, and has no value here")
    return name, value if equals else os.environ[name]


def read_hosts(args) -> dict[str, str | None]:
    """The hosts in order: name for ssh -> address for the other hosts, or None."""
    try:
        lines = Path(args.hosts).read_text().splitlines()
    except OSError as error:
        fail(f"{args.hosts}: {error.strerror}")
    rows = [words for line in lines if (words := line.partition("#")[0].split())]
    names = [row[0] for row in rows]
    if not names:
        fail(f"{args.hosts} names no host")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        fail(f"{args.hosts} names {' and '.join(twice)} more than once")
    if {len(row) for row in rows} not in ({1}, {2}):
        fail(f"{args.hosts}: each line has a name, or each line has a name and an address")
    return {row[0]: row[1] if row[1:] else None for row in rows}


def fail(sentence: str):
    print(f"launch.py: error: {sentence}", file=sys.stderr)
    sys.exit(2)


def ask(hosts: Iterable[str], args) -> None:
    """End the program, before any agent starts, if a host cannot be reached or lacks the port."""
    first, *_ = hosts
    calls = {} if args.lab else {host: [*SSH, host, "true"] for host in hosts}
    calls["port"] = on(first, [sys.executable, "-c", IS_FREE, str(args.port)], args.lab)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    for asked, call in calls.items():
        command = [word for word in call if word != "-tt"]
        calls[asked] = subprocess.Popen(command, **pipes, text=True)
    for asked, call in calls.items():
        said = call.communicate()[1].strip().splitlines()
        if call.returncode and asked != "port":
            fail(f"{asked} cannot be reached: {said[-1] if said else 'ssh does not say why'}")
        if call.returncode == TAKEN:
            fail(f"port {args.port} is taken on {first}: pass another port with --port")


def on(host: str, command: list[str], in_lab: bool) -> list[str]:
    """The command that runs a command on a host, in this directory."""
    if in_lab:
        return [sys.executable, str(LAB), "exec", host.removeprefix("host"), "--", *command]
    return [*SSH, host, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"]


def start(host: str, command: list[str], in_lab: bool) -> subprocess.Popen:
    return subprocess.Popen(
        on(host, command, in_lab),
        stdin=subprocess.DEVNULL if in_lab else subprocess.PIPE,  # for Ctrl-C: see end()
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches us alone: we end the agents
    )


def in_background(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def show(host: str, agent: subprocess.Popen) -> None:
    """Print a host's output, until all processes that could write to it have ended."""
    for line in agent.stdout:
        with contextlib.suppress(OSError):  # our terminal is closed, and the ranks still save
            sys.stdout.write(f"{host}: {line.rstrip()}\n")  # in one write: other hosts print, too
            sys.stdout.flush()
            if line.startswith("ValueError: Cuda is not available"):
                advice = "pass the number of ranks, --nproc-per-node N"
                says = f"{host} has no GPU that PyTorch can use: {advice}"
                print(f"launch.py: error: {says}", file=sys.stderr)


def first_failure(count: int, ended: SimpleQueue) -> int:
    """The exit status for this program: 0 once all agents have ended with 0."""
    for _ in range(count):
        host, status = ended.get()
        if status:
            if host:
                print(f"launch.py: {host} has ended with status {status}", file=sys.stderr)
            return status if status > 0 else 128 - status  # as a shell has it
    return 0


def end(agents, printers: list[threading.Thread], grace: int) -> None:
    """Ask all agents to end, which first end their ranks; after `grace` seconds, kill the agents.

    Ranks whose agent was killed are orphans. They end when they lose the other ranks.
    """
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10)):
        for agent, printer in zip(agents, printers, strict=True):
            if printer.is_alive():
                with contextlib.suppress(ProcessLookupError, BrokenPipeError):
                    if agent.stdin and number == signal.SIGTERM:
                        # Ctrl-C on the other host's terminal. A signal would end only our ssh, and
                        # with it that terminal: the ranks could not print any more, nor save.
                        agent.stdin.write("\x03")
                        agent.stdin.flush()
                    else:
                        os.killpg(agent.pid, number)
        until = time.monotonic() + seconds
        for printer in printers:
            printer.join(max(0, until - time.monotonic()))


if __name__ == "__main__":
    main()
