"""custom_backend/shm: let each allocation, mapping, futex and copy fail once, on each rank."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT

SHM = ROOT / "custom_backend" / "shm"
PROGRAM = ROOT / "tests" / "workers" / "shm_failures.cpp"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-pthread", "-DSHM_FAILURES"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory) -> Path:
    """reduce.cpp, compiled once for all programs."""
    if shutil.which(COMPILER) is None:
        pytest.skip("needs a C++ compiler")
    output = tmp_path_factory.mktemp("arithmetic") / "reduce.o"
    compile_with([SHM / "reduce.cpp", "-c"], output)
    return output


def compile_with(arguments: list, output: Path) -> Path:
    command = [COMPILER, *FLAGS, *arguments, "-o", output]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return output


def run(program: Path, ranks: int) -> subprocess.CompletedProcess:
    return subprocess.run([program, str(ranks)], capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def program(arithmetic, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("failures") / "failures"
    return compile_with(["-I", SHM, PROGRAM, arithmetic], output)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_failure_is_an_error_on_all_ranks(program, ranks):
    result = run(program, ranks)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    counts = {site: int(n) for site, n in re.findall(r"(\w+) (\d+)", result.stdout)}
    assert set(counts) == {"allocate", "map", "sleep", "wake", "copy"}
    assert all(counts.values()), counts


PLANTED = {
    "an exception that other ranks do not hear of": (
        "waiting.h",
        "fail_in(kind, error.what());",
        "throw;",
    ),
    "a sleep that fails without a word": (
        "waiting.h",
        'throw std::system_error(errno, std::generic_category(), "the kernel',
        'if (!failed) throw std::system_error(errno, std::generic_category(), "the kernel',
    ),
    "a send whose failure stays in its list": (
        "point_to_point.h",
        "peers_.run(kind, action);",
        "action();",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(arithmetic, tmp_path, mistake):
    file, right, wrong = PLANTED[mistake]
    headers = shutil.copytree(SHM, tmp_path / "shm")
    source = (headers / file).read_text()
    assert source.count(right) == 1
    (headers / file).write_text(source.replace(right, wrong))
    program = compile_with(["-I", headers, PROGRAM, arithmetic], tmp_path / "failures")
    result = run(program, 2)
    assert result.returncode == 1
    print(result.stderr)
    assert (" WRONG " in result.stderr) == ("do not hear" in mistake)
