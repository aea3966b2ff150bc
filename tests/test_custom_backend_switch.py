"""run_on.py finds backends, and training on them equals training on Gloo."""

import argparse
import importlib

import pool
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, learned, python, torchrun
from run_on import known_backend
from workers.equivalence_slice import SLICES

RUN_ON = ROOT / "custom_backend/run_on.py"
TRAIN = ROOT / "ddp_basics/train.py"
TEMPLATES = ("ddp_basics", "fsdp_basics", "t5_finetuning", "transformer_basics")
SHORT = ("--epochs", 1, "--log-every", 1)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Write a module on Python's path; unregister its backend after the test."""
    for name in ("backend_list", "backend_capability", "backend_type_map"):
        monkeypatch.setattr(dist.Backend, name, getattr(dist.Backend, name).copy())
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, *lines: str) -> None:
        head = "import torch.distributed as dist"
        (tmp_path / f"{name}.py").write_text("\n".join([head, *lines]))
        importlib.invalidate_caches()

    return write


def registering(name: str) -> str:
    return f"dist.Backend.register_backend('{name}', lambda *args: None, devices=['cpu'])"


def test_a_module_may_register_it(modules):
    modules("switch_a", registering("switch_a"))
    modules("switch_b_backend", registering("switch_b"))
    modules("switch_b", "raise RuntimeError('NAME_backend comes first')")
    assert known_backend("switch_a") == "switch_a"
    assert known_backend("switch_a") == "switch_a"  # registered by the first import
    assert known_backend("switch_b") == "switch_b"
    assert known_backend("gloo") == "gloo"


NOWHERE = (
    "{0} is not in this build of torch, and no module {0}_backend or {0} here or on PYTHONPATH"
)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("switch_nowhere", NOWHERE.format("switch_nowhere")),
        ("not/a/name", NOWHERE.format("not/a/name")),
        ("switch.nowhere", NOWHERE.format("switch.nowhere")),
        ("switch_silent", NOWHERE.format("switch_silent")),
        ("switch_lacking", "switch_lacking: No module named 'switch_nothing'"),
        ("switch_unable", "switch_unable: no compiler"),
    ],
)
def test_a_name_that_cannot_be_had_is_one_sentence(modules, name, says):
    modules("switch_silent")
    modules("switch_lacking", "import switch_nothing")
    modules("switch_unable", "raise RuntimeError('no compiler')")
    with pytest.raises(argparse.ArgumentTypeError) as error:
        known_backend(name)
    assert str(error.value).startswith(says)


def test_a_wrong_name_is_said_once_by_all_ranks(tmp_path):
    command = ("switch_nowhere", TRAIN, "--output-dir", tmp_path / "run")
    result = pool.run(RUN_ON, *command, ranks=2)
    says = f"run_on.py: error: backend: {NOWHERE.format('switch_nowhere')} registers it\n"
    assert (result.returncode, result.output) == (2, says)
    assert not list(tmp_path.iterdir())


def test_a_script_that_is_not_there_is_one_sentence():
    result = pool.run(RUN_ON, "gloo", "nowhere.py")
    says = "run_on.py: error: there is no script nowhere.py\n"
    assert (result.returncode, result.output) == (2, says)


SCRIPT = """
import sys
import runtime
import torch.distributed as dist
print(sys.argv[1:], runtime.name, dist.get_default_backend_for_device("cpu"), __name__)
"""


def test_the_script_is_as_when_run_alone(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "runtime.py").write_text("name = 'the own sibling'")
    said = pool.run(RUN_ON, "ring", tmp_path / "script.py", "--a", "--help").check().output
    assert said == "['--a', '--help'] the own sibling ring __main__\n"


# ---- --backend, for backends of torch


