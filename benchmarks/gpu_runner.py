"""Run the commands of benchmarks/gpu.py in their own processes until a deadline; format records."""

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import bench
from gpu_guard import kill_all, processes_with

DAY = uuid.uuid4().hex  # begins the mark of each command


class Failed(Exception):
    """A command ended with a status other than 0, without an expected line, or too late."""


class LeftOut(Exception):
    """A step cannot run here; the text says why."""


class Job:
    """Runs the commands of one step until the deadline, and records their rows.

    minutes: until the deadline of all its commands together.
    record: {"status", "runs": {name: see Process.end}, "rows": {name: {column: value}}}.
    save: a function that writes the record; called after every command.
    """

    def __init__(self, args, name: str, minutes: float, record: dict, save: Callable[[], None]):
        self.args, self.record, self.save = args, record, save
        self.is_tiny = args.sizes == "tiny"
        self.folder = args.output_dir / name
        shutil.rmtree(self.folder, ignore_errors=True)  # a train.py would continue the run in it
        self.folder.mkdir(parents=True)
        self.deadline = time.monotonic() + 60 * minutes
        save()

    def run(self, name: str, *command, **how) -> None:
        self.run_all({name: command}, **how)

    def run_all(
        self,
        commands: dict[str, tuple],
        at_once: int = 1,
        expects: str = "",
        seconds: float = math.inf,
        threads: int = 1,
        visible: Sequence[str] = (),
        must: bool = True,
    ) -> None:
        """Run commands to their end or the deadline, then raise `Failed` if one of them failed.

        expects: a pattern; each command must print a line that matches. The record has these lines.
        must: False: a command that prints none has not failed.
        seconds: limit of one command, so that one that hangs does not use up the step's time.
        threads: CPU threads of each process.
        visible: values of CUDA_VISIBLE_DEVICES instead of `at_once`: each running command has one
            value for itself, so that simultaneous jobs share no GPU.
        """
        waiting, running = list(commands.items()), []
        free = list(visible) or [None] * at_once
        try:
            while waiting or running:
                while waiting and free and time.monotonic() < self.deadline:
                    name, command = waiting.pop(0)
                    running.append(Process(name, command, self.folder, threads, free.pop(0)))
                for process in list(running):
                    limit = min(self.deadline, process.started + seconds)
                    if process.has_ended() or time.monotonic() > limit:
                        running.remove(process)
                        free.append(process.visible)
                        self.record["runs"][process.name] = process.end(expects, must)
                        self.note(process.rows())
                if waiting and time.monotonic() > self.deadline:
                    name, _ = waiting.pop(0)
                    late = {"status": "failed", "why": "was not started before the time limit"}
                    self.record["runs"][name] = late
                time.sleep(0.02)
        finally:
            for process in running:  # Ctrl-C, SIGTERM
                process.kill()
                self.note(process.rows())
        runs = {name: self.record["runs"][name] for name in commands}
        failures = [f"{name} {run['why']}" for name, run in runs.items() if "why" in run]
        if failures:
            more = f" and {len(failures) - 3} more" if len(failures) > 3 else ""
            raise Failed("; ".join(failures[:3]) + more)

    def leave_out(self, name: str, why: str) -> None:
        self.record["runs"][name] = {"status": "left out", "lines": why}

    def note(self, rows: dict[str, dict]) -> None:
        """rows: name -> {column: text, number, or a list of samples}."""
        self.record.setdefault("rows", {}).update(rows)
        self.save()


class Process:
    """A running command with all processes that it starts; FOLDER/NAME.log has its output."""

    def __init__(self, name: str, command: tuple, folder: Path, threads: int, visible: str | None):
        self.name, self.visible = name, visible
        self.command = [str(word) for word in command]
        self.log = folder / f"{re.sub('[^a-zA-Z0-9]+', '_', name)}.log"
        # torchrun's ranks lead their own sessions: we find them by a mark in their environment.
        self.mark = f"{DAY}-{uuid.uuid4().hex}"
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        environment |= {"GPU_DAY": self.mark}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end(self, expects: str, must: bool) -> dict:
        """Kill the processes left. Returns the record; it has a "why" if the command failed."""
        status = self.process.poll()
        if status is None:  # Ctrl-C: then pytest prints why tests have failed until now
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        left = self.kill()
        output = self.log.read_text(errors="replace")
        lines = [x.strip() for x in output.splitlines() if expects and re.search(expects, x)]
        record = {"status": "passed", "seconds": round(time.monotonic() - self.started, 1)}
        record |= {"command": shlex.join(self.command), "lines": "; ".join(lines[:20])}
        if status is None:
            record["why"] = "was ended at the time limit"
        elif status:
            record["why"] = f"ended with status {status}"
        elif expects and must and not lines:
            record["why"] = f"printed no line with {expects}"
        if left:
            record["why"] = f"could not be killed: processes {left}"
        if "why" in record:
            record |= {"status": "failed", "output": output[-3000:]}
        return record

    def rows(self) -> dict[str, dict]:
        """The rows that a measurement has printed so far, see bench.say."""
        rows = {}
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith(bench.MARK):
                with contextlib.suppress(ValueError):  # it was cut short
                    rows |= json.loads(line.removeprefix(bench.MARK))
        return rows

    def kill(self) -> list[int]:
        """Kill the command and its processes; returns those that cannot be killed."""

        def find() -> list[int]:
            # A process that has just been started does not show its mark yet.
            return processes_with(self.mark) + [self.process.pid] * (not self.has_ended())

        return kill_all(find)


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Let a second process kill all commands when this process ends, even by SIGKILL."""
    command = [sys.executable, Path(__file__).with_name("gpu_guard.py"), DAY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield


# ---- the report

LINES = 20  # of a failed command's output


def status_of(record: dict) -> str:
    reason = f": {record['reason']}" if "reason" in record else ""
    return f"{record.get('seconds', '-'):>6} s   {record['status']}{reason}"


def section(record: dict) -> str:
    earlier = f", on {record['earlier']}" if "earlier" in record else ""
    texts = [f"## {record['title']}", status_of(record).strip() + earlier]
    rows, runs = record.get("rows"), record["runs"]
    if rows:
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        cells = [
            (n, *(cell(row[c]) if c in row else "" for c in columns)) for n, row in rows.items()
        ]
        texts.append(bench.table([("", *columns), *cells]))
    if runs:
        columns = ("status", "seconds", "lines")
        cells = [(name, *(cell(run.get(c, "")) for c in columns)) for name, run in runs.items()]
        texts.append(bench.table([("command", *columns), *cells]))
    for name, run in runs.items():
        if run.get("output"):
            lines = run["output"].splitlines()[-LINES:]
            texts.append(f"{name} {run['why']}. Its last lines:")
            texts.append("\n".join(["~~~~~~text", *lines, "~~~~~~"]))
    return "\n\n".join(texts)


def cell(value) -> str:
    if isinstance(value, list):
        return bench.summary(value)
    text = bench.number(value) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
