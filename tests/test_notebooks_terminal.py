"""notebooks/terminal.py: runs commands where it can, shows a record where not, and hides no error;
every record belongs to a cell, and the pages are saved as run."""

import re
import sys

import nbformat
import psutil
import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

import terminal

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CALL = re.compile(r'(?:hosts|slurm|gpu)\(\s*"(\w+)"')
LAB_SAYS = "lab.py: error: a lab needs ip and tc: apt install iproute2"
NO_LAB = f"echo '{LAB_SAYS}'; exit 2"


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(terminal, "RECORDED", tmp_path)
    (tmp_path / "one.txt").write_text("2026-11-23, 2 processors, torch 2.15.0\nhost0\n")
    (tmp_path / "two.txt").write_text("2026-11-23, 2 processors, torch 2.15.0\nhost1\n")
    return tmp_path


def test_commands_run_in_the_root_and_stop_at_the_first_that_fails(records, capsys):
    hosts = terminal.Terminal()
    said = hosts("one", "ls clusters/lab.py; echo $RUNS; echo oops >&2; echo $LAB")
    assert said == f"clusters/lab.py\n$RUNS\noops\n{hosts.lab}\n"  # without paths of this machine
    assert capsys.readouterr().out == f"Run here:\n{said}"
    assert terminal.Terminal().lab != hosts.lab
    with pytest.raises(RuntimeError, match=r"exit status 1\nbefore\n$"):
        hosts("one", "echo before; false; echo after")
    with pytest.raises(RuntimeError, match="exit status 3"):
        hosts("one", "exit 3 | cat")
    assert (records / "one.txt").read_text().endswith("host0\n")  # not written over


def test_what_cannot_run_is_shown_as_recorded(records, capsys):
    hosts = terminal.Terminal()
    assert hosts("one", NO_LAB) == "host0\n"
    why = "Not run here: a lab needs ip and tc: apt install iproute2. "
    when = "Recorded (2026-11-23, 2 processors, torch 2.15.0):\n"
    assert capsys.readouterr().out == f"{why}{when}host0\n"
    assert hosts("two", "touch $RUNS/made; echo live") == "host1\n"  # nor anything later
    assert not (terminal.RUNS / "made").exists()
    assert terminal.Terminal()("two", "echo live") == "live\n"  # another terminal can


@pytest.mark.parametrize(
    ("says", "missing"),
    [
        ("lab.py: error: no hosts could be made here: unshare: Operation not permitted", True),
        ("test_cluster.sh: error: there is no slurmctld here: apt install slurm-wlm munge", True),
        ("test_cluster.sh: error: the daemons of Slurm need root", True),
        ("streams.py: error: streams need a GPU. Without one: make .venv-emulated", True),
        ("streams.py: error: --size: must be an integer of at least 16, not 1", False),
        ("lab.py: error: there is no host 9: they are 0 to 2", False),
        ("lab.py: error: there is no lab named lab; `lab.py up 3` makes one", False),
        ("test_cluster.sh: error: slurmctld does not start: a reason", False),
    ],
)
def test_only_what_is_missing_is_excused(records, says, missing):
    def run():
        return terminal.Terminal()("one", f'echo "{says.replace("`", "")}"; exit 2')

    if missing:
        assert run() == "host0\n"
    else:
        with pytest.raises(RuntimeError, match="exit status 2"):
            run()


def test_record(records, monkeypatch):
    monkeypatch.setenv("RECORD", "yes")
    terminal.Terminal()("three", "echo new")
    when, said = (records / "three.txt").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d, \d+ processors, torch \S+", when)
    assert said == "new"


@pytest.mark.slow
def test_in_the_background():
    job = terminal.start("setsid sleep 1000 & echo $NAME $!; wait", NAME="here")
    job.wait_until(lambda: job.output.endswith("\n"))
    name, other = job.output.split()
    assert (name, job.running, psutil.pid_exists(int(other))) == ("here", True, True)
    job.kill()
    assert (job.wait(), psutil.pid_exists(int(other))) == (-9, False)
    with pytest.raises(RuntimeError, match="it never happened:\nbye"):
        terminal.start("echo bye").wait_until(lambda: False)
    job = terminal.start("echo begun; sleep 1000")
    job.wait_until(lambda: "begun" in job.output)
    with pytest.raises(TimeoutError, match=r"no end within 0.2 s\nbegun"):
        job.wait(1 / 5)
    assert terminal.start("exit 7").wait() == 7


def cells(path) -> list:
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_record_is_of_a_cell_and_names_no_machine():
    names = [
        name for path in NOTEBOOKS for cell in cells(path) for name in CALL.findall(cell.source)
    ]
    assert len(set(names)) == len(names) > 0, "two cells with one record"
    assert sorted(names) == sorted(file.stem for file in terminal.RECORDED.iterdir())
    for file in terminal.RECORDED.iterdir():
        text = file.read_text()
        assert re.match(r"\d{4}-\d\d-\d\d, \d+ processors, torch \S+\n", text), file
        assert not re.search(r"/tmp/|/home/|/root/", text), file
        assert str(ROOT) not in text, file
        assert max(map(len, text.splitlines())) <= 100, file


def test_the_pages_are_saved_as_run():
    """And what they show is what is recorded, but for times."""
    for path in NOTEBOOKS:
        for cell in cells(path):
            if CALL.search(cell.source):
                assert cell.outputs[0].text.startswith("Run here:\n"), cell.source
                assert "nbval-ignore-output" in cell.metadata.tags
