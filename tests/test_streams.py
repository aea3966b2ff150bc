"""Streams of emulated GPUs (emulated_gpu/): streams.py, and scripts that wait for communication."""

import re

import pool
import pytest
from helpers import EMULATED, HAS_EMULATED, ROOT, python

STREAMS = ROOT / "collectives/streams.py"
SIZE = 64
on_emulated_gpus = pytest.mark.skipif(not HAS_EMULATED, reason="make .venv-emulated/installed")


@pytest.fixture(scope="module")
def said() -> str:
    told = {"interpreter": EMULATED, "EMULATED_GPUS": "1"}
    return pool.run(STREAMS, "--size", SIZE, "--batches", 3, **told).check().output


def test_streams_say_what_they_need():
    result = python(STREAMS, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "error: streams need a GPU. Without one: make .venv-emulated/installed" in result.output


RACE = "CUDA race: .*does not wait for it"
WITHOUT = {
    "use on a side stream": RACE,
    "use on this stream": RACE,
    "delete while it is read": "CUDA race: memory was freed while .*record_stream",
    "read a copy": f"{SIZE**2} of {SIZE**2} numbers are wrong",
    "refill a pinned buffer": f"{SIZE**2} of {SIZE**2} numbers are wrong",
}


@on_emulated_gpus
@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT)
def test_program_is_right_with_its_line_and_wrong_without(name, said):
    program = re.search(rf"^{name}\n((?: +.*\n)+)", said, re.M)[1]
    right, wrong = " ".join(program.split()).split(" without: ")
    assert re.fullmatch(r"with .+: right", right)
    assert re.match(WITHOUT[name], wrong)


@on_emulated_gpus
@pytest.mark.slow
def test_each_batch_is_prefetched(said):
    assert re.findall(r"^ +(\d) \|", said, re.M) == ["0", "1", "2"]


@on_emulated_gpus
@pytest.mark.slow
def test_out_of_memory_is_survived(said):
    assert "3. CUDA out of memory. Tried to allocate" in said
    assert "Still allocated: 0.00 MiB" in " ".join(said.split())


@on_emulated_gpus
@pytest.mark.slow
def test_memory_of_a_step_is_what_arithmetic_says(said):
    """In units of one weight, of which there are four; a batch or gradient is as large.

    Behind each layer one more output is kept. In backward each layer makes a gradient of its
    weight and one of its input, and lets one output go. The last has no gradient of its input.
    AdamW adds two moments for each weight, zero_grad lets the gradients go.
    """
    unit = 4 * SIZE**2 / 2**20
    rows = re.findall(r"^(\w+(?: \w+)*) +(\d+\.\d+)  #+$", said, re.M)
    found = {what: round(float(mib) / unit) for what, mib in rows}
    assert found == {
        "parameters": 4, "batch": 5,
        "forward 0": 6, "forward 1": 7, "forward 2": 8, "forward 3": 9,
        "backward 3": 10, "backward 2": 10, "backward 1": 10, "backward 0": 8,
        "backward": 8, "optimizer step": 16, "zero_grad": 12,
    }  # fmt: skip


# Each compares its results with others, and fails or says so if they differ.
WAITS = {
    "collectives/compare_all_reduce.py": "--numel 1003",
    "collectives/point_to_point.py": "--steps 20",
    "parallel_basics/pipeline_from_scratch.py": "",
}


@on_emulated_gpus
@pytest.mark.slow
@pytest.mark.parametrize("script", WAITS)
def test_script_waits_for_what_it_has_received(script):
    told = {"ranks": 2, "interpreter": EMULATED, "EMULATED_GPUS": "2"}
    result = pool.run(ROOT / script, *WAITS[script].split(), **told).check().output
    assert "2 rank(s) on cuda" in result
