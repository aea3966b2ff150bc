"""Read the file of hosts, start an agent on each, send it requests over ssh, srun or lab pipes.

Used by clusters/preflight.py. The requests do not use the network under test.
"""

import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
AGENT = [sys.executable, "-u", str(HERE / "preflight_agent.py")]
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
# --overlap: the step may share CPUs with another step, and gets all of the job's CPUs and GPUs on
# its host.
SRUN = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--unbuffered"]


def read_hosts(file: str) -> dict[str, str | None]:
    """The hosts in order, as launch.py reads them: name for ssh -> address, or None."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError as error:
        fail(f"the hosts file {file}: {error.strerror}")
    rows = [words for line in lines if (words := line.partition("#")[0].split())]
    hosts = {row[0]: row[1] if row[1:] else None for row in rows}
    if not hosts or len(hosts) < len(rows):
        fail(f"{file} names {'a host more than once' if hosts else 'no host'}")
    if {len(row) for row in rows} not in ({1}, {2}):
        fail(f"{file}: each line has a name, or each line has a name and an address")
    return hosts


def fail(sentence: str):
    print(f"preflight.py: error: {sentence}", file=sys.stderr)
    sys.exit(2)


class Fleet:
    """The agents on all hosts. A host that does not answer is lost, and is not asked again.

    hosts: their names. lost: {number of a host: what is wrong with it, in words}.
    """

    def __init__(
        self, hosts: list[str], transport: str, addresses: Mapping[str, str | None] | None = None
    ):
        """transport: ssh, srun or lab. addresses: where the other hosts reach a host, if that is
        not its name."""
        self.hosts, self.lost = hosts, {}
        known = addresses or {}
        self.addresses = [known.get(host) or host.rpartition("@")[2] for host in hosts]
        self.answers = queue.Queue()
        self.agents = [start(host, transport) for host in hosts]
        self.last_words = [deque(maxlen=1) for _ in hosts]
        self.listeners = [
            threading.Thread(target=self._listen, args=(n,)) for n in range(len(hosts))
        ]
        readers = [threading.Thread(target=self._read, args=(n,)) for n in range(len(hosts))]
        for thread in (*self.listeners, *readers):
            thread.daemon = True
            thread.start()

    @property
    def here(self) -> list[int]:
        return [number for number in range(len(self.hosts)) if number not in self.lost]

    def all(self, do: str, seconds: float = 30, **told) -> dict[int, object]:
        """Send one request to all hosts. Returns the answers of the hosts that answer."""
        return self.ask({number: {"do": do, **told} for number in self.here}, seconds)

    def ask(self, told: dict[int, dict], seconds: float = 30) -> dict[int, object]:
        """Send each host its own request. A host that answers with an error is lost, too."""
        answers = self.try_to(
            {n: request for n, request in told.items() if n in self.here}, seconds
        )
        for number, answer in answers.items():
            if "error" in answer:
                self.lost[number] = answer["error"]
        return {number: answer["is"] for number, answer in answers.items() if "is" in answer}

    def try_to(self, told: dict[int, dict], seconds: float = 30) -> dict[int, dict]:
        """Send requests to some hosts at once: {host: {"is": answer} or {"error": why not}}."""
        for number, request in told.items():
            with contextlib.suppress(OSError):  # it has ended: its last words are read below
                self.agents[number].stdin.write(json.dumps(request) + "\n")
                self.agents[number].stdin.flush()
        answers, until = {}, time.monotonic() + seconds
        while told.keys() - answers.keys():
            try:
                number, answer = self.answers.get(timeout=max(0, until - time.monotonic()))
            except queue.Empty:
                for silent in told.keys() - answers.keys():
                    answers[silent] = self._lose(silent, f"no answer within {seconds:.0f} s")
                break
            if number in self.lost:  # too late
                continue
            answers[number] = answer or self._lose(number, self._why(number))
        return answers

    def _lose(self, number: int, why: str) -> dict:
        self.lost[number] = why
        return {"error": why}

    def _why(self, number: int) -> str:
        """The last words of an agent that has ended."""
        self.listeners[number].join(5)
        return f"it cannot be asked: {(*self.last_words[number], 'it ended')[0]}"

    def _listen(self, number: int) -> None:
        """Keep the last line of stderr: a pipe that no thread reads fills, and blocks the host."""
        for line in self.agents[number].stderr:
            self.last_words[number].extend(filter(None, [line.strip()]))

    def _read(self, number: int) -> None:
        for line in self.agents[number].stdout:
            with contextlib.suppress(json.JSONDecodeError):  # a shell may greet before the agent
                answer = json.loads(line)
                if isinstance(answer, dict):
                    self.answers.put((number, answer))
        self.answers.put((number, None))

    def end(self) -> None:
        for agent in self.agents:
            with contextlib.suppress(OSError):
                agent.stdin.close()
        until = time.monotonic() + 5
        for agent in self.agents:
            try:
                agent.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()


def start(host: str, transport: str) -> subprocess.Popen:
    if transport == "lab":
        number = host.removeprefix("host")
        command = [sys.executable, str(HERE / "lab.py"), "exec", number, "--", *AGENT]
    elif transport == "srun":
        command = [*SRUN, f"--nodelist={host}", *AGENT]
    else:
        command = [*SSH, host, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(AGENT)}"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes)
