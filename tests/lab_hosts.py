"""Hosts of clusters/lab.py for tests: made, used, and gone afterwards."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers import ROOT, Job, Result, clean_environment

LAB = ROOT / "clusters/lab.py"


class Lab:
    """A lab of this name, whether it is up or not."""

    def __init__(self, name: str):
        self.name = name

    def run(self, *args, timeout: float = 60) -> Result:
        """`lab.py ARGS` to its end, such as "cut", 1."""
        done = subprocess.run(
            [sys.executable, LAB, "--name", self.name, *map(str, args)],
            cwd=ROOT,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return Result(done.returncode, done.stdout)

    def command(self, host: int, *command) -> list:
        """What runs a command on a host."""
        return [sys.executable, LAB, "--name", self.name, "exec", host, "--", *command]

    def start(self, host: int, *command, **environment: str) -> Job:
        return Job(self.command(host, *command), **environment)

    def on(self, host: int, *command) -> Result:
        """Run a command on a host to its end; it must not fail."""
        return self.run("exec", host, "--", *command).check()


@contextmanager
def up(lab: Lab, hosts: int, *args) -> Iterator[Lab]:
    """Its hosts; skips the test where none can be made, with the sentence that lab.py says."""
    try:
        made = lab.run("up", hosts, *args, timeout=300)
        if made.returncode == 2 and re.search("a lab needs|no hosts could be made", made.output):
            pytest.skip(made.output.strip())
        made.check()
        yield lab
    finally:
        lab.run("down")


def name_of(subject: str) -> str:
    """Of a lab for this process alone."""
    return f"{subject}{os.getpid()}"
