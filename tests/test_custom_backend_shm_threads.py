"""Run the core of custom_backend/shm under ThreadSanitizer, which finds data races."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import REPEAT, ROOT

SHM = ROOT / "custom_backend" / "shm"
PROGRAM = ROOT / "tests" / "workers" / "shm_threads.cpp"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-g", "-fsanitize=thread"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def compile_core(headers: Path, output: Path) -> Path:
    sources = [PROGRAM, headers / "reduce.cpp"]
    command = [COMPILER, *FLAGS, "-I", headers, *sources, "-o", output]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return output


@pytest.fixture(scope="module", autouse=True)
def sanitizer(tmp_path_factory) -> None:
    source = tmp_path_factory.mktemp("sanitizer") / "empty.cpp"
    source.write_text("int main() {}\n")
    command = [COMPILER, *FLAGS, source, "-o", source.with_suffix("")]
    if shutil.which(COMPILER) is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs a C++ compiler with ThreadSanitizer")


def run(program: Path, seed: int, operations: int, ranks: int) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    command = [program, str(seed), str(operations), str(ranks)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.timeout(600 + 300 * REPEAT)
def test_no_race(tmp_path):
    program = compile_core(SHM, tmp_path / "threads")
    for turn in range(REPEAT):
        for ranks in (2, 3):
            result = run(program, 10 * turn + ranks, 300, ranks)
            assert result.returncode == 0, result.stderr[-5000:]
            assert f"300 operations of {ranks} ranks" in result.stdout


PLANTED = {
    "a counter that publishes nothing": (
        "waiting.h",
        "flag.value.store(value, std::memory_order_seq_cst);",
        "flag.value.store(value, std::memory_order_relaxed);",
    ),
    "a slot that is written one step too early": (
        "rounds.h",
        "free_after(k) = posted_ + 1;",
        "free_after(k) = posted_;",
    ),
    "a packet that is put before it is full": (
        "point_to_point.h",
        "channel.put.store(put + 1, std::memory_order_release);",
        "channel.put.store(put + 1, std::memory_order_relaxed);",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
@pytest.mark.release
def test_a_planted_race_is_caught(tmp_path, mistake):
    file, right, wrong = PLANTED[mistake]
    headers = shutil.copytree(SHM, tmp_path / "shm")
    source = (headers / file).read_text()
    assert source.count(right) == 1
    (headers / file).write_text(source.replace(right, wrong))
    program = compile_core(headers, tmp_path / "threads")
    for seed in range(5):
        result = run(program, seed, 300, 3)
        if result.returncode == 66:
            break
    assert "ThreadSanitizer: data race" in result.stderr