def test_a_wrong_flag_is_said_once_by_all_ranks():
    result = pool.run(TRAIN, "--backend", "switch_nowhere", ranks=2)
    assert result.returncode == 2
    assert result.output.count("error: --backend switch_nowhere is not in this build of torch") == 1
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("directory", TEMPLATES)
def test_the_flags_reach_the_group(directory, tmp_path):
    joining, train = ROOT / "tests/workers/joining.py", ROOT / directory / "train.py"
    flags = ["--device", "cpu", "--timeout", 77, "--backend", "gloo"]
    if directory == "t5_finetuning":  # else it would write its default texts first
        flags += ["--train-file", tmp_path / "a", "--eval-file", tmp_path / "b"]
    result = pool.run(joining, train, *flags)
    assert result.output.splitlines()[-1] == "cpu, 77.0 s, gloo"


def test_pytest_has_the_switch_too(request):
    """pytest --backend shm reaches forked ranks and launched ranks."""
    says = f"rank(s) on cpu, {request.config.getoption('backend')}, torch"
    script = ROOT / "collectives/hello_world.py"
    assert f"2 {says}" in pool.run(script, ranks=2).check().output
    assert f"1 {says}" in python(script).check().output


# ---- on shm


@pytest.fixture
def shm():
    pytest.importorskip("shm", exc_type=RuntimeError)  # RuntimeError: no compiler


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    said = pool.run(TRAIN, *SHORT, "--output-dir", folder, "--backend", "gloo", ranks=2).check()
    assert said.output.count("2 rank(s) on cpu, gloo, torch") == 1
    return folder


def test_no_compiler_is_said_before_anything_is_made(tmp_path):
    command = ("shm", TRAIN, "--output-dir", tmp_path / "run")
    places = {"PATH": str(tmp_path), "SHM_BUILD_DIR": str(tmp_path / "builds")}
    result = pool.run(RUN_ON, *command, **places)
    assert result.returncode == 2
    assert "run_on.py: error: backend: shm: shm: " in result.output
    assert " and ninja not found. The backend is compiled on first use" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_train_py_on_shm_takes_the_steps_that_it_takes_on_gloo(shm, on_gloo, tmp_path):
    said = torchrun(RUN_ON, "shm", TRAIN, *SHORT, "--output-dir", tmp_path).check().output
    assert said.count("2 rank(s) on cpu, shm, torch") == 1
    same_run(tmp_path, on_gloo)


@pytest.mark.slow
def test_a_backend_in_python_can_be_had_by_its_name_too(on_gloo, tmp_path):
    command = ("ring", TRAIN, *SHORT, "--output-dir", tmp_path)
    said = pool.run(RUN_ON, *command, ranks=2).check().output
    assert said.count("2 rank(s) on cpu, ring, torch") == 1
    same_run(tmp_path, on_gloo)


def same_run(folder, other) -> None:
    """Losses and parameters are bit-identical: on two ranks a + b equals b + a."""
    assert learned(folder) == learned(other) != []
    saved, expected = (
        torch.load(max((place / "checkpoints").glob("step_*.pt")), weights_only=True)["model"]
        for place in (folder, other)
    )
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("matrix", SLICES)
def test_a_slice_of_the_matrix_equals_one_process(shm, matrix, tmp_path):
    script, ranks = ROOT / "tests/workers/equivalence_slice.py", SLICES[matrix][0]
    pool.run(RUN_ON, "shm", script, matrix, tmp_path / "found", ranks=ranks).check()
    saved = torch.load(tmp_path / "found")
    assert saved["backend"] == "shm"
    assert list(saved["found"]) == SLICES[matrix][1]
    for case, (expected, actual) in saved["found"].items():
        assert len(actual) == len(expected) > 0
        for a, b in zip(actual, expected, strict=True):
            compare(a, {name: b[name] for name in b if name in a}, case)


def compare(actual, expected, what) -> None:
    """Sums in another order differ by 1e-7 in fp32; AdamW magnifies that to 2e-6."""
    if isinstance(expected, dict):
        assert expected, what
        for name, value in expected.items():
            compare(actual[name], value, f"{what}, {name}")
    elif isinstance(expected, list):
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            compare(a, b, f"{what}, {number}")
    else:
        pair = (torch.as_tensor(value, dtype=torch.float32) for value in (actual, expected))
        torch.testing.assert_close(*pair, rtol=0, atol=2e-6, msg=lambda text: f"{what}: {text}")
