r"""Run two ranks on one machine with a 100 Mbit/s link between their network namespaces.

    unshare --net --pid --fork --kill-child --mount-proc \
        python benchmarks/private_network.py 1500 COMMAND...    # 1500: bytes of the largest frame

COMMAND runs twice, with torchrun's variables for rank 0 and rank 1 of two nodes. Needs Linux with
unshare, ip and tc, and root or user namespaces. This machine's own network is not touched: both
namespaces have no name, and end with their processes.
"""

import os
import shutil
import subprocess
import sys

# This is process 1 of its own namespaces: however it ends, the kernel then ends all its children,
# and a network namespace's devices go with its last process. --kill-child: also when unshare ends.
UNSHARE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
if os.geteuid():
    UNSHARE += ["--user", "--map-root-user"]
SLOWED = "tc qdisc add dev {} root tbf rate 100mbit burst 64kb latency 400ms"
BELOW = f"""
echo here && read frame && ip link set lo up && ip addr add 10.77.0.2/24 dev v1 &&
ip link set v1 mtu $frame up && {SLOWED.format("v1")} && exec "$@"
"""


def why_not() -> str | None:
    """Why this machine cannot make such a link, or None."""
    if missing := [name for name in ("unshare", "ip", "tc") if not shutil.which(name)]:
        return f"needs {' and '.join(missing)}, which this machine lacks"
    make = f"ip link add v0 type veth peer name v1 && {SLOWED.format('v0')}"
    done = subprocess.run([*UNSHARE, "sh", "-c", make], capture_output=True, text=True, timeout=10)
    return f"no slow link could be made ({done.stderr.strip()})" if done.returncode else None


def two_ranks(frame: int, *command) -> list[str]:
    """The command that runs `command` on two ranks, with frames of at most `frame` bytes."""
    return [*UNSHARE, sys.executable, __file__, str(frame), *map(str, command)]


def main() -> None:
    frame, *command = sys.argv[1:]
    shell("ip link set lo up")
    shell("ip link add v0 type veth peer name v1")
    other = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", BELOW, "sh", *command],
        env=environment(1),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    other.stdout.readline()  # now it is in its namespace
    shell(f"ip link set v1 netns {other.pid}")
    shell("ip addr add 10.77.0.1/24 dev v0")
    shell(f"ip link set v0 mtu {frame} up")
    shell(SLOWED.format("v0"))
    other.stdin.write(f"{frame}\n")
    other.stdin.flush()
    done = subprocess.run(command, env=environment(0), timeout=400)
    sys.exit(done.returncode or other.wait(30))


def shell(line: str) -> None:
    subprocess.run(line.split(), check=True, timeout=10)


def environment(rank: int) -> dict[str, str]:
    job = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    job |= {"GROUP_WORLD_SIZE": 2, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29500}
    job |= {"GLOO_SOCKET_IFNAME": f"v{rank}"}
    return os.environ | {name: str(value) for name, value in job.items()}


if __name__ == "__main__":
    main()
