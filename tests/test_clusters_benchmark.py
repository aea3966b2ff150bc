"""benchmarks/clusters.py: the bytes on the link are those of the formulas, and it ends tidily."""

import importlib
import json
import re
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "path", list(sys.path))  # it adds clusters/ to it
    return importlib.import_module


def test_says_why_nothing_is_measured(module, monkeypatch):
    clusters = module("clusters")
    done = subprocess.CompletedProcess([], 2, "", "lab.py: error: a lab needs tc\n")
    monkeypatch.setattr(clusters.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(sys, "argv", ["clusters.py"])
    with pytest.raises(SystemExit, match=r"nothing was measured: lab.*: a lab needs tc"):
        clusters.main()


def test_bad_repeats(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["clusters.py", "--repeats", "0"])
    with pytest.raises(SystemExit) as caught:
        module("clusters").main()
    assert caught.value.code == 2
    assert "--repeats 0 must be 1 or more" in capsys.readouterr().err


@pytest.mark.release
def test_bytes_that_cross_the_slow_link(module, monkeypatch):
    """One repeat of "hsdp" in the lab. Headers of full frames are 66 of 1,514 bytes; then there
    are acknowledgements, and barriers."""
    if reason := module("clusters").why_no_lab():
        pytest.skip(reason)
    links = module("clusters_links")
    found = links.run("hsdp", repeats=1)
    for name, per_parameter in links.CROSSING.items():
        ((_, sent),) = found[name]
        assert 1 < sent / (per_parameter * links.PARAMETERS) < 1.1, name


def test_steps_are_read_as_they_come(module, tmp_path):
    """The last line may be half there; a step that was only tried is none."""
    faults = module("clusters_faults")
    job = object.__new__(faults.Training)
    job.folder, job.read, job.lines = tmp_path, {}, []
    tried = {"step": 0, "ranks": 2, "batch": 1, "time": 1.0}
    lines = [tried, {"step": 0, "ranks": 2, "committed": True, "time": 2.0}]
    lines += [{"step": 1, "ranks": 1, "loss": 0.5, "time": 3.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    log = tmp_path / "a.jsonl"
    log.write_text(text[:-5])
    assert (job.steps(2, 0), job.steps(1, 0)) == ([2.0], [])
    with log.open("a") as file:
        file.write(text[-5:])
    assert (job.steps(2, 0), job.steps(1, 0)) == ([2.0], [3.0])
    assert job.steps(2, 2.5) == []


def test_what_speaks_of_a_fault(module):
    noticed = module("clusters_faults").NOTICED
    for line in (
        "RuntimeError: [...pair.cc:545] Read error [10.77.0.2]:1: Connection reset by peer",
        "got exception waiting for work Timed out waiting 5000ms",
        "failed (exitcode: -9) local_rank: 0 (pid: 1)",
    ):
        assert re.search(noticed, line)
    assert not re.search(noticed, "2 rank(s), from step 20 of 400")
