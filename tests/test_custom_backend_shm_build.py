"""custom_backend/shm/build.py: no compiler, killed builds, processes that wait for a build."""

import itertools
import os
import pwd
import queue
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, python
from torch.torch_version import TorchVersion

pytest.importorskip("shm", exc_type=RuntimeError)  # RuntimeError: no compiler
from shm import build


def test_no_compiler_is_one_clear_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("SHM_BUILD_DIR", str(tmp_path / "builds"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        RuntimeError, match=r"^shm: c\+\+ and ninja not found\. .*apt install g\+\+"
    ):
        build.load()
    (tmp_path / "ninja").write_text("#!/bin/sh\n")
    (tmp_path / "ninja").chmod(0o755)
    with pytest.raises(RuntimeError, match=r"^shm: c\+\+ not found\."):
        build.load()


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["c++", "g++-11", "g++-12", "clang++-14"])
def test_the_versions_of_a_function_compile(tmp_path, compiler):
    """GCC 11, that of Ubuntu 22.04, knows no target_clones("arch=x86-64-v3")."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    source, flags = build.HERE / "reduce.cpp", [f for f in build.FLAGS if f != "-O3"]
    subprocess.run([compiler, *flags, "-c", source, "-o", tmp_path / "reduce.o"], check=True)


def test_an_old_torch_is_one_clear_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("SHM_BUILD_DIR", str(tmp_path / "builds"))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    with pytest.raises(RuntimeError, match=r"^shm: needs torch 2\.14 or newer, this is 2\.13\.0$"):
        build.load()


@pytest.fixture
def small_source(tmp_path, monkeypatch) -> Path:
    """A small source instead of the real ones, which compile for a minute."""
    if shutil.which("ninja") is None or shutil.which(build.compiler()) is None:
        pytest.skip("needs a C++ compiler and ninja")
    source = tmp_path / "small.cpp"
    source.write_text(
        "#include <Python.h>\n"
        'static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "shm_backend", nullptr, -1};\n'
        'extern "C" PyObject* PyInit_shm_backend() { return PyModule_Create(&definition); }\n'
    )
    monkeypatch.setattr(build, "SOURCES", [source])
    monkeypatch.setenv("SHM_BUILD_DIR", str(tmp_path / "builds"))
    return source


@pytest.mark.slow
def test_a_killed_build_does_not_block_the_next(small_source):
    directory = build.cache() / build.fingerprint()
    unfinished = directory / "unfinished"
    unfinished.mkdir(parents=True)
    (directory / "building").touch()
    (unfinished / "lock").touch()  # torch's own lock, on which its build waits forever
    (unfinished / "shm_backend.so").write_bytes(b"half")
    module = build.load()
    assert Path(module.__file__) == directory / "shm_backend.so"
    assert sorted(os.listdir(directory)) == ["building", "shm_backend.so"]
    # From now on neither a compiler nor ninja is needed, and nothing is written.
    (directory / "building").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        build.load()
    assert os.listdir(directory) == ["shm_backend.so"]


def test_a_cache_that_cannot_be_written_is_one_clear_sentence(small_source, monkeypatch):
    monkeypatch.setenv("SHM_BUILD_DIR", str(small_source))  # a file
    with pytest.raises(
        RuntimeError, match=r"^shm: cannot build in .*\. Set SHM_BUILD_DIR to a folder"
    ):
        build.load()


def test_a_process_without_a_home_takes_the_folder_that_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in docker run --user 54321
    monkeypatch.setenv("SHM_BUILD_DIR", str(tmp_path))
    assert build.cache() == tmp_path
    monkeypatch.delenv("SHM_BUILD_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache() == tmp_path / "torch_shm_backend"


@pytest.mark.slow
def test_what_the_compiler_says_is_shown(small_source):
    small_source.write_text("int main() { return forty_two; }\n")
    with pytest.raises(
        RuntimeError, match=r"(?s)^shm: the backend could not be compiled:.*forty_two"
    ):
        build.load()
    assert not list(build.cache().glob("*/shm_backend.so"))


def test_other_systems_than_linux_are_one_clear_sentence(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        RuntimeError, match=r"^shm: needs Linux \(.*\), this is darwin\. Take gloo$"
    ):
        build.check_tools()


def test_a_process_that_waits_for_a_build_says_so(tmp_path, monkeypatch):
    path, entered, said = tmp_path / "building", threading.Event(), queue.SimpleQueue()
    # (capsys would lose what another thread writes while it is read.)
    stream = SimpleNamespace(write=said.put, flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", stream)

    def second() -> None:
        with build.alone(path, "waiting for the first"):
            entered.set()

    thread = threading.Thread(target=second)
    with build.alone(path, "never printed"):
        thread.start()
        assert said.get(timeout=60) == "waiting for the first"
        assert not entered.is_set()
    thread.join(60)
    assert entered.is_set()


@pytest.mark.slow
def test_python_m_builds_ahead():
    command = [sys.executable, "-m", "shm.build"]
    folder = ROOT / "custom_backend"
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)
    assert (result.stdout, result.stderr) == (f"{build.library()}\n", "")


def test_each_build_has_its_own_place(small_source, monkeypatch):
    fingerprints = {build.fingerprint()}
    monkeypatch.setattr(build, "FLAGS", ["-O0"])
    fingerprints.add(build.fingerprint())
    monkeypatch.setenv("CXX", "clang++")
    fingerprints.add(build.fingerprint())
    small_source.write_text("")
    fingerprints.add(build.fingerprint())
    assert len(fingerprints) == 4
    assert all(a != b for a, b in itertools.combinations(fingerprints, 2))


def test_the_manual_lists_every_file_and_how_long_the_first_ones_are():
    manual = (ROOT / "custom_backend/shm.md").read_text()
    first, rest = manual.split("The rest makes a complete backend of them.")
    first = first.partition("Read these five files first")[2]
    files = {file.name for file in build.HERE.iterdir() if file.suffix in (".h", ".cpp", ".py")}
    names = [re.findall(r"\(shm/(\w+\.\w+)\)", table) for table in (first, rest)]
    assert len(names[0]) == 5
    assert sorted(names[0] + names[1]) == sorted(files - {"__init__.py"})
    lines = sum((build.HERE / name).read_text().count("\n") for name in names[0])
    assert f"{round(lines, -2)} lines of plain C++, without torch" in first
    assert not any("torch/" in (build.HERE / name).read_text() for name in names[0])


def test_the_benchmark_keeps_its_numbers_if_mpi_cannot_be_compiled(tmp_path):
    """It ended there once, with all that it had measured: Debian has mpicc without mpi.h."""
    for name in ("mpicc", "mpirun"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'osu.c:3:10: error: no mpi.h' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "mpi.py"
    path = [str(ROOT / "benchmarks")]
    script.write_text(
        f"import sys\nsys.path[:0] = {path}\nimport backend\nprint(backend.mpi_text(1))"
    )
    output = python(script, PATH=f"{tmp_path}:{os.environ['PATH']}").check().output
    assert "Not measured: mpicc cannot compile osu.c (no mpi.h)." in output
